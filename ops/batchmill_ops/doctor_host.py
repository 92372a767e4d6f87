"""The checks of this host: versions, room on its disk, Flower and its port."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from batchmill_core.settings import Settings

from .doctor_check import Check, fail, ok, warn
from .flower_folder import FlowerFolder
from .ports import is_free, listener

FLOWER_PORT = 5555
_LOW_DISK_BYTES = 1_000_000_000
_NO_DISK_BYTES = 100_000_000  # a broker's append-only file and SQLite's log need room to work at all
_LIBRARIES = ("batchmill", "celery", "redis", "sqlalchemy", "aiohttp")


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


def check_disk(settings: Settings) -> Check:
    """Room, and leave to write, for what is kept on this host: an embedded broker, an SQLite database."""
    folder = _kept_in(settings)
    if folder is None:
        return ok("disk", "broker and database are elsewhere; nothing is kept here")
    if not os.access(folder, os.W_OK):
        return fail(
            "disk", f"{folder} may not be written to", f'`sudo chown -R "$USER" {folder}`{_or_elsewhere(settings)}'
        )
    free = shutil.disk_usage(folder).free
    detail = f"{free / 1e9:.1f} GB free at {folder}"
    if free >= _LOW_DISK_BYTES:
        return ok("disk", detail)
    advice = f"`df -h {folder}` shows the disk: make room{_or_elsewhere(settings)}"
    if free >= _NO_DISK_BYTES:
        return warn("disk", f"{detail}, which a large job fills", advice)
    return fail("disk", f"{free / 1e6:.0f} MB free at {folder}: too little to save answers", advice)


def _kept_in(settings: Settings) -> Path | None:
    """The nearest folder that is there already of what is written on this host; None when nothing is."""
    address = settings.database_address
    if address.startswith("sqlite"):
        folder = Path(address.partition(":///")[2].partition("?")[0]).parent
    elif settings.embedded:
        folder = settings.state_folder
    else:
        return None
    return next(f for f in (folder, *folder.parents) if f.is_dir())


def _or_elsewhere(settings: Settings) -> str:
    if settings.database_url is not None:
        return ""
    return "; or work in a folder on another disk: `export BATCHMILL_HOME=/path/to/folder` (move batchmill.toml there)"


def check_flower(settings: Settings) -> Check:
    """Whether Flower is installed, and its usual port free."""
    if find_spec("flower") is None:
        return ok("flower", "not installed; `pip install 'batchmill[flower]'` if you want it")
    running = FlowerFolder(path=settings.state_folder).running()
    if running is not None:
        return ok("flower", f"runs at {running.url} (process {running.pid})")
    if is_free(FLOWER_PORT):
        return ok("flower", f"not running; its port {FLOWER_PORT} is free")
    by = listener(FLOWER_PORT)
    detail = f"its port {FLOWER_PORT} is taken{f' by {by}' if by else ''}"
    command = (
        f"batchmill up --flower-port {_next_free()}" if settings.embedded else f"batchmill flower --port {_next_free()}"
    )
    return warn("flower", detail, f"end that, or take another port: `{command}`")


def _next_free() -> int:
    return next((p for p in range(FLOWER_PORT + 1, FLOWER_PORT + 100) if is_free(p)), 0)
