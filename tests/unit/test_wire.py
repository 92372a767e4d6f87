"""The OpenAI-compatible protocol: what goes out, and what every kind of answer becomes."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core import errors
from batchmill_core.errors import CallError, CallState
from batchmill_core.request import Completion, Request, RowStatus, TaskKind
from batchmill_core.usage import Price, Usage, cost, usd
from batchmill_workers.api.faults import error_of
from batchmill_workers.api.headers import duration_s, wait_of
from batchmill_workers.api.reported import usage_of
from batchmill_workers.api.sse import StreamedAnswer
from batchmill_workers.api.wire import body_of, parse_chat, parse_embeddings, path_for
from batchmill_workers.validation import check_output, compile_schema, sanitize, status_of

CASES = sorted((Path(__file__).parents[1] / "cases" / "responses").glob("*.json"))
NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT
CHAT = Request(model="m-1", messages=({"role": "user", "content": "hi"},))
EMBED = Request(task=TaskKind.EMBED, model="m-1", inputs=("a", "b"))


def parse(status: int, headers: Mapping[str, str], body: bytes, request: Request = CHAT) -> Completion:
    if headers.get("content-type") == "text/event-stream":
        stream = StreamedAnswer(status, headers)
        for i in range(len(body)):
            stream.feed(body[i : i + 1])
        return stream.finish(now=NOW, latency_ms=9, ttft_ms=3 if stream.begun else None)
    act = parse_embeddings if request.task is TaskKind.EMBED else parse_chat
    return act(status, headers, body, request, now=NOW, latency_ms=9)


def chat(content: Any = "positive", *, finish: Any = "stop", **message: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish}
    return json.dumps(
        {"model": "m-1", "choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}
    ).encode()


def error(status: int, body: Any, headers: Mapping[str, str] | None = None, *, started: bool = False) -> CallError:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return error_of(status, headers or {}, raw, now=NOW, started=started)


class Outcome:
    """What became of one case: the parsed answer or the error, in the words of the cases' ``expect``."""

    def __init__(self, case: dict[str, Any]) -> None:
        response = case["response"]
        inputs = tuple(case.get("inputs", ()))
        request = Request(task=TaskKind.EMBED if inputs else TaskKind.CHAT, model="m-1", inputs=inputs)
        body = json.dumps(response["json"]).encode() if "json" in response else response["text"].encode()
        self.error: CallError | None = None
        self.completion = Completion()
        self.output: Any = None
        try:
            self.completion = parse(response["status"], response["headers"], body, request)
            self.output, self.sanitized = sanitize(self.completion.text or "")
            self.output = self.output or None
            if "schema" in case:
                self.output, _ = check_output(self.output, compile_schema(case["schema"]))
        except CallError as e:
            self.error = e

    def facts(self, expect: dict[str, Any], price: dict[str, str] | None) -> dict[str, Any]:
        error, usage = self.error, self.completion.usage
        status = error.final_status if error else status_of(self.completion)
        facts: dict[str, Any] = {
            "status": status.value,
            "final_status": status.value,
            "retry": error is not None and error.retryable,
            "error": error and error.kind,
            "scope": error and error.scope.value,
            "wait_s": error and error.wait_s,
            "output": self.output,
            "outputs": [[round(x, 6) for x in struct.unpack(f"<{len(v) // 4}f", v)] for v in self.completion.vectors],
            "usage": usage and {k: v for k, v in usage.as_dict().items() if k in (expect.get("usage") or {})},
            "cost": usage and 1,
            "cost_usd": usage and price and usd(cost(usage, Price.from_usd_per_mtok(price))),
            "call_cost": "unknown_with_bound" if error and error.call_state is CallState.UNKNOWN else None,
            "keeps_raw_body": bool(error and error.raw),
            "sanitized": getattr(self, "sanitized", False),
            "has_ttft": self.completion.ttft_ms is not None,
        }
        return {k: facts[k] for k in expect}


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case_becomes_what_it_must(path: Path) -> None:
    case = json.loads(path.read_text())

    outcome = Outcome(case)

    assert outcome.facts(case["expect"], case.get("price_usd_per_mtok")) == case["expect"]


