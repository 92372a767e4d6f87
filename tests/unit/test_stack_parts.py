"""Decisions of the embedded stack that need no running one: which processes, which leases, which folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from batchmill_core.catalog import Account, Catalog, Limits, ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from batchmill_db import migrate, reaping, telemetry
from batchmill_db.session import Database
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.healthy import is_worker
from batchmill_ops.stack_folder import LockTaken, StackFolder, exclusive, file_system_of
from batchmill_ops.stack_workers import api_processes, free_leases_of_the_dead, plans_for
from tests.conformance.db.world import World

MOUNTS = """\
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:44 / /home rw,relatime shared:9 - nfs4 server:/home rw
31 30 0:45 / /home/me/local\\040disk rw - xfs /dev/vdb rw
"""


def catalogue(account: Account, *models: ModelEntry) -> Settings:
    return Settings(catalog=Catalog(accounts={account.name: account}, models={m.name: m for m in models}))


def test_a_folder_is_on_the_file_system_mounted_closest_above_it() -> None:
    kinds = [file_system_of(Path(p), MOUNTS) for p in ("/srv/x", "/home/me/x", "/home/me/local disk/x", "/homes/x")]

    assert kinds == ["ext4", "nfs4", "xfs", "ext4"]


def test_an_unknown_list_of_mounts_refuses_nothing() -> None:
    assert file_system_of(Path("/srv"), "") == ""


def test_a_network_file_system_is_refused_with_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_ops.stack_folder._mounts", lambda: "1 1 0:1 / / rw - nfs4 server:/ rw")

    with pytest.raises(ConfigurationError, match=r"network file system \(nfs4\).*BATCHMILL_HOME"):
        StackFolder(path=tmp_path / ".batchmill").prepare()


def test_a_full_disk_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)

    with pytest.raises(ConfigurationError, match=r"the disk that holds .* is full"):
        StackFolder(path=tmp_path / ".batchmill").prepare()


def test_a_lock_that_is_held_is_not_waited_for_longer_than_asked(tmp_path: Path) -> None:
    with exclusive(tmp_path / "lock", wait_s=0), pytest.raises(LockTaken), exclusive(tmp_path / "lock", wait_s=0.05):
        pass


def test_a_long_log_is_put_aside_once(tmp_path: Path) -> None:
    folder = StackFolder(path=tmp_path)
    folder.prepare()
    (folder.logs / "stack.log").write_bytes(b"x" * 10_000_001)
    (folder.logs / "api0.log").write_bytes(b"short")
    folder.rotate_logs()

    assert sorted(log.name for log in folder.logs.iterdir()) == ["api0.log", "stack.log.1"]


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (4, 2), (64, 4)])
def test_an_account_gets_a_process_per_two_cores(cores: int, processes: int) -> None:
    settings = catalogue(Account(name="acme", base_url="http://x/v1"))

    assert api_processes(settings, "acme", cores=cores) == processes


def test_an_account_with_limits_gets_one_process_that_keeps_them() -> None:
    rated = catalogue(Account(name="acme", base_url="http://x/v1", limits=Limits(requests_per_minute=60)))
    lowered = catalogue(Account(name="acme", base_url="http://x/v1", max_in_flight=8))
    model = ModelEntry(name="m", account="acme", limits=Limits(tokens_per_minute=1000))
    by_model = catalogue(Account(name="acme", base_url="http://x/v1"), model)

    assert [api_processes(s, "acme", cores=64) for s in (rated, lowered, by_model)] == [1, 1, 1]


def test_processes_of_different_queues_have_different_names_that_are_file_names() -> None:
    settings = catalogue(
        Account(name="a/b:c", base_url="http://x/v1"), ModelEntry(name="org/m", engine="openvino", source="x")
    )
    names = [plan.name for queue in ("api.a/b:c", "gpu.org/m") for plan in plans_for(settings, queue)]

    assert names[0] == "api0-a-b-c"
    assert names[-1] == "cpu0-org-m"


def test_leases_of_dead_workers_of_this_host_end_and_those_of_living_ones_stay(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    migrate.upgrade(database)
    world = World(database)
    job = world.job(sizes=(4, 4, 4))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name, host, pid in (("dead", "here", dead.pid), ("reused", "here", os.getpid()), ("away", "there", dead.pid)):
        record = WorkerRecord(
            id=name, name=name, host=host, pid=pid, wing="api", queues=["api.acme"], slots=1, version="1"
        )
        database.run(lambda conn, record=record: telemetry.register(conn, record))  # type: ignore[misc]
    for chunk, worker in zip(world.chunks(job), ("dead", "reused", "away"), strict=True):
        world.claim(chunk["id"], worker)
    freed = free_leases_of_the_dead(database, "here")

    assert freed == 2
    assert len(database.run(reaping.reap)) == 2
    assert [w.name for w in database.run(lambda conn: telemetry.workers_of_host(conn, "there"))] == ["away"]
    assert database.run(lambda conn: telemetry.workers_of_host(conn, "here")) == []
    database.close()


def test_a_process_is_a_worker_by_its_command_line() -> None:
    command = ["sh", "-c", "echo; read _; :", "batchmill_workers.tasks"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()  # before that the kernel may not show its command yet

        assert is_worker(worker.pid)
        assert not is_worker(os.getpid())
        worker.communicate()
    assert not is_worker(worker.pid)
