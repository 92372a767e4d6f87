"""What may keep Batchmill from working here, checked one by one, each with what to do."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import redis
import requests

from batchmill_core.catalog import Account, ModelEntry
from batchmill_core.engine import engine_class
from batchmill_core.errors import BatchmillError, ConfigurationError
from batchmill_core.settings import Settings, api_key, redacted_url
from batchmill_db import chunks, migrate, telemetry
from batchmill_db.session import Connection, Database
from batchmill_workers.gpu.sources import resolve_source

from .figures import one_line
from .stack import is_running
from .waits import how_to_serve

_CONNECT_S = 3.0
_MODELS_S = 5.0
_LEAST_BROKER = (6, 2)
_LOW_DISK_BYTES = 1_000_000_000
_LIBRARIES = ("batchmill", "celery", "redis", "sqlalchemy", "aiohttp")


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at. ``advice`` says what to do when it is not ok."""

    name: str
    level: Level
    detail: str
    advice: str | None = None

    def as_dict(self) -> dict[str, str | None]:
        return {"name": self.name, "level": self.level.value, "detail": self.detail, "advice": self.advice}


def ok(name: str, detail: str) -> Check:
    return Check(name=name, level=Level.OK, detail=detail)


def warn(name: str, detail: str, advice: str) -> Check:
    return Check(name=name, level=Level.WARN, detail=detail, advice=advice)


def fail(name: str, detail: str, advice: str | None = None) -> Check:
    return Check(name=name, level=Level.FAIL, detail=detail, advice=advice)


def examine(load: Callable[[], Settings]) -> Iterator[Check]:
    """All checks in order, each as soon as it is done. ``load`` reads the settings."""
    yield check_versions()
    try:
        settings = load()
    except ConfigurationError as fault:
        yield fail("settings", str(fault))
        return
    catalog = settings.catalog
    yield check_settings(settings)
    yield check_disk(settings)
    yield check_broker(settings)
    yield from check_database(settings)
    for account in catalog.accounts.values():
        yield check_account(account, settings)
    for model in catalog.models.values():
        if model.engine is not None:
            yield check_model(model)


def check_versions() -> Check:
    """Python and the libraries that matter most, for reports of faults."""
    found = ", ".join(f"{name} {_version(name)}" for name in _LIBRARIES)
    detail = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}; {found}"
    return ok("versions", detail)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def check_settings(settings: Settings) -> Check:
    """Whether there is anything to work with."""
    catalog = settings.catalog
    detail = f"{settings.home}: {len(catalog.accounts)} accounts, {len(catalog.models)} models"
    if not catalog.models:
        advice = "write batchmill.toml with an account or engine and a model; README shows one"
        return warn("settings", detail, advice)
    return ok("settings", detail)


def check_disk(settings: Settings) -> Check:
    """Room for the embedded database and broker."""
    folder = settings.state_folder if settings.state_folder.exists() else settings.home
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free at {folder}"
    if free < _LOW_DISK_BYTES and (settings.embedded or settings.database_url is None):
        return warn("disk", detail, "free some space, or set BATCHMILL_HOME to a folder on a larger disk")
    return ok("disk", detail)


def check_broker(settings: Settings) -> Check:
    """Whether the broker answers, is new enough and never evicts."""
    url = settings.broker_url
    if url is None:
        return ok("broker", "embedded: runs" if is_running(settings) else "embedded: starts when needed")
    shown = redacted_url(url)
    client = redis.Redis.from_url(url, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S)
    try:
        client.ping()
        found = str(client.info("server").get("redis_version", "0"))
        policy = _eviction_policy(client)
    except redis.RedisError as fault:
        return fail("broker", f"{shown}: {one_line(str(fault))}", "start it, or correct broker_url")
    finally:
        client.close()
    detail = f"{shown} answers, version {found}"
    if tuple(int(n) for n in found.split(".")[:2] if n.isdigit()) < _LEAST_BROKER:
        return fail("broker", detail, "use Redis 6.2 or newer, or Valkey")
    if policy not in (None, "noeviction"):
        advice = "set maxmemory-policy noeviction: a broker that evicts loses messages"
        return fail("broker", f"{detail}, maxmemory-policy {policy}", advice)
    return ok("broker", detail)


