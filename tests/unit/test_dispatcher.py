"""Publishing and reaping, tick by tick, on a real SQLite file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from sqlalchemy import text

from batchmill_core.job import JobState
from batchmill_db import chunks, jobs, reaping, steering, telemetry
from batchmill_db.doorbells import Doorbell
from batchmill_db.jobs import JobRecord
from batchmill_db.session import Database
from batchmill_db.telemetry import WorkerRecord
from batchmill_producers.submit import Submission, submit
from batchmill_workers import dispatcher as module
from batchmill_workers.dispatcher import LEADER, WINDOW_EXTRA, Cadence, Dispatcher
from tests.mill import ACCOUNT, MODEL, QUEUE, catalog_for, new_database, settings_for

NEVER_S = 86_400.0
LONG_AGO = float("-inf")


class Office:
    """A database with live workers, and dispatchers whose bells are kept."""

    def __init__(self, folder: Path) -> None:
        self.database: Database = new_database(folder)
        self.settings = settings_for(folder, catalog_for())
        self.rung: list[Doorbell] = []
        self.taken: list[int] = []
        self.broker_is_away = False
        self.free_slots = 1

    def dispatcher(self, holder: str = "d1", queues: Sequence[str] = (QUEUE,), reap_s: float = NEVER_S) -> Dispatcher:
        cadence = Cadence(publish_s=NEVER_S, reap_s=reap_s, beat_ms=20_000)
        return Dispatcher(
            self.database, holder=holder, ring=self._ring, take=self._take, queues=queues, cadence=cadence
        )

    def _ring(self, bell: Doorbell) -> None:
        if self.broker_is_away:
            raise ConnectionError("no broker")
        self.rung.append(bell)

    def _take(self, chunk_id: int) -> bool:
        if len(self.taken) >= self.free_slots:
            return False
        self.taken.append(chunk_id)
        return True

    def worker(self, name: str = "w1", *, slots: int = 2, state: str = "ready") -> None:
        record = WorkerRecord(
            id=name, name=name, host="h", pid=1, wing="api", queues=[QUEUE], slots=slots, version="1", state=state
        )
        self.database.run(lambda conn: telemetry.register(conn, record))

    def submit(self, chunk_count: int = 10) -> JobRecord:
        rows = [{"text": "x"}] * chunk_count
        wanted = Submission(dataset=rows, model=MODEL, prompt="{{ text }}", chunk_size=1, name="reviews")
        return submit(self.database, self.settings, wanted)

    def claim(self, chunk_id: int, owner: str = "w1") -> None:
        assert self.database.run(lambda conn: chunks.claim(conn, chunk_id, owner, lease_ms=60_000)) is not None

    def sql(self, statement: str) -> None:
        with self.database.transaction() as conn:
            conn.execute(text(statement))

    def chunk(self, chunk_id: int) -> tuple[str, int, int]:
        """(state, crashes, milliseconds of lease that are left)."""
        with self.database.reading() as conn:
            row = conn.execute(
                text(
                    "SELECT state, crash_count, COALESCE(lease_until_ms, 0) - "
                    "CAST((julianday('now') - 2440587.5) * 86400000.0 AS INTEGER) FROM chunk WHERE id = :id"
                ),
                {"id": chunk_id},
            ).one()
        return row[0], row[1], row[2]

    def job(self, job: JobRecord) -> JobRecord:
        with self.database.reading() as conn:
            return jobs.get(conn, job.id)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    made = Office(tmp_path)
    yield made
    made.database.close()


# Publishing


def test_as_many_chunks_are_published_as_live_slots_and_two_more(office: Office) -> None:
    office.worker(slots=2)
    office.worker("w2", slots=3)
    office.submit(20)

    office.dispatcher().tick()

    assert len(office.rung) == 5 + WINDOW_EXTRA
    assert (office.rung[0].queue, office.rung[0].label) == (QUEUE, f"reviews · rows 0 · {MODEL}")


def test_what_is_published_already_is_not_published_again(office: Office) -> None:
    office.worker()
    office.submit(20)
    dispatcher = office.dispatcher()
    dispatcher.tick()

    dispatcher.tick()

    assert len(office.rung) == 2 + WINDOW_EXTRA


def test_the_window_moves_on_when_chunks_are_claimed(office: Office) -> None:
    office.worker()
    office.submit(20)
    dispatcher = office.dispatcher()
    dispatcher.tick()
    office.claim(1)

    dispatcher.tick()

    assert [b.chunk_id for b in office.rung] == [1, 2, 3, 4, 5]


def test_a_message_that_was_lost_is_published_again(office: Office) -> None:
    office.worker()
    office.submit(1)
    dispatcher = office.dispatcher()
    dispatcher.tick()
    office.sql(f"UPDATE chunk SET published_ms = published_ms - {module.AGAIN_AFTER_MS}")

    dispatcher.tick()

    assert [b.chunk_id for b in office.rung] == [1, 1]


@pytest.mark.parametrize("state", ["draining", "starting", "unfit"])
def test_a_worker_that_takes_nothing_makes_no_window(office: Office, state: str) -> None:
    office.worker()
    office.sql(f"UPDATE worker SET state = '{state}'")
    office.submit()

    office.dispatcher().tick()

    assert office.rung == []


def test_chunks_of_a_stopped_account_are_not_published(office: Office) -> None:
    office.worker()
    office.submit()
    with office.database.transaction() as conn:
        telemetry.stop_account(conn, ACCOUNT, kind="auth_failed", reason="no", probe_after_ms=60_000)

    office.dispatcher().tick()

    assert office.rung == []


def test_chunks_of_a_paused_job_are_not_published_and_at_once_when_it_resumes(office: Office) -> None:
    office.worker()
    job = office.submit(1)
    dispatcher = office.dispatcher()
    dispatcher.tick()
    office.database.run(lambda conn: steering.pause(conn, job.id, kind="user", reason="by hand"))
    dispatcher.tick()

    office.database.run(lambda conn: steering.resume(conn, job.id))
    dispatcher.tick()

    assert [b.chunk_id for b in office.rung] == [1, 1]


# One leader


def test_only_one_of_all_dispatchers_leads(office: Office) -> None:
    office.worker()
    office.submit(1)
    first, second = office.dispatcher("d1"), office.dispatcher("d2")

    first.tick()
    second.tick()

    assert len(office.rung) == 1
    assert first.windows == {QUEUE: 2 + WINDOW_EXTRA}
    assert second.windows == {}


def test_another_takes_the_lead_when_the_leader_has_been_silent(office: Office) -> None:
    office.worker()
    office.submit(1)
    office.dispatcher("d1").tick()
    office.sql("UPDATE leader SET until_ms = 0")
    second = office.dispatcher("d2")

    second.tick()

    assert second.windows != {}


def test_a_leader_that_stops_gives_the_lead_up(office: Office) -> None:
    first = office.dispatcher("d1")
    first.tick()
    first.start()
    first.stop()

    lead = office.database.run(lambda conn: telemetry.lead(conn, LEADER, "d2", ttl_ms=5_000))

    assert lead.leads


# Reaping, closing


def test_the_work_of_a_dead_worker_is_taken_back_and_published(office: Office) -> None:
    office.worker()
    office.submit(1)
    office.claim(1)
    dispatcher = office.dispatcher(reap_s=0.0)
    office.sql("UPDATE chunk SET lease_until_ms = 1")

    dispatcher.tick()

    assert office.chunk(1)[:2] == ("ready", 1)
    assert [b.chunk_id for b in office.rung] == [1]


def test_reaping_keeps_its_own_slower_pace(office: Office) -> None:
    office.submit(1)
    dispatcher = office.dispatcher(reap_s=NEVER_S)
    dispatcher.tick()
    office.claim(1)
    office.sql("UPDATE chunk SET lease_until_ms = 1")

    dispatcher.tick()

    assert office.chunk(1)[0] == "leased"


def test_after_an_outage_live_leases_get_a_beat_and_a_half_before_any_is_reaped(office: Office) -> None:
    office.submit(1)
    office.claim(1)
    dispatcher = office.dispatcher(reap_s=10.0)
    dispatcher.tick()
    office.sql("UPDATE leader SET tick_ms = tick_ms - 60000, until_ms = until_ms - 60000")
    office.sql("UPDATE chunk SET lease_until_ms = lease_until_ms - 100000")
    dispatcher._due.reap = 0.0

    dispatcher.tick()

    state, crashes, left_ms = office.chunk(1)
    assert (state, crashes) == ("leased", 0)
    assert 25_000 < left_ms <= 30_000


def test_a_pause_in_which_nobody_worked_is_no_outage_to_warn_of(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    dispatcher = office.dispatcher(reap_s=10.0)
    dispatcher.tick()
    office.sql("UPDATE leader SET tick_ms = tick_ms - 60000, until_ms = until_ms - 60000")
    dispatcher.tick()

    assert [said for said in caplog.messages if said.startswith("leases_extended")] == []


def test_a_lease_that_was_ended_on_purpose_is_not_extended_by_an_outage(office: Office) -> None:
    office.submit(1)
    office.claim(1)
    office.database.run(lambda conn: reaping.expire_leases(conn, worker_ids=["w1"]))

    extended = office.database.run(lambda conn: reaping.extend_all(conn, 30_000))

    assert extended == 0


def test_a_job_with_nothing_left_to_do_is_closed_with_its_sums(office: Office) -> None:
    job = office.submit(1)
    office.sql("UPDATE chunk SET state = 'done', n_ok = 1, unsummed_since_ms = 1")

    office.dispatcher().tick()

    now = office.job(job)
    assert (now.state, now.done) == (JobState.DONE, 1)


# Without a broker


def test_a_broker_that_is_away_loses_nothing_and_the_worker_helps_itself(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BROKER_AWAY_POLL_S", 0.0)
    office.worker()
    office.submit(3)
    office.broker_is_away = True
    dispatcher = office.dispatcher()

    dispatcher.tick()

    assert dispatcher.broker_away
    assert office.taken == [1]


def test_a_broker_that_came_back_is_used_again(office: Office) -> None:
    office.worker()
    office.submit(1)
    dispatcher = office.dispatcher()
    dispatcher.broker_away = True

    dispatcher.tick()

    assert not dispatcher.broker_away


def test_an_idle_worker_takes_what_was_left_lying_though_the_broker_is_there(office: Office) -> None:
    office.submit(2)
    office.sql("UPDATE chunk SET created_ms = 1 WHERE id = 2")
    dispatcher = office.dispatcher()
    dispatcher._last_idle_poll = LONG_AGO

    dispatcher.tick()

    assert office.taken == [2]


def test_a_worker_helps_itself_only_to_queues_that_it_serves(office: Office) -> None:
    office.submit(2)
    office.sql("UPDATE chunk SET created_ms = 1")
    dispatcher = office.dispatcher(queues=("api.other",))
    dispatcher._last_idle_poll = LONG_AGO

    dispatcher.tick()

    assert office.taken == []
