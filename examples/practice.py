"""What the examples have in common: this folder's models, and the simulated provider among them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import batchmill
from batchmill_ops.ports import is_free
from batchmill_ops.simulator.process import simulated

HERE = Path(__file__).parent
REVIEWS = HERE / "reviews.jsonl"


@contextmanager
def practice() -> Iterator[batchmill.Client]:
    """Batchmill in this folder, and `batchmill simulate` beside it unless one runs already.

    Jobs, answers and costs stay in `examples/.batchmill/`. In a program of your own `batchmill.connect()` is enough, or
    nothing at all: then the folder is the current one.
    """
    client = batchmill.connect(folder=HERE)
    port = urlsplit(client.settings.catalog.account("sim").base_url).port or 80
    if not is_free(port):
        yield client
        return
    with simulated(port=port):
        yield client
        client.close()
