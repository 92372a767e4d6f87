"""The process that runs a model by transformers: one thread reads and tokenises requests, another computes."""

from __future__ import annotations

import os

if __name__ == "__main__":  # before torch is imported, and not where a test loads models in its own process
    # Threads of OpenMP that spin while they wait for each other make a busy processor stand still: with SmolLM2 on 2
    # shared cores 8 tokens/s came from spinning threads and 113 from sleeping ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # rows are tokenised one at a time, beside the computing
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the files are here already, see ``sources``
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from batchmill_core.errors import CallError
from batchmill_workers.gpu.batching import Item, Limits
from batchmill_workers.gpu.batching_queue import Batcher
from batchmill_workers.gpu.batching_sizes import Sizes
from batchmill_workers.gpu.frames import Channel, Frame
from batchmill_workers.gpu.hosted_process import serve
from batchmill_workers.gpu.transformers_calls import Calls
from batchmill_workers.gpu.transformers_device import Device
from batchmill_workers.gpu.transformers_loading import free_bytes, row_token_bytes, task_of
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Work

_END_TIMEOUT_S = 10.0
_ALL_MODELS = "\nModel type should be one of"  # and then all that transformers has, four hundred
# A worker books a few dozen rows at a time: a batch that went after its first commit would be half one.
_SETTLE_MS = 20.0
_PADDING, _CHAT_PADDING = 0.4, 0.6  # see ``Limits``
_PLACES = {
    "chat": ("transformers_chat", "load_chat"),
    "embed": ("transformers_vectors", "load_embedder"),
    "classify": ("transformers_labels", "load_classifier"),
}


def main() -> None:
    """Loads the model that the first message names, answers until the worker closes the channel."""
    serve(load, reason)


class Reader:
    """The reading side: requests become rows that wait for the device."""

    def __init__(self, work: Work, batcher: Batcher, calls: Calls, channel: Channel, device: Device) -> None:
        self._work = work
        self._batcher = batcher
        self._calls = calls
        self._channel = channel
        self._device = device

    def run(self) -> None:
        """Reads until the worker is gone, which ends the computing too."""
        computing = threading.Thread(target=self._device.run, name="computing", daemon=True)
        computing.start()
        try:
            while True:
                frames = self._channel.receive(wait=True)
                with self._batcher.reading(len(frames)):
                    for frame in frames:
                        self._take(frame)
        finally:
            self._batcher.close()
            computing.join(_END_TIMEOUT_S)
            if computing.is_alive():
                os._exit(0)  # in the middle of a long step; nobody waits for it

    def _take(self, frame: Frame) -> None:
        number = frame["id"]
        if frame.get("cancel"):
            for row in self._calls.cancel(number):
                self._batcher.cancel(row)
            return
        try:
            pieces = self._work.read(frame)
        except CallError as error:
            self._calls.refuse(number, error.kind, error.message)
            return
        except Exception as error:  # noqa: BLE001  # a tokenizer's own, for a text that it cannot take
            self._calls.refuse(number, "invalid_request", f"the text cannot be read: {error}")
            return
        now_ns = time.monotonic_ns()
        for row, piece in zip(self._calls.open(number, pieces), pieces, strict=True):
            self._batcher.put(
                Item(
                    number=row,
                    tokens=piece.tokens,
                    wanted=piece.wanted,
                    arrived_ns=now_ns,
                    group=piece.group,
                    prefix=piece.prefix,
                    payload=piece.payload,
                )
            )


def load(configuration: Frame, channel: Channel) -> tuple[Reader, Frame]:
    """The model, loaded and warmed up by one short batch, with the seconds that each took."""
    options, device = TransformersOptions(**configuration["options"]), configuration["device"]
    began = time.monotonic()
    _quiet(options)
    work = load_work(Path(configuration["path"]), device, options, configuration["context_tokens"])
    loaded = time.monotonic()
    warm_up(work)
    facts = {
        "load_s": loaded - began,
        "warm_up_s": time.monotonic() - loaded,
        "pid": os.getpid(),
        "task": work.task,
        "context_tokens": work.context_tokens,
        "dtype": str(_inner(work).dtype).removeprefix("torch."),
    }
    batcher = Batcher(limits(options, device, task=work.task), sizes(work, device))
    batcher.use({int(c): rows for c, rows in configuration["batch_sizes"].items()})
    calls = Calls(channel.send, work.merge)
    runner = Device(work, batcher, calls, max_rows=options.rows(device))
    return Reader(work, batcher, calls, channel, runner), facts


def load_work(path: Path, device: str, options: TransformersOptions, context_tokens: int | None) -> Any:
    """The model for what it does. Raises ValueError or what loading raises; ImportError names what is not installed."""
    module, name = _PLACES[task_of(path, options.task)]
    place = importlib.import_module(f"batchmill_workers.gpu.{module}")
    return getattr(place, name)(path, device, options, context_tokens)


def limits(options: TransformersOptions, device: str, *, task: str) -> Limits:
    return Limits(
        max_padding=_CHAT_PADDING if task == "chat" else _PADDING,
        max_rows=options.rows(device),
        max_tokens=options.max_batch_tokens or None,
        max_wait_ms=float(options.max_wait_ms),
        settle_ms=_SETTLE_MS,
    )


def sizes(work: Any, device: str) -> Sizes:
    """The first guess of what fits; on the processor never more, since a host out of memory kills instead of failing."""
    guess = max(1, free_bytes(device) // row_token_bytes(_inner(work)))
    return Sizes(row_tokens=guess, most_row_tokens=guess if device == "cpu" else None)


def warm_up(work: Any) -> None:
    """Computes one short row, so that the first real one finds everything in place."""
    frame = {
        "messages": [{"role": "user", "content": "Hello"}],
        "sampling": {"max_tokens": 1, "stop": ()},
        "schema": None,
        "inputs": ["Hello"],
    }
    (piece,) = work.read(frame)
    run = work.begin([Item(number=0, tokens=piece.tokens, wanted=1, arrived_ns=0, payload=piece.payload)])
    with torch.inference_mode():
        run.step(lambda _item, _fields: None)


def reason(error: BaseException) -> str:
    """What an error of loading says to the user."""
    if isinstance(error, ImportError):
        return f"{error}; pip install 'batchmill[transformers]'"
    return str(error).partition(_ALL_MODELS)[0] or type(error).__name__


def _inner(work: Any) -> Any:
    """The Hugging Face model itself; a model of sentence-transformers holds it in its first module."""
    return work.model if hasattr(work.model, "config") and hasattr(work.model, "dtype") else work.model[0].auto_model


def _quiet(options: TransformersOptions) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    threads = options.threads or int(os.environ.get("OMP_NUM_THREADS") or 0)
    if threads:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
