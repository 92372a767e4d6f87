"""The folder of an embedded stack: its files, who may use it, and one lock per purpose."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill_core.errors import ConfigurationError

_MOST_LOG_BYTES = 10_000_000
_POLL_S = 0.02
_ELSEWHERE = (
    "set BATCHMILL_HOME to a folder on a local disk, or configure broker_url and database_url, which need no folder"
)
# SQLite's write-ahead log and flock need one host's memory; over these the database can be damaged silently.
_NETWORK_KINDS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "lustre", "gpfs", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone"}
)


class LockTaken(Exception):
    """Another process holds the lock, for longer than the caller could wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFolder:
    """The paths under ``.batchmill/``. ``prepare`` makes them; the rest only names them."""

    path: Path

    @property
    def socket(self) -> Path:
        return self.path / "stack.sock"

    @property
    def state_file(self) -> Path:
        """Process id and broker URL of the running stack; holds a password, so it is its user's alone."""
        return self.path / "stack.json"

    @property
    def running_lock(self) -> Path:
        """Held by the stack's own process as long as it lives."""
        return self.path / "stack.lock"

    @property
    def starting_lock(self) -> Path:
        """Held by a user that looks for a stack or starts one, so that two that race start one."""
        return self.path / "start.lock"

    @property
    def valkey(self) -> Path:
        return self.path / "valkey"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def prepare(self) -> None:
        """Makes the folder, open to its user alone. Idempotent. Raises ConfigurationError when it cannot be used."""
        try:
            for folder in (self.path, self.valkey, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            kind = file_system_of(self.path.resolve(), _mounts())
            if kind not in _NETWORK_KINDS:
                (self.path / ".gitignore").write_text("*\n")
                return
        except OSError as fault:
            raise unusable(self.path, fault) from fault
        raise ConfigurationError(f"{self.path} is on a network file system ({kind}); {_ELSEWHERE}")

    def rotate_logs(self) -> None:
        """Puts logs that have grown long aside, one older one each. Called before anything writes to them."""
        for log in self.logs.glob("*.log"):
            if log.stat().st_size > _MOST_LOG_BYTES:
                log.replace(log.with_suffix(".log.1"))

    def write_state(self, state: dict[str, Any]) -> None:
        """Saves what a later stack of this folder and people like to know, whole or not at all."""
        new = self.state_file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(state, file)
        new.replace(self.state_file)

    def read_state(self) -> dict[str, Any]:
        """What the last stack saved, running or not; empty when it ended in order."""
        try:
            state = json.loads(self.state_file.read_text())
        except (OSError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}


def unusable(path: Path, fault: OSError) -> ConfigurationError:
    """What to tell the user of a folder that cannot be written."""
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigurationError(f"the disk that holds {path} is full; free some space, or {_ELSEWHERE}")
    if fault.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
        return ConfigurationError(f"the file system of {path} has no file locks or sockets; {_ELSEWHERE}")
    return ConfigurationError(f"{fault.filename or path} cannot be written ({fault.strerror}); {_ELSEWHERE}")


@contextlib.contextmanager
def exclusive(path: Path, *, wait_s: float) -> Iterator[None]:
    """Holds the lock of a file; the kernel frees it when its holder dies. Raises LockTaken after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockTaken(str(path)) from None
            time.sleep(_POLL_S)
        yield


def file_system_of(path: Path, mounts: str) -> str:
    """The kind of file system that holds ``path``, by the text of Linux's mountinfo; empty when that is not known."""
    found = (Path("/"), "")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) > 4 and after:
            point = Path(fields[4].encode().decode("unicode_escape"))
            if path.is_relative_to(point) and len(point.parts) >= len(found[0].parts):
                found = (point, after.split()[0])
    return found[1]


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ""


def tail(log: Path, *, begin: int = 0, chars: int = 600) -> str:
    """The end of what a log holds from byte ``begin`` on, for a message."""
    try:
        with log.open("rb") as file:
            file.seek(begin)
            return file.read().decode(errors="replace")[-chars:].strip()
    except OSError:
        return ""
