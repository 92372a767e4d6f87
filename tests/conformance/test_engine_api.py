"""ApiEngine over real HTTP: every case of answers, and what breaks on the way."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from batchmill_core import errors
from batchmill_core.catalog import Account, Limits, ModelEntry
from batchmill_core.engine import Engine
from batchmill_core.errors import CallError, CallState, ConfigurationError
from batchmill_core.request import Completion, Request, TaskKind
from batchmill_workers.api.engine import ApiEngine
from tests.scripted_server import ScriptedServer, scripted

CASES = sorted((Path(__file__).parents[1] / "cases" / "responses").glob("*.json"))
KEY = "sk-planted-6f1c0e"
CHAT = Request(model="m-1", messages=({"role": "user", "content": "hi"},))
STREAM = Request(model="m-1", messages=({"role": "user", "content": "hi"},), stream=True)
GOOD = {
    "json": {
        "model": "m-1",
        "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1},
    }
}
REFUSED = {
    "status": 401,
    "json": {"error": {"message": f"Incorrect API key provided: {KEY}", "code": "invalid_api_key"}},
}
EVENTS = (
    'data: {"choices":[{"delta":{"content":"ye"}}]}\n\n'
    'data: {"choices":[{"delta":{"content":"s"},"finish_reason":"stop"}]}\n\n'
    'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)
AS_STREAM = {"headers": {"content-type": "text/event-stream"}}


def engine_for(
    base_url: str, *, timeout_s: float = 10.0, keys: Iterator[str | None] | None = None, **fields: Any
) -> ApiEngine:
    account = Account(name="a", base_url=base_url, timeout_s=timeout_s, **fields)
    return ApiEngine(account, (lambda: next(keys)) if keys is not None else (lambda: KEY))


def run(engine: ApiEngine, act: Callable[[ApiEngine], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        await engine.start()
        try:
            return await asyncio.wait_for(act(engine), 20)
        finally:
            await engine.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(bounded())


def ask(engine: ApiEngine, request: Request = CHAT) -> Completion:
    completion = run(engine, lambda e: e.complete(request))
    assert isinstance(completion, Completion)
    return completion


def ask_server(script: Any, request: Request = CHAT, **options: Any) -> tuple[Completion | CallError, ScriptedServer]:
    with scripted(script) as server:
        try:
            return ask(engine_for(server.base_url, **options), request), server
        except CallError as e:
            return e, server


def as_script(response: Mapping[str, Any]) -> dict[str, Any]:
    script = dict(response)
    if "text" in script and "choices" in script["text"] and not script["text"].endswith(("\n", "}")):
        return script | {"close": True}
    return script | {"close": True} if "text" in script else script


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_case_over_http_is_what_it_must_be(path: Path) -> None:
    case = json.loads(path.read_text())
    inputs, expect = tuple(case.get("inputs", ())), case["expect"]
    streams = "event-stream" in case["response"].get("headers", {}).get("content-type", "")
    request = Request(
        task=TaskKind.EMBED if inputs else TaskKind.CHAT, model="m-1", inputs=inputs, stream=streams,
        schema=case.get("schema"),
    )  # fmt: skip

    found, server = ask_server(as_script(case["response"]), request)

    assert len(server.requests) == 1
    if isinstance(found, CallError):
        assert found.kind == expect.get("error", found.kind)
        assert found.retryable == expect["retry"]
        assert found.wait_s == expect.get("wait_s")
        assert found.scope.value == expect.get("scope", "row")
        if "call_cost" in expect:
            assert found.call_state is CallState.UNKNOWN
    else:
        assert expect.get("error") in (None, "invalid_output")
        assert (found.ttft_ms is not None) == expect.get("has_ttft", False)


def test_it_is_an_engine() -> None:
    assert isinstance(engine_for("http://127.0.0.1:9/v1"), Engine)


def test_the_request_arrives_as_the_protocol_wants_it() -> None:
    request = Request(model="m-1", messages=CHAT.messages, params={"max_tokens": 5}, idempotency_key="c-1")

    _, server = ask_server(GOOD, request)

    (arrived,) = server.requests
    assert (arrived.method, arrived.path) == ("POST", "/v1/chat/completions")
    assert arrived.json == {"model": "m-1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    assert arrived.headers["authorization"] == f"Bearer {KEY}"
    assert arrived.headers["content-type"] == "application/json"
    assert arrived.headers["idempotency-key"] == "c-1"
    assert "cookie" not in arrived.headers


def test_without_a_key_no_authorization_is_sent() -> None:
    _, server = ask_server(GOOD, keys=iter([None]))

    assert "authorization" not in server.requests[0].headers


def test_a_base_url_with_a_query_keeps_it() -> None:
    with scripted(GOOD) as server:
        ask(engine_for(server.base_url + "/?api-version=2024-06-01"))

    assert server.requests[0].path == "/v1/chat/completions?api-version=2024-06-01"


def test_a_stream_is_read_as_it_comes_and_its_connection_used_again() -> None:
    script = {"text": EVENTS, "chunked": True, "chunk_bytes": 7, **AS_STREAM}

    with scripted(script) as server:
        first, second = run(engine_for(server.base_url), lambda e: _twice(e, STREAM))

    assert first.text == second.text == "yes"
    assert first.usage is not None
    assert first.ttft_ms is not None
    assert 0 <= first.ttft_ms <= first.latency_ms
    assert server.requests[0].json["stream_options"] == {"include_usage": True}


async def _twice(engine: ApiEngine, request: Request) -> tuple[Completion, Completion]:
    return await engine.complete(request), await engine.complete(request)


def test_a_plain_answer_to_a_streamed_request_is_understood() -> None:
    found, _ = ask_server(GOOD, STREAM)

    assert isinstance(found, Completion)
    assert (found.text, found.ttft_ms) == ("yes", None)


def test_a_streamed_answer_to_a_plain_request_is_understood() -> None:
    found, _ = ask_server({"text": EVENTS, **AS_STREAM})

    assert isinstance(found, Completion)
    assert found.text == "yes"


def test_an_error_answer_to_a_streamed_request_is_read_whole() -> None:
    found, _ = ask_server({"status": 429, "headers": {"retry-after": "2"}, "json": {"error": "slow"}}, STREAM)

    assert isinstance(found, errors.RateLimited)
    assert found.wait_s == 2.0


def test_a_refused_connection_sent_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    with pytest.raises(errors.Unreachable) as caught:
        ask(engine_for(f"http://127.0.0.1:{port}/v1"))

    assert caught.value.call_state is CallState.VOID


@pytest.mark.parametrize("base_url", ["http://no-such-host.invalid/v1", "https://{netloc}/v1"], ids=["dns", "tls"])
def test_an_unknown_name_and_a_failed_handshake_sent_nothing(base_url: str) -> None:
    with scripted(GOOD) as server, pytest.raises(errors.Unreachable) as caught:
        ask(engine_for(base_url.format(netloc=server.base_url.split("/")[2])))

    assert caught.value.call_state is CallState.VOID
    assert server.requests == []


@pytest.mark.parametrize(
    "script",
    [
        GOOD | {"cut_after": 0},
        GOOD | {"cut_after": 20},
        GOOD | {"cut_after": 20, "chunked": True},
    ],
    ids=["headers only", "cut by length", "cut in chunks"],
)
def test_a_connection_that_breaks_after_sending_may_have_been_billed_and_is_not_resent(script: dict[str, Any]) -> None:
    found, server = ask_server(script)

    assert isinstance(found, errors.ConnectionLost)
    assert found.call_state is CallState.UNKNOWN
    assert len(server.requests) == 1


async def _serve_raw(answer: bytes, act: Callable[[str], Awaitable[Any]]) -> Any:
    """A server that answers every request, once its head is there, by ``answer`` and hangs up."""
    arrived = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await reader.readuntil(b"\r\n\r\n")
        arrived += 1
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        return await act(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"), arrived
    finally:
        server.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(b"", errors.ConnectionLost), (b"SSH-2.0-hello\r\n", errors.MalformedResponse)],
    ids=["hangs up", "not http"],
)
def test_a_server_that_hangs_up_or_does_not_speak_http_is_asked_once(answer: bytes, kind: type[CallError]) -> None:
    async def act(base_url: str) -> CallError:
        engine = engine_for(base_url)
        await engine.start()
        with pytest.raises(CallError) as caught:
            await engine.complete(CHAT)
        await engine.close()
        return caught.value

    error, arrived = asyncio.run(_serve_raw(answer, act))

    assert type(error) is kind
    assert error.call_state is CallState.UNKNOWN
    assert arrived == 1


@pytest.mark.parametrize(
    "script",
    [{"hang": True}, GOOD | {"delay_s": 30}, GOOD | {"chunked": True, "chunk_bytes": 1, "chunk_gap_s": 0.05}],
    ids=["hangs", "late", "drips"],
)
def test_the_deadline_covers_the_whole_call_and_may_have_been_billed(script: dict[str, Any]) -> None:
    found, _ = ask_server(script, timeout_s=0.3)

    assert isinstance(found, errors.CallTimeout)
    assert found.call_state is CallState.UNKNOWN
    assert found.latency_ms is not None
    assert 290 <= found.latency_ms < 2_000


def test_a_dripping_stream_meets_the_deadline_too() -> None:
    found, _ = ask_server({"text": EVENTS, "chunked": True, "chunk_gap_s": 0.2, **AS_STREAM}, STREAM, timeout_s=0.3)

    assert isinstance(found, errors.CallTimeout)


def test_a_model_may_have_a_timeout_of_its_own() -> None:
    with scripted({"hang": True}) as server:
        account = Account(name="a", base_url=server.base_url, timeout_s=60)
        engine = ApiEngine(account, lambda: KEY, models=[ModelEntry(name="x", model="m-1", timeout_s=0.2)])
        with pytest.raises(errors.CallTimeout):
            ask(engine)


def test_a_redirect_is_refused_and_the_key_stays_here() -> None:
    with scripted(GOOD) as elsewhere:
        found, _ = ask_server({"status": 307, "headers": {"location": elsewhere.base_url}})

    assert isinstance(found, errors.UnknownModel)
    assert elsewhere.requests == []


def test_a_body_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_workers.api.engine.MAX_BODY_BYTES", 10_000)

    found, _ = ask_server({"text": "x" * 1_000_000})

    assert isinstance(found, errors.MalformedResponse)
    assert found.call_state is CallState.UNKNOWN


def test_a_key_that_changed_is_read_again_after_a_401() -> None:
    found, server = ask_server([REFUSED, GOOD], keys=iter(["old", "new"]))

    assert isinstance(found, Completion)
    assert [r.headers["authorization"] for r in server.requests] == ["Bearer old", "Bearer new"]


def test_a_key_that_stays_wrong_is_sent_once() -> None:
    found, server = ask_server(REFUSED)

    assert isinstance(found, errors.AuthFailed)
    assert len(server.requests) == 1


def test_calls_refused_together_ask_for_the_key_once() -> None:
    keys = iter(["old", "new"])

    async def act(engine: ApiEngine) -> list[Completion]:
        return await asyncio.gather(*(engine.complete(CHAT) for _ in range(20)))

    with scripted([*[REFUSED | {"delay_s": 0.2}] * 20, GOOD]) as server:
        completions = run(engine_for(server.base_url, keys=keys), act)

    assert [c.text for c in completions] == ["yes"] * 20
    assert len(server.requests) == 40


@pytest.mark.parametrize(
    "script",
    [REFUSED, GOOD | {"cut_after": 5}, {"hang": True}, {"status": 500, "text": f"no {KEY}"}],
    ids=["refused", "cut", "hangs", "echo"],
)
def test_the_key_is_in_no_message_traceback_or_log(script: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    found, _ = ask_server(script, timeout_s=0.2)

    assert isinstance(found, CallError)
    shown = "".join(traceback.format_exception(found)) + repr(found) + repr(found.__cause__) + caplog.text
    assert KEY not in shown + str(found.raw) + str(found.as_dict())


def test_a_key_that_no_header_can_carry_is_refused_before_sending() -> None:
    with pytest.raises(ConfigurationError, match="characters"):
        ask(engine_for("http://127.0.0.1:9/v1", keys=iter(["sk-\nHost: evil"])))


def test_an_address_that_is_none_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="ftp://x"):
        engine_for("ftp://x")


def test_a_429_pauses_the_whole_account_and_says_until_when() -> None:
    async def act(engine: ApiEngine) -> tuple[float | None, float]:
        before = engine.throttled_until
        with pytest.raises(errors.RateLimited):
            await engine.complete(CHAT)
        assert engine.throttled_until is not None
        return before, engine.quota.paused_s

    with scripted({"status": 429, "headers": {"retry-after": "30"}, "json": {}}) as server:
        before, paused_s = run(engine_for(server.base_url), act)

    assert before is None
    assert 29 < paused_s <= 30


def test_many_calls_run_side_by_side_within_the_quota() -> None:
    most = 0

    async def one(engine: ApiEngine) -> None:
        nonlocal most
        async with engine.quota.admit("m-1", 10) as permit:
            most = max(most, engine.in_flight)
            completion = await engine.complete(CHAT)
            permit.used(completion.usage.total if completion.usage else 10)

    async def act(engine: ApiEngine) -> None:
        await asyncio.gather(*(one(engine) for _ in range(60)))

    with scripted(GOOD | {"delay_s": 0.05}) as server:
        engine = engine_for(server.base_url, max_in_flight=20, limits=Limits(tokens_per_minute=1e9))
        run(engine, act)

    assert most == 20
    assert engine.in_flight == 0
    assert len(server.requests) == 60


def test_a_cancelled_call_ends_at_once_and_frees_its_place() -> None:
    async def act(engine: ApiEngine) -> int:
        async def one() -> None:
            async with engine.quota.admit("m-1"):
                await engine.complete(CHAT)

        task = asyncio.ensure_future(one())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine.in_flight

    with scripted({"hang": True}) as server:
        assert run(engine_for(server.base_url), act) == 0


def test_a_proxy_is_used_where_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(GOOD) as proxy:
        monkeypatch.setenv("http_proxy", proxy.base_url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        completion = ask(engine_for("http://provider.invalid/v1"))

    assert completion.text == "yes"
    assert proxy.requests[0].path == "http://provider.invalid/v1/chat/completions"


def test_a_server_on_this_host_is_asked_without_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(GOOD) as server, scripted(GOOD) as proxy:
        monkeypatch.setenv("http_proxy", proxy.base_url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        ask(engine_for(server.base_url))

    assert proxy.requests == []
    assert len(server.requests) == 1


def test_closing_twice_is_once() -> None:
    engine = engine_for("http://127.0.0.1:9/v1")

    async def act(engine: ApiEngine) -> None:
        await engine.close()

    run(engine, act)

    with pytest.raises(errors.Unreachable, match="not open"):
        asyncio.run(engine.complete(CHAT))


def test_a_proxy_that_would_not_connect_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted({"status": 502, "text": "no route"}) as proxy:
        monkeypatch.setenv("https_proxy", proxy.base_url.removesuffix("/v1"))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with pytest.raises(errors.Unreachable) as caught:
            ask(engine_for("https://provider.invalid/v1"))

    assert caught.value.call_state is CallState.VOID


def test_a_row_of_several_megabytes_is_sent() -> None:
    found, server = ask_server(GOOD, Request(model="m-1", messages=({"role": "user", "content": "x" * 3_000_000},)))

    assert isinstance(found, Completion)
    assert len(server.requests[0].body) > 3_000_000


def test_a_server_that_keeps_a_finished_stream_open_does_not_hold_up_its_row() -> None:
    script = {"text": EVENTS + ": still here" * 99, "chunked": True, "chunk_bytes": len(EVENTS), "chunk_gap_s": 0.5}

    found, _ = ask_server(script | AS_STREAM, STREAM, timeout_s=5)

    assert isinstance(found, Completion)
    assert found.ttft_ms is not None
    assert found.latency_ms - found.ttft_ms < 200


def test_azure_gets_its_own_header() -> None:
    engine = engine_for("https://x.openai.azure.com/openai/v1")

    async def act(engine: ApiEngine) -> Mapping[str, str]:
        return engine._headers

    headers = run(engine, act)

    assert headers["api-key"] == KEY
    assert "Authorization" not in headers


def test_a_stream_without_end_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_workers.api.engine.MAX_BODY_BYTES", 10_000)

    found, _ = ask_server({"text": ": x\n\n" * 10_000, **AS_STREAM}, STREAM)

    assert isinstance(found, errors.MalformedResponse)


def test_a_key_that_cannot_be_read_again_is_a_refusal() -> None:
    def read_key() -> str:
        if reads.append(1) or len(reads) > 1:
            raise ConfigurationError("gone")
        return KEY

    reads: list[int] = []
    with scripted(REFUSED) as server, pytest.raises(errors.AuthFailed):
        ask(ApiEngine(Account(name="a", base_url=server.base_url), read_key))


def test_starting_twice_is_once() -> None:
    async def act(engine: ApiEngine) -> str | None:
        await engine.start()
        return (await engine.complete(CHAT)).text

    with scripted(GOOD) as server:
        assert run(engine_for(server.base_url), act) == "yes"
