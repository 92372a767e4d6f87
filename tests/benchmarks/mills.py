"""A mill on SQLite with a broker of its own, for benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchmill_ops.simulator import SimulatorConfig
from tests.integration.harness import Mill, milling
from tests.servers import Valkey


@contextmanager
def mill(
    provider: SimulatorConfig | str,
    *,
    account: Mapping[str, Any] | None = None,
    tables: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Mill]:
    """Real servers for the length of a ``with`` block; the broker appends to a file, as the embedded one does."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        valkey = Valkey(home, appendonly=True)
        valkey.start()
        try:
            with milling(
                home,
                broker_url=valkey.url,
                database_url=f"sqlite:///{home / 'batchmill.db'}",
                provider=provider,
                account=account,
                tables=tables,
                settings=settings,
            ) as running:
                yield running
        finally:
            valkey.kill()
