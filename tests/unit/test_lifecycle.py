"""A worker process works on so many chunks and no more, whoever brings them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from batchmill_workers.summary import Summary
from tests.mill import Mill, catalog_for, milling

SLOTS = 2  # of the process that a mill starts
RACERS = 8


class Gate:
    """Stands in for the run of a chunk: lets it wait, and counts how many do so side by side."""

    def __init__(self) -> None:
        self.inside = self.most = self.done = 0
        self.open = False

    async def run(self, chunk_id: int) -> Summary:
        self.inside += 1
        self.most = max(self.most, self.inside)
        while not self.open:  # noqa: ASYNC110  # opened from the test's thread
            await asyncio.sleep(0.005)
        self.inside -= 1
        self.done += 1
        return Summary(text="ran")


def _race(mill: Mill, gate: Gate) -> list[bool]:
    """Messages and the dispatcher bring chunks from threads that start together; answers which the dispatcher got in."""
    start = threading.Barrier(2 * RACERS)
    taken: list[bool] = []

    def take(chunk_id: int) -> None:
        start.wait()
        taken.append(mill.process._take(chunk_id))

    def deliver(chunk_id: int) -> None:
        start.wait()
        mill.process.run_chunk(chunk_id)

    threads = [threading.Thread(target=act, args=(n,)) for n in range(RACERS) for act in (take, deliver)]
    for thread in threads:
        thread.start()
    while len(taken) < RACERS:
        threads[0].join(0.01)
    gate.open = True
    for thread in threads:
        thread.join(30)
    return taken


def test_messages_and_the_dispatcher_together_never_fill_more_slots_than_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with milling(tmp_path, catalog_for(), monkeypatch) as mill:
        gate = Gate()
        monkeypatch.setattr(mill.process, "_run", gate.run)
        taken = _race(mill, gate)
        idle = mill.process._slots.wait_idle(10)

    assert gate.most <= SLOTS
    assert taken.count(True) <= SLOTS
    assert gate.done == RACERS + taken.count(True)
    assert idle
