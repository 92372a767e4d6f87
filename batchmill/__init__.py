"""Batchmill grinds data sets through models: durable, counted, fast batch inference on Celery, Redis and SQL."""

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
