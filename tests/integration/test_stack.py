"""The embedded stack with its real processes: shared by its users, ended by the last, found again after any crash."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from batchmill.opening import opened
from batchmill_core.errors import ConfigurationError, JobStopped, SchemaVersionError
from batchmill_core.job import JobState
from batchmill_core.settings import Settings, load_settings
from batchmill_db import counters, jobs, telemetry
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Connection
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.simulator import SimulatorConfig, simulated
from batchmill_ops.stack import Stack, attach, is_running, processes
from batchmill_ops.stack_folder import StackFolder
from batchmill_ops.stack_hold import status
from batchmill_producers.submit import Submission, submit
from tests.servers import Valkey

PATIENCE_S = 30.0
CATALOG = """
drain_s = 2.0
[accounts.sim]
base_url = "http://127.0.0.1:9/v1"
[accounts.keyed]
base_url = "http://127.0.0.1:9/v1"
api_key_env = "BATCHMILLTEST_KEY"
[models.absent]
engine = "openvino"
source = "/nowhere/model.gguf"
"""
USER = """
import sys
from pathlib import Path
from batchmill_core.settings import load_settings
from batchmill_ops.stack import attach
stack = attach(load_settings(Path(sys.argv[1])))
print(stack.broker_url, flush=True)
sys.stdin.read()
stack.stop()
"""


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A folder of its own; after the test no process may be left that works in it."""
    home = tmp_path / ("a-folder-deeper-than-the-107-bytes-that-a-socket-may-have-" * 2)
    home.mkdir()
    (home / "batchmill.toml").write_text(CATALOG)
    yield load_settings(home)
    left = wait_for(lambda: not running_in(home), otherwise=lambda: running_in(home))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    assert left == []


def wait_for(
    happened: Callable[[], bool], *, otherwise: Callable[[], list[psutil.Process]] | None = None
) -> list[psutil.Process]:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > deadline:
            assert otherwise is not None, "it did not happen in time"
            return otherwise()
        time.sleep(0.02)
    return []