def test_chat_body_is_openais() -> None:
    request = Request(
        model="m-1",
        messages=({"role": "user", "content": "hi"},),
        params={"temperature": 0, "model": "other"},
        schema={"type": "object"},
        stream=True,
    )

    body = json.loads(body_of(request))

    assert path_for(request) == "/chat/completions"
    assert body == {
        "model": "m-1",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_the_rows_own_response_format_wins_over_the_schemas() -> None:
    own = {"type": "json_object"}

    body = json.loads(body_of(Request(model="m", schema={"type": "object"}, params={"response_format": own})))

    assert body["response_format"] == own


def test_embedding_body_holds_all_inputs_and_asks_for_base64() -> None:
    assert path_for(EMBED) == "/embeddings"
    assert json.loads(body_of(EMBED)) == {"model": "m-1", "input": ["a", "b"], "encoding_format": "base64"}


@pytest.mark.parametrize("params", [{"seed": 2**80}, {"stop": "\ud800"}, {"stop": object()}])
def test_parameters_that_are_not_json_are_the_rows_fault(params: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidRequest, match="cannot be written as JSON"):
        body_of(Request(model="m", params=params))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xef\xbb\xbf" + chat("x"), "x"),
        (chat("x").replace(b'"x"', rb'"x\ud83d"'), "x\ud83d"),
        (chat("x").replace(b'"x"', b'"x\xff"'), "x\ufffd"),
        (chat([{"type": "thinking", "thinking": []}, {"type": "text", "text": "x"}, "y"]), "xy"),
        (chat(""), ""),
        (chat(None, finish="tool_calls", tool_calls=[{"id": "1"}]), '[{"id": "1"}]'),
        (chat("", finish="tool_calls", tool_calls=[{"id": "1"}]), '[{"id": "1"}]'),
    ],
    ids=["bom", "lone surrogate", "not utf-8", "parts", "empty", "tool calls", "tool calls beside empty text"],
)
def test_a_paid_answer_is_not_lost_to_an_odd_shape(body: bytes, text: str) -> None:
    assert parse(200, {}, body).text == text


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("MAX_TOKENS", RowStatus.TRUNCATED),
        ("max_output_tokens", RowStatus.TRUNCATED),
        ("SAFETY", RowStatus.FILTERED),
        ("eos", RowStatus.OK),
        (7, RowStatus.OK),
    ],
)
def test_finish_reasons_of_other_dialects_are_understood(finish: Any, status: RowStatus) -> None:
    assert status_of(parse(200, {}, chat(finish=finish))) is status


@pytest.mark.parametrize("finish", ["insufficient_system_resource", "abort", "error"])
def test_an_answer_that_the_provider_broke_off_is_retried_and_its_usage_settled(finish: str) -> None:
    with pytest.raises(errors.Unavailable) as caught:
        parse(200, {}, chat(finish=finish))

    assert caught.value.call_state is CallState.SETTLED


def test_an_answer_that_says_nothing_is_malformed_and_its_usage_settled() -> None:
    with pytest.raises(errors.MalformedResponse) as caught:
        parse(200, {}, chat(None))

    assert caught.value.usage == Usage(input=4, output=2)


def test_an_error_inside_a_choice_may_have_been_billed() -> None:
    body = {"choices": [{"finish_reason": "error", "error": {"code": 429, "message": "upstream"}}]}

    with pytest.raises(errors.RateLimited) as caught:
        parse(200, {}, json.dumps(body).encode())

    assert caught.value.call_state is CallState.UNKNOWN


def vectors(*items: dict[str, Any]) -> bytes:
    return json.dumps({"data": items, "usage": {"prompt_tokens": 4}}).encode()


