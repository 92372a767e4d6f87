"""When a worker process has done enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_workers.wear import Wear, memory_mib

HOLDS_64_MIB = "import sys; kept = bytearray(b'x' * (64 << 20)); print('holds', flush=True); sys.stdin.read()"


def test_without_bounds_a_process_lives_for_ever() -> None:
    assert Wear().reason(chunks=10**9, memory_mib=10**9) is None


@pytest.mark.parametrize(("chunks", "worn"), [(99, False), (100, True), (101, True)])
def test_a_process_is_worn_after_its_chunks(chunks: int, worn: bool) -> None:
    reason = Wear(max_chunks=100).reason(chunks=chunks, memory_mib=None)

    assert (reason is not None) is worn


def test_a_process_past_its_memory_is_worn_and_says_both_figures() -> None:
    wear = Wear(max_memory_mib=2000)

    assert wear.reason(chunks=0, memory_mib=2000) is None
    assert wear.reason(chunks=0, memory_mib=2001) == "it holds 2001 MiB (worker_max_memory_mb is 2000)"


def test_a_bound_below_what_a_fresh_worker_holds_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="worker_max_memory_mb is 100, but a worker that has just started holds 300"
    ):
        Wear(max_memory_mib=100).check_fresh(300)


def test_memory_that_cannot_be_read_bounds_nothing(tmp_path: Path) -> None:
    assert memory_mib(proc=tmp_path) is None
    assert Wear(max_memory_mib=1).reason(chunks=0, memory_mib=None) is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system has no /proc")
def test_the_memory_of_a_worker_is_its_own_and_that_of_its_children() -> None:
    before = memory_mib()
    child = subprocess.Popen([sys.executable, "-c", HOLDS_64_MIB], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    alone, together = memory_mib(child.pid), memory_mib(os.getpid())
    child.communicate()

    assert before is not None
    assert alone is not None
    assert together is not None
    assert alone >= 64
    assert together >= before + 60
