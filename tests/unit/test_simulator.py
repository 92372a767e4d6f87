"""The simulated provider over real connections: answers, streams, embeddings, limits, refusals, faults and the bill."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import jsonschema
import pytest

from batchmill_core.usage import Usage, cost, usd
from batchmill_ops.simulator import (
    PRICES,
    FaultRate,
    Simulator,
    SimulatorConfig,
)
from batchmill_ops.simulator.connection import HttpRequest
from batchmill_ops.simulator.provider import Provider

QUICK = SimulatorConfig(latency_s=0.0)


def chat_body(text: str = "Review: great phone", **more: Any) -> dict[str, Any]:
    return {"model": "sim-chat", "messages": [{"role": "user", "content": text}], **more}


def run_with(config: SimulatorConfig, use: Callable[[aiohttp.ClientSession], Awaitable[Any]]) -> Any:
    """Runs a simulator and a client in one loop; paths in ``use`` are relative to the server's root."""

    async def go() -> Any:
        simulator = Simulator(config)
        port = await simulator.start("127.0.0.1", 0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(10)) as session:
            try:
                return await use(session)
            finally:
                await simulator.close()

    return asyncio.run(go())


async def post(session: aiohttp.ClientSession, path: str, body: Any, **options: Any) -> tuple[int, Any, Any]:
    async with session.post(path, data=json.dumps(body), **options) as response:
        text = await response.text()
        is_json = response.headers["content-type"] == "application/json"
        return response.status, response.headers, json.loads(text) if is_json else text


async def chat(session: aiohttp.ClientSession, text: str = "Review: great phone", **more: Any) -> tuple[int, Any, Any]:
    return await post(session, "/v1/chat/completions", chat_body(text, **more))


async def bill(session: aiohttp.ClientSession, *, calls: bool = False) -> Any:
    async with session.get("/bill?calls=1" if calls else "/bill") as response:
        return await response.json()


def answer_text(body: Any) -> str:
    content = body["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def fault(kind: str) -> SimulatorConfig:
    return SimulatorConfig(latency_s=0.0, faults=(FaultRate(kind=kind, probability=1.0),))


def test_a_refused_call_is_told_its_wait_in_the_headers_of_real_providers() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        return [await chat(session), await chat(session)], await bill(session)

    config = SimulatorConfig(latency_s=0.0, requests_per_minute=1, tokens_per_minute=1000)
    ((ok, ok_headers, _), (refused, headers, body)), billed = run_with(config, use)

    assert (ok, refused) == (200, 429)
    assert ok_headers["x-ratelimit-remaining-requests"] == "0"
    assert ok_headers["x-ratelimit-reset-requests"] == "1m0s"
    assert ok_headers["x-ratelimit-limit-tokens"] == "1000"
    assert 59 <= int(headers["retry-after"]) <= 60
    assert 59_000 < int(headers["retry-after-ms"]) <= 60_000
    assert body["error"]["code"] == "rate_limit_exceeded"
    assert "Limit 1, Used 1, Requested 1" in body["error"]["message"]
    assert (billed["calls"], billed["billed_calls"]) == (2, 1)


SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["negative", "positive"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["label", "stars"],
}


def test_a_prompt_about_a_review_is_answered_by_its_label_and_the_words_of_the_prompt_do_not_count() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        prompt = "Is this review positive, negative or neutral? Terrible, it broke."
        return await chat(session, prompt), await chat(session, prompt)

    (_, _, first), (_, _, again) = run_with(QUICK, use)

    assert answer_text(first) == answer_text(again) == "negative"
    assert first["usage"]["completion_tokens"] == 2


def test_an_answer_longer_than_max_tokens_is_cut_and_says_length() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        return await chat(session, "Übersetze das Wörterbuch " * 20, max_tokens=7)

    _, _, body = run_with(QUICK, use)

    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 7
    assert 25 <= len(answer_text(body).encode()) <= 28


def test_a_schema_is_honoured_over_http_and_json_mode_gives_an_object() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA}}

    async def use(session: aiohttp.ClientSession) -> Any:
        by_schema = await chat(session, "great", response_format=wanted)
        return by_schema, await chat(session, "great", response_format={"type": "json_object"})

    (_, _, by_schema), (_, _, by_mode) = run_with(QUICK, use)

    jsonschema.validate(json.loads(answer_text(by_schema)), SCHEMA)
    assert json.loads(answer_text(by_mode)) == {"label": "positive"}


