"""The process that runs a model by OpenVINO GenAI's continuous batching; see ``engine_process`` for how it is spoken to.

It has a process of its own because ``ContinuousBatchingPipeline.step`` keeps Python's lock: measured with SmolLM2 on
2 cores, every other thread of the process stood still for 60 to 1000 ms per step.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill_core.errors import CallError
from batchmill_workers.gpu.frames import Channel, Frame
from batchmill_workers.gpu.hosted_process import failure, serve
from batchmill_workers.gpu.openvino_generation import generation_config, prompt_tokens, reason
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sampling import check_fits, cut_at_stop

_FINISH_REASONS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "tool_calls"}


def main() -> None:
    """Loads the model that the first message names, answers until the worker closes the channel."""
    serve(load, reason)


@dataclass(slots=True, kw_only=True)
class Running:
    """One request in the batch."""

    handle: Any
    input_tokens: int
    stop: tuple[str, ...]
    first_token_ns: int | None = None


class Batch:
    """The requests that run together, and the loop that steps them."""

    def __init__(self, pipeline: Any, channel: Channel, *, context_tokens: int | None, guided: bool) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._channel = channel
        self._context_tokens = context_tokens
        self._guided = guided
        self._running: dict[int, Running] = {}

    def run(self) -> None:
        """Takes what has come, steps once, sends what is finished, and so on until the worker is gone."""
        while True:
            for frame in self._channel.receive(wait=not self._pipeline.has_non_finished_requests()):
                self._take(frame)
            if self._pipeline.has_non_finished_requests():
                self._pipeline.step()
            self._harvest()

    def _take(self, frame: Frame) -> None:
        number = frame["id"]
        if frame.get("cancel"):
            cancelled = self._running.pop(number, None)
            if cancelled is not None:
                cancelled.handle.cancel()
            return
        try:
            self._add(number, frame)
        except CallError as error:
            self._fail(number, error.kind, error.message)
        except RuntimeError as error:  # what OpenVINO raises for a template, schema or parameter that it refuses
            self._fail(number, "invalid_request", reason(error))

    def _add(self, number: int, frame: Frame) -> None:
        tokens = prompt_tokens(self._tokenizer, frame["messages"])
        length = tokens.shape[1]
        check_fits(length, frame["sampling"]["max_tokens"], self._context_tokens)
        left = None if self._context_tokens is None else self._context_tokens - length
        schema = frame["schema"] if self._guided else None
        config = generation_config(self._pipeline.get_config(), frame["sampling"], room=left, schema=schema)
        handle = self._pipeline.add_request(number, tokens, config)
        self._running[number] = Running(handle=handle, input_tokens=length, stop=tuple(frame["sampling"]["stop"]))
        self._channel.send({"id": number, "input_tokens": length})

    def _harvest(self) -> None:
        now_ns = time.monotonic_ns()
        for number, one in list(self._running.items()):
            if one.first_token_ns is None and one.handle.can_read():
                one.first_token_ns = now_ns
            status = one.handle.get_status().name
            if status != "RUNNING":
                del self._running[number]
                self._finish(number, one, status)

    def _finish(self, number: int, one: Running, status: str) -> None:
        if status != "FINISHED":
            self._fail(number, "engine_failed", "the key-value cache is full; raise options.cache_gb, or set it to 0")
            return
        output = one.handle.read_all()[0]
        tokens = output.generated_ids
        self._channel.send(
            {
                "id": number,
                "done": True,
                "text": cut_at_stop(self._tokenizer.decode(tokens), one.stop),
                "finish_reason": _FINISH_REASONS.get(output.finish_reason.name, "stop"),
                "input_tokens": one.input_tokens,
                "output_tokens": len(tokens),
                "first_token_ns": one.first_token_ns,
            }
        )

    def _fail(self, number: int, kind: str, message: str) -> None:
        self._channel.send(failure(number, kind, message))


def load(configuration: Frame, channel: Channel) -> tuple[Batch, Frame]:
    """The model, loaded and warmed up by one short request, with the seconds that each took."""
    options = OpenVinoOptions(**configuration["options"])
    began = time.monotonic()
    pipeline = build_pipeline(Path(configuration["path"]), configuration["device"], options)
    tokenizer = pipeline.get_tokenizer()
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template; give one as options.chat_template")
    loaded = time.monotonic()
    _warm_up(pipeline, tokenizer)
    facts = {"load_s": loaded - began, "warm_up_s": time.monotonic() - loaded, "pid": os.getpid()}
    batch = Batch(pipeline, channel, context_tokens=configuration["context_tokens"], guided=options.guided)
    return batch, facts


def build_pipeline(path: Path, device: str, options: OpenVinoOptions) -> Any:
    """The bare ContinuousBatchingPipeline under our options."""
    import openvino_genai

    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(path), _scheduler(openvino_genai.SchedulerConfig(), options), device, _properties(options, device)
    )
    if options.chat_template:
        pipeline.get_tokenizer().set_chat_template(options.chat_template)
    return pipeline


def _scheduler(config: Any, options: OpenVinoOptions) -> Any:
    config.max_num_seqs = options.capacity_rows
    config.max_num_batched_tokens = options.max_batched_tokens
    config.cache_size = options.cache_gb
    config.enable_prefix_caching = options.prefix_caching
    config.dynamic_split_fuse = options.split_prompts
    return config


def _properties(options: OpenVinoOptions, device: str) -> dict[str, Any]:
    if device != "CPU":
        return {}
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": options.inference_precision,
        "KV_CACHE_PRECISION": options.kv_cache_precision,
    }
    threads = options.threads or int(os.environ.get("OMP_NUM_THREADS") or 0)
    return {**properties, "INFERENCE_NUM_THREADS": threads} if threads else properties


def _warm_up(pipeline: Any, tokenizer: Any) -> None:
    config = pipeline.get_config()
    config.max_new_tokens = 1
    handle = pipeline.add_request(0, prompt_tokens(tokenizer, [{"role": "user", "content": "Hello"}]), config)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    handle.read_all()  # held until here: a request whose handle is gone is dropped


if __name__ == "__main__":
    main()
