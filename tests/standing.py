"""A folder with a simulated provider in which `batchmill up` keeps everything running, as a user would have it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from batchmill_ops.simulator import SimulatorConfig, simulated

PATIENCE_S = 60.0
_POLL_S = 0.1
REVIEWS = Path(__file__).parents[1] / "examples" / "reviews.jsonl"
PROMPT = "Positive or negative? {{ text }}"
_TOML = """\
drain_s = 5.0
[accounts.sim]
base_url = "{base_url}"
max_in_flight = 16

[models.sim-chat]
account = "sim"
price = {{ input = 0.40, output = 1.60 }}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The folder and its login."""

    home: Path

    @property
    def flower_url(self) -> str:
        return str(self.status()["flower"]["url"]).rstrip("/")

    @property
    def login(self) -> tuple[str, str]:
        found = json.loads((self.home / ".batchmill" / "flower.json").read_text())
        return found["user"], found["password"]

    def run(self, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """One command of the program, in this folder."""
        done = subprocess.run(
            command(*arguments),
            cwd=self.home,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return found

    def submit(self, name: str, *options: str) -> str:
        """A job over all reviews; its id."""
        asked = ["-m", "sim-chat", "-p", PROMPT, "--param", "max_tokens=5", "--name", name, *options]
        return self.run("submit", str(REVIEWS), *asked).stdout.strip()

    def get(self, path: str) -> requests.Response:
        """A page of Flower, logged in."""
        return requests.get(f"{self.flower_url}{path}", auth=self.login, timeout=30)

    def tasks(self) -> list[dict[str, Any]]:
        return list(self.get("/api/tasks?limit=1000").json().values())


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "batchmill.cli", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith(("BATCHMILL_", "FLOWER_"))}, **more}


def wait_until(happened: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(_POLL_S)


@contextlib.contextmanager
def milling_folder(home: Path, *, latency_s: float = 0.05, more: str = "") -> Iterator[Standing]:
    """A configured folder, nothing running; whatever runs in it at the end is ended."""
    with simulated(SimulatorConfig(latency_s=latency_s)) as provider:
        (home / "batchmill.toml").write_text(_TOML.format(base_url=provider.base_url) + more)
        try:
            yield Standing(home=home)
        finally:
            subprocess.run(command("down"), cwd=home, env=environment(), capture_output=True, timeout=120, check=False)
