"""Who listens on a port of this host, for a message that says what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from batchmill_core.errors import ConfigurationError

_LISTENS = "0A"  # the kernel's number for that state
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Whether somebody could listen there now."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, port), family=family):
            return True
    except OSError:
        return False


def taken(port: int, option: str) -> ConfigurationError:
    """What to tell the user of a port that another process has."""
    by = listener(port)
    return ConfigurationError(f"port {port} is taken{f' by {by}' if by else ''}; end that, or give another {option}")


def listener(port: int) -> str | None:
    """The process that listens on a port, as ``process 123 (redis-server)``; None when it cannot be told.

    Processes of other users are hidden from those who are not root.
    """
    links = {f"socket:[{inode}]" for table in _TABLES for inode in _listening(table, port)}
    for process in Path("/proc").glob("[0-9]*") if links else ():
        with suppress(OSError):
            if any(str(fd.readlink()) in links for fd in (process / "fd").iterdir()):
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return None


def _listening(table: Path, port: int) -> Iterator[str]:
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]
