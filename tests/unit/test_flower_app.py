"""Flower as we run it: nothing is open to strangers, operations are off, our figures are on the metrics page."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from batchmill_ops.flower import Place, make_flower, run_flower
from batchmill_ops.flower_folder import FlowerFolder
from batchmill_ops.flower_login import Login
from batchmill_ops.flower_pages import readable
from tests.mill import new_database

LOGIN = Login(password="pl4nted-s3cret", token="t0ken-of-pr0metheus")
AUTH = {"Authorization": f"Basic {base64.b64encode(LOGIN.credentials.encode()).decode()}"}
BEARER = {"Authorization": f"Bearer {LOGIN.token}"}
Visit = Callable[[aiohttp.ClientSession, Any], Awaitable[Any]]


@pytest.fixture
def visited(tmp_path: Path) -> Callable[..., Any]:
    """Runs ``visit`` against a Flower that listens; answers what it answers."""

    def run(visit: Visit, prefix: str = "") -> Any:
        database = new_database(tmp_path)
        settings = Settings(home=tmp_path, broker_url="memory://")

        async def going() -> Any:
            place = Place(port=0, prefix=prefix)
            app = make_flower(settings, place, FlowerFolder(path=tmp_path), LOGIN, database)
            url = place.url(app.listen_there()).rstrip("/")
            try:
                async with aiohttp.ClientSession(url + "/") as session:
                    return await visit(session, app)
            finally:
                app.stop()

        try:
            return asyncio.run(going())
        finally:
            database.close()

    return run


def paths() -> list[str]:
    """One address of every route that Flower has, and one that it has not."""
    from flower.urls import handlers

    patterns = [h.regex.pattern if hasattr(h, "regex") else h[0] for h in handlers]
    addresses = {re.sub(r"\(\.[+*]\)|\.\*", "x", p).rstrip("$?").lstrip("/") for p in patterns}
    return sorted({*addresses, "static/css/flower.css", "no/such/page"})


def test_every_route_needs_the_login_by_every_method(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> set[tuple[str, str, int, str | None]]:
        found = set()
        for path in paths():
            for method in ("GET", "POST", "HEAD", "OPTIONS"):
                async with session.request(method, path) as answer:
                    found.add((method, path, answer.status, answer.headers.get("WWW-Authenticate")))
        return found

    answers = visited(visit)

    assert len(answers) > 100
    challenge = 'Basic realm="Batchmill", charset="UTF-8"'
    assert {(m, p) for m, p, status, wants in answers if status != 401 or wants != challenge} == set()


def test_the_login_opens_pages_metrics_and_the_api(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> dict[str, int]:
        return {
            path: (await session.get(path, headers=AUTH)).status
            for path in ("", "workers", "tasks", "metrics", "healthcheck", "api/workers", "static/css/flower.css")
        }

    assert set(visited(visit).values()) == {200}


def test_the_token_opens_metrics_alone(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> list[int]:
        return [
            (await session.get(path, headers=BEARER)).status
            for path in ("metrics", "healthcheck", "", "tasks", "api/workers")
        ]

    assert visited(visit) == [200, 200, 401, 401, 401]


def test_metrics_hold_flowers_figures_and_ours(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> tuple[str, str]:
        async with session.get("metrics", headers=AUTH) as answer:
            return await answer.text(), answer.headers["Content-Type"]

    page, kind = visited(visit)

    assert kind.startswith("text/plain; version=")
    assert "# TYPE flower_worker_online gauge" in page
    assert "batchmill_up 1.0" in page
    assert 'batchmill_jobs{state="open"} 0.0' in page


@pytest.mark.parametrize(
    "path",
    [
        "api/worker/shutdown/w",
        "api/worker/queue/cancel-consumer/w",
        "api/task/revoke/t",
        "api/task/send-task/batchmill.run_chunk",
    ],
)
def test_operations_are_off_since_jobs_are_steered_by_batchmill(visited: Callable[..., Any], path: str) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> int:
        return (await session.post(path, headers=AUTH)).status

    assert visited(visit) == 403


def test_pages_work_under_a_prefix_and_nothing_is_open_there(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> list[tuple[int, int]]:
        found = []
        for path in ("tasks", "metrics", "static/css/flower.css"):
            stranger, user = await session.get(path), await session.get(path, headers=AUTH)
            found.append((stranger.status, user.status))
        bearer = await session.get("metrics", headers=BEARER)
        return [*found, (bearer.status, 0)]

    assert visited(visit, "mill") == [(401, 200), (401, 200), (401, 200), (200, 0)]


def test_the_tasks_page_shows_rows_results_and_workers(visited: Callable[..., Any]) -> None:
    async def visit(session: aiohttp.ClientSession, _: Any) -> str:
        return await (await session.get("tasks", headers=AUTH)).text()

    page = visited(visit)

    headers = re.findall(r'<th data-column="(\w+)">(\w+)</th>', page)
    assert headers == [
        ("args", "Rows"),
        ("state", "State"),
        ("result", "Result"),
        ("runtime", "Runtime"),
        ("worker", "Worker"),
        ("received", "Received"),
        ("uuid", "UUID"),
    ]


class Task:
    args, result, kwargs = "'reviews · rows 0-9 · m'", "'10 ok'", "{}"


def test_a_task_is_shown_without_celerys_quotes() -> None:
    task = readable(Task())

    assert (task.args, task.result, task.kwargs) == ("reviews · rows 0-9 · m", "10 ok", "")


@pytest.mark.parametrize("name", ["FLOWER_UNAUTHENTICATED_API", "FLOWER_BASIC_AUTH", "FLOWER_AUTH"])
def test_a_variable_of_flower_that_would_open_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "true")

    with pytest.raises(ConfigurationError, match=f"{name} is not for `batchmill flower`"):
        run_flower(Settings(home=tmp_path, broker_url="memory://"), Place(), ready=lambda *_: None)


def test_a_service_of_kubernetes_named_flower_is_no_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWER_PORT", "tcp://10.0.0.1:5555")
    monkeypatch.setenv("FLOWER_AUTH", "stops it before it listens")

    with pytest.raises(ConfigurationError, match="FLOWER_AUTH is not for"):
        run_flower(Settings(home=tmp_path, broker_url="memory://"), Place(), ready=lambda *_: None)


@pytest.mark.parametrize(
    ("place", "url"),
    [
        (Place(), "http://127.0.0.1:80/"),
        (Place(address="0.0.0.0", prefix="/mill/"), "http://127.0.0.1:80/mill/"),
        (Place(address="::1"), "http://[::1]:80/"),
    ],
)
def test_the_address_that_is_told(place: Place, url: str) -> None:
    assert place.url(80) == url
