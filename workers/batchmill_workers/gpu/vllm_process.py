"""The process that runs a model by vLLM's asynchronous engine; see ``engine_process`` for how it is spoken to.

vLLM batches by itself and computes in processes of its own. This one turns messages into token ids, hands calls on as
they come, and sends answers back as they end.
"""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvloop

from batchmill_workers.gpu.frames import Channel, Frame
from batchmill_workers.gpu.hosted_process import serve
from batchmill_workers.gpu.process_group import kill_members
from batchmill_workers.gpu.vllm_errors import death, load_failure
from batchmill_workers.gpu.vllm_figures import Figures, stat_logger
from batchmill_workers.gpu.vllm_loading import build_engine, check_platform, prepare_environment, tokenizer_of
from batchmill_workers.gpu.vllm_log import Log
from batchmill_workers.gpu.vllm_model import VllmModel, tokens_prompt
from batchmill_workers.gpu.vllm_requests import EngineDied, Requests

_DYING_S = 10.0  # from vLLM's first word of what kills it to its death


def main() -> None:
    """Loads the model that the first message names, answers until the worker closes the channel."""
    prepare_environment(os.environ)
    log = Log()
    try:
        serve(partial(load, log), lambda error: load_failure(error, log.lines()))
    except EngineDied as error:
        sys.exit(str(error))
    finally:
        log.close()
        sys.unraisablehook = lambda _raised: None  # vLLM's finalizers fail while Python takes itself apart


class VllmRunner:
    """A loaded model with its event loop."""

    def __init__(self, loop: asyncio.Runner, model: VllmModel, requests: Requests) -> None:
        self._loop = loop
        self._model = model
        self._requests = requests

    def run(self) -> None:
        """Answers until the worker is gone, or vLLM is; then vLLM's processes are ended."""
        try:
            self._loop.run(self._requests.serve())
        finally:
            end_vllm(self._model.engine)


def load(log: Log, configuration: Frame, channel: Channel) -> tuple[VllmRunner, Frame]:
    """The model, loaded and warmed up by one short request, with the seconds that each took."""
    began = time.monotonic()
    loop = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    figures = Figures()
    with ending_with_worker(channel):
        check_platform(configuration["device"])
        model = loop.run(_model(configuration, figures))
        loaded = time.monotonic()
        loop.run(_warm_up(model, pooling=configuration["pooling"]))
    facts = {
        "load_s": loaded - began,
        "warm_up_s": time.monotonic() - loaded,
        "pid": os.getpid(),
        "context_tokens": model.context_tokens,
        "capacity_rows": model.capacity_rows,
    }
    return VllmRunner(loop, model, Requests(model, channel, figures, lambda: death(log.lines(_DYING_S)))), facts


def end_vllm(engine: Any) -> None:
    """Ends vLLM's processes. They are killed, as nothing of theirs is worth the 5 s that they take to end by request.

    Its workers end when its core does; ``engine_process`` ends what is left.
    """
    for core in multiprocessing.active_children():
        core.kill()
    engine.shutdown()


@contextmanager
def ending_with_worker(channel: Channel) -> Iterator[None]:
    """While the block runs, the worker's end is the end of this process and of all that it started.

    Loading can take minutes in which nobody reads the channel; the worker sends nothing until it is over.
    """
    over, end = os.pipe()

    def watch() -> None:
        readable: list[int] = select.select([channel.fileno(), over], [], [])[0]
        if channel.fileno() in readable:
            kill_members(os.getpgrp())
            os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="worker's end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(over)


async def _model(configuration: Frame, figures: Figures) -> VllmModel:
    pooling = configuration["pooling"]
    engine = build_engine(configuration["path"], configuration["args"], stat_logger(figures), pooling=pooling)
    tokenizer = await tokenizer_of(engine)
    if not (pooling or configuration["chat_template"] or tokenizer.chat_template):
        raise ValueError("the model has no chat template; give one as options.chat_template")
    return VllmModel(engine, tokenizer, configuration)


async def _warm_up(model: VllmModel, *, pooling: bool) -> None:
    vllm = importlib.import_module("vllm")
    prompt = tokens_prompt([1, 2, 3])
    if pooling:
        outputs = model.engine.encode(prompt, vllm.PoolingParams(task="embed"), request_id="warm up")
    else:
        outputs = model.engine.generate(prompt, vllm.SamplingParams(max_tokens=2), request_id="warm up")
    async for _ in outputs:
        pass


if __name__ == "__main__":
    main()
