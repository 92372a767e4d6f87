"""Workers under a supervisor, as `batchmill worker` has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from batchmill_core.settings import HOME_VARIABLE, Settings
from batchmill_workers.launch import ProcessPlan, Supervisor


@contextmanager
def supervised(
    home: Path, settings: Settings, plans: Sequence[ProcessPlan], *, env: Mapping[str, str] | None = None
) -> Iterator[Supervisor]:
    """Runs these processes for the length of a block; their logs lie under ``home``, in ``logs``."""
    where = {HOME_VARIABLE: str(home), **(env or {})}
    supervisor = Supervisor(plans, settings=settings, environment=where, log_folder=home / "logs")
    supervisor.start()
    try:
        yield supervisor
    finally:
        supervisor.stop()
