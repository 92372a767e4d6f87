"""The item that takes a GPU's memory away under a loaded worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from batchmill_core.request import RowStatus
from batchmill_db import batch_sizes
from batchmill_workers.gpu.device_kind import device_kind

from .ground import Ground, milling
from .verdicts import Verdict, failed, judged

ROWS = 400
PROMPT = "a long prompt, " * 200  # 3000 tokens: 400 rows need 20 GB of KV cache, and more to read the prompts
LEFT_MIB = 8192
_CLASS = 12  # rows of at most 2**12 tokens
_SAVED_WITHIN_S = 45.0  # a worker saves what it has learned every 30 s


def out_of_memory(ground: Ground, *, rows: int = ROWS, prompt: str = PROMPT, max_tokens: int = 64) -> Verdict:
    """Batches of a running worker no longer fit, and every row is answered all the same, by the same worker."""
    kind = device_kind(ground.engine_device, ground.pinned)
    with milling(ground, "oom") as mill:
        before = mill.supervisor.pids
        with _hog(ground):
            report = mill.run([f"{n} {prompt}" for n in range(rows)], max_tokens=max_tokens, timeout_s=150)
        answered = report.by_status.get(RowStatus.TRUNCATED, 0) + report.by_status.get(RowStatus.OK, 0)
        figures = f"{answered} of {rows} rows answered with {LEFT_MIB} MiB left"
        if answered != rows or mill.supervisor.pids != before:
            lives = "lives" if mill.supervisor.pids == before else "died"
            return failed(f"{figures}; the job is {report.job.state}, its worker {lives}", answered=answered, rows=rows)
        sizes = mill.until(
            "the batch sizes that work are saved",
            lambda: mill.database.run(lambda conn: batch_sizes.load(conn, "oom", kind)),
            timeout_s=_SAVED_WITHIN_S,
        )
        fits = sizes.get(_CLASS, rows)
        return judged(
            fits < rows,
            f"{figures}, {fits} at once fitted (target: all answered, fewer than {rows} at once)",
            answered=answered,
            rows=rows,
            fits=fits,
        )


@contextmanager
def _hog(ground: Ground) -> Iterator[None]:
    """Holds the slot's memory, but for a little, for the length of a ``with`` block."""
    command = [sys.executable, "-P", "-m", "batchmill_ops.gpu_check.hog", str(LEFT_MIB)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=dict(ground.pinned), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            if "holding" not in process.stdout.readline():
                raise RuntimeError("memory could not be taken away")
            yield
        finally:
            try:
                process.communicate(timeout=30)
            except BaseException:
                process.kill()
                raise
