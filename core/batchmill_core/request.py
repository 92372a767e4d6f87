"""Row, Request, Completion and RowStatus: what goes into and comes out of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from .usage import Usage


class RowStatus(StrEnum):
    """The one final status of a row. The first four are paid answers and may fill an empty place even when stale."""

    OK = "ok"
    TRUNCATED = "truncated"  # the answer ended at max_tokens
    FILTERED = "filtered"  # a content filter took the prompt or the answer
    REFUSED = "refused"  # the model refused
    INVALID = "invalid"  # the answer broke the schema on every try
    TOO_LONG = "too_long"  # the prompt does not fit the model's context
    FAILED = "failed"  # the request was wrong, or every try failed
    DEAD = "dead"  # the row brought its worker down
    CANCELLED = "cancelled"


STATUSES: tuple[RowStatus, ...] = tuple(RowStatus)
PAID_STATUSES = frozenset({RowStatus.OK, RowStatus.TRUNCATED, RowStatus.FILTERED, RowStatus.REFUSED})
BAD_STATUSES = frozenset({RowStatus.FAILED, RowStatus.INVALID, RowStatus.TOO_LONG, RowStatus.DEAD})


class TaskKind(StrEnum):
    CHAT = "chat"
    EMBED = "embed"
    CLASSIFY = "classify"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One accepted row of a data set, as its source gave it.

    ``index`` counts accepted rows from 0; ``line`` is where it stood in ``source`` (1-based; None where lines mean
    nothing). ``request`` is set when the row already is a request (a line of an OpenAI batch file).
    ``sanitized``: some text in it held NUL or a lone surrogate, which was replaced by U+FFFD.
    """

    index: int
    input: Mapping[str, Any]
    source: str | None = None
    line: int | None = None
    custom_id: str | None = None
    request: Request | None = None
    sanitized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one call asks of an engine.

    ``messages`` are chat messages in OpenAI's shape, for chat and classify; ``inputs`` are the texts of an embedding
    call, one per row that the call covers. ``params`` are sampling parameters under OpenAI's names. ``model`` is the
    provider's name of the model, filled in by the worker from the job's spec, never stored with the row.
    """

    task: TaskKind = TaskKind.CHAT
    messages: tuple[Mapping[str, Any], ...] = ()
    inputs: tuple[str, ...] = ()
    params: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    idempotency_key: str | None = None

    def as_payload(self) -> dict[str, Any]:
        """The part that is stored with the row: messages or inputs, and the row's own parameters."""
        payload: dict[str, Any] = {}
        if self.messages:
            payload["messages"] = list(self.messages)
        if self.inputs:
            payload["inputs"] = list(self.inputs)
        if self.params:
            payload["params"] = dict(self.params)
        return payload

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any], *, task: TaskKind) -> Request:
        return cls(
            task=task,
            messages=tuple(payload.get("messages", ())),
            inputs=tuple(payload.get("inputs", ())),
            params=payload.get("params", {}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine answered to one Request, translated to one shape for all providers.

    ``text`` is the answer of a chat call (None when the model gave none); ``vectors`` are the embeddings in the order
    of ``Request.inputs``, float32 little-endian bytes each. ``usage`` is None when the provider reported none.
    ``device_ns`` is a local engine's share of device time in nanoseconds: the integral of dt/n over the call, n being
    the calls running at that moment.
    """

    text: str | None = None
    vectors: tuple[bytes, ...] = ()
    finish_reason: str | None = None
    refusal: str | None = None
    usage: Usage | None = None
    latency_ms: int = 0
    ttft_ms: int | None = None
    model: str | None = None
    request_id: str | None = None
    device_ns: int | None = None