def packed(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def test_base64_vectors_are_the_bytes_they_hold() -> None:
    body = vectors(
        {"index": 1, "embedding": base64.b64encode(packed(3, 4)).decode()}, {"index": 0, "embedding": [1, 2.0]}
    )

    completion = parse(200, {}, body, EMBED)

    assert completion.vectors == (packed(1, 2), packed(3, 4))
    assert completion.usage == Usage(input=4)


def test_vectors_without_indexes_are_in_order() -> None:
    completion = parse(200, {}, vectors({"embedding": [1]}, {"embedding": [2]}), EMBED)

    assert completion.vectors == (packed(1), packed(2))


@pytest.mark.parametrize(
    "items",
    [
        [],
        [{"index": 0, "embedding": [1]}] * 2,
        [{"index": 1, "embedding": [1]}, {"index": 2, "embedding": [1]}],
        [{"index": True, "embedding": [1]}, {"index": 0, "embedding": [1]}],
        [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": [1, 2]}],
        [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": []}],
        [{"index": 0, "embedding": ["x"]}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": [None]}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": [1e300]}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": "%%%"}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": base64.b64encode(packed(float("nan"))).decode()}, {"index": 1, "embedding": [1]}],
        [{"index": 0, "embedding": [1]}, {"index": 1}],
        ["x", "y"],
    ],
)
def test_vectors_that_do_not_fit_their_inputs_are_never_paired(items: list[Any]) -> None:
    with pytest.raises(errors.MalformedResponse) as caught:
        parse(200, {}, vectors(*items), EMBED)

    assert caught.value.usage == Usage(input=4)


GEMINI_LIMIT = {
    "error": {
        "code": 429,
        "message": "You exceeded your current quota, please check your plan and billing details.",
        "status": "RESOURCE_EXHAUSTED",
        "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "33s"}],
    }
}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, [GEMINI_LIMIT], errors.RateLimited),
        (400, {"error": {"message": "API key not valid.", "status": "INVALID_ARGUMENT"}}, errors.AuthFailed),
        (403, {"error": {"status": "PERMISSION_DENIED", "message": "denied"}}, errors.AuthFailed),
        (403, {"error": {"code": 403, "message": "Input was flagged", "metadata": {"reasons": []}}}, errors.Filtered),
        (403, b"<html><title>Attention Required!</title></html>", errors.Unavailable),
        (402, {"error": {"message": "Insufficient Balance", "type": "unknown_error"}}, errors.OutOfCredit),
        (400, {"type": "error", "error": {"message": "Your credit balance is too low"}}, errors.OutOfCredit),
        (429, {"error": {"message": "Request too large for gpt-4 on tokens per min"}}, errors.TooLong),
        (429, b"", errors.RateLimited),
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, errors.Overloaded),
        (503, b"no healthy upstream", errors.Overloaded),
        (500, {"error": "the input length exceeds the context length"}, errors.TooLong),
        (400, {"object": "error", "message": "maximum context length is 2048", "code": 400}, errors.TooLong),
        (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum"}}, errors.TooLong),
        (413, b"<html><h1>413 Request Entity Too Large</h1></html>", errors.TooLong),
        (404, {"error": "model 'x' not found, try pulling it first"}, errors.UnknownModel),
        (400, {"error": {"message": "Model Not Exist"}}, errors.UnknownModel),
        (404, {"error": {"code": "DeploymentNotFound", "message": "no such deployment"}}, errors.UnknownModel),
        (400, {"error": {"code": 400, "message": "x/y is not a valid model ID"}}, errors.UnknownModel),
        (404, b"<html>nothing here</html>", errors.UnknownModel),
        (301, b"", errors.UnknownModel),
        (400, {"error": {"message": "Content Exists Risk"}}, errors.Filtered),
        (422, {"detail": [{"loc": ["body"], "msg": "field required"}]}, errors.InvalidRequest),
        (418, b"\xff\x00", errors.InvalidRequest),
        (408, b"", errors.Unavailable),
        (500, {"error": {"message": "boom", "code": None}}, errors.Unavailable),
        (200, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}, errors.RateLimited),
        (200, {"error": {"message": "slow down", "code": "429"}}, errors.RateLimited),
        (200, {"error": "boom"}, errors.Unavailable),
        (200, {"error": {"type": "invalid_request_error", "message": "bad"}}, errors.InvalidRequest),
        (200, {"error": {"code": 402, "message": "credits"}}, errors.OutOfCredit),
    ],
)
def test_error_answers_of_many_dialects_are_told_apart(status: int, body: Any, kind: type[CallError]) -> None:
    found = error(status, body)

    assert isinstance(found, kind)
    assert found.http_status == status


