"""Progress: paces, what is shown, why rows wait, and when waiting ends."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from batchmill import control
from batchmill_core.errors import JobStopped
from batchmill_core.job import JobState
from batchmill_core.request import RowStatus
from batchmill_core.usage import dollars
from batchmill_db import chunks, steering, telemetry
from batchmill_db.session import Database, DatabaseUnavailable
from batchmill_db.telemetry import WorkerRecord
from batchmill_ops.figures import duration, one_line, percent, rate
from batchmill_ops.live_screen import LiveScreen, frame, screen_for
from batchmill_ops.progress import Follower, LineScreen, Unseen, View, as_line
from batchmill_ops.rates import Pace, PaceMeter
from batchmill_ops.report import read_situation
from batchmill_ops.waits import resume_here, start_a_worker, why_waiting
from tests.prepared_jobs import PreparedFolder

MIXED = (RowStatus.OK, RowStatus.TRUNCATED, RowStatus.FAILED, RowStatus.INVALID)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


class Clock:
    """Moves when somebody sleeps; ``then`` runs at each sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps = 0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps += 1


class Seen:
    """A screen that keeps what it was shown."""

    def __init__(self) -> None:
        self.views: list[View] = []
        self.closed = False

    def show(self, view: View) -> None:
        self.views.append(view)

    def close(self) -> None:
        self.closed = True


def add_worker(
    database: Database, *, queue: str = "api.sim", state: str = "ready", throttled: str | None = None
) -> None:
    record = WorkerRecord(
        id=f"id-{state}", name="api0@here", host="here", pid=1, wing="api", queues=(queue,), slots=8, version="1"
    )
    database.run(lambda conn: telemetry.register(conn, record))
    database.run(
        lambda conn: telemetry.beat(
            conn, record.id, state=state, throttled=throttled, reason="no such model" if state == "unfit" else None
        )
    )


# paces


def test_pace_is_what_happened_over_the_recent_window() -> None:
    meter = PaceMeter(window_s=10)
    for at_s, done in ((0, 0), (1, 100), (11, 300), (12, 350)):
        pace = meter.add(at_s, done=done, tokens=10 * done, rows=1000)

    assert pace.rows_per_s == pytest.approx(250 / 11)
    assert pace.tokens_per_s == pytest.approx(2500 / 11)
    assert pace.left_s == pytest.approx(650 / (250 / 11))


def test_time_before_the_first_call_is_no_part_of_the_pace() -> None:
    meter = PaceMeter()
    assert [meter.add(t, done=0, tokens=0, rows=10, idle=True) for t in (0.0, 5.0)] == [Pace(), Pace()]

    assert meter.add(6.0, done=0, tokens=0, rows=10).rows_per_s == 0.0
    assert meter.add(7.0, done=5, tokens=50, rows=10).rows_per_s == 2.5


def test_a_retry_that_takes_rows_back_starts_the_pace_anew() -> None:
    meter = PaceMeter()
    meter.add(0, done=0, tokens=0, rows=10)
    meter.add(1, done=10, tokens=10, rows=10)

    assert meter.add(2, done=4, tokens=10, rows=10) == Pace()


# figures