def _eviction_policy(client: redis.Redis) -> str | None:
    """None where the server does not tell, as hosted ones do."""
    try:
        found: str | None = client.config_get("maxmemory-policy").get("maxmemory-policy")
    except redis.ResponseError:
        return None
    return found


def check_database(settings: Settings) -> Iterator[Check]:
    """Whether the database answers with the schema of this code; then, which queues have rows and no worker."""
    if settings.database_url is None and not (settings.state_folder / "batchmill.db").exists():
        yield ok("database", "embedded: made when needed")
        return
    try:
        database = Database(settings.database_address)
    except BatchmillError as fault:
        yield fail("database", str(fault))
        return
    try:
        database.run(lambda _: None, patience_s=_CONNECT_S)
        yield ok("database", f"{database.address} answers")
        migrate.check(database)
        yield ok("schema", f"version {migrate.version(database)}")
        yield from database.run(lambda conn: _check_work(conn, settings))
    except ConfigurationError as fault:
        yield fail("schema", str(fault))
    except BatchmillError as fault:
        yield fail("database", str(fault), "start it, or correct database_url")
    finally:
        database.close()


def _check_work(conn: Connection, settings: Settings) -> list[Check]:
    workers = telemetry.live_workers(conn)
    served = {queue for w in workers for queue in w.queues}
    checks = [
        warn(
            "workers",
            f"no live worker serves queue {queue}, which has {ready:,} chunks ready",
            f"start one: {'batchmill resume JOB' if settings.embedded else how_to_serve(queue)}",
        )
        for queue, (ready, _) in sorted(chunks.queues_with_work(conn).items())
        if ready and queue not in served
    ]
    stopped = [
        warn("account " + a.name, f"stopped: {a.reason}", "set it right; it is probed until it works again")
        for a in telemetry.accounts(conn).values()
        if a.state == "stopped"
    ]
    return [*(checks or [ok("workers", f"{len(workers)} live")]), *stopped]


def check_account(account: Account, settings: Settings) -> Check:
    """Whether the key is to be had, and whether the provider takes it."""
    name = f"account {account.name}"
    try:
        key = api_key(account, folder=settings.home)
    except ConfigurationError as fault:
        return fail(name, str(fault))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = f"{account.base_url}/models"
    try:
        answer = requests.get(url, headers=headers, timeout=_MODELS_S, allow_redirects=False)
    except requests.RequestException as fault:
        return fail(name, f"{url} does not answer ({type(fault).__name__})", "start the server, or correct base_url")
    if answer.status_code in (401, 403):
        where = account.api_key_env or account.api_key_file or "api_key_env, which is not set"
        return fail(name, f"{url} refuses the key ({answer.status_code})", f"correct the key in {where}")
    if answer.status_code == 200:
        return ok(name, f"{url} answers{' and takes the key' if key else ''}")
    return warn(name, f"{url} answers {answer.status_code}", "correct base_url, unless this provider lists no models")


def check_model(model: ModelEntry) -> Check:
    """Whether the engine of a model that runs here is installed and its files are there."""
    name = f"model {model.name}"
    try:
        engine_class(model.engine or "")
        path = None if (model.source or "").startswith("hf:") else resolve_source(model.source or "")
    except ConfigurationError as fault:
        return fail(name, str(fault))
    except ImportError as fault:
        extra = {"openvino": "local"}.get(model.engine or "", model.engine)
        return fail(name, f"engine {model.engine} is not installed ({fault.name})", f"pip install 'batchmill[{extra}]'")
    return ok(name, f"{model.engine}, {_shown(path, model)}")


def _shown(path: Path | None, model: ModelEntry) -> str:
    return f"{model.source} (looked up when loaded)" if path is None else f"{path.name} is there"