def test_a_message_that_quotes_the_row_is_not_taken_for_its_words() -> None:
    quoted = "1 validation error for Request: messages " + "." * 300 + " insufficient balance on my invalid api key"

    assert type(error(400, {"error": {"message": quoted}})) is errors.InvalidRequest


def test_a_redirect_says_where_it_leads() -> None:
    found = error(307, b"", {"location": "https://elsewhere.example/v1"})

    assert "https://elsewhere.example/v1" in found.message


def test_openrouters_upstream_reason_is_part_of_the_message() -> None:
    body = {"error": {"code": 400, "message": "Provider returned error", "metadata": {"raw": "bad image"}}}

    assert "Provider returned error: bad image" in error(400, body).message


def test_an_html_page_is_named_by_its_title() -> None:
    found = error(502, b"<html><head><title>502 Bad Gateway</title></head></html>")

    assert found.message == "502 Bad Gateway (HTTP 502)"


@pytest.mark.parametrize(
    ("headers", "body", "wait_s"),
    [
        ({}, {}, None),
        ({"retry-after": "1.5"}, {}, 1.5),
        ({"retry-after": "-3"}, {}, 0.0),
        ({"retry-after": "soon"}, {}, None),
        ({"retry-after": "nan"}, {}, None),
        ({"retry-after": "1e9999"}, {}, None),
        ({"retry-after": "999999"}, {}, 86_400.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:30 GMT"}, {}, 10.0),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:30 GMT", "date": "Tue, 14 Nov 2023 22:13:29 GMT"}, {}, 1.0),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"}, {}, 0.12),
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "9s"}, {}, None),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000004500"}, {}, 4.5),
        ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1700000007"}, {}, 7.0),
        ({"x-ratelimit-reset-tokens": "7.66s"}, {}, 7.66),
        (
            {"anthropic-ratelimit-tokens-remaining": "0", "anthropic-ratelimit-tokens-reset": "2023-11-14T22:13:50Z"},
            {},
            30,
        ),
        ({}, GEMINI_LIMIT, 33.0),
        ({}, {"error": {"message": "Limit 3. Please try again in 6m0s. Contact us."}}, 360.0),
        ({}, {"error": {"message": "Please retry after 23 seconds."}}, 23.0),
        ({}, {"error": {"message": "Please try again in 20ms."}}, 0.02),
    ],
)
def test_how_long_a_provider_asks_to_wait(headers: dict[str, str], body: Any, wait_s: float | None) -> None:
    assert error(429, body, headers).wait_s == pytest.approx(wait_s)


