"""Flower's memory on disk: whole after a kill, put aside when damaged, not written without need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.broker import make_celery
from batchmill_core.settings import Settings

TASK = {
    "type": "task-received",
    "uuid": "u1",
    "hostname": "api0@host",
    "clock": 1,
    "local_received": 1.0,
    "timestamp": 1.0,
    "utcoffset": 0,
    "pid": 1,
    "name": "batchmill.run_chunk",
    "args": "reviews · rows 0-9 · m",
}


def on_loop(act: Callable[[Callable[[], Any]], Any], folder: Path) -> Any:
    """Runs ``act`` with a function that opens the history of ``folder``, on an event loop as Flower would."""

    async def acting() -> Any:
        from tornado.ioloop import IOLoop

        from batchmill_ops.flower_history import History

        def open_history() -> Any:
            app = make_celery(Settings(home=folder, broker_url="memory://"))
            return History(
                app, io_loop=IOLoop.current(), db=str(folder / "flower.db"), persistent=True, max_tasks_in_memory=10
            )

        return act(open_history)

    return asyncio.run(acting())


def test_tasks_and_counters_are_there_after_a_kill(tmp_path: Path) -> None:
    def act(open_history: Callable[[], Any]) -> Any:
        history = open_history()
        history.state.event(dict(TASK))
        history.save_state()
        return open_history().state  # nothing was closed

    state = on_loop(act, tmp_path)

    assert state.tasks["u1"].args == "reviews · rows 0-9 · m"
    assert state.counter["api0@host"]["task-received"] == 1
    assert (tmp_path / "flower.db").stat().st_mode & 0o777 == 0o600


def test_nothing_is_written_when_nothing_happened(tmp_path: Path) -> None:
    def act(open_history: Callable[[], Any]) -> tuple[int, int]:
        history = open_history()
        history.state.event(dict(TASK))
        history.save_state()
        before = (tmp_path / "flower.db").stat().st_mtime_ns
        history._not_before = 0.0
        history.save_state()
        return before, (tmp_path / "flower.db").stat().st_mtime_ns

    before, after = on_loop(act, tmp_path)

    assert before == after


def test_a_damaged_history_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "flower.db").write_bytes(b"\x80\x05no pickle")

    with caplog.at_level(logging.WARNING):
        state = on_loop(lambda open_history: open_history().state, tmp_path)

    assert len(state.tasks) == 0
    assert (tmp_path / "flower.db.damaged").exists()
    assert "history_put_aside" in caplog.text
