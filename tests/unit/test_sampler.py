"""A worker's sampler: what it records of its devices and engines, and that nothing it meets disturbs the work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.engine import EngineFigures
from batchmill_core.settings import Settings
from batchmill_db import schema
from batchmill_db.samples import DeviceReading
from batchmill_db.session import Database
from batchmill_workers.gpu import sampler as sampler_module
from batchmill_workers.gpu.sampler import Sampler
from batchmill_workers.gpu.sampler_engine import EngineWatch
from tests.conformance.db.world import World
from tests.integration.harness import until
from tests.mill import new_database

S = 1_000_000_000
SLOW = Settings(sample_every_s=3600.0)
QUICK = Settings(sample_every_s=0.05)


class Engine:
    """An engine that shows whatever figures a test gives it. Not one that answers."""

    capacity_rows = 4
    context_tokens = None

    def __init__(self) -> None:
        self.now = EngineFigures()

    async def start(self) -> None: ...

    async def complete(self, request: Any) -> Any: ...

    async def close(self) -> None: ...

    def figures(self) -> EngineFigures:
        return replace(self.now)


class Mute:
    """An engine of somebody else, which shows nothing."""

    capacity_rows = 4
    context_tokens = None

    async def start(self) -> None: ...

    async def complete(self, request: Any) -> Any: ...

    async def close(self) -> None: ...


class Devices:
    """Devices that say what a test told them to."""

    def __init__(self, *readings: DeviceReading) -> None:
        self.readings = readings
        self.closed = threading.Event()
        self.fault: Exception | None = None

    @property
    def devices(self) -> Sequence[str]:
        return [r.device for r in self.readings]

    def peek(self) -> None: ...

    def read(self) -> list[DeviceReading]:
        if self.fault is not None:
            raise self.fault
        return list(self.readings)

    def close(self) -> None:
        self.closed.set()


GPU = DeviceReading(device="0", use_percent=60.0, memory_used_bytes=1, memory_total_bytes=2)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = new_database(tmp_path)
    yield found
    found.close()


def sampler(database: Database, settings: Settings = SLOW, *, worker: str = "gpu0@h", holder: str = "a") -> Sampler:
    return Sampler(database, settings, worker=worker, holder=holder)


def lines(database: Database) -> list[dict[str, Any]]:
    return World(database).table(schema.device_sample)


# one engine


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def watch(engine: Engine, clock: Clock, *, booked: int = 0) -> EngineWatch:
    return EngineWatch(engine, worker="gpu0@h", model="small", booked=lambda: booked, clock=clock)


def test_rates_are_differences_between_two_samples() -> None:
    engine, clock = Engine(), Clock()
    engine.now = EngineFigures(output_tokens=100, busy_ns=S)
    seen = watch(engine, clock)
    clock.now_ns += 4 * S
    engine.now = EngineFigures(output_tokens=300, busy_ns=2 * S, running=3, kv_cache_percent=7.0, batch_rows=2.5)

    with seen.sampled(devices=1) as (reading, busy_percent):
        pass

    assert (reading.tokens_per_s, busy_percent, reading.bubble_ms) == (50.0, 25.0, 0)
    assert (reading.running, reading.kv_cache_percent, reading.batch_rows) == (3, 7.0, 2.5)


def test_an_engine_over_two_devices_shares_its_tokens_out() -> None:
    engine, clock = Engine(), Clock()
    seen = watch(engine, clock)
    clock.now_ns += S
    engine.now = EngineFigures(output_tokens=100)

    with seen.sampled(devices=2) as (reading, _):
        pass

    assert reading.tokens_per_s == 50.0


def test_a_sample_that_was_not_saved_is_covered_by_the_next() -> None:
    engine, clock = Engine(), Clock()
    seen = watch(engine, clock)
    with seen.bubble.holding():
        clock.now_ns += S
        with pytest.raises(OSError, match="full"), seen.sampled(devices=1):
            raise OSError("full")
        clock.now_ns += S
    engine.now = EngineFigures(output_tokens=100)

    with seen.sampled(devices=1) as (reading, _):
        pass

    assert (reading.tokens_per_s, reading.bubble_ms) == (50.0, 2000)


@pytest.mark.parametrize(("waiting", "booked", "said"), [(5, 0, 5), (0, 9, 7), (9, 4, 9), (0, 1, 0)])
def test_rows_wait_in_the_engine_or_before_it(waiting: int, booked: int, said: int) -> None:
    engine = Engine()
    engine.now = EngineFigures(running=2, waiting=waiting)

    with watch(engine, Clock(), booked=booked).sampled(devices=1) as (reading, _):
        pass

    assert reading.waiting == said


def test_an_engine_that_started_anew_never_counts_backwards() -> None:
    engine, clock = Engine(), Clock()
    engine.now = EngineFigures(output_tokens=100, busy_ns=S)
    seen = watch(engine, clock)
    clock.now_ns += S
    engine.now = EngineFigures()

    with seen.sampled(devices=1) as (reading, busy_percent):
        pass

    assert (reading.tokens_per_s, busy_percent) == (0.0, 0.0)


def test_an_engine_that_fails_to_tell_fails_no_attempt(caplog: pytest.LogCaptureFixture) -> None:
    engine, clock = Engine(), Clock()
    engine.now = EngineFigures(running=3, busy_ns=S)
    seen = watch(engine, clock)
    engine.now = None  # type: ignore[assignment]  # a bug: reading it fails

    with seen.bubble.holding(), seen.sampled(devices=1) as (reading, _):
        pass

    assert reading.running == 3
    assert [r.getMessage() for r in caplog.records] == ["engine_figures_failed model=small"]


# the thread


def test_samples_are_recorded_while_it_runs(database: Database) -> None:
    engine, devices = Engine(), Devices(GPU)
    engine.now = EngineFigures(running=2)
    sampling = sampler(database, QUICK)
    sampling.start({"small": engine}, "cuda:0", reader=devices, booked=lambda _: 5)
    until("two samples are there", lambda: len(lines(database)) >= 2)
    sampling.stop()

    first = lines(database)[0]
    assert (first["device"], first["worker"], first["model"]) == ("0", "gpu0@h", "small")
    assert (first["use_percent"], first["running"], first["waiting"]) == (60.0, 2, 3)
    assert devices.closed.is_set()


def test_a_worker_without_an_engine_samples_nothing(database: Database) -> None:
    sampling = sampler(database, QUICK)
    sampling.start({}, "cpu")
    with sampling.holding("api.acme"):
        pass
    sampling.stop()

    assert lines(database) == []


def test_of_an_engine_that_shows_nothing_the_device_is_sampled(database: Database) -> None:
    sampling = sampler(database, QUICK)
    sampling.start({"small": Mute()}, "cuda:0", reader=Devices(GPU))
    until("a sample is there", lambda: lines(database))
    sampling.stop()

    assert (lines(database)[0]["use_percent"], lines(database)[0]["worker"]) == (60.0, None)


def started(database: Database, devices: Devices, engine: Engine | None = None, **more: Any) -> Sampler:
    """One that samples when the test says so."""
    found = sampler(database, **more)
    found.start({"small": engine or Engine()}, "cuda:0", reader=devices)
    return found


def test_each_device_of_a_slot_is_sampled(database: Database) -> None:
    sampling = started(database, Devices(GPU, replace(GPU, device="1")))
    sampling.sample()
    sampling.stop()

    assert [(x["device"], x["use_percent"]) for x in lines(database)] == [("0", 60.0), ("1", 60.0)]


def test_two_processes_on_one_device_write_its_figures_once(database: Database) -> None:
    one = started(database, Devices(GPU))
    two = started(database, Devices(GPU), worker="gpu0.b@h", holder="b")
    for sampling in (one, two, one, two):
        sampling.sample()
    used = [x["use_percent"] for x in lines(database)]
    one.stop()
    two.sample()
    two.stop()

    assert used == [60.0, None, 60.0, None]
    assert lines(database)[-1]["use_percent"] == 60.0  # the other took over at once


def test_a_part_of_a_gpu_is_used_as_much_as_its_engine_computes(database: Database) -> None:
    part = DeviceReading(device="0.1", memory_used_bytes=1, memory_total_bytes=2)
    sampling = started(database, Devices(part))
    sampling.sample()
    sampling.stop()

    assert lines(database)[0]["use_percent"] == 0.0


def test_of_a_lost_gpu_the_engine_is_still_sampled(database: Database) -> None:
    sampling = started(database, Devices(DeviceReading(device="0")))
    sampling.sample()
    sampling.stop()

    (line,) = lines(database)
    assert (line["use_percent"], line["worker"], line["running"]) == (None, "gpu0@h", 0)


def test_a_database_that_is_away_is_said_once_and_forgotten_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = new_database(tmp_path)
    sampling = sampler(database, QUICK)
    sampling.start({"small": Engine()}, "cuda:0", reader=Devices(GPU))
    until("a sample is there", lambda: lines(database))
    path = tmp_path / "batchmill.db"
    with caplog.at_level(logging.WARNING, "batchmill_workers.gpu.sampler"):
        path.rename(tmp_path / "away")
        until("it was noticed", lambda: [r for r in caplog.records if "samples_not_saved" in r.getMessage()])
        (tmp_path / "away").rename(path)
    before = len(lines(database))
    until("samples go on", lambda: len(lines(database)) > before)
    sampling.stop()
    database.close()

    assert len([r for r in caplog.records if "samples_not_saved" in r.getMessage()]) == 1


def test_a_reader_that_fails_ends_nothing(database: Database, caplog: pytest.LogCaptureFixture) -> None:
    devices = Devices(GPU)
    devices.fault = ValueError("a bug")
    sampling = sampler(database, QUICK)
    sampling.start({"small": Engine()}, "cuda:0", reader=devices)
    until("it failed", lambda: [r for r in caplog.records if "sampler_failed" in r.getMessage()])
    devices.fault = None
    until("it went on", lambda: lines(database))
    sampling.stop()

    assert lines(database)[0]["use_percent"] == 60.0


def test_old_and_surplus_samples_are_pruned(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module.samples, "PRUNE_ROWS", 2)
    sampling = started(database, Devices(GPU))
    sampling._settings = replace(SLOW, sample_max_rows=3)
    for _ in range(9):
        sampling.sample()
    sampling.prune()
    sampling.stop()

    assert [x["id"] for x in lines(database)] == [7, 8, 9]


# rows that wait


def test_a_held_chunk_makes_an_idle_engine_a_bubble(database: Database) -> None:
    sampling = started(database, Devices(GPU))
    with sampling.holding("gpu.small"):
        until("time has passed", lambda: sampling._watches["gpu.small"].bubble.bubble_ns > 10_000_000)
        sampling.sample()
    sampling.stop()

    assert lines(database)[0]["bubble_ms"] >= 10


def test_ready_chunks_of_its_queue_make_an_idle_engine_a_bubble(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LOOK_EVERY_S", 0.01)
    sampling = started(database, Devices(GPU))
    before = sampling._watches["gpu.small"].bubble.bubble_ns
    World(database).job(queue="gpu.small")

    until("the look found it", lambda: sampling._watches["gpu.small"].bubble.bubble_ns > 0)
    sampling.stop()

    assert before == 0


def test_a_worker_that_takes_no_chunks_is_not_starved_by_those_that_wait(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LOOK_EVERY_S", 0.01)
    World(database).job(queue="gpu.small")
    sampling = sampler(database, QUICK)
    sampling.start({"small": Engine()}, "cuda:0", reader=Devices(GPU), serving=lambda: False)
    until("three samples are there", lambda: len(lines(database)) >= 3)
    sampling.stop()

    assert {x["bubble_ms"] for x in lines(database)} == {0}
