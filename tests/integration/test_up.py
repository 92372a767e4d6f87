"""`up`, `down`, `status` and `flower` as commands, with all the real processes behind them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from tests.servers import Valkey, free_port
from tests.standing import Standing, command, environment, milling_folder, wait_until

PATIENCE_S = 30.0


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Standing]:
    """A configured folder; after the test no process may be left that works in it."""
    with milling_folder(tmp_path) as standing:
        yield standing
    deadline = time.monotonic() + PATIENCE_S
    while left := running_in(tmp_path):
        assert time.monotonic() < deadline, f"left behind: {[p.cmdline() for p in left]}"
        time.sleep(0.05)


def running_in(home: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_up_serves_what_is_submitted_and_flower_shows_it_until_down(here: Standing) -> None:
    said = here.run("up", "--flower-port", "0")
    job_id = here.submit("reviews", "--limit", "60", "--chunk-size", "20")
    wait_until(lambda: here.status()["jobs"] == {"done": 1}, "the job")

    status = here.status()
    wait_until(lambda: [t["state"] for t in here.tasks()] == ["SUCCESS"] * 3, "Flower's events")
    page = here.get("/metrics").text
    down = here.run("down")

    user, password = here.login
    assert f"password {password}  (user {user}; made now, shown this once)" in said.stdout
    assert status["stack"]["users"] == 1
    assert [q["queue"] for q in status["queues"]] == ["api.sim"]
    assert [w["name"] for w in status["workers"]] == [f"api0-sim@{socket.gethostname()}"]
    assert status["broker_answers"]
    assert f'batchmill_rows{{job="{job_id}",status="ok"}} 60.0' in page
    assert "reviews · rows" not in page  # names of jobs are figures' labels, what is asked is not
    assert down.stdout.startswith("it is down")
    assert here.status()["stack"] is None


def test_up_again_says_that_it_runs_and_down_again_that_it_does_not(here: Standing) -> None:
    here.run("up", "--no-flower")

    again = here.run("up", "--no-flower")
    here.run("down")
    down_again = here.run("down")

    assert "it runs already, as it was started" in again.stderr
    assert down_again.stdout == "nothing runs here by `batchmill up`\n"


def test_the_broker_listens_on_the_chosen_port(here: Standing) -> None:
    port = free_port()

    said = here.run("up", "--no-flower", "--port", str(port))

    assert said.stdout.startswith(f"broker   127.0.0.1:{port} ")
    assert here.status()["broker"] == f"redis://:***@127.0.0.1:{port}/0"
    assert here.status()["flower"] is None


@pytest.mark.parametrize("option", ["--port", "--flower-port"])
def test_a_port_that_is_taken_names_who_has_it_and_nothing_is_left_running(here: Standing, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        said = here.run("up", option, str(port), code=2)

    me = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
    assert f"port {port} is taken by {me}; end that, or give another {option}" in said.stderr
    assert here.status()["stack"] is None


def test_flower_is_started_again_when_killed_and_keeps_its_history_and_password(here: Standing) -> None:
    here.run("up", "--flower-port", str(free_port()))
    here.submit("reviews", "--limit", "60", "--chunk-size", "20")
    wait_until(lambda: [t["state"] for t in here.tasks()] == ["SUCCESS"] * 3, "Flower's events")
    before, login = {t["uuid"] for t in here.tasks()}, here.login
    history = here.home / ".batchmill" / "flower.db"
    saved_at = time.time()
    wait_until(lambda: history.exists() and history.stat().st_mtime > saved_at, "the history is saved")
    pid = here.status()["flower"]["pid"]

    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (here.status()["flower"] or {"pid": pid})["pid"] != pid, "another Flower")

    assert {t["uuid"] for t in here.tasks()} == before
    assert here.login == login


def test_a_killed_keeper_leaves_no_process_behind(here: Standing) -> None:
    here.run("up", "--flower-port", "0")

    os.kill(here.status()["up_pid"], signal.SIGKILL)
    wait_until(lambda: not running_in(here.home), "all of it ends")

    assert here.status()["flower"] is None


def test_up_is_for_embedded_stacks_only(here: Standing) -> None:
    said = here.run("up", code=2, BATCHMILL_BROKER_URL="redis://127.0.0.1:6379/0")

    assert "broker_url is configured, so there is no embedded stack to keep running" in said.stderr


def test_flower_on_a_configured_broker_until_it_is_told_to_end(here: Standing, valkey_server: Valkey) -> None:
    env = environment(
        BATCHMILL_BROKER_URL=valkey_server.url,
        BATCHMILL_FLOWER_PASSWORD="pl4nted-s3cret",
        BATCHMILL_METRICS_TOKEN="t0ken-of-pr0metheus",
    )
    here.run("db", "upgrade")
    with subprocess.Popen(
        command("flower", "--port", "0"), cwd=here.home, env=env, stdout=subprocess.PIPE, text=True
    ) as flower:
        assert flower.stdout is not None
        line = flower.stdout.readline()
        url = line.split()[1]
        metrics = requests.get(f"{url}metrics", headers={"Authorization": "Bearer t0ken-of-pr0metheus"}, timeout=30)
        stranger = requests.get(f"{url}metrics", timeout=30)
        flower.terminate()
        code = flower.wait(30)

    assert "the password is the configured flower_password" in line
    assert (metrics.status_code, stranger.status_code, code) == (200, 401, 0)
    assert "pl4nted-s3cret" not in line
    assert not (here.home / ".batchmill" / "flower.json").exists()
