"""Answers of more providers of the kinds in ``cases/responses``, so that the kind of fault is what is tested."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}
_LABEL = {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}
_HTML = {"content-type": "text/html"}
_STREAM = {"content-type": "text/event-stream"}


def _error(http_status: int, body: Any, **expect: Any) -> dict[str, Any]:
    return {"response": {"status": http_status, "json": body}, "expect": {"retry": False, **expect}}


def _chat(content: Any, *, finish: str | None = "stop", usage: Any = _USAGE, **message: Any) -> dict[str, Any]:
    answer = {"role": "assistant", "content": content, **message}
    return {"status": 200, "json": {"choices": [{"message": answer, "finish_reason": finish}], "usage": usage}}


def _ok(response: Mapping[str, Any], output: Any = "positive", **rest: Any) -> dict[str, Any]:
    expect = {"status": "ok", "output": output, "usage": {"input": 40, "output": 3}, "retry": False}
    return {"response": response, "expect": expect | rest.pop("expect", {}), **rest}


def _passing(response: Mapping[str, Any], kind: str, **expect: Any) -> dict[str, Any]:
    return {"response": response, "expect": {"retry": True, "error": kind, **expect}}


_UNKNOWN = "unknown_with_bound"
_BUSY = "overloaded_or_unavailable"
_EMBEDDED = {"data": [{"index": i, "embedding": [i / 4]} for i in range(3)], "usage": {"prompt_tokens": 7}}

VARIANTS: dict[str, Mapping[str, Any]] = {
    # the account's fault
    "deepseek-no-balance": _error(
        402,
        {"error": {"message": "Insufficient Balance", "code": "invalid_request_error"}},
        error="out_of_credit",
        scope="account",
    ),
    "anthropic-no-balance": _error(
        400,
        {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}},
        error="out_of_credit",
        scope="account",
    ),
    "gemini-bad-key": _error(
        400,
        [{"error": {"code": 400, "message": "API key not valid.", "status": "INVALID_ARGUMENT"}}],
        error="auth_failed",
        scope="account",
    ),
    "forbidden-key": _error(
        403, {"error": {"message": "no access", "type": "permission_error"}}, error="auth_failed", scope="account"
    ),
    "bad-key-as-text": _error(401, {"detail": "Unauthorized"}, error="auth_failed", scope="account"),
    "bad-key-in-200": _error(200, {"error": {"message": "No auth", "code": 401}}, error="auth_failed", scope="account"),
    # the job's fault
    "ollama-no-model": _error(
        404, {"error": "model 'gpt-9' not found, try pulling it first"}, error="unknown_model", scope="job"
    ),
    "azure-no-deployment": _error(
        404,
        {"error": {"code": "DeploymentNotFound", "message": "The deployment does not exist."}},
        error="unknown_model",
        scope="job",
    ),
    "deepseek-no-model": _error(
        400,
        {"error": {"message": "Model Not Exist", "type": "invalid_request_error"}},
        error="unknown_model",
        scope="job",
    ),
    # the row's own fault
    "vllm-too-long": _error(
        400,
        {"object": "error", "message": "This model's maximum context length is 4096 tokens.", "code": 400},
        status="too_long",
    ),
    "anthropic-too-long": _error(
        400,
        {"type": "error", "error": {"message": "prompt is too long: 210000 tokens > 200000 maximum"}},
        status="too_long",
    ),
    "body-too-large": _error(413, {"error": {"message": "Request too large"}}, status="too_long"),
    "llamacpp-too-long": _error(
        500, {"error": {"code": 500, "message": "the request exceeds the available context size"}}, status="too_long"
    ),
    "unprocessable": _error(
        422, {"detail": [{"loc": ["body", "temperature"], "msg": "too high"}]}, status="failed", error="invalid_request"
    ),
    "qwen-filtered": _error(
        400,
        {"error": {"code": "data_inspection_failed", "message": "inappropriate"}},
        status="filtered",
        error="filtered",
    ),
    "filtered-with-text": {
        "response": _chat("It beg", finish="content_filter"),
        "expect": {"status": "filtered", "output": "It beg", "usage": {"input": 40, "output": 3}, "retry": False},
    },
    # usable answers of unusual shape
    "empty-answer": _ok(_chat(""), ""),
    "one-part": _ok(_chat([{"type": "text", "text": "positive"}])),
    "reasoning-beside": _ok(_chat("positive", reasoning_content="hm")),
    "lone-surrogate": {
        "response": {
            "status": 200,
            "headers": {"content-type": "application/json"},
            "text": '{"choices":[{"message":{"content":"a\\ud83db"},"finish_reason":"stop"}],'
            '"usage":{"prompt_tokens":40,"completion_tokens":3}}',
        },
        "expect": {"status": "ok", "output": "a\ufffdb", "sanitized": True, "usage": {"input": 40, "output": 3}},
    },
    "nul-in-schema-answer": _ok(
        _chat('{"label": "a\\u0000b"}'),
        {"label": "a\ufffdb"},
        schema=_LABEL,
        expect={"usage": {"input": 40, "output": 3}},
    ),
    "tilde-fence": _ok(_chat('~~~\n{"label": "positive"}\n~~~'), {"label": "positive"}, schema=_LABEL),
    "fence-in-capitals": _ok(_chat('```JSON\n{"label": "```"}\n```'), {"label": "```"}, schema=_LABEL),
    "fence-without-schema": _ok(_chat("```\nx\n```"), "```\nx\n```"),
    "usage-of-zeros-missing": _ok(_chat("positive", usage={}), expect={"usage": None}),
    "deepseek-cache-hit": _ok(
        _chat("positive", usage={**_USAGE, "prompt_cache_hit_tokens": 30, "prompt_cache_miss_tokens": 10}),
        expect={"usage": {"input": 40, "cached_input": 30, "output": 3}, "cost_usd": "0.0000118"},
    ),
    "truncated-under-schema": {
        "schema": _LABEL,
        "response": _chat('{"label": "posi', finish="length"),
        "expect": {"status": "truncated", "output": '{"label": "posi', "usage": {"input": 40, "output": 3}},
    },
    "refusal-under-schema": {
        "schema": _LABEL,
        "response": _chat(None, refusal="No."),
        "expect": {"status": "refused", "output": "No.", "usage": {"input": 40, "output": 3}},
    },
    "stream-without-usage": {
        "response": {
            "status": 200,
            "headers": _STREAM,
            "text": 'data: {"choices":[{"delta":{"content":"positive"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n',
        },
        "expect": {"status": "ok", "output": "positive", "usage": None, "has_ttft": True},
    },
    "embeddings-in-order": {
        "inputs": ["a", "bb", "cccc"],
        "response": {"status": 200, "json": _EMBEDDED},
        "expect": {"outputs": [[0.0], [0.25], [0.5]], "usage": {"input": 7, "output": 0}},
    },
    # faults that pass
    "html-503": _passing({"status": 503, "headers": _HTML, "text": "<h1>503 Service Unavailable</h1>"}, _BUSY),
    "cloudflare-524": _passing({"status": 524, "headers": _HTML, "text": "<title>A timeout occurred</title>"}, _BUSY),
    "json-500": _passing({"status": 500, "json": {"error": {"message": "internal error"}}}, _BUSY, call_cost=_UNKNOWN),
    "html-in-200": _passing(
        {"status": 200, "headers": _HTML, "text": "<html>maintenance</html>"}, "malformed_response", call_cost=_UNKNOWN
    ),
    "empty-body": _passing({"status": 200, "text": ""}, "malformed_response", call_cost=_UNKNOWN),
    "connection-cut": _passing(
        {"status": 200, "text": '{"choices": [{"message": {"content": "pos"}}]}', "cut_after": 9},
        "connection_lost",
        call_cost=_UNKNOWN,
    ),
    "openrouter-429-in-200": _passing(
        {"status": 200, "json": {"error": {"code": 429, "message": "slow down"}}}, "rate_limited"
    ),
    "gemini-retry-delay": _passing(
        {
            "status": 429,
            "json": [
                {
                    "error": {
                        "code": 429,
                        "message": "Quota exceeded",
                        "status": "RESOURCE_EXHAUSTED",
                        "details": [{"@type": "RetryInfo", "retryDelay": "3s"}],
                    }
                }
            ],
        },
        "rate_limited",
        wait_s=3.0,
    ),
    "try-again-in-words": _passing(
        {"status": 429, "json": {"error": {"message": "Rate limit reached. Please try again in 1.5s."}}},
        "rate_limited",
        wait_s=1.5,
    ),
    "retry-after-a-minute": _passing(
        {"status": 429, "headers": {"retry-after": "60"}, "json": {"error": {"message": "slow down"}}},
        "rate_limited",
        wait_s=60.0,
    ),
    "overloaded-with-long-wait": _passing(
        {"status": 503, "headers": {"retry-after": "30"}, "json": {"error": {"message": "busy"}}}, _BUSY, wait_s=30.0
    ),
    "prose-instead-of-json": {
        "schema": _LABEL,
        "response": _chat("I think it is positive."),
        "expect": {"retry": True, "error": "invalid_output", "final_status": "invalid"},
    },
    "bad-json-without-usage": {
        "schema": _LABEL,
        "response": _chat('{"label": ', usage=None),
        "expect": {"retry": True, "error": "invalid_output", "final_status": "invalid", "call_cost": _UNKNOWN},
    },
    "embeddings-duplicate-index": {
        "inputs": ["a", "b"],
        "response": {
            "status": 200,
            "json": {"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [2.0]}]},
        },
        "expect": {"retry": True, "error": "malformed_response", "call_cost": _UNKNOWN},
    },
}
