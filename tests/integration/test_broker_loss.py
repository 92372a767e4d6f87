"""The broker is a doorbell: it may forget everything, die, or stay away, and the job ends without help."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from batchmill_ops.simulator import SimulatorConfig
from tests.integration.conftest import MakeMill
from tests.servers import Valkey

ROWS = 160
CHUNK = 10
STEADY = SimulatorConfig(latency_s=0.1)
BOUNDED = {"max_in_flight": 8}  # so that the job takes two seconds, and is in the middle when the broker goes


def _flush(broker: Valkey) -> None:
    broker.flush()


def _kill_and_restart(broker: Valkey) -> None:
    broker.kill()
    broker.start()


def _kill(broker: Valkey) -> None:
    broker.kill()


def _freeze(broker: Valkey) -> None:
    os.kill(broker.pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    "harm",
    [_flush, _kill_and_restart, _kill, _freeze],
    ids=["flushed", "killed and back", "gone for good", "hangs for good"],
)
def test_a_job_ends_by_itself_whatever_becomes_of_the_broker(
    harm: Callable[[Valkey], None], make_mill: MakeMill, valkey_server: Valkey
) -> None:
    mill = make_mill(broker_url=valkey_server.url, provider=STEADY, account=BOUNDED, settings={"lease_s": 6})
    worker = mill.start_worker(slots=2)
    job = mill.submit(ROWS, chunk_size=CHUNK)
    mill.wait_rows(job, ROWS // 8)
    harm(valkey_server)
    saved = len(mill.saved(job))
    mill.wait_done(job, timeout_s=45)

    assert saved < ROWS
    mill.invariants(job)
    assert len(mill.bill()) == ROWS
    assert worker.alive


def test_a_worker_drains_while_the_broker_is_away(make_mill: MakeMill, valkey_server: Valkey) -> None:
    mill = make_mill(broker_url=valkey_server.url, provider=STEADY, account=BOUNDED, settings={"drain_s": 3})
    worker = mill.start_worker(slots=2)
    job = mill.submit(ROWS, chunk_size=CHUNK)
    mill.wait_rows(job, ROWS // 8)
    valkey_server.kill()
    worker.terminate()

    assert worker.wait_dead(15) == 0, worker.log
    assert {c.state for c in mill.chunks(job)} <= {"ready", "done"}
    assert {c.state for c in mill.calls(job)} <= {"settled", "void"}
    mill.invariants(job)
