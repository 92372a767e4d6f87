"""An engine with a process and our batcher, whose device is a script: some rows crash it, some do not fit.

A prompt that holds ``segfault`` ends the process by that signal for as long as a file of that name lies in the model's
source folder; while ``lost`` lies there, the device answers every batch as a broken one does. ``memory_rows`` says how many rows fit at once; a prompt that holds ``huge`` does not fit at all.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request
from batchmill_workers.gpu.batching import Batch, Item, Limits
from batchmill_workers.gpu.batching_faults import is_device_lost, is_out_of_memory
from batchmill_workers.gpu.batching_queue import Batcher
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.chat import text_messages
from batchmill_workers.gpu.frames import Channel, Frame
from batchmill_workers.gpu.hosted import HostedEngine
from batchmill_workers.gpu.hosted_process import failure, serve

CAPACITY_ROWS = 32
TOKENS = 16


class ScriptedEngine(HostedEngine):
    """The worker's side. What the process learns of its device comes as news."""

    kind = "scripted"
    process_module = "tests.scripted_engine"

    def __init__(self, *, model: ModelEntry, device: str) -> None:
        super().__init__(model=model, device=device, capacity_rows=CAPACITY_ROWS)
        self._sizes: dict[int, int] = {}

    def configuration(self) -> Frame:
        return {"sizes": list(self._sizes.items())}

    def message(self, request: Request) -> Frame:
        return {"text": text_messages(request, engine=self.kind)[-1]["content"]}

    def news(self, frame: Frame) -> None:
        super().news(frame)
        self._sizes = dict(frame.get("sizes", self._sizes.items()))

    def use_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        self._sizes = dict(sizes)

    def batch_sizes(self) -> Mapping[int, int]:
        return self._sizes


class Device:
    """The process's side: a thread that reads, and this one, which computes."""

    def __init__(self, source: Path, channel: Channel, sizes: Mapping[int, int]) -> None:
        self._source = source
        self._channel = channel
        self._batcher = Batcher(
            Limits(max_rows=CAPACITY_ROWS, in_flight=CAPACITY_ROWS), Sizes(row_tokens=CAPACITY_ROWS * TOKENS)
        )
        self._batcher.use(sizes)

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while (batch := self._batcher.take()) is not None:
            try:
                self._compute(batch)
            except Exception as error:
                if is_device_lost(error):
                    for item in batch.items:
                        self._channel.send(failure(item.number, "engine_down", str(error)))
                    return
                if not is_out_of_memory(error):
                    raise
                self._shrink(batch)
            else:
                self._answer(batch)
            self._channel.send({"sizes": list(self._batcher.learned().items())})

    def _read(self) -> None:
        try:
            while True:
                frames = self._channel.receive(wait=True)
                with self._batcher.reading(len(frames)):
                    for frame in frames:
                        self._take(frame)
        except (EOFError, OSError):
            self._batcher.close()

    def _take(self, frame: Frame) -> None:
        if frame.get("cancel"):
            self._batcher.cancel(frame["id"])
            return
        now_ns = time.monotonic_ns()
        self._batcher.put(Item(number=frame["id"], tokens=TOKENS, arrived_ns=now_ns, payload=frame["text"]))

    def _compute(self, batch: Batch) -> None:
        for item in batch.items:
            self._channel.send({"id": item.number})
        texts = [item.payload for item in batch.items]
        if (self._source / "segfault").exists() and any("segfault" in text for text in texts):
            os.kill(os.getpid(), signal.SIGSEGV)
        if (self._source / "lost").exists():
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        fits = int((self._source / "memory_rows").read_text())
        if batch.rows > fits or any("huge" in text for text in texts):
            raise MemoryError

    def _answer(self, batch: Batch) -> None:
        for item in batch.items:
            answer = {"text": item.payload.upper(), "finish_reason": "stop", "input_tokens": TOKENS, "output_tokens": 1}
            self._channel.send({"id": item.number, "done": True, **answer})
        self._batcher.ran(batch, 0.01)

    def _shrink(self, batch: Batch) -> None:
        too_long = self._batcher.out_of_memory(batch)
        if too_long is not None:
            self._channel.send(failure(too_long.number, "too_long", "the row does not fit the device's memory"))


def load(configuration: Frame, channel: Channel) -> tuple[Device, Frame]:
    sizes = {int(c): int(rows) for c, rows in configuration["sizes"]}
    return Device(Path(configuration["path"]), channel, sizes), {"pid": os.getpid()}


if __name__ == "__main__":
    serve(load)