@given(st.text(max_size=30), st.floats(0, 2e9))
def test_any_header_gives_a_wait_within_a_day_or_none(text: str, now: float) -> None:
    wait = wait_of({"retry-after": text, "x-ratelimit-reset": text, "date": text}, now=now)

    assert wait is None or 0.0 <= wait <= 86_400.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h2m3s", 3723), ("350ms", 0.35), ("1.5s", 1.5), ("10µs", 1e-5), ("1m30", None), ("", None)]
)
def test_go_durations(text: str, seconds: float | None) -> None:
    assert duration_s(text, now=NOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 2, "prompt_cache_hit_tokens": 4}, Usage(input=9, cached_input=4, output=2)),
        (
            {"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 3},
            Usage(input=98, cached_input=90, cache_write=3, output=2),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 4}},
            Usage(input=9, cached_input=1, cache_write=4, output=2),
        ),
        ({"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 17}, Usage(input=5, output=12, reasoning=10)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "total_tokens": 17,
                "completion_tokens_details": {"reasoning_tokens": 10},
            },
            Usage(input=5, output=12, reasoning=10),
        ),
        ({"prompt_tokens": 5, "completion_tokens": None, "total_tokens": 7}, Usage(input=5, output=2)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 50}}, Usage(input=5, cached_input=5, output=2)),
        ({"prompt_tokens": 5.0, "completion_tokens": "2"}, Usage(input=5, output=2)),
        ({"prompt_tokens": -5, "completion_tokens": 2}, None),
        ({"prompt_tokens": True, "completion_tokens": 2}, None),
        ({"prompt_tokens": 5}, None),
        ({"prompt_tokens": 0, "completion_tokens": 0}, None),
        ({"prompt_tokens": 10**30, "completion_tokens": 2}, None),
        ([], None),
        ("usage", None),
    ],
)  # fmt: skip
def test_usage_in_many_dialects(reported: Any, usage: Usage | None) -> None:
    assert usage_of(reported) == usage


COUNTS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=1)
)
NAMES = st.sampled_from(
    [
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "input_tokens",
        "output_tokens",
        "cached_tokens",
        "reasoning_tokens",
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
        "prompt_cache_hit_tokens",
        "cache_write_tokens",
    ]
)
GROUPS = st.sampled_from(["prompt_tokens_details", "completion_tokens_details"])


@given(st.dictionaries(NAMES, COUNTS), st.dictionaries(GROUPS, st.dictionaries(NAMES, COUNTS) | COUNTS), st.booleans())
def test_usage_never_contradicts_itself(flat: dict[str, Any], nested: dict[str, Any], has_output: bool) -> None:
    usage = usage_of({**flat, **nested}, has_output=has_output)

    if usage is not None:
        assert 0 <= usage.cached_input + usage.cache_write <= usage.input
        assert 0 <= usage.reasoning <= usage.output
        assert cost(usage, Price(input=2, cached_input=1, output=4)) >= 0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "error",
                    "choices",
                    "message",
                    "content",
                    "delta",
                    "usage",
                    "data",
                    "embedding",
                    "index",
                    "code",
                    "type",
                    "finish_reason",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
BODIES = st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode())
STATUSES = st.sampled_from([200, 201, 204, 301, 400, 401, 403, 404, 413, 429, 500, 503, 529, 599])


def raw_of_failure(status: int, headers: Mapping[str, str], body: bytes, request: Request) -> str:
    try:
        parse(status, headers, body, request)
    except CallError as e:
        return e.raw or ""
    return ""


@given(STATUSES, BODIES, st.dictionaries(st.sampled_from(["retry-after", "date"]), st.text(max_size=8)))
def test_any_answer_becomes_a_completion_or_a_call_error(status: int, body: bytes, headers: dict[str, str]) -> None:
    raws = [raw_of_failure(status, headers, body, request) for request in (CHAT, EMBED)]

    assert all(len(raw) <= 2_000 and "\x00" not in raw for raw in raws)


