"""A user with a browser: logs in to Flower, sees workers, sees the tasks of a running job with their results."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page, browsing, find_chromium
from tests.standing import Standing, milling_folder

WORKER = f"api0-sim@{socket.gethostname()}"


@pytest.fixture
def page() -> Iterator[Page]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium on this host; as root: apt-get install chromium")
    with browsing(executable) as opened:
        yield opened


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Standing]:
    with milling_folder(tmp_path, latency_s=0.5) as standing:
        standing.run("up", "--flower-port", "0")
        yield standing


@pytest.mark.timeout(300)
def test_a_user_logs_in_and_sees_workers_and_the_tasks_of_a_running_job(page: Page, here: Standing) -> None:
    page.open(f"{here.flower_url}/tasks")
    assert "Login needed" in page.text
    assert page.asked_to_log_in == 1

    page.login = here.login
    here.submit("reviews", "--chunk-size", "50")
    page.open(f"{here.flower_url}/workers")
    page.wait_for_text(WORKER)
    page.wait_for("document.querySelector('#workers-online').innerText === '1'")
    assert "Online" in page.text

    while "STARTED" not in page.text:
        page.open(f"{here.flower_url}/tasks")
        page.wait_for("document.querySelectorAll('#tasks-table tbody tr').length > 1")
    assert here.status()["jobs"] == {"open": 1}
    rows = table(page)
    assert all(row["Rows"].startswith("reviews · rows ") and row["Worker"] == WORKER for row in rows)

    while "SUCCESS" not in page.text:
        page.open(f"{here.flower_url}/tasks")
        page.wait_for_text("STARTED")
    done = [row for row in table(page) if row["State"] == "SUCCESS"]
    assert all(row["Result"].startswith("50 ok · ") and "$0.00" in row["Result"] for row in done)
    assert all(row["Runtime"] for row in done)

    page.read("document.querySelector('#tasks-table tbody a[href*=\"/task/\"]').click()")
    page.wait_for("document.querySelector('#task-page') !== null")
    assert "batchmill.run_chunk" in page.text
    assert "Terminate" not in page.text


def table(page: Page) -> list[dict[str, str]]:
    """The tasks that are shown, by column."""
    names = ["Rows", "State", "Result", "Runtime", "Worker", "Received", "UUID"]
    cells = page.read(
        "[...document.querySelectorAll('#tasks-table tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    return [dict(zip(names, row, strict=True)) for row in cells]
