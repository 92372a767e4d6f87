"""What Flower keeps under ``.batchmill/``: its password, its history, and where it listens while it runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from batchmill_core.errors import ConfigurationError

from .stack_folder import LockTaken, exclusive, unusable

USER = "batchmill"
LOOKING_S = 1.0  # a lock is waited for this long, since somebody may just be looking whether it is held


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A Flower that runs: its process and its address."""

    pid: int
    url: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerFolder:
    """The files of one folder's Flower. All are their user's alone."""

    path: Path

    @property
    def password_file(self) -> Path:
        return self.path / "flower.json"

    @property
    def history_file(self) -> Path:
        return self.path / "flower.db"

    @property
    def lock_file(self) -> Path:
        """Held as long as Flower runs: two would overwrite each other's history."""
        return self.path / "flower.lock"

    @property
    def running_file(self) -> Path:
        return self.path / "flower.run.json"

    def password(self) -> tuple[str, bool]:
        """The generated password, and whether it was made just now. Raises ConfigurationError."""
        try:
            found = json.loads(self.password_file.read_text())["password"]
            self.password_file.chmod(0o600)
            return str(found), False
        except FileNotFoundError:
            made = secrets.token_urlsafe(15)
            self._write(self.password_file, {"user": USER, "password": made})
            return made, True
        except (ValueError, KeyError, TypeError, OSError) as fault:
            raise ConfigurationError(
                f"{self.password_file} cannot be read ({fault}); remove it, and a new password is made"
            ) from fault

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For as long as Flower runs. Raises ConfigurationError when one runs in this folder already."""
        try:
            with exclusive(self.lock_file, wait_s=LOOKING_S):
                yield
                self.running_file.unlink(missing_ok=True)
        except LockTaken:
            found = self.running()
            where = f"at {found.url} (process {found.pid})" if found else "and is just starting"
            raise ConfigurationError(
                f"Flower runs in {self.path.parent} already, {where}; use that one, or stop it first"
            ) from None

    def note_running(self, running: Running) -> None:
        self._write(self.running_file, asdict(running))

    def running(self) -> Running | None:
        """The Flower that runs in this folder; None when none does."""
        if not is_held(self.lock_file):
            return None
        try:
            return Running(**json.loads(self.running_file.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _write(self, path: Path, content: dict[str, object]) -> None:
        """Whole or not at all, open to its user alone."""
        new = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                json.dump(content, file)
            new.replace(path)
        except OSError as fault:
            raise unusable(path, fault) from fault


def is_held(lock_file: Path) -> bool:
    """Whether a process holds the lock of a file. Looking takes a share of it for a moment: see LOOKING_S."""
    try:
        with lock_file.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
