"""``batchmill.submit``, ``batchmill.connect`` and ``batchmill.job``: the Python API over one default Client."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, get_type_hints

from batchmill_core.settings import load_settings

from .asked import Options, make_submission, parameters
from .client import Client, Job

_lock = threading.Lock()
_default: Client | None = None


def connect(
    *,
    broker_url: str | None = None,
    database_url: str | None = None,
    folder: str | PathLike[str] | None = None,
) -> Client:
    """Says which broker, database and folder later calls of this program use; answers the Client, for several of them.

    What is not given comes from BATCHMILL_BROKER_URL, BATCHMILL_DATABASE_URL and batchmill.toml. Opens nothing yet.
    Raises ConfigurationError.
    """
    global _default
    overrides = {"broker_url": broker_url, "database_url": database_url}
    settings = load_settings(None if folder is None else Path(folder), overrides=overrides)
    client = Client(settings=settings)
    with _lock:
        _default = client
    return client


def submit(dataset: str | PathLike[str] | Iterable[Any], **options: Unpack[Options]) -> Job:
    """Submits a data set (a path, ``-``, an iterable of mappings or a data frame) and answers its Job.

    Every row is read, rendered and saved before this returns; with ``eager`` workers begin with the first rows meanwhile.
    With no broker configured it starts workers in the folder and keeps them until ``wait()`` returns or the program ends.
    With a ``key``, the same call answers the same job. Raises SourceError, PromptError or ConfigurationError when the
    data set or what is asked is wrong, JobStopped when an ``eager`` job's data set turns out so: it is paused, and the
    same key goes on. JobError when the key belongs to another submission or data set.
    """
    given = dataset if isinstance(dataset, (str, Path)) or not isinstance(dataset, PathLike) else Path(dataset)
    return default_client().submit(make_submission(given, **options))


submit.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # for help(): what `options` may be
    [
        inspect.Parameter("dataset", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *parameters(get_type_hints(Options)),
    ],
    return_annotation=Job,
)


def job(reference: str) -> Job:
    """The job with this id or key, or the newest of this name. Raises JobError when there is none."""
    return default_client().job(reference)


def jobs(*, limit: int = 1000) -> list[Job]:
    """The newest jobs, newest first."""
    return default_client().jobs(limit=limit)


def default_client() -> Client:
    """The Client that ``connect`` made, else one of the current folder and environment."""
    with _lock:
        client = _default
    return connect() if client is None else client
