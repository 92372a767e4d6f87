"""``ops/gpu-check``: every item of the GPU wing on this machine, pass or fail; see ``--help``."""

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

from . import items
from .ground import Ground, milling
from .local_model import BILLION, TINY, build
from .verdicts import Outcome, Sheet, Verdict, passed, skipped

NO_GPU_EXIT_CODE = 3
_QUICK_ROWS = 48


def main(arguments: list[str]) -> int:
    """Exit code: 0 when nothing failed, 1 when something did, 2 for wrong arguments, 3 without a GPU."""
    asked = _parser().parse_args(arguments)
    asked.quick = asked.quick or asked.device == "cpu"  # a billion parameters would take a processor hours
    try:
        every = slots("cpu" if asked.device == "cpu" else "all")
    except ConfigurationError as fault:
        sys.stdout.write(f"nothing was checked: {fault}\n")
        return NO_GPU_EXIT_CODE
    sheet = Sheet()
    with tempfile.TemporaryDirectory(prefix="batchmill-gpu-check-", ignore_cleanup_errors=True) as folder:
        _check(sheet, every, Path(folder), asked)
    left_out = [name for name, v in sheet.verdicts.items() if v.outcome is Outcome.SKIP]
    failures = [name for name, v in sheet.verdicts.items() if v.outcome is Outcome.FAIL]
    sys.stdout.write(
        f"{len(sheet.verdicts)} items; failed: {', '.join(failures) or 'none'}; skipped: {', '.join(left_out) or 'none'}\n"
    )
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ops/gpu-check", description=__doc__)
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
    return parser


def _check(sheet: Sheet, every: tuple[Slot, ...], folder: Path, asked: argparse.Namespace) -> None:
    slot, gpu = every[0], asked.device == "cuda"
    ground = Ground(
        folder=folder,
        devices=",".join(slot.devices) or "cpu",
        engine=_engine(asked.engine, gpu=gpu),
        pinned={**os.environ, **slot.environment(), "HF_HUB_OFFLINE": "1"},
        engine_device=slot.engine_device,
        max_tokens=16 if asked.quick else 128,
    )
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        for name in ("pinning", "model", "engine", "sampling", "use", "throughput", "memory"):
            sheet.note(name, skipped("torch or transformers is not installed; pip install 'batchmill[transformers]'"))
        return
    sheet.item("pinning", lambda: items.pinning(every, ground))
    if sheet.item("model", lambda: _model(ground, quick=asked.quick)).outcome is Outcome.PASS:
        _run(sheet, ground, gpu=gpu, quick=asked.quick, seconds=asked.seconds)
        if gpu and not asked.quick:
            sheet.item("memory", lambda: items.out_of_memory(ground))
        else:
            sheet.note("memory", skipped("only a GPU's memory can be taken away without ending the process"))


def _engine(asked: str, *, gpu: bool) -> str:
    if asked != "auto":
        return asked
    return "vllm" if gpu and importlib.util.find_spec("vllm") is not None else "transformers"


def _model(ground: Ground, *, quick: bool) -> Verdict:
    ground.write_catalog()
    parameters = build(ground.model_folder, TINY if quick else BILLION, device="cpu")
    return passed(f"{parameters / 1e6:,.1f} million random parameters for engine {ground.engine}")


def _run(sheet: Sheet, ground: Ground, *, gpu: bool, quick: bool, seconds: float) -> None:
    """One job through the whole system, and what is to be seen of it."""
    judge = gpu and not quick

    def run() -> Verdict:
        bare = items.bare_tokens_per_s(ground, rows=_QUICK_ROWS // 8 if quick else 256, seconds=1.0 if quick else 30.0)
        rows = _QUICK_ROWS if quick else max(256, int(bare * seconds / ground.max_tokens))
        with milling(ground, "m") as mill:
            report = items.through_the_system(
                mill, rows=rows, max_tokens=ground.max_tokens, timeout_s=120 + 2 * seconds
            )
            ended = time.monotonic()
            sheet.item("sampling", lambda: items.sampling(mill, lambda: items.timed(report, ended), gpu=gpu))
            sheet.item("use", lambda: items.use(mill, items.timed(report, ended), judge=judge))
        sheet.item("throughput", lambda: items.throughput(report, bare, judge=judge))
        return passed(f"{rows} rows in {report.seconds or 0:.1f} s by {ground.engine} on {ground.engine_device}")

    if sheet.item("engine", run).outcome is Outcome.FAIL:
        for name in ("sampling", "use", "throughput"):
            if name not in sheet.verdicts:
                sheet.note(name, skipped("the engine failed"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