@given(st.lists(BODIES, max_size=4), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r"]))
def test_any_stream_becomes_a_completion_or_a_call_error(bodies: list[bytes], end: bytes) -> None:
    stream = StreamedAnswer(200, {})
    stream.feed(b"".join(b"data: " + body + end for body in bodies))
    try:
        completion = stream.finish(now=NOW)
    except CallError:
        return

    assert isinstance(completion, Completion)


def events(*chunks: Any) -> bytes:
    return b"".join(b"data: " + (c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n\n" for c in chunks)


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def streamed(body: bytes) -> Completion:
    return parse(200, {"content-type": "text/event-stream"}, body)


@given(st.lists(st.integers(1, 40), max_size=20))
def test_a_stream_reads_the_same_however_it_is_cut_into_pieces(sizes: list[int]) -> None:
    body = b"\xef\xbb\xbf: hi\r\n\r\n" + events(delta(content="p\u00f6s"), delta("stop", content="itive"), b"[DONE]")
    stream = StreamedAnswer(200, {})
    for size in sizes:
        stream.feed(body[:size])
        body = body[size:]
    stream.feed(body)

    assert stream.finish(now=NOW).text == "p\u00f6sitive"


@pytest.mark.parametrize(
    "body",
    [
        events(delta(content="x"), delta("stop")),
        events(delta(content="x"), b"[DONE]"),
        events(delta(content="x"), b"[DONE]").rstrip(),
        events(delta("stop", content="x")) + b'data: {"choices": [], "usa',
    ],
)
def test_a_stream_is_whole_when_it_says_either_how_or_that_it_ended(body: bytes) -> None:
    assert streamed(body).text == "x"


def test_streamed_tool_calls_and_refusals_are_put_together() -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a"'}}
    more = {"index": 0, "function": {"arguments": ": 1}"}}

    called = streamed(
        events(delta(content=""), delta(tool_calls=[call]), delta("tool_calls", tool_calls=[more]), b"[DONE]")
    )
    refused = streamed(events(delta(refusal="I can"), delta("stop", refusal="not."), b"[DONE]"))

    assert json.loads(called.text or "") == [{"function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"}]
    assert refused.refusal == "I cannot."


def test_a_stream_refused_before_its_first_token_was_not_billed() -> None:
    with pytest.raises(errors.RateLimited) as caught:
        streamed(events({"error": {"code": 429, "message": "slow down"}}))

    assert caught.value.call_state is CallState.VOID


def test_a_surrogate_pair_cut_between_two_events_becomes_its_character() -> None:
    halves = [b'{"choices":[{"delta":{"content":"\\ud83d"}}]}', b'{"choices":[{"delta":{"content":"\\ude00"}}]}']

    completion = streamed(events(*halves, b"[DONE]"))

    assert sanitize(completion.text or "") == ("\U0001f600", True)


def test_an_error_inside_the_choice_of_a_stream_may_have_been_billed() -> None:
    broken = {"choices": [{"index": 0, "error": {"code": 502, "message": "gone"}, "finish_reason": "error"}]}

    with pytest.raises(errors.Unavailable) as caught:
        streamed(events(delta(content="x"), broken))

    assert caught.value.call_state is CallState.UNKNOWN


def test_other_choices_and_odd_events_of_a_stream_are_passed_over() -> None:
    other = {"choices": [{"index": 1, "delta": {"content": "no"}}, "x", {"index": 0, "delta": "x"}]}

    completion = streamed(events(delta(content="yes"), other, [], {"choices": 7}, delta("stop"), b"[DONE]", b"{"))

    assert completion.text == "yes"


def test_a_stream_with_an_event_that_is_not_json_is_malformed() -> None:
    with pytest.raises(errors.MalformedResponse, match="not JSON"):
        streamed(events(delta(content="x"), b"{garbage", b"[DONE]"))


@pytest.mark.parametrize("body", [b'[{"error": {"code": 429}}]', b'{"object": "error", "code": 429}'])
def test_an_error_in_200_may_come_in_a_list_or_flat(body: bytes) -> None:
    with pytest.raises(errors.RateLimited):
        parse(200, {}, body)


def test_a_choice_without_a_message_is_malformed() -> None:
    with pytest.raises(errors.MalformedResponse, match="without a message"):
        parse(200, {}, b'{"choices": [{"message": null}]}')


def test_messages_of_any_mapping_are_written() -> None:
    message = MappingProxyType({"role": "user", "content": "hi"})

    assert json.loads(body_of(Request(model="m", messages=(message,))))["messages"] == [dict(message)]


def test_an_error_says_how_to_find_it_at_the_provider() -> None:
    assert error(500, {}, {"x-request-id": "r-1"}).request_id == "r-1"
    assert error(500, {"request_id": "r-2"}).request_id == "r-2"
