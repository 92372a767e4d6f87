"""Results as lines of an OpenAI batch output file."""

from __future__ import annotations

from typing import Any

import orjson

from batchmill_core.request import RowStatus

from .export_rows import Result, Vector


def openai_line(r: Result) -> bytes:
    """One line as the OpenAI Batch API writes them (https://platform.openai.com/docs/api-reference/batch)."""
    answered = r.error is None and r.status not in (RowStatus.DEAD, RowStatus.CANCELLED, None)
    line: dict[str, Any] = {
        "id": f"batch_req_{r.row}",
        "custom_id": r.custom_id if r.custom_id is not None else f"row-{r.row}",
        "response": None,
        "error": None,
    }
    if answered:
        line["response"] = {"status_code": 200, "request_id": f"row-{r.row}", "body": _openai_body(r)}
    else:
        error = r.error or {"kind": str(r.status), "message": f"the row ended {r.status}"}
        line["error"] = {"code": error["kind"], "message": error["message"]}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _openai_body(r: Result) -> dict[str, Any]:
    usage = None
    if r.usage is not None:
        usage = {
            "prompt_tokens": r.usage["input"],
            "completion_tokens": r.usage["output"],
            "total_tokens": r.usage["input"] + r.usage["output"],
            "prompt_tokens_details": {"cached_tokens": r.usage["cached_input"]},
            "completion_tokens_details": {"reasoning_tokens": r.usage["reasoning"]},
        }
    if isinstance(r.output, Vector):
        data = [{"object": "embedding", "index": 0, "embedding": r.output}]
        return {"object": "list", "model": r.model, "data": data, "usage": usage}
    refused = r.status is RowStatus.REFUSED
    text = r.output if r.output is None or isinstance(r.output, str) else orjson.dumps(r.output).decode()
    message = {"role": "assistant", "content": None if refused else text, "refusal": text if refused else None}
    choice = {"index": 0, "message": message, "finish_reason": r.finish_reason or "stop"}
    return {"object": "chat.completion", "model": r.model, "choices": [choice], "usage": usage}
