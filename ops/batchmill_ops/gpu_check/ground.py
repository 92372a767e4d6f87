"""Where the check runs: a folder of its own with a stack, a model and workers under a supervisor."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from batchmill_core.job import JobState
from batchmill_core.settings import HOME_VARIABLE, Settings, load_settings
from batchmill_db import telemetry
from batchmill_db.session import Database
from batchmill_ops.report import JobReport, read_report
from batchmill_ops.stack import attach
from batchmill_producers.submit import Submission, submit
from batchmill_workers.launch import Supervisor, plan_gpu

from .local_model import Shape

T = TypeVar("T")
_LOOK_EVERY_S = 0.2
_ENDED = (JobState.DONE, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """``devices`` is one slot as ``--devices`` names it, ``engine`` what serves the model ``m``, whose
    answers have ``max_tokens``."""

    folder: Path
    devices: str
    engine: str
    pinned: Mapping[str, str]  # variables that pin a process to the slot
    engine_device: str
    shape: Shape
    max_tokens: int

    @property
    def model_folder(self) -> Path:
        return self.folder / "model"

    def write_catalog(self) -> None:
        """Model ``m`` on the engine under test, model ``oom`` on ours with batches as large as can be."""
        toml = f"sample_every_s = 1\ndrain_s = 5\n{self._entry('m', self.engine)}"
        (self.folder / "batchmill.toml").write_text(toml + self._entry("oom", "transformers", "max_rows = 512"))

    def _entry(self, name: str, engine: str, options: str = "") -> str:
        table = f'\n[models.{name}]\nengine = "{engine}"\nsource = "{self.model_folder}"\ndevice_usd_per_hour = 1.0\n'
        return f"{table}options = {{ {options} }}\n"


def run_python(environment: Mapping[str, str], *arguments: str, timeout_s: float) -> str:
    """What a Python process with that environment prints. Raises RuntimeError with its last words."""
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"{' '.join(arguments[:2])} ended with {done.returncode}: {last}")
    return done.stdout


class Mill:
    """A running worker of one model, and jobs for it."""

    def __init__(self, settings: Settings, database: Database, supervisor: Supervisor, model: str) -> None:
        self._settings = settings
        self.database = database
        self.supervisor = supervisor
        self._model = model

    def until(self, what: str, found: Callable[[], T | None], *, timeout_s: float) -> T:
        """Asks again until the answer is true. Raises RuntimeError when it is not in time, or no worker could start."""
        deadline = time.monotonic() + timeout_s
        while True:
            if answer := found():
                return answer
            if self.supervisor.unfit:
                raise RuntimeError("; ".join(self.supervisor.unfit))
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {timeout_s:.0f} s in vain until {what}")
            time.sleep(_LOOK_EVERY_S)

    def run(self, texts: Sequence[str], *, max_tokens: int, timeout_s: float) -> JobReport:
        """One job with these prompts, to its end."""
        submission = Submission(
            dataset=[{"text": text} for text in texts],
            model=self._model,
            prompt="{{ text }}",
            params={"max_tokens": max_tokens, "temperature": 0},
        )
        job = submit(self.database, self._settings, submission)

        def ended() -> JobReport | None:
            report = read_report(self.database, job.id)
            return report if report.job.state in _ENDED else None

        return self.until("the job has ended", ended, timeout_s=timeout_s)


@contextmanager
def milling(ground: Ground, model: str) -> Iterator[Mill]:
    """A worker of ``model`` on the slot, loaded and ready, for the length of a ``with`` block."""
    settings = load_settings(ground.folder, {})
    stack = attach(settings)
    try:
        where = {HOME_VARIABLE: str(ground.folder), "BATCHMILL_BROKER_URL": stack.broker_url, "HF_HUB_OFFLINE": "1"}
        plans = plan_gpu(stack.settings, model, ground.devices)
        logs = ground.folder / "logs"
        supervisor = Supervisor(plans, settings=stack.settings, environment=where, log_folder=logs)
        supervisor.start()
        mill = Mill(stack.settings, stack.database, supervisor, model)
        try:
            mill.until("the worker is ready", lambda: _ready(mill), timeout_s=120)
            yield mill
        finally:
            supervisor.stop()
    finally:
        stack.stop()


def _ready(mill: Mill) -> list[Any]:
    with mill.database.reading() as conn:
        return [w for w in telemetry.live_workers(conn) if w.state == "ready" and w.pid in mill.supervisor.pids]
