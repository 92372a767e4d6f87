"""Device samples and latencies, the same on both databases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import func, insert, select, update

from batchmill_core.job import Rows
from batchmill_core.settings import Settings
from batchmill_db import booking, latencies, sample_spans, samples, schema
from batchmill_db.sample_spans import Span
from batchmill_db.samples import DeviceReading, EngineReading, Newest
from batchmill_db.schema import device_sample
from batchmill_db.session import now_ms
from batchmill_ops.gpus import read_devices
from batchmill_ops.gpus_diagnosis import Verdict
from batchmill_ops.gpus_report import read_report
from tests.conformance.db.world import World, answered, call_of, settled

EVERY_MS = 5000.0
READING = DeviceReading(device="0", use_percent=60.0, memory_used_bytes=70, memory_total_bytes=100, power_w=300.0)


def engine(worker: str = "gpu0@h", model: str = "small", **more: Any) -> EngineReading:
    return EngineReading(worker=worker, model=model, **more)


def add(world: World, *engines: EngineReading, holder: str = "a", reading: DeviceReading = READING) -> bool:
    with world.database.transaction() as conn:
        return samples.add(conn, "h", reading, engines, holder=holder, every_ms=EVERY_MS)


def put(world: World, *, ago_ms: int = 1000, **values: Any) -> None:
    """A sample of some time ago."""
    known = {"host": "h", "device": "0", "worker": "gpu0@h", "model": "small", **values}
    with world.database.transaction() as conn:
        conn.execute(insert(device_sample).values(at_ms=now_ms() - ago_ms, **known))


def lines(world: World) -> list[dict[str, Any]]:
    return world.table(device_sample)


def newest(world: World) -> list[Newest]:
    return world.database.read(samples.newest)


def spans(world: World, *, ago_ms: int = 60_000, count: int = 6) -> list[Span]:
    return world.database.read(lambda conn: sample_spans.spans(conn, ago_ms=ago_ms, count=count))


def prune(world: World, *, keep_ms: int = 60_000, most_rows: int = 1000) -> int:
    with world.database.transaction() as conn:
        return samples.prune(conn, keep_ms=keep_ms, most_rows=most_rows)


# writing


def test_a_device_with_one_engine_is_one_line(world: World) -> None:
    assert add(world, engine(running=3, tokens_per_s=12.5, bubble_ms=40))

    (line,) = lines(world)
    assert (line["host"], line["device"], line["worker"], line["model"]) == ("h", "0", "gpu0@h", "small")
    assert (line["use_percent"], line["power_w"], line["running"], line["bubble_ms"]) == (60.0, 300.0, 3, 40)
    assert line["temperature_c"] is None


def test_the_figures_of_a_device_stand_once_however_many_processes_sample_it(world: World) -> None:
    led = [add(world, engine(), holder="a"), add(world, engine("gpu1@h", "other"), holder="b"), add(world, holder="c")]

    assert led == [True, False, False]
    assert [(x["worker"], x["use_percent"]) for x in lines(world)] == [("gpu0@h", 60.0), ("gpu1@h", None)]


def test_the_figures_of_a_device_stand_once_though_a_process_runs_two_engines(world: World) -> None:
    add(world, engine(), engine(model="other"))

    assert [(x["model"], x["use_percent"]) for x in lines(world)] == [("small", 60.0), ("other", None)]


def test_a_device_of_another_host_is_another_device(world: World) -> None:
    add(world, holder="a")
    with world.database.transaction() as conn:
        assert samples.add(conn, "other", READING, (), holder="b", every_ms=EVERY_MS)

    assert [x["host"] for x in lines(world)] == ["h", "other"]


def test_who_leaves_makes_room_for_another_at_once(world: World) -> None:
    add(world, holder="a")
    with world.database.transaction() as conn:
        samples.leave(conn, "h", "0", "b")
    still = add(world, holder="b")
    with world.database.transaction() as conn:
        samples.leave(conn, "h", "0", "a")

    assert (still, add(world, holder="b")) == (False, True)


def test_of_processes_that_race_one_writes_the_figures_of_the_device(world: World) -> None:
    led: list[bool] = []
    start = threading.Barrier(6)

    def sample(holder: str) -> None:
        start.wait()
        led.append(world.database.run(lambda conn: samples.add(conn, "h", READING, (), holder=holder, every_ms=60_000)))

    threads = [threading.Thread(target=sample, args=(f"w{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(led) == [False] * 5 + [True]
    assert len(lines(world)) == 1


# pruning


def test_old_samples_go(world: World) -> None:
    put(world, ago_ms=61_000)
    put(world, ago_ms=1000)

    assert prune(world) == 1
    assert len(lines(world)) == 1


def test_of_too_many_samples_the_newest_stay(world: World) -> None:
    for use in range(6):
        put(world, use_percent=float(use))

    assert prune(world, most_rows=2) == 4
    assert [x["use_percent"] for x in lines(world)] == [4.0, 5.0]
    assert prune(world, most_rows=2) == 0


def test_much_is_pruned_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "PRUNE_ROWS", 2)
    for _ in range(5):
        put(world, ago_ms=61_000)

    assert [prune(world) for _ in range(4)] == [2, 2, 1, 0]


# the newest


def test_the_newest_sample_counts_until_it_is_old(world: World) -> None:
    put(world, ago_ms=3000, use_percent=10.0)
    put(world, ago_ms=1000, use_percent=20.0)
    put(world, ago_ms=120_000, device="1", use_percent=30.0)

    (found,) = newest(world)

    assert (found.host, found.device, found.figures) == ("h", "0", {"use_percent": 20.0})


def test_engines_that_share_a_device_are_taken_together(world: World) -> None:
    add(world, engine(running=3, waiting=5, tokens_per_s=10.0, kv_cache_percent=40.0), holder="a")
    add(world, engine("gpu1@h", running=2, waiting=0, tokens_per_s=5.0, kv_cache_percent=60.0), holder="b")

    (found,) = newest(world)

    assert found.figures["use_percent"] == 60.0
    assert (found.figures["running"], found.figures["waiting"], found.figures["tokens_per_s"]) == (5.0, 5.0, 15.0)
    assert found.figures["kv_cache_percent"] == 60.0


def test_of_an_engine_only_the_newest_line_counts(world: World) -> None:
    put(world, ago_ms=9000, running=7)
    put(world, ago_ms=1000, running=1)

    (found,) = newest(world)

    assert found.figures == {"running": 1.0}


# spans


def test_spans_hold_means_of_what_was_measured(world: World) -> None:
    put(world, ago_ms=55_000, use_percent=10.0, bubble_ms=100, temperature_c=50.0)
    put(world, ago_ms=54_000, use_percent=30.0, bubble_ms=300, temperature_c=70.0)
    put(world, ago_ms=5000, power_w=200.0)

    first, last = spans(world)

    assert (first.number, first.samples, first.bubble_ms, first.most_temperature_c) == (0, 2, 400, 70.0)
    assert first.means == {"use_percent": 20.0, "temperature_c": 60.0}
    assert (last.number, last.bubble_ms, last.means) == (5, None, {"power_w": 200.0})


def test_a_sample_of_just_now_is_in_the_last_span(world: World) -> None:
    put(world, ago_ms=0, use_percent=1.0)

    assert [s.number for s in spans(world)] == [5]


def test_a_sample_of_this_moment_stands_in_the_newest_span_with_those_before_it(world: World) -> None:
    put(world, ago_ms=2000, running=64)
    put(world, ago_ms=-1000, running=64)  # by a clock that is ahead, or in the millisecond of the question

    (found,) = spans(world)

    assert (found.number, found.samples, found.means["running"]) == (5, 2, 64.0)


def test_samples_before_the_time_asked_for_are_left_out(world: World) -> None:
    put(world, ago_ms=61_500, use_percent=1.0)

    assert spans(world) == []


def test_heat_that_slowed_a_device_is_counted(world: World) -> None:
    for throttle in ("power_cap,hardware_thermal", "software_thermal", "power_cap", None):
        put(world, throttle=throttle)

    (found,) = spans(world)

    assert (found.samples, found.thermal, found.throttle) == (4, 2, "software_thermal")


def test_what_gpus_shows_can_be_read(world: World) -> None:
    """The statements above as one program asks them."""
    for ago_ms in range(0, 60_000, 5000):
        put(world, ago_ms=ago_ms, use_percent=5.0, running=0, waiting=9, bubble_ms=4000, power_w=100.0)
    finished_job(world, [700], queue="gpu.small")

    (state,) = read_devices(world.database, Settings())
    (report,) = world.database.read(lambda conn: read_report(conn, Settings(), since_s=60, now=datetime.now(UTC)))

    assert (state.finding.verdict, report.told[0].finding.verdict) == (Verdict.STARVED, Verdict.STARVED)
    assert report.mean.bubble_share == pytest.approx(0.8)


# latencies


def finished_job(world: World, waits_ms: Sequence[int], *, queue: str) -> int:
    """A job whose rows took so long, answered by the worker host/w1."""
    job_id = world.job(sizes=(len(waits_ms),), queue=queue)
    claim = world.take(job_id)
    world.reserve(claim, range(1, len(waits_ms) + 1))
    rows = [answered(row, row + 1) for row in range(len(waits_ms))]
    world.save(claim, 1, rows, [settled(n + 1, latency_ms=ms) for n, ms in enumerate(waits_ms)], releases=True)
    world.get(job_id)  # sums
    return job_id


def recent(world: World, ago_ms: int = 60_000) -> dict[tuple[str, str], list[int]]:
    found = world.database.read(lambda conn: latencies.recent(conn, ago_ms=ago_ms))
    return {key: sorted(values) for key, values in found.items()}


def test_latencies_are_those_of_calls_on_devices(world: World) -> None:
    finished_job(world, [100, 300], queue="gpu.small")
    finished_job(world, [900], queue="api.acme")

    assert recent(world) == {("host/w1", "small"): [100, 300]}


def test_latencies_of_long_ago_are_left_out(world: World) -> None:
    job_id = finished_job(world, [100], queue="gpu.small")
    finished_job(world, [200], queue="gpu.small")
    with world.database.transaction() as conn:
        old = update(schema.call).where(schema.call.c.job_id == job_id)
        conn.execute(old.values(settled_ms=schema.call.c.settled_ms - 120_000))

    assert recent(world) == {("host/w1", "small"): [200]}


def test_no_more_calls_are_read_than_the_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latencies, "MOST_CALLS", 3)
    finished_job(world, [1, 2, 3, 4, 5], queue="gpu.small")

    assert sum(len(v) for v in recent(world).values()) == 3


def test_a_call_that_is_still_in_flight_has_no_latency(world: World) -> None:
    finished_job(world, [100], queue="gpu.small")
    claim = world.take(world.job(sizes=(1,), queue="gpu.small"))
    with world.database.transaction() as conn:
        booking.reserve(conn, [call_of(claim, 1, Rows.of([0]))], budgeted=False)
        booked = conn.execute(select(func.count()).select_from(schema.call)).scalar_one()

    assert booked == 2
    assert recent(world) == {("host/w1", "small"): [100]}
