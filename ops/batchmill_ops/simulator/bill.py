"""The provider's own bill: what it would charge for the calls it answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from batchmill_core.usage import Usage, cost, usd

from .prices import PRICES

CUSTOM_CHARS = 80


class BilledCall(NamedTuple):
    """One call as it arrived. A plain tuple: hundreds of thousands are kept.

    ``client_custom`` is the start of the last user message (or of the first text to embed), by which a test finds the
    row that the call was made for.
    """

    id: str
    path: str
    status: int
    billed: bool
    input_tokens: int
    cached_input_tokens: int
    output_tokens: int
    cost_nanousd: int
    idempotency_key: str | None
    client_custom: str

    def as_dict(self) -> dict[str, Any]:
        answer = self._asdict()
        answer["cost_usd"] = usd(answer.pop("cost_nanousd"))
        return answer


class Bill:
    """Sums over all calls, and the newest ``kept_calls`` of them one by one."""

    def __init__(self, *, kept_calls: int) -> None:
        self._kept: deque[BilledCall] = deque(maxlen=kept_calls)
        self.clear()

    def clear(self) -> None:
        self._kept.clear()
        self._calls = self._billed_calls = 0
        self._input_tokens = self._cached_input_tokens = self._output_tokens = self._cost_nanousd = 0

    def add(self, call: BilledCall) -> None:
        self._calls += 1
        self._kept.append(call)
        if call.billed:
            self._billed_calls += 1
            self._input_tokens += call.input_tokens
            self._cached_input_tokens += call.cached_input_tokens
            self._output_tokens += call.output_tokens
            self._cost_nanousd += call.cost_nanousd

    def totals(self) -> dict[str, Any]:
        return {
            "calls": self._calls,
            "billed_calls": self._billed_calls,
            "input_tokens": self._input_tokens,
            "cached_input_tokens": self._cached_input_tokens,
            "output_tokens": self._output_tokens,
            "cost_usd": usd(self._cost_nanousd),
        }

    def per_call(self) -> Iterator[dict[str, Any]]:
        """The kept calls, oldest first; ``totals()["calls"]`` minus their number were dropped."""
        return (call.as_dict() for call in self._kept)


@lru_cache(maxsize=8192)
def call_cost(model: str, input_tokens: int, cached_input_tokens: int, output_tokens: int) -> int:
    """Cost of one call in nano-USD, by the arithmetic that Batchmill itself uses."""
    usage = Usage(input=input_tokens, cached_input=cached_input_tokens, output=output_tokens)
    return cost(usage, PRICES[model])
