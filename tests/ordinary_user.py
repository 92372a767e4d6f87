"""What an ordinary user may do, in tests that root runs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may read and write everything, so root is somebody else for the length of the block."""
    if os.geteuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)  # the real one too: `access` asks for that
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


@contextmanager
def folder_for_all() -> Iterator[Path]:
    """A folder that everybody may enter: pytest's are closed to all but their user."""
    folder = Path(tempfile.mkdtemp(prefix="batchmill-test-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
