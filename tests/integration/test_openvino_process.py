"""The process of the OpenVINO engine: it dies, is started again, never outlives its worker, and frees what is cancelled."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import CallState, ConfigurationError, EngineFailed, EngineLost, InvalidRequest
from batchmill_core.request import Completion
from batchmill_workers.gpu.openvino import OpenVinoEngine
from tests.conformance.engine_host import COMPARABLE, SMOLLM2, EngineCase, EngineHost, chat

WORKER = """
import asyncio, sys
from batchmill_workers.gpu.openvino import OpenVinoEngine
from tests.conformance.engine_host import SMOLLM2, chat
async def main():
    engine = OpenVinoEngine(model=SMOLLM2)
    await engine.start()
    print(engine.facts["pid"], flush=True)
    await engine.complete(chat("Write a very long story.", max_tokens=4000))
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    host = EngineHost(EngineCase(name="openvino", make=lambda: OpenVinoEngine(model=COMPARABLE)))
    try:
        host.run(host.engine.start())
        yield host
    finally:
        host.close()


def started(host: EngineHost) -> OpenVinoEngine:
    assert isinstance(host.engine, OpenVinoEngine)
    return host.engine


async def in_batch(engine: OpenVinoEngine, rows: int) -> None:
    """Waits until so many calls are in the batch."""
    async with asyncio.timeout(60):
        while engine.meter.running != rows:  # noqa: ASYNC110  # the meter is a counter, not an event
            await asyncio.sleep(0.005)


def test_loading_and_warming_up_are_timed(host: EngineHost) -> None:
    facts = started(host).facts

    assert facts["load_s"] > 0
    assert facts["warm_up_s"] > 0


def test_the_event_loop_goes_on_while_the_model_computes(host: EngineHost) -> None:
    async def beats_while_computing() -> float:
        task = asyncio.create_task(host.engine.complete(chat("word " * 250, max_tokens=2)))
        longest_s, last_s = 0.0, asyncio.get_running_loop().time()
        while not task.done():
            await asyncio.sleep(0.002)
            now_s = asyncio.get_running_loop().time()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return longest_s

    # The step over this prompt takes hundreds of milliseconds; in the worker's own process the loop stood still for it.
    assert host.run(beats_while_computing()) < 0.25


def test_shares_of_device_time_sum_to_the_time_it_was_busy(host: EngineHost) -> None:
    engine = started(host)
    before_ns = engine.meter.busy_ns
    answers = host.answer(*(chat(f"Say {i}", max_tokens=2 + i) for i in range(6)))

    assert sum(answer.device_ns or 0 for answer in answers) == engine.meter.busy_ns - before_ns


def test_a_row_has_its_time_to_first_token(host: EngineHost) -> None:
    (answer,) = host.answer(chat("Tell me about the sea", max_tokens=20, temperature=0))

    assert answer.ttft_ms is not None
    assert 0 < answer.ttft_ms < answer.latency_ms


def test_the_same_seed_gives_the_same_answer_whatever_else_runs(host: EngineHost) -> None:
    seeded = chat("Tell me a story", max_tokens=12, temperature=1.0, seed=7)
    alone = host.answer(seeded)[0].text
    together = host.answer(*(chat(f"Tell me {i}", max_tokens=12) for i in range(5)), seeded)[-1].text

    assert together == alone


def test_greedy_answers_do_not_depend_on_who_computed_their_prefix(host: EngineHost) -> None:
    prefix = "You sort reviews of a shop. Say whether the review is positive, negative or neutral. " * 12
    asked = [chat(f"{prefix}{text}", max_tokens=4, temperature=0) for text in ("It leaks.", "I love it!", "ok " * 40)]
    alone = [host.answer(one)[0].text for one in asked]

    assert [answer.text for answer in host.answer(*asked, *asked)] == alone * 2


def test_a_schema_that_openvino_cannot_compile_ends_its_own_rows_only(host: EngineHost) -> None:
    engine = started(host)
    bad = replace(chat("Hi", max_tokens=4), schema={"type": "nonsense"})
    good = replace(chat("Hi", max_tokens=4), schema={"type": "boolean"})
    pid = engine.facts["pid"]

    async def together() -> list[object]:
        asked = [chat("Say 1", max_tokens=4), bad, good, bad, chat("Say 2", max_tokens=4)]
        return list(await asyncio.gather(*(engine.complete(one) for one in asked), return_exceptions=True))

    first, refused, guided, refused_too, last = host.run(together())
    with pytest.raises(InvalidRequest, match="refuses the schema"):
        host.answer(bad)

    for error in (refused, refused_too):
        assert isinstance(error, InvalidRequest)
        assert str(error) == 'model smollm2: OpenVINO refuses the schema: Unsupported type "nonsense"'
    assert all(isinstance(answer, Completion) and answer.text for answer in (first, guided, last))
    assert engine.facts["pid"] == pid


