"""The items of the check, each a function that answers a verdict."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from batchmill_core.errors import ConfigurationError
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_db import sample_spans
from batchmill_ops.report import JobReport
from batchmill_workers.gpu.devices import Slot
from batchmill_workers.gpu.listing import slots

from .ground import Ground, Mill, run_python
from .local_model import prompts
from .verdicts import Verdict, failed, judged, passed, skipped

LEAST_USE_PERCENT = 90.0
LEAST_SHARE = 0.95
_SEEN = """
import json, torch
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "names": [g.name for g in gpus],
                  "uuids": [str(g.uuid) for g in gpus]}))
"""
_EDGE_S = 5
_SAMPLED_WITHIN_S = 10.0


def sees_device(ground: Ground, *, gpu: bool) -> Verdict:
    """torch is there, is built for the device and sees it; the folder has room for the model."""
    missing = [name for name in ("torch", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        return skipped(f"{', '.join(missing)} is not installed; pip install 'batchmill[transformers]'")
    seen = seen_in(ground.pinned)
    figures = f"torch {seen['torch']}, {', '.join(seen['names']) or 'no GPU'}"
    if gpu and seen["cuda"] is None:
        return failed(f"{figures}: it is built without CUDA; install the torch of the machine's CUDA", **seen)
    if gpu and not seen["uuids"]:
        return failed(f"{figures}: torch for CUDA {seen['cuda']} sees no GPU here; is the driver as new?", **seen)
    free = shutil.disk_usage(ground.folder).free
    if free < ground.shape.disk_bytes:
        need = f"{ground.folder.parent} has {free >> 20} MiB free, the model needs {ground.shape.disk_bytes >> 20}"
        return failed(f"{need}; set TMPDIR to a folder with room", **seen)
    return passed(f"{figures}, CUDA {seen['cuda']}", **seen)


def pinning(every: Sequence[Slot]) -> Verdict:
    """Each slot's process sees its own devices and no other; one device named twice is refused."""
    first = every[0].devices[0] if every[0].devices else "cpu"
    try:
        slots(f"{first},{first}")
    except ConfigurationError:
        pass
    else:
        return failed(f"{first} named twice was not refused")
    seen = [seen_in({**os.environ, **slot.environment()})["uuids"] for slot in every]
    wanted = [len(slot.devices) for slot in every]
    all_seen = [uuid for one in seen for uuid in one]
    told = ", ".join(all_seen) or "none"
    good = [len(one) for one in seen] == wanted and len(set(all_seen)) == len(all_seen)
    if not good:
        return failed(f"slots of {wanted} devices see {[len(one) for one in seen]} ({told})", seen=seen)
    return passed(f"{len(every)} slots see their own devices ({told}); one named twice is refused", seen=seen)


def seen_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """What torch sees in a process with that environment: its version, its CUDA, names and UUIDs of GPUs."""
    found: dict[str, Any] = json.loads(run_python(environment, "-c", _SEEN, timeout_s=120).splitlines()[-1])
    return found


def build_model(ground: Ground) -> int:
    """The model's parameters. Made on the device, which takes seconds where a processor takes half a minute."""
    arguments = (str(ground.model_folder), ground.shape.name, ground.engine_device)
    said = run_python(ground.pinned, "-m", "batchmill_ops.gpu_check.local_model", *arguments, timeout_s=150)
    return int(said.split()[-1])


def bare_tokens_per_s(ground: Ground, *, rows: int, seconds: float) -> float:
    """What the engine does without us, in a process that is pinned as a worker is."""
    arguments = (
        ground.engine,
        str(ground.model_folder),
        ground.engine_device,
        str(rows),
        str(ground.max_tokens),
        str(seconds),
        ground.shape.name,
    )
    said = run_python(ground.pinned, "-m", "batchmill_ops.gpu_check.bare", *arguments, timeout_s=120 + 3 * seconds)
    return float(said.split()[-1])


def through_the_system(mill: Mill, ground: Ground, *, rows: int, timeout_s: float) -> JobReport:
    """One job of so many rows. Raises RuntimeError unless every row is answered."""
    report = mill.run(prompts(rows, ground.shape), max_tokens=ground.max_tokens, timeout_s=timeout_s)
    answered = report.by_status.get(RowStatus.TRUNCATED, 0) + report.by_status.get(RowStatus.OK, 0)
    if report.job.state is not JobState.DONE or answered != rows:
        raise RuntimeError(f"the job is {report.job.state} ({report.job.reason}) with {dict(report.by_status)}")
    return report


def sampling(mill: Mill, seconds: Callable[[], float], *, gpu: bool) -> Verdict:
    """The device's own figures were recorded while the job ran; for a run between two samples the next one counts."""
    if gpu and importlib.util.find_spec("pynvml") is None:
        return skipped("nvidia-ml-py is not installed, which tells the figures; pip install 'batchmill[nvidia]'")
    deadline = time.monotonic() + _SAMPLED_WITHIN_S
    while not (found := _spans(mill, seconds())) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = ("use_percent", "memory_used_bytes", *(("power_w", "temperature_c") if gpu else ()))
    told = {name: round(span.means[name], 1) for span in found for name in names if name in span.means}
    lacks = [name for name in names if name not in told]
    count = sum(span.samples for span in found)
    if lacks:
        return failed(f"{count} samples without {', '.join(lacks)}", samples=count, **told)
    return passed(f"{count} samples, means {told}", samples=count, **told)


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
    known = {"use_percent": mean(inner), "target_percent": LEAST_USE_PERCENT}
    if not judge:
        return skipped(f"{figure}; judged on a GPU only", **known)
    return judged(mean(inner) > LEAST_USE_PERCENT, figure, **known)


def throughput(report: JobReport, bare: float, *, judge: bool) -> Verdict:
    """Output tokens per second through the whole system, from the first claim to the last save, against the bare engine."""
    ours = report.job.usage.output / (report.seconds or 1e-9)
    figure = f"{ours:,.0f} tok/s, bare {bare:,.0f}: {ours / bare:.1%} (target {LEAST_SHARE:.0%})"
    known = {"tokens_per_s": ours, "bare_tokens_per_s": bare, "share": ours / bare, "target_share": LEAST_SHARE}
    if not judge:
        return skipped(f"{figure}; judged on a GPU only", **known)
    return judged(ours / bare >= LEAST_SHARE, figure, **known)


def timed(report: JobReport, ended: float) -> float:
    """Seconds from the job's first claim until now, for asking what was sampled meanwhile."""
    return (report.seconds or 0.0) + time.monotonic() - ended
