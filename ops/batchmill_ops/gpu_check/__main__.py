"""``ops/gpu-check``: every item of the GPU wing on this machine, pass or fail, with its figure and its target.

It needs no network and downloads nothing: a Python with Batchmill and what that depends on, torch built for the
machine's CUDA, transformers, accelerate, nvidia-ml-py for the samples, and a driver with nvidia-smi. vLLM is used where
it is installed. 3 GB are written to a temporary folder (TMPDIR). On a machine that reaches nothing, `ops/gpu-pack` says
how to bring all but torch and transformers along.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.devices import Slot
from batchmill_workers.gpu.listing import slots

from . import items, memory
from .ground import Ground, milling
from .guard import at_most
from .local_model import SHAPES
from .verdicts import Outcome, Sheet, Verdict, passed, skipped

NO_GPU_EXIT_CODE = 3
_QUICK_ROWS = 48
_BATCH_ROWS = 256  # what our transformers engine runs at once on a GPU; the bare one gets the same
_BARE_S = 20.0  # one pass over its prompts, which is 8 batches
_AFTER = ("sampling", "use", "throughput")


def main(arguments: list[str]) -> int:
    """Exit code: 0 when nothing failed, 1 when something did, 2 for wrong arguments, 3 without a GPU."""
    asked = _parser().parse_args(arguments)
    asked.quick = asked.quick or asked.device == "cpu"  # a billion parameters would take a processor hours
    try:
        every = slots("cpu" if asked.device == "cpu" else "all")
    except ConfigurationError as fault:
        sys.stdout.write(f"nothing was checked: {fault}\n")
        return NO_GPU_EXIT_CODE
    sheet = Sheet(most_s=asked.most_seconds, path=asked.json)
    with tempfile.TemporaryDirectory(prefix="batchmill-gpu-check-", ignore_cleanup_errors=True) as folder:
        try:
            with at_most(asked.most_seconds):
                _check(sheet, every, Path(folder), asked)
        finally:
            _keep_logs(Path(folder), sheet)
    failures, left_out = sheet.those(Outcome.FAIL), sheet.those(Outcome.SKIP)
    sys.stdout.write(
        f"{len(sheet.verdicts)} items; failed: {', '.join(failures) or 'none'}; skipped: {', '.join(left_out) or 'none'}\n"
    )
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="ops/gpu-check", description=__doc__, formatter_class=shape)
    out = Path(os.environ["OUT"]) / "gpu-check.json" if os.environ.get("OUT") else None
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the items that a processor can, quickly"
    )
    parser.add_argument(
        "--engine", choices=("auto", "vllm", "transformers"), default="auto", help="auto: vLLM where it is"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few rows: does the check itself work?")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="how long the job shall run (default: %(default)s)"
    )
    parser.add_argument(
        "--most-seconds", type=float, default=460.0, help="when all must be over (default: %(default)s)"
    )
    parser.add_argument(
        "--json", type=Path, default=out, help="also write what was found there, and the workers' log beside it"
        " (default: $OUT/gpu-check.json where OUT is set)",
    )  # fmt: skip
    return parser


def _check(sheet: Sheet, every: tuple[Slot, ...], folder: Path, asked: argparse.Namespace) -> None:
    slot, gpu = every[0], asked.device == "cuda"
    ground = Ground(
        folder=folder,
        devices=",".join(slot.devices) or "cpu",
        engine=_engine(asked.engine, gpu=gpu),
        pinned={**os.environ, **slot.environment(), "HF_HUB_OFFLINE": "1"},
        engine_device=slot.engine_device,
        shape=SHAPES["tiny" if asked.quick else "billion"],
        max_tokens=16 if asked.quick else 128,
    )
    if sheet.item("torch", lambda: items.sees_device(ground, gpu=gpu)).outcome is not Outcome.PASS:
        for name in ("pinning", "model", "engine", *_AFTER, "memory"):
            sheet.note(name, skipped("torch is not ready for it"))
        return
    sheet.item("pinning", lambda: items.pinning(every))
    if sheet.item("model", lambda: _model(ground), needs_s=30).outcome is not Outcome.PASS:
        for name in ("engine", *_AFTER, "memory"):
            sheet.note(name, skipped("there is no model"))
        return
    _run(sheet, ground, gpu=gpu, quick=asked.quick, seconds=asked.seconds)
    if gpu and not asked.quick:
        sheet.item("memory", lambda: memory.out_of_memory(ground), needs_s=60)
    else:
        sheet.note("memory", skipped("only a GPU's memory can be taken away without ending the process"))


def _engine(asked: str, *, gpu: bool) -> str:
    if asked != "auto":
        return asked
    return "vllm" if gpu and importlib.util.find_spec("vllm") is not None else "transformers"


def _model(ground: Ground) -> Verdict:
    ground.write_catalog()
    parameters = items.build_model(ground)
    return passed(
        f"{parameters / 1e6:,.1f} million random parameters for engine {ground.engine}", parameters=parameters
    )


def _run(sheet: Sheet, ground: Ground, *, gpu: bool, quick: bool, seconds: float) -> None:
    """One job through the whole system, and what is to be seen of it."""
    judge = gpu and not quick

    def run() -> Verdict:
        batch = _QUICK_ROWS // 8 if quick else _BATCH_ROWS
        bare = items.bare_tokens_per_s(ground, rows=batch, seconds=1.0 if quick else _BARE_S)
        # Whole batches: a last one that is not full would take as long as a full one.
        rows = _QUICK_ROWS if quick else batch * max(1, round(bare * seconds / ground.max_tokens / batch))
        with milling(ground, "m") as mill:
            report = items.through_the_system(mill, ground, rows=rows, timeout_s=120 + 2 * seconds)
            ended = time.monotonic()
            sheet.item("sampling", lambda: items.sampling(mill, lambda: items.timed(report, ended), gpu=gpu))
            sheet.item("use", lambda: items.use(mill, items.timed(report, ended), judge=judge))
        sheet.item("throughput", lambda: items.throughput(report, bare, judge=judge))
        took = report.seconds or 0.0
        return passed(
            f"{rows} rows in {took:.1f} s by {ground.engine} on {ground.engine_device}", rows=rows, job_seconds=took
        )

    needs_s = 20.0 if quick else 90.0 + seconds
    if sheet.item("engine", run, needs_s=needs_s).outcome is Outcome.FAIL:
        for name in _AFTER:
            if name not in sheet.verdicts:
                sheet.note(name, skipped("the engine failed"))


def _keep_logs(folder: Path, sheet: Sheet) -> None:
    """What the workers said, beside the sheet's file; after a failure its end is told too, for people who see no files."""
    said = "".join(f"--- {one.name}\n{one.read_text(errors='replace')}" for one in sorted(folder.glob("logs/*.log")))
    if sheet.path is not None:
        sheet.path.with_suffix(".log").write_text(said)
    if sheet.those(Outcome.FAIL):
        sys.stderr.write(said[-4000:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
