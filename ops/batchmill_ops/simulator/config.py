"""SimulatorConfig: how the simulated provider behaves, parsed and validated once."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

_LATENCY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s)")
_SECONDS = {"ms": 0.001, "s": 1.0}

ODD_FAULTS = ("cut", "hang", "malformed", "nousage", "empty")


class LatencyShape(StrEnum):
    """How latencies spread around their mean; ``latency_jitter`` is the spread relative to it.

    lognormal: standard deviation / mean, with the long tail real providers have. uniform: half the width / mean.
    """

    LOGNORMAL = "lognormal"
    UNIFORM = "uniform"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRate:
    """The share of calls that end in one kind of fault.

    ``kind`` is an HTTP status from 400 to 599, or ``cut`` (the answer breaks off in the middle), ``hang`` (no answer at
    all), ``malformed`` (choices are null), ``empty`` (choices are an empty list), ``nousage`` (a good answer without
    usage). Calls that end in an HTTP status are not billed; the others are.
    """

    kind: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatorConfig:
    """Everything the simulated provider can be told. Raises ConfigurationError when it contradicts itself.

    ``kept_calls`` is how many calls ``GET /bill?calls=1`` can list at most (the newest; 0 keeps none), so that memory
    stays bounded; the sums cover all calls.
    """

    latency_s: float = 0.1
    latency_jitter: float = 0.0
    latency_shape: LatencyShape = LatencyShape.LOGNORMAL
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    faults: tuple[FaultRate, ...] = ()
    seed: int = 0
    api_key: str | None = field(default=None, repr=False)
    context_tokens: int = 131_072
    kept_calls: int = 250_000

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise ConfigurationError(f"latency is {self.latency_s} s; it must be at least 0.")
        _check_jitter(self.latency_jitter, self.latency_shape)
        _check_positive("rpm", self.requests_per_minute)
        _check_positive("tpm", self.tokens_per_minute)
        _check_positive("context-tokens", self.context_tokens)
        if self.kept_calls < 0:
            raise ConfigurationError(f"kept-calls is {self.kept_calls}; it must be at least 0.")
        _check_faults(self.faults)


def parse_latency(text: str) -> float:
    """Seconds of ``100ms``, ``1.5s`` or ``0``. Raises ConfigurationError."""
    stripped = text.strip().lower()
    if stripped == "0":
        return 0.0
    match = _LATENCY.fullmatch(stripped)
    if match is None:
        raise ConfigurationError(
            f"latency {text!r} is not a duration; write milliseconds or seconds, as 100ms or 1.5s."
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_faults(text: str) -> tuple[FaultRate, ...]:
    """Reads ``429:0.05,500:0.01,cut:0.01``: kind and probability per call. Raises ConfigurationError."""
    faults = tuple(_fault(part.strip()) for part in text.split(",") if part.strip())
    _check_faults(faults)
    return faults


def _fault(part: str) -> FaultRate:
    kind, colon, probability = (piece.strip() for piece in part.partition(":"))
    if not colon:
        raise ConfigurationError(f"fault {part!r} has no probability; write kind:probability, as 429:0.05.")
    try:
        return FaultRate(kind=kind.lower(), probability=float(probability))
    except ValueError:
        raise ConfigurationError(
            f"fault {part!r}: {probability!r} is not a number; write a probability from 0 to 1, as {kind}:0.05."
        ) from None


def _check_jitter(jitter: float, shape: LatencyShape) -> None:
    if not 0 <= jitter < math.inf:
        raise ConfigurationError(f"latency-jitter is {jitter}; it must be at least 0, as 0.2.")
    if shape is LatencyShape.UNIFORM and jitter > 1:
        raise ConfigurationError(f"latency-jitter is {jitter}; uniform latencies need one from 0 to 1.")


def _check_positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigurationError(f"{option} is {value}; it must be at least 1. Leave it out for no limit.")


def _check_faults(faults: tuple[FaultRate, ...]) -> None:
    for fault in faults:
        _check_kind(fault.kind)
        if not 0 <= fault.probability <= 1:
            raise ConfigurationError(
                f"fault {fault.kind}:{fault.probability:g} has a probability outside 0 to 1; write as {fault.kind}:0.05."
            )
    kinds = [fault.kind for fault in faults]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"fault {twice} is given twice; give each kind one probability.")
    total = math.fsum(fault.probability for fault in faults)
    if total > 1 + 1e-9:
        raise ConfigurationError(f"the probabilities of all faults sum to {total:g}; they can sum to 1 at most.")


def _check_kind(kind: str) -> None:
    if kind in ODD_FAULTS or (kind.isascii() and kind.isdigit() and 400 <= int(kind) <= 599):
        return
    raise ConfigurationError(
        f"fault {kind!r} is neither an HTTP status from 400 to 599 nor a kind{nearest(kind, ODD_FAULTS)}"
    )
