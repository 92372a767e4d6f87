"""Docker for tests: the image of this tree, a Compose project that leaves nothing behind, the simulator in a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TAG = "test"
IMAGE = f"batchmill:{TAG}"
BUILD_TIMEOUT_S = 900
TIMEOUT_S = 180


def run(command: list[str], *, env: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> str:
    """Runs a command in the repository's root; answers its standard output, or fails with all that it said."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@cache
def build_image() -> str:
    """Builds the image of this tree. Its pip looks where this shell's variables say, on this machine's own network."""
    passed = [f"--build-arg={name}" for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")]
    dockerfile = "--file=ops/docker/Dockerfile"
    run(
        ["docker", "build", "--quiet", "--network=host", dockerfile, f"--tag={IMAGE}", *passed, "."],
        timeout_s=BUILD_TIMEOUT_S,
    )
    return IMAGE


def compose_command() -> list[str]:
    """Compose v2 where it is, else 1.29."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else [shutil.which("docker-compose") or "docker-compose"]


class Project:
    """One Compose project of docker-compose.yml with the simulator."""

    def __init__(self, name: str, env_file: Path, variables: Mapping[str, str]) -> None:
        self.name = name
        self._env = {**os.environ, "MILL_ENV_FILE": str(env_file), "MILL_TAG": TAG, **variables}
        files = ["-f", "docker-compose.yml", "-f", "tests/compose/simulator.yml"]
        self._command = [*compose_command(), "--env-file", str(env_file), "-p", name, *files]

    def __call__(self, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
        return run([*self._command, *arguments], env=self._env, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """Ids of a service's containers, running or not, oldest first."""
        labels = {"project": self.name, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        return run(["docker", "ps", "-a", "-q", "--no-trunc", *filters]).split()[::-1]

    def state(self, container: str) -> dict[str, Any]:
        """What Docker knows of a container: Running, ExitCode, Health and more."""
        state: dict[str, Any] = json.loads(run(["docker", "inspect", "--format={{json .State}}", container]))
        return state

    def logs(self) -> str:
        return self("logs", "--no-color", "--tail=40")

    def down(self) -> None:
        """Ends and removes everything of the project, data too. Idempotent."""
        self("down", "--volumes", "--remove-orphans", "-t", "5")


class Provider:
    """A simulator in a container, through its published port."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def bill(self, *, calls: bool = False) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/bill{'?calls=1' if calls else ''}", timeout=30) as answer:
            bill: dict[str, Any] = json.load(answer)
        return bill
