"""The items of the check, each a function that answers a verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean

from batchmill_core.errors import ConfigurationError
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import batch_sizes, sample_spans
from batchmill_ops.report import JobReport
from batchmill_workers.gpu.device_kind import device_kind
from batchmill_workers.gpu.devices import Slot
from batchmill_workers.gpu.listing import slots

from .ground import Ground, Mill, milling
from .local_model import prompts
from .verdicts import Verdict, failed, judged, passed, skipped

LEAST_USE_PERCENT = 90.0
LEAST_SHARE = 0.95
_SEEN = "import json, torch; print(json.dumps([str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]))"
_OOM_ROWS = 400
_OOM_PROMPT = "a long prompt, " * 200  # 3000 tokens, so that 400 rows need 40 GiB of KV cache
_OOM_LEFT_MIB = 8192
_OOM_CLASS = 12  # rows of at most 2**12 tokens
_EDGE_S = 5
_SAMPLED_WITHIN_S = 10.0


def pinning(every: Sequence[Slot], ground: Ground) -> Verdict:
    """Each slot's process sees its own devices and no other; one device named twice is refused."""
    first = every[0].devices[0] if every[0].devices else "cpu"
    try:
        slots(f"{first},{first}")
    except ConfigurationError:
        pass
    else:
        return failed(f"{first} named twice was not refused")
    seen = [seen_by(slot) for slot in every]
    wanted = [len(slot.devices) for slot in every]
    all_seen = [uuid for one in seen for uuid in one]
    good = [len(one) for one in seen] == wanted and len(set(all_seen)) == len(all_seen)
    if not good:
        return failed(f"slots of {wanted} devices see {[len(one) for one in seen]} ({', '.join(all_seen) or 'none'})")
    return passed(
        f"{len(every)} slots see their own devices ({', '.join(all_seen) or 'none'}); one named twice is refused"
    )


def seen_by(slot: Slot) -> list[str]:
    """UUIDs of the GPUs that torch sees in a process that is pinned to the slot."""
    environment = {**os.environ, **slot.environment()}
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SEEN], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def bare_tokens_per_s(ground: Ground, *, rows: int, seconds: float) -> float:
    """What the engine does without us, in a process that is pinned as a worker is."""
    arguments = (
        ground.engine,
        str(ground.model_folder),
        ground.engine_device,
        str(rows),
        str(ground.max_tokens),
        str(seconds),
    )
    said = ground.python("-m", "batchmill_ops.gpu_check.bare", *arguments, timeout_s=150 + 3 * seconds)
    return float(said.split()[-1])


def through_the_system(mill: Mill, *, rows: int, max_tokens: int, timeout_s: float) -> JobReport:
    """One job of so many rows. Raises RuntimeError unless every row is answered."""
    report = mill.run(prompts(rows), max_tokens=max_tokens, timeout_s=timeout_s)
    answered = report.by_status.get(RowStatus.TRUNCATED, 0) + report.by_status.get(RowStatus.OK, 0)
    if report.job.state is not JobState.DONE or answered != rows:
        raise RuntimeError(f"the job is {report.job.state} ({report.job.reason}) with {dict(report.by_status)}")
    return report


def sampling(mill: Mill, seconds: Callable[[], float], *, gpu: bool) -> Verdict:
    """The device's own figures were recorded while the job ran; for a run between two samples the next one counts."""
    deadline = time.monotonic() + _SAMPLED_WITHIN_S
    while not (found := _spans(mill, seconds())) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = ("use_percent", "memory_used_bytes", *(("power_w", "temperature_c") if gpu else ()))
    told = {name: round(span.means[name], 1) for span in found for name in names if name in span.means}
    lacks = [name for name in names if name not in told]
    count = sum(span.samples for span in found)
    return failed(f"{count} samples without {', '.join(lacks)}") if lacks else passed(f"{count} samples, means {told}")


def _spans(mill: Mill, seconds: float) -> list[sample_spans.Span]:
    with mill.database.reading() as conn:
        found = sample_spans.spans(conn, ago_ms=int((seconds + _EDGE_S) * 1000), count=1)
    return [span for span in found if "memory_used_bytes" in span.means and "use_percent" in span.means]


def use(mill: Mill, seconds: float, *, judge: bool) -> Verdict:
    """Mean use of the device over the run, without its first and last seconds."""
    spans_of = max(1, int(seconds))
    with mill.database.reading() as conn:
        found = sample_spans.spans(conn, ago_ms=spans_of * 1000, count=spans_of)
    inner = [
        s.means["use_percent"] for s in found if _EDGE_S <= s.number < spans_of - _EDGE_S and "use_percent" in s.means
    ]
    if not inner:
        return skipped("the run was too short to leave out its edges, or the device does not tell its use")
    figure = f"{mean(inner):.1f} % over {len(inner)} s (target {LEAST_USE_PERCENT:.0f} %)"
    return judged(mean(inner) > LEAST_USE_PERCENT, figure) if judge else skipped(f"{figure}; judged on a GPU only")


def throughput(report: JobReport, bare: float, *, judge: bool) -> Verdict:
    """Output tokens per second through the whole system, from the first claim to the last save, against the bare engine."""
    ours = report.job.usage.output / (report.seconds or 1e-9)
    figure = f"{ours:,.0f} tok/s, bare {bare:,.0f}: {ours / bare:.1%} (target {LEAST_SHARE:.0%})"
    return judged(ours / bare >= LEAST_SHARE, figure) if judge else skipped(f"{figure}; judged on a GPU only")


def out_of_memory(ground: Ground) -> Verdict:
    """Memory is taken away under a loaded worker: its batches no longer fit, and every row is answered all the same."""
    with milling(ground, "oom") as mill:
        before = mill.supervisor.pids
        with _hog(ground):
            report = mill.run([f"{n} {_OOM_PROMPT}" for n in range(_OOM_ROWS)], max_tokens=64, timeout_s=150)
        kind = device_kind(ground.engine_device, ground.pinned)
        sizes = mill.database.run(lambda conn: batch_sizes.load(conn, "oom", kind))
        answered = report.by_status.get(RowStatus.TRUNCATED, 0) + report.by_status.get(RowStatus.OK, 0)
        figures = f"{answered} of {_OOM_ROWS} rows answered, sizes that worked {sizes}"
        if answered != _OOM_ROWS or mill.supervisor.pids != before:
            return failed(
                f"{figures}; the job is {report.job.state}, its worker {'lives' if mill.supervisor.pids == before else 'died'}"
            )
        return judged(sizes.get(_OOM_CLASS, _OOM_ROWS) < _OOM_ROWS, f"{figures} with {_OOM_LEFT_MIB} MiB left")


@contextmanager
def _hog(ground: Ground) -> Iterator[None]:
    """Holds the slot's memory, but for a little, for the length of a ``with`` block."""
    command = [sys.executable, "-P", "-m", "batchmill_ops.gpu_check.hog", str(_OOM_LEFT_MIB)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=dict(ground.pinned), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            if "holding" not in process.stdout.readline():
                raise RuntimeError("memory could not be taken away")
            yield
        finally:
            process.communicate(timeout=30)


def timed(report: JobReport, ended: float) -> float:
    """Seconds from the job's first claim until now, for asking what was sampled meanwhile."""
    return (report.seconds or 0.0) + time.monotonic() - ended