def test_content_parts_are_read_and_an_image_costs_tokens() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}

    async def use(session: aiohttp.ClientSession) -> Any:
        parts = [{"type": "text", "text": "Review: bad"}]
        return [
            await post(
                session, "/v1/chat/completions", {"model": "sim-chat", "messages": [{"role": "user", "content": c}]}
            )
            for c in (parts, [*parts, image])
        ]

    (_, _, plain), (_, _, with_image) = run_with(QUICK, use)

    assert answer_text(plain) == "negative"
    assert with_image["usage"]["prompt_tokens"] - plain["usage"]["prompt_tokens"] == 85


def events_of(text: str) -> list[Any]:
    return [json.loads(e[6:]) if e != "data: [DONE]" else "DONE" for e in text.split("\n\n") if e]


def test_a_stream_has_role_content_finish_usage_and_done() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        whole = await chat(session, "Describe the sea")
        return whole, await chat(session, "Describe the sea", stream=True, stream_options={"include_usage": True})

    (_, _, whole), (_, headers, text) = run_with(SimulatorConfig(latency_s=0.03), use)
    events = events_of(text)
    *chunks, finish, usage, done = events

    assert headers["content-type"].startswith("text/event-stream")
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == answer_text(whole)
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"], done) == ([], whole["usage"], "DONE")


def test_a_stream_without_include_usage_has_none() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        return await chat(session, stream=True)

    _, _, text = run_with(QUICK, use)

    assert all("usage" not in event for event in events_of(text))


def test_embeddings_come_with_their_index_and_alike_in_both_encodings() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        body = {"model": "sim-embed", "input": ["red shoes", "blue car", "red shoes size 8"]}
        as_floats = await post(session, "/v1/embeddings", body)
        return as_floats, await post(session, "/v1/embeddings", body | {"encoding_format": "base64"})

    (status, _, floats), (_, _, encoded) = run_with(QUICK, use)
    vectors = [entry["embedding"] for entry in floats["data"]]

    assert status == 200
    assert [entry["index"] for entry in floats["data"]] == [0, 1, 2]
    assert [list(struct.unpack("<64f", base64.b64decode(e["embedding"]))) for e in encoded["data"]] == vectors
    assert sum(x * x for x in vectors[0]) == pytest.approx(1)
    close, far = (sum(x * y for x, y in zip(vectors[0], other, strict=True)) for other in (vectors[2], vectors[1]))
    assert close > far
    assert floats["usage"] == {"prompt_tokens": 3 + 2 + 4, "total_tokens": 9}


def test_a_single_text_token_ids_and_dimensions_are_understood() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        given = ["one", [1, 2, 3], [[1, 2], [3]]]
        return [
            await post(session, "/v1/embeddings", {"model": "sim-embed", "input": text, "dimensions": 5})
            for text in given
        ]

    answers = run_with(QUICK, use)

    assert [len(body["data"]) for _, _, body in answers] == [1, 1, 2]
    assert all(len(entry["embedding"]) == 5 for _, _, body in answers for entry in body["data"])


def test_the_bill_equals_the_cost_of_the_usage_that_was_answered() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        answers = [await chat(session, f"Summarise text number {n} " * n) for n in range(1, 8)]
        await post(session, "/v1/embeddings", {"model": "sim-embed", "input": "twelve bytes"})
        return [body["usage"] for _, _, body in answers], await bill(session)

    usages, billed = run_with(QUICK, use)

    chat_cost = sum(
        cost(Usage(input=u["prompt_tokens"], output=u["completion_tokens"]), PRICES["sim-chat"]) for u in usages
    )
    assert billed["cost_usd"] == usd(chat_cost + cost(Usage(input=3), PRICES["sim-embed"]))
    assert billed["input_tokens"] == sum(u["prompt_tokens"] for u in usages) + 3
    assert billed["output_tokens"] == sum(u["completion_tokens"] for u in usages)
    assert (billed["calls"], billed["billed_calls"]) == (8, 8)


