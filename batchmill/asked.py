"""What users say, as texts and numbers, as values: submissions, amounts, statuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus, TaskKind
from batchmill_core.usage import nanousd
from batchmill_producers.submit import Submission


def make_submission(
    dataset: Any, *, budget_usd: float | str | None = None, task: str | None = None, **options: Any
) -> Submission:
    """A Submission from the options of the Python API. Raises ConfigurationError for an amount or task that is none."""
    if options.get("params") is None:
        options["params"] = {}
    return Submission(
        dataset=dataset,
        budget_nanousd=None if budget_usd is None else parse_budget(budget_usd),
        task=None if task is None else _task(task),
        **options,
    )


def statuses_of(status: str | Iterable[str] | None) -> list[RowStatus] | None:
    """Row statuses by name, from ``"failed,invalid"`` or several names. Raises ConfigurationError for an unknown one."""
    if status is None:
        return None
    names = [n.strip() for text in ([status] if isinstance(status, str) else status) for n in str(text).split(",")]
    unknown = [n for n in names if n and n not in set(RowStatus)]
    if unknown:
        raise ConfigurationError(f"there is no status {unknown[0]!r}; there are {', '.join(RowStatus)}")
    return [RowStatus(n) for n in names if n]


def parse_budget(amount: float | str) -> int:
    """Nano-USD of an amount of USD. Raises ConfigurationError."""
    try:
        return nanousd(amount)
    except ValueError as fault:
        raise ConfigurationError(f"the budget {fault}; write USD, such as 5 or 0.50") from None


def _task(task: str) -> TaskKind:
    try:
        return TaskKind(task)
    except ValueError:
        raise ConfigurationError(f"task {task!r} is not known; there are chat and embed") from None