@pytest.mark.parametrize(
    ("nanousd", "text"),
    [
        (None, "–"),
        (0, "$0"),
        (4_100_000, "$0.0041"),
        (28_000, "$0.000028"),
        (12_345_000_000, "$12.35"),
        (1, "$0.000000001"),
    ],
)
def test_dollars(nanousd: int | None, text: str) -> None:
    assert dollars(nanousd) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (3.14, "3.1 s"), (59.4, "59 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (356_400, "4 d 3 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_rates_and_percents() -> None:
    assert [rate(x) for x in (None, 0.0, 0.42, 9.96, 1932.4)] == ["–", "0", "0.4", "10", "1,932"]
    assert [percent(999, 1000), percent(1000, 1000), percent(0, 0)] == ["99%", "100%", "0%"]


def test_long_texts_are_cut_to_one_line() -> None:
    assert one_line("a\n b", 10) == "a b"
    assert one_line("abcdef", 4) == "abc…"


# what is shown


def test_a_line_tells_everything_that_matters(folder: PreparedFolder) -> None:
    job = folder.done(MIXED)
    view = View(
        situation=read_situation(folder.database, job.id),
        pace=Pace(rows_per_s=1932.4, tokens_per_s=94_210, left_s=3.2),
        waits=["account sim: throttled to 12 calls in flight"],
    )

    assert as_line(view) == (
        f"reviews {job.public_id}: 4 of 4 rows (100%) · 1 ok · 1 truncated · 1 invalid · 1 failed · 1,932 rows/s · "
        "94,210 tok/s · $0.000028 spent · 0 in flight · waits: account sim: throttled to 12 calls in flight"
    )


def test_the_live_frame_shows_errors_with_an_example(folder: PreparedFolder) -> None:
    job = folder.done(MIXED)
    console = Console(file=io.StringIO(), width=100)

    console.print(frame(View(situation=read_situation(folder.database, job.id))))

    shown = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    assert "100% · 4 of 4 rows" in shown
    assert "1 × invalid_request: what was wrong with row 2" in shown


def test_lines_come_every_few_seconds_and_at_once_when_the_reason_changes(folder: PreparedFolder) -> None:
    situation = read_situation(folder.database, folder.submit().id)
    clock, out = Clock(), io.StringIO()
    screen = LineScreen(Console(file=out, width=300), every_s=5, clock=clock)
    for at_s, waits in (
        (0, ()),
        (1, ()),
        (2, ("wait 9 s",)),
        (3, ("wait 8 s",)),
        (4, ("throttled",)),
        (9, ("throttled",)),
    ):
        clock.now_s = at_s
        screen.show(View(situation=situation, waits=waits))

    ends = [line.rpartition(" · ")[2] for line in out.getvalue().splitlines()]
    assert ends == ["0 in flight", "waits: wait 9 s", "waits: throttled", "waits: throttled"]


def test_a_terminal_gets_a_live_screen_and_a_log_gets_lines() -> None:
    assert isinstance(screen_for(Console(file=io.StringIO(), force_terminal=True)), LiveScreen)
    assert isinstance(screen_for(Console(file=io.StringIO(), force_terminal=False)), LineScreen)


# why rows wait


def reasons(folder: PreparedFolder, job_id: int, *, now_ms: int = 0) -> list[str]:
    return why_waiting(read_situation(folder.database, job_id), remedy=start_a_worker, now_ms=now_ms)


def test_a_served_queue_without_throttling_waits_for_nothing(folder: PreparedFolder) -> None:
    job = folder.submit()
    add_worker(folder.database)

    assert reasons(folder, job.id) == []


def test_throttled_and_starting_workers_say_so(folder: PreparedFolder) -> None:
    job = folder.submit()
    add_worker(folder.database, throttled="account sim: throttled to 3 calls in flight")
    add_worker(folder.database, state="starting")

    assert set(reasons(folder, job.id)) == {
        "account sim: throttled to 3 calls in flight",
        "worker api0@here is starting",
    }


def test_workers_of_other_queues_do_not_count(folder: PreparedFolder) -> None:
    job = folder.submit()
    add_worker(folder.database, queue="api.other", throttled="busy")

    assert reasons(folder, job.id) == [
        "no live worker serves queue api.sim; start one: batchmill worker api --accounts sim"
    ]


def test_a_worker_that_could_not_start_tells_why(folder: PreparedFolder) -> None:
    job = folder.submit()
    add_worker(folder.database, state="unfit")

    assert reasons(folder, job.id)[0].startswith(
        "no live worker serves queue api.sim (the last one could not start: no such model); start one"
    )


def test_rows_that_are_due_later_say_when(folder: PreparedFolder) -> None:
    job = folder.submit()
    add_worker(folder.database)
    with folder.database.transaction() as conn:
        conn.exec_driver_sql("UPDATE chunk SET not_before_ms = 99999999999000")

    assert reasons(folder, job.id, now_ms=99_999_999_957_000) == ["the next retry is due in 42 s"]


def test_an_ended_job_waits_for_nothing(folder: PreparedFolder) -> None:
    assert reasons(folder, folder.done().id) == []


# when waiting ends


def follower(folder: PreparedFolder, job_id: int, screen: Seen, clock: Clock, **options: object) -> Follower:
    return Follower(
        database=folder.database,
        job_id=job_id,
        screen=screen,
        clock=clock,
        sleep=clock.sleep,
        **options,  # type: ignore[arg-type]  # of Follower
    )


def test_waiting_ends_with_the_report_of_a_job_that_is_done(folder: PreparedFolder) -> None:
    job, screen, clock = folder.submit(), Seen(), Clock()
    add_worker(folder.database)
    waiting = follower(folder, job.id, screen, clock)
    waiting.sleep = lambda _: folder.answer(job, MIXED)

    report = waiting.wait()

    assert (report.job.done, report.bad_rows) == (4, 2)
    assert [v.report.job.done for v in screen.views] == [0, 4]
    assert screen.closed


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("budget", "raise it and go on: `batchmill resume {} --budget USD`"),
        ("account", "set the account right, then `batchmill resume {}`"),
        ("unknown_model", "once the provider has it, `batchmill resume {}`; else correct the model in batchmill.toml"),
        ("user", "go on with `batchmill resume {}`"),
    ],
)
def test_a_pause_stops_the_waiting_with_one_sentence(folder: PreparedFolder, kind: str, advice: str) -> None:
    job = folder.submit()
    folder.database.run(lambda conn: steering.pause(conn, job.id, kind=kind, reason="it went wrong."))

    with pytest.raises(JobStopped) as stopped:
        follower(folder, job.id, Seen(), Clock()).wait()

    assert str(stopped.value).startswith(
        f"job {job.public_id} is paused: it went wrong; {advice.format(job.public_id)}"
    )


