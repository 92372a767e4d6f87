"""The provider behind the wire: keys, limits, faults, answers and the bill. One reply per request, decided at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson

from .bill import CUSTOM_CHARS, Bill, BilledCall, call_cost
from .chance import Chance
from .chat import ChatRequest, answer, parse_chat
from .config import SimulatorConfig
from .connection import Ending, HttpRequest, Reply
from .embeddings import EmbeddingRequest, embeddings, parse_embeddings
from .error_bodies import JSON, BadRequest, fault_body, openai_error
from .limits import RateLimits, retry_after_headers
from .prices import CHAT_MODEL, EMBED_MODEL, PRICES
from .wire import ChatAnswer, Sending, chat_reply, embedding_reply, error_reply, json_reply, stream_reply

CHAT_PATH = "/v1/chat/completions"
EMBED_PATH = "/v1/embeddings"
FAULT_RETRY_AFTER_S = 0.2  # what a drawn 429 asks for
_PROMPTS_CACHED = 1024
_MODELS = {CHAT_PATH: CHAT_MODEL, EMBED_PATH: EMBED_MODEL}
_ID_PREFIXES = {CHAT_PATH: "chatcmpl-sim", EMBED_PATH: "embd-sim"}


class _Work(NamedTuple):
    """A call that was understood: what it costs and how to send its answer."""

    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    custom: str
    reply: Callable[[Sending], Reply]


class Provider:
    """Answers requests and bills them. A call is billed when it is accepted, whether or not its answer arrives."""

    def __init__(self, config: SimulatorConfig, *, now_s: Callable[[], float]) -> None:
        self._config = config
        self._now_s = now_s
        self._chance = Chance(config)
        self._limits = RateLimits(
            requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute
        )
        self._bill = Bill(kept_calls=config.kept_calls)
        self._numbers = count(1)
        self._prompts: OrderedDict[str, None] = OrderedDict()

    def respond(self, request: HttpRequest) -> Reply:
        path, _, query = request.target.partition("?")
        if path in _MODELS and request.method == "POST":
            return self._call(request, path)
        try:
            return self._other(request, path, query)
        except BadRequest as refused:
            return error_reply(refused.status, JSON, refused.body)

    def _other(self, request: HttpRequest, path: str, query: str) -> Reply:
        match request.method, path:
            case "GET", "/v1/models":
                self._check_key(request)
                return json_reply({"object": "list", "data": [_model_entry(name) for name in PRICES]})
            case "GET", "/bill":
                return json_reply(self._bill_answer(parse_qs(query)))
            case "POST", "/reset":
                self._bill.clear()
                return json_reply(self._bill.totals())
        name = path.removeprefix("/v1/models/")
        if request.method == "GET" and name in PRICES:
            self._check_key(request)
            return json_reply(_model_entry(name))
        if path in _MODELS:
            raise BadRequest(f"Not allowed to {request.method} on {path}; use POST.", status=405)
        raise BadRequest(f"Invalid URL ({request.method} {path})", status=404)

    def _call(self, request: HttpRequest, path: str) -> Reply:
        call_id = f"{_ID_PREFIXES[path]}-{next(self._numbers)}"
        try:
            self._check_key(request)
            work = self._understand(request, path)
        except BadRequest as refused:
            self._book(request, call_id, path, status=refused.status)
            return error_reply(refused.status, JSON, refused.body, headers=self._headers(call_id))
        return self._within_limits(request, call_id, path, work) or self._answer(request, call_id, path, work)

    def _within_limits(self, request: HttpRequest, call_id: str, path: str, work: _Work) -> Reply | None:
        """The refusal of a call over a limit, or None for one that passes."""
        over = self._limits.admit(tokens=work.input_tokens + work.output_tokens, now_s=self._now_s())
        if over is None:
            return None
        self._book(request, call_id, path, status=429, custom=work.custom)
        body = openai_error(429, message=over.message, kind=over.name)
        return error_reply(429, JSON, body, headers=self._headers(call_id) + retry_after_headers(over.wait_s))

    def _answer(self, request: HttpRequest, call_id: str, path: str, work: _Work) -> Reply:
        fault, latency_s = self._chance.fault(), self._chance.latency_s()
        if fault is not None and fault.isdigit():
            status = int(fault)
            self._book(request, call_id, path, status=status, custom=work.custom)
            headers = self._headers(call_id) + (retry_after_headers(FAULT_RETRY_AFTER_S) if status == 429 else "")
            return error_reply(status, *fault_body(status), headers=headers, delay_s=latency_s)
        self._book(request, call_id, path, status=200, custom=work.custom, work=work)
        if fault == "hang":
            return Reply(ending=Ending.HANG)
        return work.reply(Sending(call_id, latency_s, self._headers(call_id), fault))

    def _understand(self, request: HttpRequest, path: str) -> _Work:
        body = _json_object(request.body)
        model = body.get("model")
        if model != _MODELS[path]:
            message = f"The model `{model}` does not exist or you do not have access to it."
            raise BadRequest(message, status=404, param="model", code="model_not_found")
        return self._chat(parse_chat(body)) if path == CHAT_PATH else self._embed(parse_embeddings(body))

    def _chat(self, request: ChatRequest) -> _Work:
        self._check_context(request.input_tokens)
        text, finish_reason, output_tokens = answer(request)
        cached = self._cached_tokens(request)
        answered = ChatAnswer(text, finish_reason, request.input_tokens, cached, output_tokens)

        def reply(sending: Sending) -> Reply:
            if request.stream:
                return stream_reply(answered, sending, include_usage=request.include_usage)
            return chat_reply(answered, sending)

        return _Work(request.input_tokens, cached, output_tokens, request.text[:CUSTOM_CHARS], reply)

    def _embed(self, request: EmbeddingRequest) -> _Work:
        self._check_context(request.longest_tokens)
        tokens = request.input_tokens

        def reply(sending: Sending) -> Reply:
            return embedding_reply(embeddings(request), tokens, sending)

        return _Work(tokens, 0, 0, request.texts[0][:CUSTOM_CHARS], reply)

    def _cached_tokens(self, request: ChatRequest) -> int:
        """Tokens that the prompt cache has, as OpenAI counts them: the first message, when long and seen before."""
        tokens = request.cacheable_tokens
        if not tokens:
            return 0
        seen = request.prefix in self._prompts
        self._prompts[request.prefix] = None
        self._prompts.move_to_end(request.prefix)
        if len(self._prompts) > _PROMPTS_CACHED:
            self._prompts.popitem(last=False)
        return tokens if seen else 0

    def _check_key(self, request: HttpRequest) -> None:
        wanted = self._config.api_key
        if wanted is None:
            return
        given = (request.header(b"authorization") or "").removeprefix("Bearer ").strip()
        if given == wanted:
            return
        masked = f"{given[:3]}***{given[-2:]}" if len(given) > 8 else "***"
        message = f"Incorrect API key provided: {masked}." if given else "You didn't provide an API key."
        raise BadRequest(message, status=401)

    def _check_context(self, tokens: int) -> None:
        limit = self._config.context_tokens
        if tokens > limit:
            message = f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} tokens."
            raise BadRequest(message, param="messages", code="context_length_exceeded")

    def _headers(self, call_id: str) -> str:
        return f"x-request-id: {call_id}\r\n{self._limits.headers()}"

    def _book(
        self, request: HttpRequest, call_id: str, path: str, *, status: int, custom: str = "", work: _Work | None = None
    ) -> None:
        tokens = (work.input_tokens, work.cached_input_tokens, work.output_tokens) if work else (0, 0, 0)
        cost_nanousd = call_cost(_MODELS[path], *tokens)
        key = request.header(b"idempotency-key")
        self._bill.add(BilledCall(call_id, path, status, work is not None, *tokens, cost_nanousd, key, custom))

    def _bill_answer(self, query: Mapping[str, list[str]]) -> dict[str, Any]:
        answered = self._bill.totals()
        if query.get("calls", ["0"])[-1] not in ("", "0", "false"):
            answered["per_call"] = list(self._bill.per_call())
        return answered


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}.") from error
    if not isinstance(value, dict):
        raise BadRequest("The body of your request must be a JSON object.")
    return value


def _model_entry(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "batchmill"}
