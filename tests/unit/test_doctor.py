"""The checks of `batchmill doctor`, each against a real broker, database or HTTP server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import redis

from batchmill.cli import main
from batchmill_core.catalog import Account, Catalog, ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from batchmill_ops.doctor import Level, check_account, check_broker, check_database, check_disk, check_model, examine
from batchmill_ops.simulator import SimulatorConfig, simulated
from tests.prepared_jobs import PreparedFolder


def test_a_broker_that_answers_is_ok(valkey_url: str) -> None:
    check = check_broker(Settings(broker_url=valkey_url))

    assert (check.level, check.advice) == (Level.OK, None)


def test_a_broker_that_evicts_fails_with_what_to_set(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        check = check_broker(Settings(broker_url=valkey_url))
        client.config_set("maxmemory-policy", "noeviction")

    assert check.level is Level.FAIL
    assert "set maxmemory-policy noeviction" in (check.advice or "")


def test_a_broker_that_is_away_fails_without_its_password() -> None:
    check = check_broker(Settings(broker_url="redis://:sesame@127.0.0.1:1/0"))

    assert check.level is Level.FAIL
    assert check.detail.startswith("redis://:***@127.0.0.1:1/0: ")
    assert "sesame" not in check.detail


def test_an_embedded_stack_that_does_not_run_is_ok(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)

    assert [check_broker(settings).detail, next(check_database(settings)).detail] == [
        "embedded: starts when needed",
        "embedded: made when needed",
    ]


def test_a_database_without_tables_names_the_command(database_url: str) -> None:
    last = list(check_database(Settings(database_url=database_url)))[-1]

    assert (last.name, last.level) == ("schema", Level.FAIL)
    assert "run `batchmill db upgrade`" in last.detail


def test_rows_that_no_live_worker_takes_are_a_warning_with_the_command(tmp_path: Path) -> None:
    folder = PreparedFolder(tmp_path)
    folder.submit()

    last = list(check_database(folder.settings))[-1]
    folder.database.close()

    assert (last.name, last.level) == ("workers", Level.WARN)
    assert "no live worker serves queue api.sim" in last.detail
    assert last.advice == "start one: batchmill resume JOB"


def test_the_key_is_tried_at_the_provider(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GOOD=right-one\nBAD=wrong-one\n")
    settings = Settings(home=tmp_path)
    with simulated(SimulatorConfig(api_key="right-one")) as simulator:
        good = Account(name="sim", base_url=simulator.base_url, api_key_env="GOOD")
        checks = [check_account(replace(good, api_key_env=name), settings) for name in ("GOOD", "BAD", "MISSING")]
    away = check_account(good, settings)

    assert [c.level for c in checks] == [Level.OK, Level.FAIL, Level.FAIL]
    assert checks[1].advice == "correct the key in BAD"
    assert "MISSING is not set" in checks[2].detail
    assert (away.level, away.advice) == (Level.FAIL, "start the server, or correct base_url")
    assert not any("wrong-one" in f"{c.detail}{c.advice}" for c in checks)


@pytest.mark.parametrize(
    ("engine", "source", "words"),
    [("openvino", "nowhere.gguf", "no such file"), ("nosuch", "x", "no engine is called 'nosuch'")],
)
def test_a_local_model_that_cannot_load_fails(engine: str, source: str, words: str) -> None:
    check = check_model(ModelEntry(name="m", engine=engine, source=source))

    assert check.level is Level.FAIL
    assert words in check.detail


def test_little_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchmill_ops.doctor._LOW_DISK_BYTES", 10**18)

    assert check_disk(Settings(home=tmp_path)).level is Level.WARN


def test_wrong_settings_end_the_examination_with_their_sentence() -> None:
    def load() -> Settings:
        raise ConfigurationError("batchmill.toml: broker is not a known key")

    checks = list(examine(load))

    assert [(c.name, c.level) for c in checks] == [("versions", Level.OK), ("settings", Level.FAIL)]
    assert checks[1].detail == "batchmill.toml: broker is not a known key"


def test_all_of_it_is_examined_in_order(tmp_path: Path) -> None:
    catalog = Catalog(models={"m": ModelEntry(name="m", engine="openvino", source="nowhere.gguf")})

    names = [c.name for c in examine(lambda: Settings(home=tmp_path, catalog=catalog))]

    assert names == ["versions", "settings", "disk", "broker", "database", "model m"]


def test_the_command_exits_with_2_when_a_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    assert "ok   broker: embedded: starts when needed" in capsys.readouterr().out

    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")
    assert main(["doctor"]) == 2
    assert "      → start it, or correct broker_url" in capsys.readouterr().out
