"""Samples put together: of one device by several engines, over the last minutes, and over an hour."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rich.console import Console

from batchmill_core.catalog import Catalog, ModelEntry
from batchmill_core.settings import Settings
from batchmill_db import telemetry
from batchmill_db.sample_spans import Span
from batchmill_db.samples import MEAN_FIGURES
from batchmill_db.session import Database
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.gpus import DeviceState, percentile, read_devices
from batchmill_ops.gpus_diagnosis import Thresholds, Verdict
from batchmill_ops.gpus_points import Point, joined, points_of
from batchmill_ops.gpus_report import DeviceReport, read_report
from batchmill_ops.gpus_report_table import report_parts
from batchmill_ops.gpus_table import DevicesView, line_of
from tests.conformance.db.world import World
from tests.device_samples import BUSY, GIB, IDLE, STARVED, sampled
from tests.mill import new_database

SETTINGS = Settings(catalog=Catalog(models={"small": ModelEntry(name="small", engine="vllm")}))
NOW = datetime.now(UTC)
WORKER = WorkerRecord(
    id="w", name="gpu0@node-a", host="node-a", pid=7, wing="gpu", queues=("gpu.small",), slots=2, version="0.1.0"
)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    found = new_database(tmp_path)
    yield found
    found.close()


def span(number: int = 0, *, samples: int = 3, worker: str = "w", bubble_ms: int | None = None, **means: float) -> Span:
    return Span(
        host="h", device="0", worker=worker, model="m", number=number, samples=samples, last_ms=0, means=means, bubble_ms=bubble_ms
    )  # fmt: skip


def one_point(*spans: Span) -> Point:
    (point,) = points_of(spans, count=1, every_ms=1000)
    assert point is not None
    return point


# points


def test_parts_without_a_sample_are_empty() -> None:
    points = points_of([span(2, use_percent=5.0)], count=4, every_ms=1000)

    assert [p is not None for p in points] == [False, False, True, False]


def test_engines_of_one_device_are_taken_together() -> None:
    point = one_point(
        span(worker="a", use_percent=60.0, running=3.0, tokens_per_s=10.0, kv_cache_percent=30.0),
        span(worker="b", running=2.0, tokens_per_s=5.0, kv_cache_percent=50.0),
    )

    assert (point.use_percent, point.running, point.tokens_per_s, point.kv_cache_percent) == (60.0, 5.0, 15.0, 50.0)
    assert point.samples == 3


def test_every_figure_of_a_sample_reaches_a_point_and_what_points_are_joined_to() -> None:
    point = one_point(span(**dict.fromkeys(MEAN_FIGURES, 7.0)))

    assert {getattr(point, name) for name in MEAN_FIGURES} == {7.0}
    assert {getattr(joined([point, Point(samples=1)]), name) for name in MEAN_FIGURES} == {7.0}


def test_a_bubble_is_a_share_of_the_time_that_samples_stand_for() -> None:
    assert one_point(span(bubble_ms=600)).bubble_share == pytest.approx(0.2)
    assert one_point(span(bubble_ms=9000)).bubble_share == 1.0
    assert one_point(span(use_percent=1.0)).bubble_share is None


def test_while_one_engine_computes_the_device_is_not_idle() -> None:
    busy, starved = span(worker="a", running=4.0, bubble_ms=0), span(worker="b", running=0.0, bubble_ms=1500)
    without_work = span(worker="a", running=0.0, bubble_ms=0)

    assert one_point(busy, starved).bubble_share == 0.0
    assert one_point(without_work, starved).bubble_share == pytest.approx(0.5)
    assert one_point(without_work).bubble_share == 0.0


def test_points_are_joined_by_their_samples() -> None:
    joint = joined([Point(samples=1, use_percent=10.0), Point(samples=3, use_percent=50.0), Point(samples=9)])

    assert (joint.samples, joint.use_percent, joint.power_w) == (13, 40.0, None)
    assert joined([]) == Point()


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([7], 7.0), (list(range(1, 101)), 99.0), ([1, 900], 900.0), ([3, 1, 2], 3.0)]
)
def test_percentiles_are_by_nearest_rank(values: list[int], expected: float | None) -> None:
    assert percentile(values, 99) == expected


# now


def only(database: Database) -> DeviceState:
    (state,) = read_devices(database, SETTINGS)
    return state


def test_a_device_as_it_stands(database: Database) -> None:
    sampled(database, IDLE, first_s=200, last_s=75)
    sampled(database, BUSY, first_s=50)

    state = only(database)

    assert (state.history.host, state.history.device, state.history.models) == ("node-a", "0", ["small"])
    assert (state.now.use_percent, state.now.running, state.now.tokens_per_s) == (95.0, 64.0, 4000.0)
    assert state.now.memory_percent == pytest.approx(100 * 110 / 140)
    assert state.finding.verdict is Verdict.COMPUTE_BOUND
    assert state.history.points[0] is None


def test_devices_come_by_host_and_number(database: Database) -> None:
    for host, device in (("b", "0"), ("a", "10"), ("a", "2"), ("a", "cpu"), ("a", "2.1")):
        sampled(database, BUSY, first_s=5, host=host, device=device)

    found = [(s.history.host, s.history.device) for s in read_devices(database, SETTINGS)]

    assert found == [("a", "2"), ("a", "2.1"), ("a", "10"), ("a", "cpu"), ("b", "0")]


def test_a_device_whose_samples_stopped_though_its_worker_lives_is_told(database: Database) -> None:
    sampled(database, BUSY, first_s=90, last_s=40)
    with database.transaction() as conn:
        telemetry.register(conn, WORKER)

    state = only(database)

    assert (state.finding.verdict, state.is_alarm) == (Verdict.SILENT, True)
    assert state.now.use_percent is None


def test_a_device_whose_worker_has_ended_is_no_alarm(database: Database) -> None:
    sampled(database, BUSY, first_s=90, last_s=40)

    state = only(database)

    assert (state.finding.verdict, state.is_alarm) == (Verdict.GONE, False)
    assert "batchmill worker gpu --model small" in (state.told[0].advice or "")


def test_a_ready_chunk_makes_an_idle_device_starved(database: Database) -> None:
    sampled(database, IDLE, first_s=30)
    before = only(database).finding.verdict
    World(database).job(queue="gpu.small")

    assert (before, only(database).finding.verdict) == (Verdict.OUT_OF_WORK, Verdict.STARVED)


def test_an_idle_device_is_told_of_rows_that_nobody_serves(database: Database) -> None:
    sampled(database, IDLE, first_s=30)
    World(database).job(queue="gpu.other")

    assert "--model other" in (only(database).told[0].advice or "")


# over a longer time


def report(database: Database, since_s: float = 600.0) -> DeviceReport:
    (found,) = database.read(lambda conn: read_report(conn, SETTINGS, since_s=since_s, now=NOW))
    return found


def test_means_are_of_the_time_with_work(database: Database) -> None:
    sampled(database, IDLE, first_s=590, last_s=305)
    sampled(database, BUSY, first_s=300, last_s=5)

    found = report(database)

    assert found.mean.use_percent == pytest.approx(95.0, abs=3)
    assert found.work_share == pytest.approx(0.5, abs=0.03)
    assert found.sampled_s == pytest.approx(590, abs=6)
    assert found.tokens == pytest.approx(300 * 4000, rel=0.03)
    assert found.energy_wh == pytest.approx(590 * 600 / 3600, rel=0.03)
    assert found.told[0].finding.verdict is Verdict.COMPUTE_BOUND
    assert found.alarms == []


def test_an_alarm_says_how_long_it_rang_and_when(database: Database) -> None:
    sampled(database, BUSY, first_s=590, last_s=305)
    sampled(database, STARVED, first_s=300, last_s=155)
    sampled(database, BUSY, first_s=150, last_s=5)

    (alarm,) = report(database).alarms

    assert alarm.verdict is Verdict.STARVED
    assert alarm.share == pytest.approx(0.25, abs=0.05)
    assert abs(alarm.first_at - (NOW - timedelta(seconds=300))) < timedelta(seconds=30)
    assert abs(alarm.last_at - (NOW - timedelta(seconds=150))) < timedelta(seconds=30)
    assert alarm.why == "used 9 % while 500 rows wait"


def test_an_alarm_that_rang_long_is_worth_advice_though_the_mean_is_fine(database: Database) -> None:
    sampled(database, BUSY, first_s=590, last_s=65)
    sampled(database, STARVED, first_s=60, last_s=5)

    told = {t.finding.verdict: t.advice for t in report(database).told}

    assert list(told) == [Verdict.COMPUTE_BOUND, Verdict.STARVED]
    assert "gpu_slots" in (told[Verdict.STARVED] or "")


def test_an_idle_device_is_reported_as_such(database: Database) -> None:
    sampled(database, IDLE, first_s=590)

    found = report(database)

    assert (found.work_share, found.told[0].finding.verdict) == (0.0, Verdict.OUT_OF_WORK)


# on a terminal


def drawn(states: list[DeviceState], width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(DevicesView(states, Thresholds(), at=NOW))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # it is a StringIO


@pytest.fixture
def states(database: Database) -> list[DeviceState]:
    sampled(database, BUSY, first_s=300)
    sampled(database, STARVED, first_s=300, device="1", worker="gpu1@node-a")
    sampled(
        database,
        {**IDLE, "power_w": None},
        first_s=30,
        host="node-b.example",
        device="cpu",
        model="a-model-with-a-long-name",
    )
    return read_devices(database, SETTINGS)  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_table_fits_the_terminal(width: int, states: list[DeviceState]) -> None:
    lines = drawn(states, width)
    rows = [line for line in lines if line.startswith(("0 ", "1 ", "cpu "))]

    assert max(len(line) for line in lines) <= width
    assert [row.split()[0] for row in rows[:3]] == ["0", "1", "cpu"]
    assert ["compute-bound" in rows[0], "starved" in rows[1], "out of work" in rows[2]] == [True] * 3
    assert ("95%" in rows[0], "9%" in rows[1]) == (True, True)


def test_a_wide_terminal_shows_more(states: list[DeviceState]) -> None:
    narrow, wide = "\n".join(drawn(states, 80)), "\n".join(drawn(states, 160))

    assert ("bubble" in narrow, "p99" in narrow, "110/140" in narrow) == (True, False, False)
    assert ("°C" in wide, "110/140" in wide, "64+12" in wide) == (True, True, True)


def test_devices_with_the_same_trouble_share_the_advice(states: list[DeviceState]) -> None:
    again = "\n".join(drawn([states[1], states[1]], 120))

    assert again.count("raise gpu_slots") == 1
    assert "1, 1 starved" in again


def test_no_device_is_told(database: Database) -> None:
    assert "batchmill worker gpu --model M" in "\n".join(drawn([], 120))


def test_a_device_is_a_line_of_words(states: list[DeviceState]) -> None:
    line = line_of(states[0])

    assert line.startswith("0@node-a small use=95% memory=79% running=64 waiting=12 power=600W temperature=64C")
    assert line.endswith("tok/s=4,000 bubble=1.0% · compute-bound: used 95 %: it computes as fast as it can")


def test_a_report_is_drawn(database: Database) -> None:
    sampled(database, BUSY, first_s=590, last_s=65)
    sampled(database, STARVED, first_s=60, last_s=5)
    console = Console(width=120, file=io.StringIO())
    for part in report_parts([report(database)], since_s=600):
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is a StringIO

    assert "0 on node-a · small by gpu0@node-a" in text
    assert f"at most {110 * GIB / GIB:.1f} of 140.0 GiB" in text
    assert "alarm" in text
    assert "→ raise gpu_slots" in text


def test_a_report_without_samples_says_so() -> None:
    (part,) = report_parts([], since_s=3600)

    assert str(part) == "no device was sampled in the last 1 h 00 min"