def test_a_template_that_refuses_a_system_message_gets_it_in_the_first_user_message() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    entry = replace(SMOLLM2, options={"chat_template": template})
    host = EngineHost(EngineCase(name="openvino", make=lambda: OpenVinoEngine(model=entry)))
    system = {"role": "system", "content": "You answer in French."}
    try:
        host.run(host.engine.start())
        merged, whole = host.answer(
            replace(
                chat("Hi"), messages=(system, {"role": "user", "content": "Hi"}), params={"max_tokens": 4, "seed": 1}
            ),
            chat("You answer in French.\nHi", max_tokens=4, seed=1),
        )
    finally:
        host.close()

    assert merged.usage == whole.usage
    assert merged.text == whole.text


def test_cancelling_frees_the_device(host: EngineHost) -> None:
    engine = started(host)

    async def cancel_all() -> None:
        tasks = [asyncio.create_task(engine.complete(chat("A long story", max_tokens=5000))) for _ in range(8)]
        await in_batch(engine, 8)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    host.run(cancel_all())
    (answer,) = host.answer(chat("Hi", max_tokens=2))

    assert engine.meter.running == 0
    assert answer.text


def test_a_process_that_dies_fails_its_calls_and_is_started_again(host: EngineHost) -> None:
    engine = started(host)
    first_pid = engine.facts["pid"]

    async def kill_while_answering() -> list[object]:
        tasks = [asyncio.create_task(engine.complete(chat("A long story", max_tokens=5000))) for _ in range(3)]
        await in_batch(engine, 3)
        os.kill(first_pid, signal.SIGKILL)
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    failed = host.run(kill_while_answering())
    answers = host.answer(chat("Hi", max_tokens=2), chat("Ho", max_tokens=2))

    for error in failed:
        assert isinstance(error, EngineFailed)
        assert "killed by signal 9" in str(error)
        assert error.call_state is CallState.UNKNOWN
        assert error.device_ns
    assert all(answer.text for answer in answers)
    assert engine.facts["pid"] != first_pid


def test_a_worker_that_is_killed_takes_its_engine_along() -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    child = psutil.Process(int(worker.stdout.readline()))
    worker.kill()
    worker.wait()
    worker.stdout.close()

    child.wait(20)
    assert not child.is_running()


def test_a_file_that_is_no_model_is_a_configuration_error_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    engine = OpenVinoEngine(model=ModelEntry(name="broken", source=str(path)))

    with pytest.raises(ConfigurationError, match=r"model broken cannot be loaded from .*broken\.gguf: \w+"):
        asyncio.run(engine.start())


def test_a_folder_in_another_format_is_told_with_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    engine = OpenVinoEngine(model=ModelEntry(name="m", source=str(tmp_path)))

    with pytest.raises(ConfigurationError, match=r"not in OpenVINO's format .* take engine transformers"):
        asyncio.run(engine.start())


def test_without_openvino_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)

    with pytest.raises(ConfigurationError, match=r"pip install 'batchmill\[local\]'"):
        asyncio.run(OpenVinoEngine(model=SMOLLM2).start())


def test_rows_may_take_longer_than_timeout_s_as_long_as_the_batch_comes_further() -> None:
    model = replace(SMOLLM2, timeout_s=1.0)
    host = EngineHost(EngineCase(name="openvino", make=lambda: OpenVinoEngine(model=model)))
    try:
        host.run(host.engine.start())
        long = [chat(f"Write a very long story about {n}.", max_tokens=400, temperature=0) for n in range(12)]
        answers = host.answer(*long)
    finally:
        host.close()

    assert max(answer.latency_ms for answer in answers) > 1500
    assert all(answer.text for answer in answers)


def test_a_process_that_hangs_is_ended_and_its_rows_go_on_in_the_next() -> None:
    model = replace(SMOLLM2, timeout_s=2.0)
    host = EngineHost(EngineCase(name="openvino", make=lambda: OpenVinoEngine(model=model)))
    try:
        host.run(host.engine.start())
        engine = started(host)
        hung = psutil.Process(engine.facts["pid"])

        async def hang() -> Completion:
            computed = asyncio.create_task(engine.complete(chat("Write a very long story.", max_tokens=4000)))
            await in_batch(engine, 1)
            hung.suspend()
            waiting = asyncio.create_task(engine.complete(chat("Say hello", max_tokens=4)))
            with pytest.raises(EngineLost, match="the engine hangs: it came no further for 2 s"):
                await computed
            return await waiting

        answer = host.run(hang())
    finally:
        host.close()

    assert answer.text
    assert engine.facts["pid"] != hung.pid
