"""The error tree. What a fault means for retries, for the row and for the ledger is said by class attributes.

Two branches: ``UserError`` (bad input or configuration; the command line exits with 2) and ``CallError`` (one call to
an engine did not give an answer). No vendor exception leaves its adapter; each is translated ``from`` the original.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from .request import RowStatus
from .usage import Usage


class BatchmillError(Exception):
    """Root of everything Batchmill raises on purpose."""


class UserError(BatchmillError):
    """Something the user gave is wrong; the message says what, where and what to do."""


class ConfigurationError(UserError):
    """A setting, catalogue entry or environment variable is wrong or missing."""


class SourceError(UserError):
    """A data set cannot be read or has a bad row; names the file and line."""


class PromptError(UserError):
    """A template cannot be rendered for a row."""


class JobError(UserError):
    """A job does not exist or is not in a state that allows what was asked."""


class SchemaVersionError(ConfigurationError):
    """The database's schema is not the one this code works with."""


class JobStopped(BatchmillError):
    """The job cannot go on by itself: paused with a reason, account down, or no worker for its queue (exit 3)."""


class Scope(StrEnum):
    """Whose fault a failed call is: one row's, the whole job's, or the provider account's (here: the device's)."""

    ROW = "row"
    JOB = "job"
    ACCOUNT = "account"


class CallState(StrEnum):
    """State of one ledger line. ``reserved`` moves to one of the others; ``unknown`` may still become ``settled``."""

    RESERVED = "reserved"
    SETTLED = "settled"
    VOID = "void"  # surely not accepted by the provider, costs nothing
    UNKNOWN = "unknown"  # may have been billed; its upper bound is kept and counts as spent


class CallError(BatchmillError):
    """One call gave no usable answer.

    ``kind`` is the name users see in ``error.kind``. ``retryable`` says whether another try can help, ``waits``
    whether a try that ended so does not use up one of the row's tries (the provider asked to wait, or was not
    reached). ``final_status`` is the row's status when no try is left. ``ledger`` is the state of the call's ledger
    line unless ``usage`` is known, which settles it. ``wait_s`` is how long the provider asked to wait, in seconds.
    ``raw`` keeps the start of the body for people to look at.
    """

    kind: ClassVar[str] = "failed"
    scope: ClassVar[Scope] = Scope.ROW
    retryable: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    final_status: ClassVar[RowStatus] = RowStatus.FAILED
    ledger: ClassVar[CallState] = CallState.VOID

    def __init__(
        self,
        message: str,
        *,
        wait_s: float | None = None,
        usage: Usage | None = None,
        raw: str | None = None,
        request_id: str | None = None,
        http_status: int | None = None,
        latency_ms: int | None = None,
        ledger: CallState | None = None,
        device_ns: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.wait_s = wait_s
        self.usage = usage
        self.raw = raw
        self.request_id = request_id
        self.http_status = http_status
        self.latency_ms = latency_ms
        self.device_ns = device_ns
        self.call_state = CallState.SETTLED if usage is not None else (ledger or type(self).ledger)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "message": self.message}


class RateLimited(CallError):
    kind = "rate_limited"
    retryable = True
    waits = True


class Unavailable(CallError):
    """5xx, 408, 409, 425 or a gateway's error: the call may have run."""

    kind = "overloaded_or_unavailable"
    retryable = True
    ledger = CallState.UNKNOWN


class Overloaded(Unavailable):
    """503 or 529: the provider said before starting that it cannot."""

    ledger = CallState.VOID


class Unreachable(CallError):
    """No connection: refused, name not found, TLS failed. Nothing was sent."""

    kind = "unreachable"
    retryable = True
    waits = True


class ConnectionLost(CallError):
    """The connection broke after the request was sent."""

    kind = "connection_lost"
    retryable = True
    ledger = CallState.UNKNOWN


class CallTimeout(CallError):
    """The deadline of the call passed after it was sent."""

    kind = "timeout"
    retryable = True
    ledger = CallState.UNKNOWN


class MalformedResponse(CallError):
    """An answer that is not what the protocol says; its cost is known only if it carried usage."""

    kind = "malformed_response"
    retryable = True
    ledger = CallState.UNKNOWN


class InvalidOutput(CallError):
    """A complete, billed answer that is not valid JSON or breaks the job's schema."""

    kind = "invalid_output"
    retryable = True
    final_status = RowStatus.INVALID
    ledger = CallState.UNKNOWN


class InvalidRequest(CallError):
    kind = "invalid_request"


class TooLong(CallError):
    kind = "too_long"
    final_status = RowStatus.TOO_LONG


class Filtered(CallError):
    """The prompt was taken by a content filter."""

    kind = "filtered"
    final_status = RowStatus.FILTERED


class EngineFailed(CallError):
    """A local engine failed on this request; it may have used the device."""

    kind = "engine_failed"
    retryable = True
    ledger = CallState.UNKNOWN


class EngineLost(EngineFailed):
    """The engine's process died with this call in it: the call may be what killed it, so its chunk counts a crash."""

    kind = "engine_lost"


class EngineDown(CallError):
    """The engine cannot be started again, or dies each time: its worker stops, the row keeps its turn for another."""

    kind = "engine_down"
    scope = Scope.ACCOUNT


class AuthFailed(CallError):
    kind = "auth_failed"
    scope = Scope.ACCOUNT


class OutOfCredit(CallError):
    kind = "out_of_credit"
    scope = Scope.ACCOUNT


class UnknownModel(CallError):
    kind = "unknown_model"
    scope = Scope.JOB