def test_the_bill_lists_each_call_by_its_request_id_key_and_text_and_can_be_cleared() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        body = chat_body("x" * 100)
        _, headers, answered = await post(session, "/v1/chat/completions", body, headers={"Idempotency-Key": "k-1"})
        listed = await bill(session, calls=True)
        await session.post("/reset")
        return headers["x-request-id"], answered["id"], listed["per_call"], await bill(session, calls=True)

    request_id, answer_id, (call,), cleared = run_with(QUICK, use)

    assert call["id"] == request_id == answer_id
    assert (call["status"], call["billed"], call["path"]) == (200, True, "/v1/chat/completions")
    assert (call["idempotency_key"], call["client_custom"]) == ("k-1", "x" * 80)
    assert (cleared["calls"], cleared["cost_usd"], cleared["per_call"]) == (0, "0", [])


def test_the_list_of_calls_is_bounded_and_the_sums_are_not() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        for n in range(5):
            await chat(session, f"call {n}")
        return await bill(session, calls=True)

    billed = run_with(SimulatorConfig(latency_s=0.0, kept_calls=2), use)

    assert billed["calls"] == 5
    assert [call["client_custom"] for call in billed["per_call"]] == ["call 3", "call 4"]


def test_a_long_system_prompt_seen_before_is_billed_as_cached() -> None:
    system = {"role": "system", "content": "rule " * 1000}

    async def use(session: aiohttp.ClientSession) -> Any:
        bodies = [{"model": "sim-chat", "messages": [system, {"role": "user", "content": f"go {n}"}]} for n in (1, 2)]
        answers = [(await post(session, "/v1/chat/completions", body))[2]["usage"] for body in bodies]
        return answers, await bill(session)

    (first, second), billed = run_with(QUICK, use)

    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 1152  # 1250 tokens in whole steps of 128
    both = [
        Usage(
            input=u["prompt_tokens"],
            cached_input=u["prompt_tokens_details"]["cached_tokens"],
            output=u["completion_tokens"],
        )
        for u in (first, second)
    ]
    assert billed["cost_usd"] == usd(sum(cost(usage, PRICES["sim-chat"]) for usage in both))


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "gpt-9", "messages": []}, 404, "`gpt-9` does not exist"),
        ({"model": "sim-chat"}, 400, "'messages' must be a list"),
        ({"model": "sim-chat", "messages": ["hi"]}, 400, "messages[0]"),
        ({"model": "sim-chat", "messages": [{"role": "user", "content": 3}]}, 400, "messages[0]"),
        (chat_body(max_tokens=0), 400, "max_tokens"),
        (chat_body(max_tokens="5"), 400, "max_tokens"),
        (chat_body(response_format="json"), 400, "response_format"),
        (chat_body(response_format={"type": "json_schema"}), 400, "json_schema.schema"),
        (chat_body("long " * 600), 400, "maximum context length is 500 tokens"),
        ([1], 400, "must be a JSON object"),
    ],
)
def test_a_wrong_request_is_refused_unbilled_in_the_shape_of_openai(body: Any, status: int, says: str) -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        return await post(session, "/v1/chat/completions", body), await bill(session)

    (got, _, refusal), billed = run_with(SimulatorConfig(latency_s=0.0, context_tokens=500), use)

    assert got == status
    assert says in refusal["error"]["message"]
    assert set(refusal["error"]) == {"message", "type", "param", "code"}
    assert (billed["calls"], billed["billed_calls"]) == (1, 0)