def running_in(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def user_process(settings: Settings) -> Iterator[subprocess.Popen[str]]:
    """Another program that uses the folder's stack, until its standard input closes."""
    process = start_user(settings)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def start_user(settings: Settings) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", USER, str(settings.home)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def broker_url_of(user: subprocess.Popen[str]) -> str:
    assert user.stdout is not None
    return user.stdout.readline().strip()


def answers(url: str) -> bool:
    with contextlib.suppress(redis.exceptions.ConnectionError), redis.Redis.from_url(url) as client:
        return bool(client.ping())
    return False


def ready_workers(stack: Stack) -> list[WorkerRecord]:
    return [w for w in stack.database.run(telemetry.live_workers) if w.state == "ready"]


def stack_pid(settings: Settings) -> int:
    return processes(settings)["stack"][0]


def test_attach_starts_a_broker_with_a_password_and_an_upgraded_database_and_stop_ends_it(settings: Settings) -> None:
    began = time.monotonic()
    stack = attach(settings)
    took_s = time.monotonic() - began

    url = urlsplit(stack.broker_url)
    stranger = redis.Redis(host=url.hostname or "", port=url.port or 0)
    with stranger, pytest.raises(redis.exceptions.AuthenticationError):
        stranger.ping()
    with redis.Redis.from_url(stack.broker_url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert stack.settings.broker_url == stack.broker_url
    assert stack.database.run(telemetry.live_workers) == []
    assert is_running(settings)
    assert took_s < 5
    stack.stop()
    assert not is_running(settings)
    assert not answers(stack.broker_url)
    stack.stop()


def test_the_password_is_readable_by_its_user_alone(settings: Settings) -> None:
    stack = attach(settings)
    password = urlsplit(stack.broker_url).password or ""

    private = {
        path.name
        for path in settings.state_folder.rglob("*")
        if path.is_file() and password in path.read_text(errors="ignore")
    }
    shown = [process for process in psutil.process_iter(["cmdline"]) if password in str(process.info["cmdline"])]
    assert private == {"stack.json"}
    assert (settings.state_folder / "stack.json").stat().st_mode & 0o777 == 0o600
    assert settings.state_folder.stat().st_mode & 0o777 == 0o700
    assert shown == []
    stack.stop()


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_two_users_share_one_stack_which_the_last_one_out_ends(settings: Settings, first_leaves_first: bool) -> None:
    users = [attach(settings), attach(settings)]
    first, last = users if first_leaves_first else reversed(users)

    assert users[0].broker_url == users[1].broker_url
    first.stop()
    assert answers(last.broker_url)
    last.stop()
    assert not is_running(settings)


def test_the_stack_goes_on_when_the_program_that_started_it_is_killed(settings: Settings) -> None:
    with user_process(settings) as starter:
        url = broker_url_of(starter)
        stack = attach(settings)
        starter.kill()
        starter.wait()

        assert stack.broker_url == url
        assert answers(url)
        stack.stop()


def test_a_killed_user_counts_no_longer(settings: Settings) -> None:
    with user_process(settings) as user:
        url = broker_url_of(user)
        user.kill()
        user.wait()
        killed = time.monotonic()
        wait_for(lambda: not answers(url))

        assert time.monotonic() - killed < 2


def test_users_that_race_start_one_stack(settings: Settings) -> None:
    with user_process(settings) as one, user_process(settings) as two, user_process(settings) as three:
        urls = {broker_url_of(user) for user in (one, two, three)}

        assert len(urls) == 1
        assert len([p for p in running_in(settings.home) if "batchmill_ops.stack_process" in p.cmdline()]) == 1


def test_a_killed_stack_leaves_nothing_running_and_is_started_again_over_its_data(settings: Settings) -> None:
    stack = attach(settings)
    stack.serve(["api.sim"])
    wait_for(lambda: len(ready_workers(stack)) == 1)
    with redis.Redis.from_url(stack.broker_url) as client:
        client.set("kept", "yes")
    os.kill(stack_pid(settings), signal.SIGKILL)
    wait_for(lambda: not running_in(settings.home))

    assert not is_running(settings)
    again = attach(settings)
    assert again.broker_url == stack.broker_url
    with redis.Redis.from_url(again.broker_url) as client:
        assert client.get("kept") == b"yes"
    stack.stop()
    again.stop()


def test_a_user_that_outlives_its_stack_starts_it_again_with_its_queues(settings: Settings) -> None:
    stack = attach(settings)
    stack.serve(["api.sim"])
    os.kill(stack_pid(settings), signal.SIGKILL)
    wait_for(lambda: not running_in(settings.home))

    assert stack.unfit() == []
    assert len(processes(settings)["workers"]) == 1
    stack.kill()


def test_a_dead_broker_is_started_again_at_its_address(settings: Settings) -> None:
    stack = attach(settings)
    old = processes(settings)["valkey"][0]
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: processes(settings)["valkey"][0] != old and answers(stack.broker_url))

    assert answers(stack.broker_url)
    stack.stop()


def test_damaged_broker_files_are_put_aside(settings: Settings) -> None:
    attach(settings).stop()
    [manifest] = settings.state_folder.glob("valkey/appendonlydir/*.manifest")
    manifest.write_text("this is no manifest\n")
    stack = attach(settings)

    assert answers(stack.broker_url)
    assert len(list(settings.state_folder.glob("valkey.damaged-*"))) == 1
    stack.stop()


def test_serve_starts_workers_once_for_all_users(settings: Settings) -> None:
    one, two = attach(settings), attach(settings)
    one.serve(["api.sim"])
    two.serve(["api.sim"])
    one.serve(["api.sim"])
    wait_for(lambda: bool(ready_workers(one)))

    [worker] = ready_workers(one)
    assert worker.queues == ("api.sim",)
    assert processes(settings)["workers"] == [worker.pid]
    one.stop()
    assert processes(settings)["workers"] == [worker.pid]
    two.stop()


def test_queues_that_cannot_be_served_are_told_with_their_reasons(settings: Settings) -> None:
    stack = attach(settings)
    stack.serve(["api.keyed", "gpu.absent", "api.unknown"])
    wait_for(lambda: len(stack.unfit()) == 3)

    missing_key, unknown, no_model = sorted(stack.unfit())
    assert "BATCHMILLTEST_KEY is not set" in missing_key
    assert "'unknown' is not configured" in unknown
    assert no_model.startswith("cpu0-absent: ")
    assert "/nowhere/model.gguf" in no_model
    stack.stop()


def test_a_run_without_its_key_leaves_a_paused_job_that_no_later_run_pays_for(settings: Settings) -> None:
    toml = settings.home / "batchmill.toml"
    toml.write_text(f'{CATALOG}[models.keyed]\naccount = "keyed"\n')
    (settings.home / "rows.jsonl").write_text('{"text": "x"}\n')

    command = [sys.executable, "-m", "batchmill.cli", "run", "rows.jsonl", "--model", "keyed", "--name", "unkeyed"]
    ran = subprocess.run(command, cwd=settings.home, capture_output=True, text=True, check=False, timeout=60)

    assert ran.returncode == 3
    assert "is paused: no worker could start: api.keyed: account 'keyed' needs a key" in ran.stderr
    assert "then go on with: batchmill resume" in ran.stderr
    with opened(settings) as database, database.reading() as conn:
        assert jobs.find(conn, "unkeyed").state is JobState.PAUSED


def test_a_second_user_brings_the_key_that_the_first_ones_shell_lacked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = attach(settings)
    first.serve(["api.keyed"])
    without_key = first.unfit()
    monkeypatch.setenv("BATCHMILLTEST_KEY", "abcdefgh12345678")
    second = attach(settings)
    second.serve(["api.keyed"])
    wait_for(lambda: bool(ready_workers(first)))

    assert len(without_key) == 1
    assert second.unfit() == []
    first.stop()
    second.stop()


def test_a_user_may_join_while_the_workers_of_the_last_one_drain(settings: Settings) -> None:
    leaver = attach(settings)
    leaver.serve(["api.sim"])
    wait_for(lambda: bool(ready_workers(leaver)))
    [old] = processes(settings)["workers"]
    os.kill(old, signal.SIGSTOP)  # a drain that lasts
    leaving = threading.Thread(target=leaver.stop)
    leaving.start()
    wait_for(lambda: (status(StackFolder(path=settings.state_folder)) or {}).get("users") == 0)
    joined = attach(settings)
    os.kill(old, signal.SIGCONT)
    leaving.join(PATIENCE_S)
    joined.serve(["api.sim"])

    assert not leaving.is_alive()
    assert joined.broker_url == leaver.broker_url
    assert old not in processes(settings)["workers"]
    assert len(processes(settings)["workers"]) == 1
    joined.stop()


def test_after_a_crash_of_everything_the_job_goes_on_at_once_without_waiting_for_leases(settings: Settings) -> None:
    with simulated(SimulatorConfig(latency_s=0.1)) as provider:
        settings = with_provider(settings, provider.base_url)
        stack = attach(settings)
        stack.serve(["api.sim"])
        data = [{"text": f"good number {n}"} for n in range(2000)]
        wanted = Submission(
            dataset=data, model="sim-chat", prompt="{{ text }}", params={"max_tokens": 5}, chunk_size=100
        )
        job = submit(stack.database, settings, wanted)
        wait_for(lambda: 0 < current(stack, job.id).done < 1500)
        for process in running_in(settings.home):
            process.kill()
        wait_for(lambda: not running_in(settings.home))
        stack.stop()
        again = attach(settings)
        saved = current(again, job.id).done
        sent = provider.bill()["calls"]
        again.serve(["api.sim"])
        began = time.monotonic()
        wait_for(lambda: current(again, job.id).state == JobState.DONE)
        took_s = time.monotonic() - began
        calls = provider.bill()["calls"]
        again.stop()

    assert 0 < saved < 2000
    assert took_s < settings.lease_s
    assert calls - sent <= 2000 - saved  # no saved row is asked again
    assert sent - saved <= 3 * 256  # and unsaved is what was in flight, and what was just about to be saved


def with_provider(settings: Settings, base_url: str) -> Settings:
    path = settings.home / "batchmill.toml"
    sim = "\n[models.sim-chat]\naccount = 'sim'\n"
    path.write_text(CATALOG.replace("http://127.0.0.1:9/v1", base_url, 1) + sim)
    return load_settings(settings.home)


def current(stack: Stack, job_id: int) -> JobRecord:
    def now(conn: Connection) -> JobRecord:
        counters.sum_counters(conn, [job_id])
        return jobs.get(conn, job_id)

    return stack.database.run(now)


def test_kill_ends_workers_that_do_not_drain(settings: Settings) -> None:
    stack = attach(settings)
    stack.serve(["api.sim"])
    wait_for(lambda: bool(ready_workers(stack)))
    os.kill(ready_workers(stack)[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    stack.kill()

    assert time.monotonic() - began < 5
    assert running_in(settings.home) == []


def test_a_stack_told_to_end_drains_although_it_has_users_and_is_not_started_again(settings: Settings) -> None:
    stack = attach(settings)
    os.kill(stack_pid(settings), signal.SIGTERM)
    wait_for(lambda: not running_in(settings.home))

    with pytest.raises(JobStopped, match="was stopped"):
        stack.unfit()
    assert not is_running(settings)
    stack.stop()


def test_with_a_configured_broker_nothing_is_started_and_the_schema_is_only_checked(
    settings: Settings, valkey_server: Valkey
) -> None:
    configured = load_settings(settings.home, overrides={"broker_url": valkey_server.url})
    with pytest.raises(SchemaVersionError, match="batchmill db upgrade"):
        attach(configured)
    attach(settings).stop()
    stack = attach(configured)
    stack.serve(["api.sim"])

    assert stack.broker_url == valkey_server.url
    assert stack.unfit() == []
    assert not is_running(configured)
    assert running_in(settings.home) == []
    stack.stop()


def test_a_folder_that_cannot_be_written_is_refused_with_a_way_out(settings: Settings) -> None:
    settings.state_folder.write_text("a file where the folder should be")

    with pytest.raises(ConfigurationError, match="BATCHMILL_HOME"):
        attach(settings)


def test_a_database_file_that_is_none_is_refused_by_name(settings: Settings) -> None:
    StackFolder(path=settings.state_folder).prepare()
    (settings.state_folder / "batchmill.db").write_text("no database " * 100)

    with pytest.raises(ConfigurationError, match=r"batchmill\.db cannot be used: .*file is not a database"):
        attach(settings)
    assert not is_running(settings)


def test_a_stack_on_another_database_is_not_joined(settings: Settings) -> None:
    stack = attach(settings)
    other = load_settings(settings.home, overrides={"database_url": f"sqlite:///{settings.home}/other.db"})

    with pytest.raises(SchemaVersionError):
        attach(other)
    assert is_running(settings)
    stack.stop()
