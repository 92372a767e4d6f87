"""Settings: environment, .env and batchmill.toml, parsed and validated once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .catalog import Catalog, nearest
from .environment import Variable, read_variables
from .errors import ConfigurationError
from .keys import api_key
from .settings_check import SECRETS, ScalarTable, check
from .settings_file import FILE_NAME, FileSettings, read_settings_file
from .urls import redacted_url, same_server

__all__ = ["SECRETS", "Settings", "api_key", "find_folder", "load_settings", "redacted_url"]

PREFIX = "BATCHMILL_"
HOME_VARIABLE = "BATCHMILL_HOME"
DEFAULT_LEASE_S = 60.0
_REDIS_PORT = 6379

# Variables that are ours but no settings; each is read by the module named here.
OTHER_VARIABLES: Mapping[str, str] = {
    HOME_VARIABLE: "settings.find_folder",
    "BATCHMILL_FAILPOINT": "tests: where a process shall die",
    "BATCHMILL_PARENT_FD": "launch: a pipe whose end says that the parent is gone",
    "BATCHMILL_CHUNK_SLOTS": "launch: chunks that a worker process feeds at a time",
    "BATCHMILL_DEVICE": "launch: the device that a GPU worker is pinned to",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Settings:
    """How this process is configured. ``load_settings`` makes one; nothing else reads the configuration.

    A worker that misses its beats for ``lease_s`` loses its chunks; they are taken over at the next reap, so within
    ``lease_s + reap_every_s``. ``beat_s`` is a third and ``reap_every_s`` a sixth of the lease unless given.
    """

    home: Path = field(default_factory=Path.cwd)  # the folder of batchmill.toml, .env and .batchmill/
    broker_url: str | None = None  # None: embedded
    database_url: str | None = None  # None: SQLite under .batchmill/
    cache_url: str | None = None  # None: no response cache
    catalog: Catalog = field(default_factory=Catalog)
    lease_s: float = DEFAULT_LEASE_S
    beat_s: float = DEFAULT_LEASE_S / 3
    reap_every_s: float = DEFAULT_LEASE_S / 6
    publish_every_s: float = 0.2
    drain_s: float = 30.0  # how long a worker that was told to stop may finish calls in flight
    slots: int = 8  # chunks whose rows one API worker process sends at a time; one that has sent all is not counted
    gpu_slots: int = 2  # the same for one device: one fills the batch while the other drains
    worker_max_chunks: int | None = None  # a worker process makes room for a fresh one after so many; None: never
    worker_max_memory_mb: int | None = None  # or when it and its engine hold more MiB than this
    sample_every_s: float = 5.0  # how often a worker of a device records what the device does
    sample_keep_days: float = 7.0  # how long such samples are kept
    sample_max_rows: int = 1_000_000  # and how many at most
    gpu_use_percent: float = 80.0  # `batchmill gpus`: a device used this much is kept busy
    gpu_starved_percent: float = 30.0  # used less than this while rows wait, it is starved
    gpu_memory_low_percent: float = 70.0  # memory filled less than this has room for more rows at once
    gpu_memory_high_percent: float = 90.0  # filled more than this, it is what bounds the device
    gpu_p99_ms: float = 500.0  # of a hundred answers, all but one should come within this time
    log_level: str = "info"
    flower_password: str | None = None  # None: a generated one, kept under .batchmill/
    metrics_token: str | None = None  # what Prometheus may show instead of the password, for metrics alone

    @property
    def embedded(self) -> bool:
        """Whether Batchmill starts the broker itself."""
        return self.broker_url is None

    @property
    def state_folder(self) -> Path:
        """Where an embedded stack keeps its database, broker files and logs."""
        return self.home / ".batchmill"

    @property
    def database_address(self) -> str:
        """URL of the database: the configured one, else SQLite under `state_folder`."""
        return self.database_url or f"sqlite:///{self.state_folder / 'batchmill.db'}"

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{f.name}={_shown(f.name, getattr(self, f.name))}' for f in fields(self))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A setting's value and where it was found."""

    value: Any
    place: str


def find_folder(env: Mapping[str, str] | None = None) -> Path:
    """The folder whose batchmill.toml, .env and .batchmill/ count: BATCHMILL_HOME, else the current one.

    Parent folders are not searched: a run must not pick up keys and prices from a place its user did not look at.
    Raises ConfigurationError if BATCHMILL_HOME is no folder.
    """
    home = (os.environ if env is None else env).get(HOME_VARIABLE, "").strip()
    folder = Path(home).expanduser() if home else Path.cwd()
    if not folder.is_dir():
        raise ConfigurationError(
            f"{HOME_VARIABLE} is {home!r}, which is not a folder; create it or correct the variable"
        )
    return folder.absolute()


