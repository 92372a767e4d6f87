"""Checks the URLs of broker, database, cache and providers, and shows them without their passwords."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

# Greedy up to the last @: a password that somebody forgot to escape may hold an @ or a slash itself.
_USERINFO = re.compile(r"(?<=://)(?P<user>[^:/?#@\s]*):.*@", re.DOTALL)
_SECRET_IN_QUERY = re.compile(
    r"(?<=[?&])(?P<key>[^=&#]*(?:password|passwd|secret|token|key)[^=&#]*)=[^&#]*", re.IGNORECASE
)

_DATABASE_EXAMPLE = "postgresql+psycopg://user:password@host/name"
_POSTGRES = ("postgresql+psycopg", "postgresql", "postgres")  # the first two are named in messages
_SQLITE = ("sqlite", "sqlite+pysqlite")


def redacted_url(url: str) -> str:
    """The URL with its password, and anything that looks secret in its query, shown as ``***``; for people to read."""
    without_password = _USERINFO.sub(lambda found: f"{found['user']}:***@", url)
    return _SECRET_IN_QUERY.sub(lambda found: f"{found['key']}=***", without_password)


def redis_url(url: str, folder: Path) -> str:
    """Checks ``redis://[:password@]host[:port][/number]`` or ``rediss://``. Raises ValueError with what is wrong."""
    parts = _parts(url, ("redis", "rediss"), example="redis://host:6379/0")
    _need_host(parts, example="redis://host:6379/0")
    number = parts.path.strip("/")
    if number and not number.isdigit():
        raise ValueError(f"the database after the host must be a number, not {number!r}; write redis://host:6379/0")
    return url


def database_url(url: str, folder: Path) -> str:
    """Checks a PostgreSQL or SQLite URL and makes it whole. Raises ValueError with what is wrong.

    ``postgres://`` and ``postgresql://`` become ``postgresql+psycopg://``; a relative SQLite path is taken from
    ``folder``, so that processes started elsewhere open the same file.
    """
    scheme = url.partition("://")[0].lower()
    if scheme in _SQLITE:
        return _sqlite_url(url, folder)
    if scheme.startswith("postgresql+") and scheme not in _POSTGRES:
        raise ValueError(f"the driver must be psycopg (version 3), not {scheme.partition('+')[2]}; {_write_postgres()}")
    example = f"{_DATABASE_EXAMPLE} or sqlite:///file.db"
    parts = _parts(url, _POSTGRES, example=example, named=("postgresql+psycopg", "sqlite"))
    if not parts.path.strip("/"):
        raise ValueError(f"the name of the database is missing after the host; {_write_postgres()}")
    if not parts.hostname and "host=" not in parts.query:
        raise ValueError(f"the host is missing; {_write_postgres()}, or add ?host=/var/run/postgresql for a socket")
    return "postgresql+psycopg" + url[len(scheme) :]


def base_url(url: str, folder: Path) -> str:
    """Checks a provider's ``http(s)://host[:port][/path]`` and drops a final slash. Raises ValueError."""
    example = "https://api.openai.com/v1"
    parts = _parts(url, ("https", "http"), example=example)
    _need_host(parts, example=example)
    if parts.username is not None or parts.password is not None:
        raise ValueError("it must not hold a user or key; name the key's variable in api_key_env")
    if re.search(r"[<>{}]|\bYOUR[-_ ]", url):
        raise ValueError("it still holds a placeholder; fill in the address of your provider")
    if parts.fragment:
        raise ValueError("it must not have a #fragment")
    return url if parts.query else url.rstrip("/")


def same_server(one: str, other: str, default_port: int) -> bool:
    """Whether two URLs that passed their checks name the same host and port."""
    a, b = urlsplit(one), urlsplit(other)
    return (a.hostname, a.port or default_port) == (b.hostname, b.port or default_port)


CHECKS: dict[str, Callable[[str, Path], str]] = {
    "broker_url": redis_url,
    "cache_url": redis_url,
    "database_url": database_url,
    "base_url": base_url,
}


def _parts(url: str, schemes: tuple[str, ...], *, example: str, named: tuple[str, ...] = ()) -> SplitResult:
    """The parts of a URL of one of these schemes; ``named`` are those that an error names, else the first two."""
    if any(c.isspace() for c in url):
        raise ValueError("it must not hold spaces or line breaks")
    scheme, found, _ = url.partition("://")
    if not found or scheme.lower() not in schemes:
        raise ValueError(
            f"it must start with {' or '.join(f'{s}://' for s in named or schemes[:2])}; write for example {example}"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(
            "the host or port is not valid; a port is a number up to 65535, a / : @ or # inside a password is written "
            f"as %2F %3A %40 or %23; write for example {example}"
        ) from None
    if port == 0:
        raise ValueError(f"port 0 cannot be reached; write for example {example}")
    return parts


def _need_host(parts: SplitResult, *, example: str) -> None:
    if not parts.hostname:
        raise ValueError(f"the host is missing; write for example {example}")


def _sqlite_url(url: str, folder: Path) -> str:
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    file, mark, query = path.partition("?")
    if authority:
        raise ValueError(f"a SQLite URL has three slashes: {scheme}:///file.db, or four for a path from the root")
    if not file or file == ":memory:":
        raise ValueError("SQLite in memory is not shared by worker processes; write sqlite:///file.db")
    return f"{scheme}:///{folder / file}{mark}{query}"


def _write_postgres() -> str:
    return f"write {_DATABASE_EXAMPLE}"
