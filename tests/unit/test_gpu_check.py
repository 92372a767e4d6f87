"""The sheet of ``ops/gpu-check``: what it says, when it stops, and what it makes of a machine that is not ready."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchmill_ops.gpu_check.guard import OutOfTime, at_most
from batchmill_ops.gpu_check.local_model import SHAPES, prompts
from batchmill_ops.gpu_check.verdicts import Outcome, Sheet, Verdict, failed, passed
from tests.nvml.host import A, gpu, host_in


def test_what_was_found_is_written_after_each_item_with_its_figures(tmp_path: Path) -> None:
    sheet = Sheet(most_s=100, path=tmp_path / "found.json")
    sheet.item("use", lambda: failed("80 % (target 90 %)", use_percent=80.0))
    first = json.loads((tmp_path / "found.json").read_text())
    sheet.item("model", lambda: passed("well"))

    assert first["failed"] == ["use"]
    assert first["items"]["use"] == {"outcome": "fail", "detail": "80 % (target 90 %)", "use_percent": 80.0}
    assert set(json.loads((tmp_path / "found.json").read_text())["items"]) == {"use", "model"}


def test_an_item_that_hangs_fails_and_leaves_the_others_their_turn(capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet(most_s=0.3)

    def hangs() -> Verdict:
        time.sleep(60)
        return passed("never")

    with at_most(sheet.most_s):
        sheet.item("engine", hangs)
        sheet.item("memory", lambda: passed("needs more time than is left"), needs_s=60)
        sheet.item("pinning", lambda: passed("needs none"), needs_s=-60)

    assert sheet.those(Outcome.FAIL) == ["engine", "memory"]
    assert sheet.those(Outcome.PASS) == ["pinning"]
    assert "OutOfTime: the check may take 0 s (--most-seconds)" in capsys.readouterr().out
    assert "not checked: 0 s are left" in sheet.verdicts["memory"].detail


def test_the_guard_is_gone_when_its_block_is() -> None:
    with at_most(0.05):
        pass
    with pytest.raises(OutOfTime), at_most(0.05):
        time.sleep(60)


def test_prompts_are_of_nearly_one_length_so_that_sorting_them_gains_nothing() -> None:
    lengths = [len(text) for text in prompts(500, SHAPES["billion"])]

    assert min(lengths) > 0.95 * max(lengths)
    assert abs(max(lengths) - SHAPES["billion"].prompt_bytes) < 50


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: the check needs it")
def test_a_torch_without_cuda_fails_at_once_by_name_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    host = host_in(tmp_path / "driver")
    host.has(gpu(0, A))
    command = [sys.executable, "-P", "-m", "batchmill_ops.gpu_check"]
    environment = {**os.environ, **host.environment, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads((tmp_path / "gpu-check.json").read_text())

    assert done.returncode == 1, done.stderr
    assert any(why in done.stdout for why in ("built without CUDA", "sees no GPU", "driver"))  # by how torch is built
    assert found["failed"] == ["torch"]
    assert set(found["skipped"]) == {"pinning", "model", "engine", "sampling", "use", "throughput", "memory"}
