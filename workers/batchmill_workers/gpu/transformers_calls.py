"""The calls that the process has taken: which rows of a batch belong to whom, and what each was answered."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.hosted_process import failure
from batchmill_workers.gpu.transformers_work import Piece

Send = Callable[[Mapping[str, Any]], None]
Merge = Callable[[Sequence[Frame]], Frame]


@dataclass(slots=True, kw_only=True)
class _Call:
    number: int
    pieces: Sequence[Piece]
    rows: range  # numbers of its rows, one a piece
    begun: bool = False
    parts: dict[int, Frame] = field(default_factory=dict)

    @property
    def input_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


class Calls:
    """Safe to use from the reading and the computing thread. A call of several texts ends with the last of them."""

    def __init__(self, send: Send, merge: Merge) -> None:
        self._send = send
        self._merge = merge
        self._lock = threading.Lock()
        self._rows = itertools.count(1)
        self._by_number: dict[int, _Call] = {}
        self._by_row: dict[int, _Call] = {}

    def open(self, number: int, pieces: Sequence[Piece]) -> range:
        """Takes a call; answers the numbers of its rows."""
        with self._lock:
            first = next(self._rows)
            self._rows = itertools.count(first + len(pieces))
            call = _Call(number=number, pieces=pieces, rows=range(first, first + len(pieces)))
            self._by_number[number] = call
            self._by_row.update(dict.fromkeys(call.rows, call))
            return call.rows

    def begin(self, rows: Iterable[int]) -> None:
        """Says which calls are on the device from now on."""
        with self._lock:
            calls = {id(call): call for row in rows if (call := self._by_row.get(row)) and not call.begun}
            for call in calls.values():
                call.begun = True
                self._send({"id": call.number, "input_tokens": call.input_tokens})

    def answered(self, row: int, part: Frame) -> None:
        """Takes a row's answer; the last one of its call sends the call's. Of a call that is gone it does nothing."""
        with self._lock:
            call = self._by_row.pop(row, None)
            if call is None:
                return
            call.parts[row] = part
            if len(call.parts) == len(call.pieces):
                del self._by_number[call.number]
                merged = self._merge([call.parts[one] for one in call.rows])
                self._send({"id": call.number, "done": True, "input_tokens": call.input_tokens, **merged})

    def failed(self, row: int, kind: str, message: str) -> range:
        """Ends the whole call of a row; answers the rows that nobody waits for any more."""
        with self._lock:
            call = self._by_row.get(row)
            if call is None:
                return range(0)
            self._forget(call)
            self._send(failure(call.number, kind, message))
            return call.rows

    def give_up(self, kind: str, message: str) -> None:
        """Ends every call."""
        with self._lock:
            for call in list(self._by_number.values()):
                self._forget(call)
                self._send(failure(call.number, kind, message))

    def refuse(self, number: int, kind: str, message: str) -> None:
        """Ends a call that was never opened."""
        with self._lock:
            self._send(failure(number, kind, message))

    def cancel(self, number: int) -> range:
        """Nobody waits for the call any more; answers its rows."""
        with self._lock:
            call = self._by_number.get(number)
            if call is None:
                return range(0)
            self._forget(call)
            return call.rows

    def gone(self, rows: Iterable[int]) -> frozenset[int]:
        """Those of the rows that nobody waits for."""
        with self._lock:
            return frozenset(row for row in rows if row not in self._by_row)

    def news(self, frame: Frame) -> None:
        """A message about the process itself."""
        with self._lock:
            self._send(frame)

    def _forget(self, call: _Call) -> None:
        del self._by_number[call.number]
        for row in call.rows:
            self._by_row.pop(row, None)
