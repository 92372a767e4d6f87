"""The computing thread of the transformers engine: batches side by side, memory that runs out, rows that nobody awaits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_workers.gpu import transformers_device  # noqa: E402
from batchmill_workers.gpu.batching import Item, Limits  # noqa: E402
from batchmill_workers.gpu.batching_queue import Batcher  # noqa: E402
from batchmill_workers.gpu.batching_sizes import Sizes  # noqa: E402
from batchmill_workers.gpu.frames import Frame  # noqa: E402
from batchmill_workers.gpu.transformers_calls import Calls  # noqa: E402
from batchmill_workers.gpu.transformers_device import Device  # noqa: E402
from batchmill_workers.gpu.transformers_loading import precision  # noqa: E402
from batchmill_workers.gpu.transformers_work import Answered, Piece, broken  # noqa: E402

DEADLINE_S = 30.0


class CountedRun:
    """Answers a row after as many steps as it wants tokens."""

    def __init__(self, work: CountedWork, items: Sequence[Item]) -> None:
        self._work = work
        self.live: list[Item] = list(items)
        self._steps = 0

    def step(self, answered: Answered) -> None:
        self._work.at_step(self.live)
        self._steps += 1
        for item in [item for item in self.live if item.wanted <= self._steps]:
            self.live.remove(item)
            said = self._work.broken.get(item.number)
            answered(item, {"text": f"{item.wanted} steps"} if said is None else broken(said))

    def drop(self, numbers: frozenset[int]) -> None:
        self.live = [item for item in self.live if item.number not in numbers]


class CountedWork:
    """A stand-in for a model, so that a device can fail at will: ``at_step`` sees the rows of each step."""

    task = "chat"
    context_tokens = None

    def __init__(self, at_step: Callable[[Sequence[Item]], None]) -> None:
        self.at_step = at_step
        self.broken: dict[int, str] = {}  # rows, and why they have no answer

    def read(self, frame: Frame) -> list[Piece]:
        raise NotImplementedError

    def begin(self, items: Sequence[Item]) -> CountedRun:
        return CountedRun(self, items)

    def merge(self, parts: Sequence[Frame]) -> Frame:
        return parts[0]


class Bench:
    """A device that computes in a thread of its own, and what it answered."""

    def __init__(self, at_step: Callable[[Sequence[Item]], None], *, max_rows: int = 8) -> None:
        self.ended: dict[int, Frame] = {}
        self.news: list[Frame] = []
        self._changed = threading.Condition()
        work = self.work = CountedWork(at_step)
        self.calls = Calls(self._sent, work.merge)
        limits = Limits(max_rows=max_rows, max_wait_ms=20.0, settle_ms=2.0)
        self.batcher = Batcher(limits, Sizes(row_tokens=4096))
        self._device = Device(work, self.batcher, self.calls, max_rows=max_rows)
        self.thread = threading.Thread(target=self._device.run)

    def put(self, number: int, *, tokens: int = 10, wanted: int = 1) -> None:
        for row in self.calls.open(number, [Piece(tokens=tokens, wanted=wanted)]):
            self.batcher.put(Item(number=row, tokens=tokens, wanted=wanted, arrived_ns=time.monotonic_ns()))

    def wait_for(self, *numbers: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(numbers) <= self.ended.keys(), DEADLINE_S), self.ended

    def wait_for_sizes(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.news and self.news[-1]["batch_sizes"], DEADLINE_S), self.news

    def _sent(self, frame: Frame) -> None:
        if "batch_sizes" in frame:
            with self._changed:
                self.news.append(frame)
                self._changed.notify_all()
        if frame.get("done"):
            with self._changed:
                self.ended[frame["id"]] = frame
                self._changed.notify_all()


@contextmanager
def computing(bench: Bench) -> Iterator[Bench]:
    bench.thread.start()
    try:
        yield bench
    finally:
        bench.batcher.close()
        bench.thread.join(DEADLINE_S)


def out_of_memory_above(rows: int) -> Callable[[Sequence[Item]], None]:
    def at_step(live: Sequence[Item]) -> None:
        if len(live) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    return at_step


def test_a_batch_that_does_not_fit_is_halved_until_it_does() -> None:
    bench = Bench(out_of_memory_above(2))
    for number in range(8):
        bench.put(number)
    with computing(bench):
        bench.wait_for(*range(8))

    assert {frame.get("text") for frame in bench.ended.values()} == {"1 steps"}


def test_rows_answered_before_memory_ran_out_are_not_answered_again() -> None:
    steps: list[int] = []

    def grows(live: Sequence[Item]) -> None:
        steps.append(len(live))
        if len(steps) == 3:
            raise MemoryError

    bench = Bench(grows)
    for number, wanted in enumerate((1, 1, 4, 4)):
        bench.put(number, wanted=wanted)
    with computing(bench):
        bench.wait_for(*range(4))

    assert steps[:3] == [4, 2, 2]
    assert steps[3:] == [2, 2, 2, 2]
    assert [bench.ended[n]["text"] for n in range(4)] == ["1 steps", "1 steps", "4 steps", "4 steps"]


def test_a_row_that_does_not_fit_alone_is_too_long_and_the_others_are_answered() -> None:
    def huge(live: Sequence[Item]) -> None:
        if any(item.tokens == 13 for item in live):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    bench = Bench(huge)
    for number, tokens in enumerate((10, 13, 10)):
        bench.put(number, tokens=tokens)
    with computing(bench):
        bench.wait_for(0, 1, 2)

    assert bench.ended[1]["error"]["kind"] == "too_long"
    assert "13 tokens" in bench.ended[1]["error"]["message"]
    assert "error" not in bench.ended[0]
    assert "error" not in bench.ended[2]


def test_another_fault_fails_its_batch_only() -> None:
    def once(live: Sequence[Item]) -> None:
        if live[0].tokens == 13:
            raise ValueError("shapes do not match")

    bench = Bench(once)
    bench.put(1, tokens=13)
    with computing(bench):
        bench.wait_for(1)
        bench.put(2)
        bench.wait_for(2)

    assert bench.ended[1]["error"] == {"kind": "engine_failed", "message": "ValueError: shapes do not match"}
    assert bench.ended[2]["text"] == "1 steps"


def test_a_row_that_fails_ends_alone_and_the_rows_beside_it_are_answered() -> None:
    def unknown(live: Sequence[Item]) -> None:
        if any(item.tokens == 13 for item in live):
            raise IndexError("index out of range in self")

    bench = Bench(unknown)
    for number, tokens in enumerate((10, 10, 13, 10, 10)):
        bench.put(number, tokens=tokens)
    with computing(bench):
        bench.wait_for(*range(5))

    assert bench.ended[2]["error"] == {"kind": "engine_failed", "message": "IndexError: index out of range in self"}
    assert [bench.ended[n].get("text") for n in (0, 1, 3, 4)] == ["1 steps"] * 4


def test_a_fault_that_does_not_come_again_fails_no_row() -> None:
    steps: list[int] = []

    def once(live: Sequence[Item]) -> None:
        steps.append(len(live))
        if len(steps) == 1:
            raise RuntimeError("a shape does not match")

    bench = Bench(once)
    for number in range(4):
        bench.put(number)
    with computing(bench):
        bench.wait_for(*range(4))

    assert steps == [4, 2, 2]
    assert {frame.get("text") for frame in bench.ended.values()} == {"1 steps"}


def test_a_row_that_is_answered_as_broken_fails_and_the_others_go_on() -> None:
    bench = Bench(lambda _live: None)
    bench.work.broken = {2: "not finite"}  # the second row, that of call 1
    for number in range(3):
        bench.put(number, wanted=2)
    with computing(bench):
        bench.wait_for(*range(3))

    assert bench.ended[1]["error"] == {"kind": "broken", "message": "not finite"}
    assert [bench.ended[n].get("text") for n in (0, 2)] == ["2 steps", "2 steps"]


def test_short_rows_do_not_wait_for_a_long_one() -> None:
    began = threading.Event()
    bench = Bench(lambda _live: began.set())
    bench.put(1, wanted=10**9)
    with computing(bench):
        assert began.wait(DEADLINE_S)
        bench.put(2)
        bench.put(3)
        bench.wait_for(2, 3)

    assert set(bench.ended) == {2, 3}


def test_rows_of_a_device_that_is_lost_keep_their_turn_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    begun, all_wait = threading.Event(), threading.Event()

    def lost(_rows: Sequence[Item]) -> None:
        begun.set()
        all_wait.wait(DEADLINE_S)
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nand more")

    monkeypatch.setattr(transformers_device.os, "_exit", ended.append)
    with computing(Bench(lost, max_rows=1)) as bench:
        bench.put(1)
        begun.wait(DEADLINE_S)
        bench.put(2)
        all_wait.set()
        bench.wait_for(1, 2)

    expected = {"kind": "engine_down", "message": "RuntimeError: CUDA error: uncorrectable ECC error encountered"}
    assert [bench.ended[n]["error"] for n in (1, 2)] == [expected, expected]
    assert ended == [transformers_device.BROKEN_DEVICE]


def test_rows_of_a_sticky_fault_are_left_to_the_end_of_the_process_which_may_be_their_doing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def broken(_rows: Sequence[Item]) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(transformers_device.os, "_exit", ended.append)
    with computing(Bench(broken)) as bench:
        bench.put(1)
        bench.thread.join(DEADLINE_S)

    assert ended == [transformers_device.BROKEN_DEVICE]
    assert bench.ended == {}


def test_what_the_last_batch_taught_is_told_before_the_device_idles() -> None:
    with computing(Bench(lambda _rows: None)) as bench:
        bench.put(1, wanted=2)  # nothing is learned at the first step, when the first news are due
        bench.wait_for(1)
        bench.wait_for_sizes()

    assert bench.news[0]["batch_sizes"] == {}
    assert bench.news[-1]["batch_sizes"] == {"4": 1}


def test_a_cancelled_row_leaves_the_device() -> None:
    began = threading.Event()
    bench = Bench(lambda _live: began.set())
    bench.put(1, wanted=10**9)
    with computing(bench):
        assert began.wait(DEADLINE_S)
        bench.calls.cancel(1)
        bench.put(2)
        bench.wait_for(2)

    assert set(bench.ended) == {2}


@pytest.mark.parametrize(("real", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_that_has_bfloat16_by_emulation_only_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, real: bool, dtype: str
) -> None:
    def supported(including_emulation: bool = True) -> bool:  # as torch answers on such GPUs
        return real or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)

    assert str(precision("auto", "cuda:0")) == f"torch.{dtype}"
