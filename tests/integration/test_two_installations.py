"""Two installations on one host that share a broker and a database keep their workers' names apart."""

from __future__ import annotations

import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from batchmill_core.settings import load_settings
from batchmill_db import telemetry
from batchmill_workers.launch import Supervisor, plan_api
from batchmill_workers.node_names import mark_of
from tests.integration.conftest import MakeMill
from tests.integration.harness import Mill, until
from tests.integration.supervised import supervised


def _installation(home: Path) -> AbstractContextManager[Supervisor]:
    settings = load_settings(home, {})
    return supervised(home, settings, plan_api(settings, ["sim"]))


def _ready(mill: Mill, pids: list[int]) -> str | None:
    """The name, without its host, of the worker that is one of these processes and takes chunks."""
    with mill.database.reading() as conn:
        live = telemetry.live_workers(conn)
    return next((w.name.partition("@")[0] for w in live if w.state == "ready" and w.pid in pids), None)


def test_the_second_installation_of_a_host_marks_its_names_and_the_first_keeps_its_own(
    make_mill: MakeMill, tmp_path: Path
) -> None:
    mill = make_mill()
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(mill.home / "batchmill.toml", other)
    with _installation(mill.home) as one:
        first = until("the first is ready", lambda: _ready(mill, one.pids), timeout_s=60)
        with _installation(other) as two:
            second = until("the second is ready", lambda: _ready(mill, two.pids), timeout_s=60)
    with _installation(mill.home) as one:
        again = until("the first is ready again", lambda: _ready(mill, one.pids), timeout_s=60)

    assert (first, second, again) == ("api0", f"api0-{mark_of(other)}", "api0")
