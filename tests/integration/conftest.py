"""Fixtures of the durability tests: a mill on each database, with servers of their own where a test harms them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import Mill, milling

MakeMill = Callable[..., Mill]


@pytest.fixture
def make_mill(tmp_path: Path, valkey_url: str, database_url: str) -> Iterator[MakeMill]:
    """Makes a mill on the shared Valkey and a database of this test; what is given is passed to `milling`."""
    with ExitStack() as stack:

        def make(**options: Any) -> Mill:
            servers = {"broker_url": valkey_url, "database_url": database_url}
            return stack.enter_context(milling(tmp_path, **{**servers, **options}))

        yield make
