"""What a lane adds to an engine of the user's own: a bound on its time, and the times that it does not tell."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.job import Step
from batchmill_core.request import Completion, Request
from batchmill_workers.local_lane import LocalLane
from batchmill_workers.unit import Unit
from tests.integration.plugin_engine import install_engine

ENGINE = '''
    """Answers after 50 ms, and tells its device time only where it is asked to."""

    import asyncio

    from batchmill_core.request import Completion


    class PlainEngine:
        capacity_rows = 4
        context_tokens = None

        def __init__(self, *, model, device):
            pass

        async def start(self):
            pass

        async def complete(self, request):
            await asyncio.sleep(0.05)
            told = request.messages[0]["content"] == "told"
            return Completion(text="yes", device_ns=7 if told else None, latency_ms=9 if told else 0)

        async def close(self):
            pass
'''
STEP = Step(model="m", upstream="m", queue="gpu.m", timeout_s=30.0, max_retries=0)


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLane:
    install_engine(tmp_path, monkeypatch, entry="plain = plain_engine:PlainEngine", code=ENGINE)
    return LocalLane(ModelEntry(name="m", engine="plain"), "cpu")


async def _answers(lane: LocalLane, texts: list[str]) -> list[Completion]:
    await lane.start()
    requests = [Request(messages=({"role": "user", "content": text},)) for text in texts]
    return await asyncio.gather(*(lane.send(request, STEP, Unit(items=[])) for request in requests))


def test_calls_of_an_engine_that_tells_no_times_share_the_time_that_it_worked(lane: LocalLane) -> None:
    began_ns = time.perf_counter_ns()
    answers = asyncio.run(_answers(lane, ["a", "b", "c"]))
    took_ns = time.perf_counter_ns() - began_ns

    assert all(one.latency_ms >= 49 for one in answers)
    assert all((one.device_ns or 0) > 0 for one in answers)
    assert 49_000_000 <= sum(one.device_ns or 0 for one in answers) <= took_ns


def test_what_an_engine_tells_of_its_times_is_kept(lane: LocalLane) -> None:
    (answer,) = asyncio.run(_answers(lane, ["told"]))

    assert (answer.device_ns, answer.latency_ms) == (7, 9)