def test_a_cancelled_job_stops_the_waiting(folder: PreparedFolder) -> None:
    job = folder.submit()
    folder.database.run(lambda conn: steering.cancel(conn, job.id))

    with pytest.raises(JobStopped, match="was cancelled"):
        follower(folder, job.id, Seen(), Clock()).wait()


def test_without_a_live_worker_waiting_ends_after_the_patience(folder: PreparedFolder) -> None:
    job, clock = folder.submit(), Clock()

    with pytest.raises(
        JobStopped, match=f"no live worker serves queue api.sim; start one: batchmill resume {job.public_id}"
    ):
        follower(folder, job.id, Seen(), clock, patience_s=15.0, remedy=resume_here).wait()

    assert clock.now_s == pytest.approx(15, abs=0.3)


def test_workers_of_others_are_waited_for_as_long_as_it_takes(folder: PreparedFolder) -> None:
    job, screen, clock = folder.submit(), Seen(), Clock()
    waiting = follower(folder, job.id, screen, clock, every_s=3600.0)

    def a_worker_comes_the_next_day(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.sleeps == 24:
            folder.answer(job, [RowStatus.OK] * 4)

    waiting.sleep = a_worker_comes_the_next_day

    assert waiting.wait().job.done == 4
    assert screen.views[0].waits == [
        "no live worker serves queue api.sim; start one: batchmill worker api --accounts sim"
    ]


def test_who_waits_without_looking_is_told_once_that_no_worker_is_there(
    folder: PreparedFolder, caplog: pytest.LogCaptureFixture
) -> None:
    job, screen = folder.submit(), Unseen()
    with pytest.raises(JobStopped):
        Follower(database=folder.database, job_id=job.id, screen=screen, patience_s=0.5, every_s=0.1).wait()

    assert [r.getMessage() for r in caplog.records] == [
        f"job {job.public_id} waits: no live worker serves queue api.sim; start one: batchmill worker api --accounts sim"
    ]


def test_workers_of_our_own_that_cannot_start_end_the_waiting_at_once(folder: PreparedFolder) -> None:
    job, clock = folder.submit(), Clock()

    with pytest.raises(JobStopped, match="no worker could start: gpu0: no such file"):
        follower(folder, job.id, Seen(), clock, unfit=lambda: ["gpu0: no such file"]).wait()

    assert clock.sleeps == 0


def test_an_unfit_worker_beside_a_live_one_does_not_end_the_waiting(folder: PreparedFolder) -> None:
    job, clock = folder.submit(), Clock()
    add_worker(folder.database)

    with pytest.raises(TimeoutError):
        follower(folder, job.id, Seen(), clock, unfit=lambda: ["gpu0: no such file"]).wait(timeout_s=1)


def test_a_job_whose_last_worker_died_before_closing_it_is_closed_by_whoever_waits(folder: PreparedFolder) -> None:
    job, clock = folder.submit(), Clock()
    folder.answer(job, [RowStatus.OK] * 4, closed=False)

    report = follower(folder, job.id, Seen(), clock).wait(timeout_s=5)
    assert (report.job.state, report.job.done) == (JobState.DONE, 4)


def test_a_job_that_was_paused_while_its_last_rows_ran_is_done_when_it_is_resumed(folder: PreparedFolder) -> None:
    job = folder.submit()
    folder.answer(job, [RowStatus.OK] * 4, closed=False)
    control.pause(folder.database, job.id)
    control.resume(folder.database, job.id)

    assert folder.read(job).state is JobState.DONE


def test_a_chunk_that_a_vanished_worker_still_holds_does_not_keep_the_waiting_up(folder: PreparedFolder) -> None:
    job = folder.submit()
    folder.database.run(lambda conn: chunks.claim(conn, 1, "gone", lease_ms=60_000))

    with pytest.raises(JobStopped, match="no live worker"):
        follower(folder, job.id, Seen(), Clock(), patience_s=1.0).wait()


def test_a_database_that_is_away_for_a_while_is_shown_and_waited_for(
    folder: PreparedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, screen, clock = folder.submit(), Seen(), Clock()
    add_worker(folder.database)
    waiting = follower(folder, job.id, screen, clock)
    waiting._look()

    with monkeypatch.context() as patch:
        patch.setattr("batchmill_ops.progress.read_situation", _away)
        assert waiting._look() is None
    folder.answer(job, MIXED)

    assert waiting.wait().job.done == 4
    assert screen.views[1].waits == ("the database does not answer",)


def _away(*_: object, **__: object) -> None:
    raise DatabaseUnavailable("the database does not answer")
