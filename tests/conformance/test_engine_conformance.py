"""What every engine does, whatever runs the model. A new engine joins by one line in ``engine_host.CASES``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from batchmill_core.engine import Engine
from batchmill_core.errors import CallError, CallState, InvalidRequest, TooLong
from batchmill_core.request import Request, TaskKind
from tests.conformance.engine_host import CASES, EngineHost, chat

SUBJECTS = ("cats", "the sea", "trains", "bread", "winter", "music", "rain", "coffee")
FORMS = (
    "Write two sentences about {}.",
    "List three facts about {}.",
    "Is this review positive or negative? Answer with one word. Review: I love {}",
    "Translate to French: I like {}, and my brother does too, but our parents don't.",
)
PROMPTS = [form.format(subject) for subject in SUBJECTS for form in FORMS]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def host(request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    host = EngineHost(request.param)
    try:
        host.run(host.engine.start())
        yield host
    finally:
        host.close()


def test_it_is_an_engine(host: EngineHost) -> None:
    assert isinstance(host.engine, Engine)
    assert host.engine.capacity_rows > 0


def test_it_answers_a_chat_request(host: EngineHost) -> None:
    (answer,) = host.answer(chat("Is this review positive or negative? Review: I love it", **host.case.greedy))

    assert answer.text is not None
    assert "positive" in answer.text.lower()
    assert answer.finish_reason == "stop"


def test_greedy_answers_are_the_same_in_a_batch_and_alone(host: EngineHost) -> None:
    requests = [chat(prompt, max_tokens=12, **host.case.greedy) for prompt in PROMPTS]
    together = [answer.text for answer in host.answer(*requests)]
    picked = range(0, len(requests), len(requests) // host.case.alone)
    alone = [host.answer(requests[i])[0].text for i in picked]

    assert [together[i] for i in picked] == alone


def test_concurrent_requests_get_their_own_answers(host: EngineHost) -> None:
    requests = [chat(f"Repeat the word {word}.", max_tokens=20, **host.case.greedy) for word in ("apple", "tiger")]
    apple, tiger = (str(answer.text).lower() for answer in host.answer(*requests))

    assert "apple" in apple
    assert "tiger" in tiger


def test_usage_counts_prompt_and_answer(host: EngineHost) -> None:
    short, long = host.answer(
        chat("Hi", max_tokens=5, **host.case.greedy), chat("Hi " * 50, max_tokens=9, **host.case.greedy)
    )

    assert short.usage is not None
    assert long.usage is not None
    assert 0 < short.usage.input < long.usage.input
    assert (short.usage.output, long.usage.output) == (5, 9)


def test_an_answer_that_is_cut_says_length(host: EngineHost) -> None:
    (answer,) = host.answer(chat("Write a long story about the sea.", max_tokens=4, **host.case.greedy))

    assert answer.finish_reason == "length"


def test_text_ends_before_a_stop_text(host: EngineHost) -> None:
    request = chat("Count: one, two, three, four, five, six", max_tokens=40, **host.case.greedy)
    full = str(host.answer(request)[0].text)
    stop = full.split()[2]
    (answer,) = host.answer(
        Request(messages=request.messages, params={**request.params, "stop": [stop]}),
    )

    assert answer.text == full[: full.index(stop)]
    assert answer.finish_reason == "stop"


def test_text_parts_are_read_as_one_text(host: EngineHost) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    in_parts = Request(messages=({"role": "user", "content": parts},), params={"max_tokens": 8, **host.case.greedy})
    whole = chat("Say hello", max_tokens=8, **host.case.greedy)
    answers = host.answer(in_parts, whole)

    assert answers[0].text == answers[1].text


def test_a_prompt_longer_than_the_context_is_too_long_and_uses_nothing(host: EngineHost) -> None:
    with pytest.raises(TooLong) as refused:
        host.answer(chat("word " * (host.engine.context_tokens or 100_000)))

    assert refused.value.usage is None
    assert not refused.value.device_ns
    assert refused.value.call_state is CallState.VOID


def test_a_prompt_that_leaves_no_room_for_max_tokens_is_too_long(host: EngineHost) -> None:
    with pytest.raises(TooLong):
        host.answer(chat("Hi", max_tokens=host.engine.context_tokens))


def test_a_cancelled_request_leaves_the_engine_usable(host: EngineHost) -> None:
    async def cancel_while_another_runs() -> None:
        abandoned = asyncio.create_task(host.engine.complete(chat("Write a long story.", max_tokens=2000)))
        await host.engine.complete(chat("Hi", max_tokens=2))
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        assert abandoned.cancelled()

    host.run(cancel_while_another_runs())

    (answer,) = host.answer(chat("Hi", max_tokens=2))
    assert answer.text


@pytest.mark.parametrize(
    "params",
    [
        {"no_such_parameter": 1},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 2.0},
        {"stop": [1]},
        {"stop": ""},
        {"n": 2},
        {"seed": -1},
    ],
    ids=str,
)
def test_a_bad_parameter_is_named(host: EngineHost, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        host.answer(chat("Hi", **params))


@pytest.mark.parametrize(
    "request_",
    [
        Request(),
        Request(messages=({"content": "no role"},)),
        Request(messages=({"role": "user", "content": 5},)),
        Request(messages=({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},)),
        Request(messages=({"role": "user", "content": ["bare"]},)),
        Request(messages=({"role": "user", "content": "a lone surrogate \ud800"},)),
        Request(task=TaskKind.EMBED, inputs=("text",)),
        Request(messages=({"role": "user", "content": "Hi"},), schema={"type": "no such type"}),
    ],
    ids=["nothing", "no role", "number", "image", "bare part", "surrogate", "embed", "schema"],
)
def test_a_request_it_cannot_answer_raises_a_call_error(host: EngineHost, request_: Request) -> None:
    with pytest.raises(CallError):
        host.answer(request_)


def test_unusual_texts_are_answered(host: EngineHost) -> None:
    texts = ["", " ", "\n\n", "👩‍👩‍👧 émoji", "日本語のレビュー", 'a\tb\\n"quoted"', "<|im_end|>", "x" * 3000]
    answers = host.answer(*(chat(text, max_tokens=2) for text in texts))

    assert all(answer.usage is not None and answer.usage.output > 0 for answer in answers)


def test_closing_twice_is_closing_once(host: EngineHost) -> None:
    unused = host.case.make()

    async def close_twice() -> None:
        await unused.close()
        await unused.close()

    host.run(close_twice())

    with pytest.raises(CallError):
        host.run(unused.complete(chat("Hi")))
