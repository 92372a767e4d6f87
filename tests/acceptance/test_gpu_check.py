"""``ops/gpu-check`` works: on a processor with a tiny model, and it says so where there is no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NO_GPU_EXIT_CODE = 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: the check needs it")
def test_the_check_of_a_gpu_works_on_a_processor_with_a_tiny_model() -> None:
    command = [str(ROOT / "ops" / "gpu-check"), "--device", "cpu", "--quick", "--seconds", "5"]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)

    outcomes = {words[1]: words[0] for line in done.stdout.splitlines() if len(words := line.split(maxsplit=2)) == 3}
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert {name for name, outcome in outcomes.items() if outcome == "pass"} >= {
        "torch",
        "pinning",
        "model",
        "engine",
        "sampling",
    }
    assert outcomes["memory"] == "skip"
    assert "skipped: use, throughput, memory" in done.stdout


def test_without_a_gpu_the_check_says_so_and_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "batchmill_ops.gpu_check"]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    assert done.returncode == NO_GPU_EXIT_CODE
    assert "nothing was checked: --devices: no NVIDIA GPU was found on this host" in done.stdout
