"""Runs Flower on the configured broker, or on the folder's embedded one: set up, behind a login, with our figures."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import Settings
from batchmill_db.session import Database

from .flower_folder import FlowerFolder, Running
from .flower_login import Login, login_for
from .ports import taken
from .stack_folder import StackFolder

if TYPE_CHECKING:
    from .flower_app import MillFlower

log = logging.getLogger(__name__)

MAX_TASKS = 5_000
SAVE_EVERY_MS = 5_000
_PURGE_AFTER_S = 3_600
# Variables of Flower that would open what we close, or move what `status` and a restart look for.
_REFUSED = {
    "FLOWER_BASIC_AUTH": "set BATCHMILL_FLOWER_PASSWORD instead; the user is batchmill",
    "FLOWER_AUTH": "put a proxy that logs people in before Flower, or use the password",
    "FLOWER_UNAUTHENTICATED_API": "the API needs the login, like every page",
    "FLOWER_PORT": "give --port",
    "FLOWER_ADDRESS": "give --address",
    "FLOWER_URL_PREFIX": "give --url-prefix",
    "FLOWER_UNIX_SOCKET": "give --port",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where Flower listens. ``prefix`` is a path that a proxy before it passes on, such as ``flower``."""

    port: int = 5555
    address: str = "127.0.0.1"
    prefix: str = ""

    def url(self, port: int, *, secure: bool = False) -> str:
        host = "127.0.0.1" if self.address in ("", "0.0.0.0", "::") else self.address
        shown = f"[{host}]" if ":" in host else host
        path = f"/{self.prefix.strip('/')}" if self.prefix else ""
        return f"http{'s' if secure else ''}://{shown}:{port}{path}/"


def run_flower(settings: Settings, place: Place, *, ready: Callable[[Running, Login], None]) -> None:
    """Runs Flower until SIGTERM or SIGINT; ``settings`` name the broker. Calls ``ready`` once it listens.

    Raises ConfigurationError when it cannot: the extra is missing, the port is taken, one runs here already.
    """
    _need_extra()
    for noisy in ("flower.inspector", "tornado.access"):  # a warning for each worker's silence, a line for each page
        logging.getLogger(noisy).setLevel(logging.ERROR)
    StackFolder(path=settings.state_folder).prepare()
    folder = FlowerFolder(path=settings.state_folder)
    with folder.held():
        login = login_for(settings)
        database = Database(settings.database_address, pool_size=1)
        try:
            asyncio.run(_serve(settings, place, folder, login, database, ready))
        finally:
            database.close()


async def _serve(
    settings: Settings,
    place: Place,
    folder: FlowerFolder,
    login: Login,
    database: Database,
    ready: Callable[[Running, Login], None],
) -> None:
    app = make_flower(settings, place, folder, login, database)
    try:
        running = _listen(app, place)
        folder.note_running(running)
        app.start()
        ready(running, login)
        await _told_to_end()
    finally:
        app.stop()


def make_flower(settings: Settings, place: Place, folder: FlowerFolder, login: Login, database: Database) -> MillFlower:
    """A Flower that does not listen yet; to be made on a running event loop, once per process."""
    from batchmill_core.broker import make_celery, queues

    from .flower_app import MillFlower
    from .metrics import MillCollector

    return MillFlower(
        capp=make_celery(settings),
        login=login,
        collector=MillCollector(database, queues=[q.name for q in queues(settings) if q.name != "batchmill.none"]),
        settings=_flower_settings(place, folder, login),
    )


def _flower_settings(place: Place, folder: FlowerFolder, login: Login) -> dict[str, Any]:
    """Sets Flower's global options: ours, then what its own variables say, then those that are not open to these."""
    from flower.command import apply_env_options, extract_settings
    from flower.options import options
    from flower.urls import settings as flower_settings
    from flower.views.tasks import TASK_COLUMNS

    from .flower_pages import COLUMNS, HEADERS, Pages, readable

    _set(options, max_tasks=MAX_TASKS, tasks_columns=COLUMNS, purge_offline_workers=_PURGE_AFTER_S)
    _set(options, read_only=True, format_task=readable)
    _set(options, state_save_interval=SAVE_EVERY_MS, persistent=True, db=str(folder.history_file))
    apply_env_options()
    _set(options, port=place.port, address=place.address, url_prefix=place.prefix.strip("/"))
    _set(options, basic_auth=[login.credentials], auth="", unix_socket="")
    TASK_COLUMNS.update(HEADERS)
    extract_settings()
    return {**flower_settings, "template_loader": Pages(str(flower_settings["template_path"]))}


def _set(options: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(options, name, value)


def _listen(app: MillFlower, place: Place) -> Running:
    try:
        port = app.listen_there()
    except OSError as fault:
        if fault.errno == errno.EADDRINUSE:
            raise taken(place.port, "--port") from fault
        raise ConfigurationError(
            f"Flower cannot listen on {place.address}:{place.port}: {fault.strerror}; give another --address or --port"
        ) from fault
    return Running(pid=os.getpid(), url=place.url(port, secure=app.ssl_options is not None), port=port)


async def _told_to_end() -> None:
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def _need_extra() -> None:
    with contextlib.suppress(ImportError):
        import flower  # noqa: F401
        import prometheus_client  # noqa: F401

        _refuse_variables()
        return
    raise ConfigurationError("Flower is not installed; pip install 'batchmill[flower]'")


def _refuse_variables() -> None:
    if os.environ.get("FLOWER_PORT", "").startswith("tcp://"):  # what Kubernetes sets for a Service named flower
        del os.environ["FLOWER_PORT"]
    for name in _REFUSED.keys() & os.environ.keys():
        raise ConfigurationError(f"{name} is not for `batchmill flower`: {_REFUSED[name]}")