@pytest.mark.parametrize(
    "body",
    [{}, {"input": ""}, {"input": []}, {"input": [None]}, {"input": ["a"], "dimensions": 0}, {"input": {"a": 1}}],
)
def test_a_wrong_embedding_request_is_refused(body: dict[str, Any]) -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        return await post(session, "/v1/embeddings", {"model": "sim-embed", **body})

    status, _, refusal = run_with(QUICK, use)

    assert status == 400
    assert refusal["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b'{"model": "\\ud800"}', b"[" * 5000])
def test_a_body_that_is_no_json_is_refused(raw: bytes) -> None:
    provider = Provider(QUICK, now_s=lambda: 0.0)

    reply = provider.respond(HttpRequest("POST", "/v1/chat/completions", {}, raw))

    assert reply.parts[0].startswith(b"HTTP/1.1 400 ")


def test_another_key_is_refused_and_shown_masked() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        keys = ("sk-right-key", "sk-wrong-key-abc", None)
        headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in keys]
        return [await post(session, "/v1/chat/completions", chat_body(), headers=given) for given in headers]

    right, wrong, none = run_with(SimulatorConfig(latency_s=0.0, api_key="sk-right-key"), use)

    assert (right[0], wrong[0], none[0]) == (200, 401, 401)
    assert wrong[2]["error"]["code"] == "invalid_api_key"
    assert "wrong-key" not in wrong[2]["error"]["message"]


def test_models_are_listed_and_other_paths_are_not_found() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        found = []
        for path in ("/v1/models", "/v1/models/sim-chat", "/v1/models/x", "/nowhere", "/v1/chat/completions"):
            async with session.get(path) as response:
                found.append((response.status, await response.json()))
        return found

    listed, one, *others = run_with(QUICK, use)

    assert [model["id"] for model in listed[1]["data"]] == ["sim-chat", "sim-embed"]
    assert one[1]["id"] == "sim-chat"
    assert [status for status, _ in others] == [404, 404, 405]


@pytest.mark.parametrize(
    ("status", "content_type", "shape"),
    [
        (429, "application/json", '"rate_limit_exceeded"'),
        (400, "application/json", '"invalid_request_error"'),
        (500, "application/json", '"server_error"'),
        (502, "text/html", "<h1>502 Bad Gateway</h1>"),
        (503, "application/json", "overloaded"),
        (529, "application/json", '"type":"overloaded_error"'),
        (418, "application/json", '"error"'),
    ],
)
def test_a_drawn_status_comes_in_its_real_shape_and_is_not_billed(status: int, content_type: str, shape: str) -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        async with session.post("/v1/chat/completions", json=chat_body()) as response:
            return response.status, response.headers, await response.text(), await bill(session)

    got, headers, text, billed = run_with(fault(str(status)), use)

    assert (got, headers["content-type"]) == (status, content_type)
    assert shape in text
    assert ("retry-after-ms" in headers) == (status == 429)
    assert (billed["calls"], billed["billed_calls"]) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_answer_is_billed_and_breaks_off(stream: bool) -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        async with session.post("/v1/chat/completions", json=chat_body("Tell me a story", stream=stream)) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        return await bill(session)

    billed = run_with(fault("cut"), use)

    assert billed["billed_calls"] == 1


def test_a_hanging_call_is_billed_and_never_answered() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await session.post("/v1/chat/completions", json=chat_body(), timeout=aiohttp.ClientTimeout(0.1))
        return await bill(session)

    billed = run_with(fault("hang"), use)

    assert (billed["calls"], billed["billed_calls"]) == (1, 1)


def test_spoiled_bodies_are_billed() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        _, _, chat_body_ = await chat(session)
        _, _, embed_body = await post(session, "/v1/embeddings", {"model": "sim-embed", "input": "a"})
        return chat_body_, embed_body, await bill(session)

    malformed, empty, nousage = (run_with(fault(kind), use) for kind in ("malformed", "empty", "nousage"))

    assert (malformed[0]["choices"], malformed[1]["data"]) == (None, None)
    assert (empty[0]["choices"], empty[1]["data"]) == ([], [])
    assert "usage" not in nousage[0]
    assert answer_text(nousage[0]) == "positive"
    assert [billed["billed_calls"] for _, _, billed in (malformed, empty, nousage)] == [2, 2, 2]


def test_faults_reach_streams_too() -> None:
    async def use(session: aiohttp.ClientSession) -> Any:
        _, _, text = await chat(session, stream=True, stream_options={"include_usage": True})
        return events_of(text)

    malformed, empty, nousage = (run_with(fault(kind), use) for kind in ("malformed", "empty", "nousage"))

    assert malformed[0]["choices"] is None
    assert empty[0]["choices"] == []
    assert all("usage" not in event for event in nousage)