def load_settings(
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Reads ``overrides`` (arguments of ``connect``) over the environment over .env over batchmill.toml over defaults.

    ``folder`` defaults to ``find_folder(env)``, ``env`` to the process environment. An override of None and an empty
    variable count as not given. Raises ConfigurationError, one sentence about the first thing that is wrong.
    """
    env = os.environ if env is None else env
    folder = find_folder(env) if folder is None else folder.absolute()
    path = folder / FILE_NAME
    file = read_settings_file(path) if path.exists() else FileSettings()
    found = {key: _Found(value=value, place=f"{path}: {key}") for key, value in file.scalars.items()}
    found |= _from_variables(read_variables(folder, env), folder)
    found |= _from_overrides(overrides or {}, folder)
    values = _with_derived({key: setting.value for key, setting in found.items()})
    settings = Settings(home=folder, catalog=file.catalog, **values)
    _check_together(settings, found)
    return settings


def _from_variables(variables: Mapping[str, Variable], folder: Path) -> dict[str, _Found]:
    known = {PREFIX + key.upper(): key for key in ScalarTable.model_fields}
    ours = {name: variable for name, variable in variables.items() if name.startswith(PREFIX)}
    for name in sorted(ours.keys() - known.keys() - OTHER_VARIABLES.keys()):
        hint = nearest(name, [*known, *OTHER_VARIABLES])
        raise ConfigurationError(f"{ours[name].place} is not a known variable{hint} Correct or unset it")
    home = ours.get(HOME_VARIABLE)
    if home is not None and home.place != HOME_VARIABLE:
        raise ConfigurationError(f"{home.place} has no effect: .env is read from that folder; export it instead")
    given = {known[name]: v for name, v in ours.items() if name in known and v.value.strip()}
    texts = {key: variable.value.strip() for key, variable in given.items()}
    texts |= {"log_level": texts["log_level"].lower()} if "log_level" in texts else {}
    checked = check(ScalarTable, texts, where=lambda key: given[key].place, folder=folder, strict=False)
    return {key: _Found(value=getattr(checked, key), place=given[key].place) for key in given}


def _from_overrides(overrides: Mapping[str, Any], folder: Path) -> dict[str, _Found]:
    given = {key: value for key, value in overrides.items() if value is not None}
    checked = check(ScalarTable, given, where=lambda key: f"argument {key}", folder=folder, strict=True)
    return {key: _Found(value=getattr(checked, key), place=f"argument {key}") for key in given}


def _with_derived(values: dict[str, Any]) -> dict[str, Any]:
    lease_s = values.get("lease_s", DEFAULT_LEASE_S)
    return {"beat_s": lease_s / 3, "reap_every_s": lease_s / 6, **values}


def _check_together(settings: Settings, found: Mapping[str, _Found]) -> None:
    """Settings that are fine alone and contradict each other stop the process."""
    if settings.beat_s > settings.lease_s / 2:
        raise ConfigurationError(
            f"{_place('beat_s', found)} is {settings.beat_s:g} s, but {_place('lease_s', found)} is "
            f"{settings.lease_s:g} s; a lease must outlive at least two beats: lower the one or raise the other"
        )
    for less, more in (
        ("gpu_starved_percent", "gpu_use_percent"),
        ("gpu_memory_low_percent", "gpu_memory_high_percent"),
    ):
        if getattr(settings, less) >= getattr(settings, more):
            raise ConfigurationError(
                f"{_place(less, found)} is {getattr(settings, less):g}, which is not below {_place(more, found)}, "
                f"{getattr(settings, more):g}; lower the one or raise the other"
            )
    broker_url, cache_url = settings.broker_url, settings.cache_url
    if broker_url and cache_url and same_server(broker_url, cache_url, _REDIS_PORT):
        raise ConfigurationError(
            f"{_place('cache_url', found)} and {_place('broker_url', found)} name the same server; the cache needs its "
            "own, which may evict (maxmemory-policy allkeys-lru): a broker must not"
        )


def _place(key: str, found: Mapping[str, _Found]) -> str:
    return found[key].place if key in found else f"{key} (by default)"


def _shown(name: str, value: object) -> str:
    if name in SECRETS and value is not None:
        return "'***'"
    if isinstance(value, Catalog):
        return f"{len(value.accounts)} accounts and {len(value.models)} models"
    return repr(redacted_url(value) if isinstance(value, str) else value)
