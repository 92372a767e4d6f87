"""What a job would cost, before any call: renders and checks every row, counts tokens as a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchmill_core import tokens
from batchmill_core.job import Step
from batchmill_core.request import TaskKind
from batchmill_core.settings import Settings
from batchmill_core.usage import Usage, cost, usd

from .submit import Submission, prepare

_GUESSED_OUTPUT = (1, 500)  # tokens of an answer when nothing bounds it
_GUESSED_CALL_S = (0.3, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Ranges: (low, high). Costs are nano-USD, None without a price; seconds are for one worker at full use."""

    rows: int
    skipped: int
    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    cost_nanousd: tuple[int, int] | None
    seconds: tuple[float, float] | None
    problems: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        low, high = (self.input_tokens[i] + self.output_tokens[i] for i in (0, 1))
        money = (None, None) if self.cost_nanousd is None else self.cost_nanousd
        return {
            "rows": self.rows,
            "skipped": self.skipped,
            "tokens": {"low": low, "high": high},
            "cost_usd": {"low": usd(money[0]), "high": usd(money[1])},
            "seconds": None
            if self.seconds is None
            else {"low": round(self.seconds[0], 1), "high": round(self.seconds[1], 1)},
            "problems": list(self.problems),
        }


def estimate(settings: Settings, submission: Submission) -> Estimate:
    """Reads the whole data set once, in flat memory. Raises the same errors as `submit`, and sends nothing."""
    prepared = prepare(submission, settings)
    step, account = prepared.spec.steps[0], prepared.account
    rows = low_in = high_in = low_out = high_out = 0
    for _, request in prepared.requests():
        low, high = tokens.estimate_tokens(request)
        out_low, out_high = _output_range(prepared.spec.task, {**prepared.spec.params, **request.params})
        rows, low_in, high_in = rows + 1, low_in + low, high_in + high
        low_out, high_out = low_out + out_low, high_out + out_high
    seconds = None
    if account is not None:
        seconds = (
            _at_least_s(rows, low_in + low_out, account.limits, account.max_in_flight, _GUESSED_CALL_S[0]),
            _at_least_s(rows, high_in + high_out, account.limits, account.max_in_flight, _GUESSED_CALL_S[1]),
        )
    return Estimate(
        rows=rows,
        skipped=prepared.source.bad_row_count,
        input_tokens=(low_in, high_in),
        output_tokens=(low_out, high_out),
        cost_nanousd=_cost_range(step, (low_in, high_in), (low_out, high_out)),
        seconds=seconds,
        problems=_problems(step, prepared.notes, [f"line {b.line}: {b.reason}" for b in prepared.source.bad_rows[:20]]),
    )


def _output_range(task: TaskKind, params: dict[str, Any]) -> tuple[int, int]:
    if task is not TaskKind.CHAT:
        return 0, 0
    most = params.get("max_completion_tokens", params.get("max_tokens"))
    return (1, most) if isinstance(most, int) else _GUESSED_OUTPUT


def _cost_range(step: Step, inputs: tuple[int, int], outputs: tuple[int, int]) -> tuple[int, int] | None:
    if step.price is None:
        return None
    low, high = (cost(Usage(input=inputs[i], output=outputs[i]), step.price) for i in (0, 1))
    return low, high


def _at_least_s(rows: int, all_tokens: int, limits: Any, max_in_flight: int, call_s: float) -> float:
    """Seconds that the account's limits and the calls in flight need at least."""
    rates = [max_in_flight / call_s]
    if limits.requests_per_second is not None:
        rates.append(limits.requests_per_second)
    if limits.requests_per_minute is not None:
        rates.append(limits.requests_per_minute / 60)
    seconds = rows / min(rates)
    if limits.tokens_per_minute is not None:
        seconds = max(seconds, all_tokens / (limits.tokens_per_minute / 60))
    return seconds


def _problems(step: Step, notes: Sequence[str], bad: Sequence[str]) -> list[str]:
    problems = list(notes)
    if not step.has_price:
        problems.append(f"model {step.model!r} has no known price, so its cost is unknown (not zero)")
    return [*problems, *bad]
