"""What a process on this host may use: the least of the host's memory, its control groups and `ulimit -v`."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from batchmill_workers.gpu.host_memory import host_memory, memory_in_use

MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable: 6000 kB\nHugePages_Total: 0\n"


def system(root: Path, **files: str) -> Path:
    places = {
        "meminfo": "proc/meminfo",
        "cgroup": "proc/self/cgroup",
        "limit": "sys/fs/cgroup/memory.max",
        "used": "sys/fs/cgroup/memory.current",
        "stat": "sys/fs/cgroup/memory.stat",
        "above_limit": "sys/fs/cgroup/a/memory.max",
        "above_used": "sys/fs/cgroup/a/memory.current",
        "above_stat": "sys/fs/cgroup/a/memory.stat",
        "own_limit": "sys/fs/cgroup/a/b/memory.max",
        "own_used": "sys/fs/cgroup/a/b/memory.current",
    }
    for name, text in files.items():
        (root / places[name]).parent.mkdir(parents=True, exist_ok=True)
        (root / places[name]).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({"meminfo": MEMINFO}, 8000 << 10, 6000 << 10),
        ({"meminfo": MEMINFO, "limit": "max\n", "used": "9\n"}, 8000 << 10, 6000 << 10),
        ({"meminfo": MEMINFO, "limit": "9223372036854771712\n", "used": "9\n"}, 8000 << 10, 6000 << 10),
        ({"meminfo": MEMINFO, "limit": "1000\n", "used": "900\n", "stat": "inactive_file 300\n"}, 1000, 400),
        ({"meminfo": MEMINFO, "limit": "1000\n", "used": "1100\n"}, 1000, 0),
        ({"meminfo": MEMINFO, "limit": "1000\n", "used": "100\n", "stat": "inactive_file 300\n"}, 1000, 1000),
        (
            {
                "meminfo": MEMINFO, "cgroup": "0::/a/b\n", "own_limit": "max", "own_used": "10",
                "above_limit": "4096000", "above_used": "3072000", "above_stat": "inactive_file 1024000\n",
            },
            4096000,
            2048000,
        ),
    ],
    ids=["no group", "no limit", "a limit above the host's", "pages of files", "over it", "mostly files", "a group above"],
)  # fmt: skip
def test_a_containers_limit_counts_before_the_hosts_memory(
    tmp_path: Path, files: dict[str, str], total: int, free: int
) -> None:
    for found in (host_memory(system(tmp_path, **files)), memory_in_use(tmp_path)):
        assert found is not None
        assert (found.total_bytes, found.free_bytes) == (total, free)


def test_what_leaves_least_is_not_always_the_smallest(tmp_path: Path) -> None:
    full_host = "MemTotal: 8000 kB\nMemAvailable: 1 kB\n"
    root = system(tmp_path, meminfo=full_host, limit="4096000", used="10")

    least, smallest = host_memory(root), memory_in_use(root)
    assert least is not None
    assert smallest is not None
    assert (least.name, smallest.name) == ("this host", "this container")


def test_a_system_that_tells_nothing_has_no_known_memory(tmp_path: Path) -> None:
    assert memory_in_use(tmp_path) is None


def test_this_host_has_some() -> None:
    found = memory_in_use()

    assert found is not None
    assert 0 < found.free_bytes < found.total_bytes <= psutil.virtual_memory().total
