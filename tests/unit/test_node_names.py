"""A node name is one process's alone on its host, and the same after a restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from batchmill_db.telemetry import WorkerRecord
from batchmill_workers.node_names import distinct, mark_of, taken_names


def record(name: str, pid: int, age_ms: int = 0) -> WorkerRecord:
    return WorkerRecord(
        id=name, name=name, host="h", pid=pid, wing="gpu", queues=("gpu.m",), slots=2, version="1", age_ms=age_ms
    )


def test_a_name_that_nobody_has_stays_as_it_is() -> None:
    assert distinct("gpu0", {"gpu1"}, mark="3f2a") == "gpu0"


def test_where_another_installation_has_the_name_ones_own_mark_is_added() -> None:
    assert distinct("gpu0", {"gpu0"}, mark="3f2a") == "gpu0-3f2a"


def test_a_second_command_in_the_same_folder_is_numbered() -> None:
    assert distinct("gpu0", {"gpu0", "gpu0-3f2a"}, mark="3f2a") == "gpu0-3f2a-2"


def test_the_mark_of_a_folder_is_always_the_same_and_not_its_neighbours() -> None:
    assert mark_of(Path("/srv/a")) == mark_of(Path("/srv/b/../a")) != mark_of(Path("/srv/b"))


def test_the_name_of_a_worker_that_died_is_free_for_the_next() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    workers = [record("gpu0@h", child.pid), record("gpu1@h", os.getpid()), record("gpu2@h", os.getpid(), 90_000)]

    assert taken_names(workers) == {"gpu1"}
