"""The computing thread: takes batches, steps those that run, and lives through memory that runs out."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from batchmill_workers.gpu.batching import Batch, Item
from batchmill_workers.gpu.batching_faults import is_device_lost, is_out_of_memory, is_sticky
from batchmill_workers.gpu.batching_queue import Batcher
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.transformers_calls import Calls
from batchmill_workers.gpu.transformers_work import Run, Work

BROKEN_DEVICE = 70  # exit status: the device needs a new process
_JOIN_TIMEOUT_S = 0.025  # longer than a batcher lets a device that has become free wait for more rows
_JOIN_EVERY_STEPS = 4
_MOST_RUNS = 4
_TELL_EVERY_S = 0.5


@dataclass(slots=True, kw_only=True)
class _Running:
    """A batch on the device, and those of its rows that it still works on."""

    batch: Batch
    run: Run | None  # None: given up, so that what it holds on the device is free
    began_s: float
    live: list[Item] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s


class Device:
    """Steps its batches in turn. A further batch begins as soon as those that run have shrunk to half of what fits."""

    def __init__(self, work: Work, batcher: Batcher, calls: Calls, *, max_rows: int) -> None:
        self._work = work
        self._batcher = batcher
        self._calls = calls
        self._max_rows = max_rows
        self._running: list[_Running] = []
        self._alone = False  # memory ran out: until the batches that it cut are done they run one at a time
        self._told_s = 0.0
        self._steps = 0

    def run(self) -> None:
        """Computes until the batcher is closed. A fault of the device that only a new process cures ends the process."""
        try:
            while not self._batcher.closed:
                self._take()
                for one in list(self._running):
                    self._step(one)
        except BaseException:  # noqa: BLE001  # without this thread the process would answer nobody and look alive
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(BROKEN_DEVICE)

    def _take(self) -> None:
        """Another batch, if one fits beside those that run; waits for one only when nothing runs."""
        if not self._running:
            batch = self._batcher.take()
        elif self._fits_another():
            batch = self._batcher.take(_JOIN_TIMEOUT_S)
        else:
            return
        if batch is None:
            return
        self._alone = batch.last_try
        self._calls.begin(item.number for item in batch.items)
        run = self._work.begin(batch.items)
        self._running.append(_Running(batch=batch, run=run, began_s=time.monotonic(), live=list(batch.items)))
        self._calls.news({"running": self._rows_running()})

    def _fits_another(self) -> bool:
        self._steps += 1
        if self._alone or self._steps % _JOIN_EVERY_STEPS or len(self._running) >= _MOST_RUNS:
            return False
        rows = sum(len(one.live) for one in self._running)
        room = max(one.batch.rows for one in self._running)
        return 2 * rows <= max(room, self._max_rows // 2) and self._batcher.waiting > 0

    def _step(self, one: _Running) -> None:
        self._drop_abandoned(one)
        fault: Exception | None = None
        try:
            if one.live and one.run is not None:
                with torch.inference_mode():
                    one.run.step(self._answered)
                one.live = list(one.run.live)
        except Exception as error:  # whatever the device raises is these rows' trouble, or the process's
            fault = error
            if is_device_lost(error):  # no row is to blame: all of them keep their turn
                self._calls.give_up("engine_down", _first_line(error))
            if is_sticky(error):
                raise
        if fault is not None:
            self._running.remove(one)
            self._failed(one, fault)
        elif not one.live:
            self._running.remove(one)
            self._batcher.ran(one.batch, one.seconds)
        self._tell(at_once=not self._running and not self._batcher.waiting)

    def _answered(self, item: Item, fields: Frame) -> None:
        if "error" in fields:
            self._calls.failed(item.number, **fields["error"])
        else:
            self._calls.answered(item.number, fields)

    def _drop_abandoned(self, one: _Running) -> None:
        gone = self._calls.gone(item.number for item in one.live)
        if gone and one.run is not None:
            one.run.drop(gone)
            one.live = [item for item in one.live if item.number not in gone]

    def _failed(self, one: _Running, fault: Exception) -> None:
        waiting = [item for item in one.live if not self._calls.gone([item.number])]
        answered = {item.number for item in one.batch.items} - {item.number for item in waiting}
        if not is_out_of_memory(fault):
            failed = self._batcher.failed(one.batch, answered)
            if failed is not None:
                self._calls.failed(failed.number, "engine_failed", _first_line(fault))
            return
        fault.__traceback__ = None  # its frames hold the batch's tensors
        one.run = None
        _free()
        self._alone = True
        too_long = self._batcher.out_of_memory(one.batch, answered)
        if too_long is not None:
            said = f"a row of {too_long.tokens} tokens does not fit the device's memory, not even alone"
            self._calls.failed(too_long.number, "too_long", said)

    def _rows_running(self) -> dict[str, int]:
        """Told before they compute: a process that is killed for the host's memory cannot say what was too much."""
        rows: dict[str, int] = {}
        for one in self._running:
            c = str(one.batch.length_class)
            rows[c] = max(rows.get(c, 0), one.batch.row_tokens >> one.batch.length_class)
        return rows

    def _tell(self, *, at_once: bool) -> None:
        """Every half second, and before the device idles, when what was learned last would be told to nobody."""
        now_s = time.monotonic()
        if now_s - self._told_s < _TELL_EVERY_S and not at_once:
            return
        self._told_s = now_s
        figures = {"batch_rows": self._batcher.batch_rows, "bubble_ns": self._batcher.bubble_ns}
        sizes: dict[str, Any] = {str(c): rows for c, rows in self._batcher.learned().items()}
        self._calls.news({"figures": figures, "batch_sizes": sizes, "running": self._rows_running()})


def _first_line(fault: Exception) -> str:
    return f"{type(fault).__name__}: {fault}".splitlines()[0]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
