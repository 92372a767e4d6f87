"""Batchmill grinds data sets through models: durable, counted, fast batch inference on Celery, Redis and SQL."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmill_core.errors import BatchmillError, JobStopped, UserError
    from batchmill_core.request import RowStatus
    from batchmill_ops.report import JobReport
    from batchmill_producers.export import Result

    from .api import connect, job, jobs, submit
    from .client import Client, Job, JobCost
    from .version import __version__

__all__ = [
    "BatchmillError",
    "Client",
    "Job",
    "JobCost",
    "JobReport",
    "JobStopped",
    "Result",
    "RowStatus",
    "UserError",
    "__version__",
    "connect",
    "job",
    "jobs",
    "submit",
]

# Loaded at first use (PEP 562): the command line imports this package too and must not wait for what it does not use.
_HOMES = {
    "batchmill_core.errors": ("BatchmillError", "JobStopped", "UserError"),
    "batchmill_core.request": ("RowStatus",),
    "batchmill_ops.report": ("JobReport",),
    "batchmill_producers.export": ("Result",),
    "batchmill.api": ("connect", "job", "jobs", "submit"),
    "batchmill.client": ("Client", "Job", "JobCost"),
    "batchmill.version": ("__version__",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'batchmill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
