"""Prints what Batchmill needs, without Batchmill: `requirements.py EXTRA,EXTRA` reads the pyproject.toml here.

An image installs this in a layer of its own, which changes of our code leave as it is.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:  # type: ignore[type-arg]  # as TOML gives it
    """The dependencies of a project with these extras. Raises SystemExit for an extra that it does not have."""
    known = project["optional-dependencies"]
    unknown = [name for name in extras if name not in known]
    if unknown:
        raise SystemExit(f"pyproject.toml has no extra {unknown[0]!r}; it has {', '.join(known)}")
    return [*project["dependencies"], *(needed for name in extras for needed in known[name])]


if __name__ == "__main__":
    wanted = [name.strip() for argument in sys.argv[1:] for name in argument.split(",") if name.strip()]
    print("\n".join(requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], wanted)))  # noqa: T201
