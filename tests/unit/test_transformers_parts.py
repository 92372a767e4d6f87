"""Options and messages of the transformers engine, before any process is there; and the calls that its process keeps."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import Tunable, engine_class
from batchmill_core.errors import ConfigurationError, InvalidRequest
from batchmill_core.request import Request, TaskKind
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers import TransformersEngine
from batchmill_workers.gpu.transformers_calls import Calls
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Piece


def engine(**options: Any) -> TransformersEngine:
    return TransformersEngine(model=ModelEntry(name="m", engine="transformers", source="x", options=options))


def test_it_is_found_by_its_name() -> None:
    assert engine_class("transformers") is TransformersEngine


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"task": "sing"}, "one of auto, chat, embed, classify"),
        ({"dtype": "int4"}, "one of auto, float32"),
        ({"max_row": 3}, "did you mean 'max_rows'"),
        ({"max_rows": -1}, "at least 0"),
        ({"truncate": "yes"}, "must be true or false"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        engine(**options)


def test_more_rows_run_together_on_a_gpu() -> None:
    options = TransformersOptions()

    assert (options.rows("cpu"), options.rows("cuda:0"), TransformersOptions(max_rows=5).rows("cuda:0")) == (64, 256, 5)


def test_a_conversation_is_classified_by_its_texts() -> None:
    messages = ({"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]})
    message = engine().message(Request(task=TaskKind.CLASSIFY, messages=messages))

    assert message == {"inputs": ["one\ntwo"]}


@pytest.mark.parametrize("task", [TaskKind.EMBED, TaskKind.CLASSIFY])
def test_a_sampling_parameter_means_nothing_without_an_answer(task: TaskKind) -> None:
    request = Request(task=task, inputs=("x",), messages=({"role": "user", "content": "x"},), params={"temperature": 0})

    with pytest.raises(InvalidRequest, match="temperature"):
        engine().message(request)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("schema", [nested(120), nested(300), {"minimum": 10**30}], ids=["deep", "deeper", "large"])
def test_a_schema_that_cannot_be_read_is_refused(schema: dict[str, Any]) -> None:
    request = Request(messages=({"role": "user", "content": "x"},), schema=schema)

    with pytest.raises(InvalidRequest, match="the schema cannot be read"):
        engine().message(request)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "64"], ids=str)
def test_dimensions_of_an_embedding_are_a_whole_number_from_one(value: object) -> None:
    with pytest.raises(InvalidRequest, match="parameter dimensions"):
        engine().message(Request(task=TaskKind.EMBED, inputs=("x",), params={"dimensions": value}))


def test_a_model_refuses_another_task_than_its_own() -> None:
    chat = engine()
    chat.facts = {"task": "chat"}

    with pytest.raises(InvalidRequest, match="does chat, not embed"):
        chat.message(Request(task=TaskKind.EMBED, inputs=("x",)))


def test_sizes_that_worked_are_given_to_the_process_and_taken_back_from_it() -> None:
    tuned = engine()
    tuned.use_batch_sizes({7: 32})
    given = tuned.configuration()["batch_sizes"]
    tuned.news({"figures": {"batch_rows": 3.0}, "batch_sizes": {"7": 48, "9": 4}})

    assert isinstance(tuned, Tunable)
    assert given == {"7": 32}
    assert tuned.batch_sizes() == {7: 48, 9: 4}
    assert tuned.figures().batch_rows == 3.0


# the process's calls


class Sent:
    """Calls, and what they sent."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.calls = Calls(
            lambda frame: self.frames.append(dict(frame)), lambda parts: {"vectors": [p["v"] for p in parts]}
        )

    def open(self, number: int, texts: int = 1) -> list[int]:
        return list(self.calls.open(number, [Piece(tokens=10 + i) for i in range(texts)]))


def test_a_call_of_several_texts_is_answered_once_in_their_order() -> None:
    sent = Sent()
    first, second, third = sent.open(5, texts=3)
    for row, part in ((third, "c"), (first, "a"), (second, "b")):
        sent.calls.answered(row, {"v": part})

    assert sent.frames == [{"id": 5, "done": True, "input_tokens": 33, "vectors": ["a", "b", "c"]}]


def test_a_call_begins_once_though_its_texts_run_in_several_batches() -> None:
    sent = Sent()
    rows = sent.open(5, texts=2)
    sent.calls.begin(rows[:1])
    sent.calls.begin(rows[1:])

    assert sent.frames == [{"id": 5, "input_tokens": 21}]


def test_a_failed_text_ends_its_call_and_frees_the_others() -> None:
    sent = Sent()
    rows = sent.open(5, texts=3)
    sent.calls.answered(rows[0], {"v": "a"})
    freed = list(sent.calls.failed(rows[1], "too_long", "why"))
    sent.calls.answered(rows[2], {"v": "c"})

    assert freed == rows
    assert sent.calls.gone(rows) == frozenset(rows)
    assert [frame["error"] for frame in sent.frames] == [{"kind": "too_long", "message": "why"}]


def test_a_cancelled_call_is_never_answered() -> None:
    sent = Sent()
    kept, dropped = sent.open(1), sent.open(2)
    cancelled = list(sent.calls.cancel(2))
    again = list(sent.calls.cancel(2))
    sent.calls.answered(dropped[0], {"v": "x"})
    sent.calls.answered(kept[0], {"v": "y"})

    assert (cancelled, again) == (dropped, [])
    assert [frame["id"] for frame in sent.frames] == [1]
