"""The process that runs a model by OpenVINO GenAI's continuous batching; see ``engine_process`` for how it is spoken to.

It has a process of its own because ``ContinuousBatchingPipeline.step`` keeps Python's lock: measured with SmolLM2 on
2 cores, every other thread of the process stood still for 60 to 1000 ms per step.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchmill_core.errors import CallError, InvalidRequest
from batchmill_workers.gpu.frames import Channel, Frame
from batchmill_workers.gpu.hosted_process import failure, serve
from batchmill_workers.gpu.openvino_generation import generation_config, prompt_tokens, reason
from batchmill_workers.gpu.openvino_line import Line
from batchmill_workers.gpu.openvino_loading import build_pipeline, warm_up
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sampling import check_fits, cut_at_stop

_FINISH_REASONS = {"STOP": "stop", "LENGTH": "length", "TOOL_CALL": "tool_calls"}
_REFUSALS = (RuntimeError, TypeError, ValueError)  # OpenVINO's and its binding's, for what they cannot take
_TELL_EVERY_S = 0.5
_MORE_CACHE = "raise options.cache_gb, or set it to 0"


def main() -> None:
    """Loads the model that the first message names, answers until the worker closes the channel."""
    serve(load, reason)


@dataclass(slots=True, kw_only=True)
class Row:
    """One request; ``handle`` is there once it is in the batch."""

    tokens: Any
    config: Any
    stop: tuple[str, ...]
    schema: str | None
    handle: Any = None
    first_token_ns: int | None = None

    @property
    def input_tokens(self) -> int:
        return int(self.tokens.shape[1])


class Batch:
    """The requests that run together, and the loop that steps them."""

    def __init__(
        self, pipeline: Any, channel: Channel, options: OpenVinoOptions, *, context_tokens: int | None
    ) -> None:
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._channel = channel
        self._context_tokens = context_tokens
        self._guided = options.guided
        self._line = Line(places=options.capacity_rows, prefixes=options.prefix_caching)
        self._rows: dict[int, Row] = {}  # those that wait, too
        self._refused: dict[str, str] = {}  # schemas, and why
        self._told_s = 0.0
        self._told_rows: int | None = None

    def run(self) -> None:
        """Takes what has come, steps once, sends what is finished, and so on until the worker is gone."""
        while True:
            for frame in self._channel.receive(wait=not (self._rows or self._pipeline.has_non_finished_requests())):
                self._read(frame)
            for number in self._line.take():
                self._add(number)
            if self._pipeline.has_non_finished_requests():
                self._step()
            self._harvest()
            self._tell()

    def _read(self, frame: Frame) -> None:
        number = frame["id"]
        if frame.get("cancel"):
            self._cancel(number)
            return
        try:
            row = self._row(frame)
        except CallError as error:
            self._fail(number, error.kind, error.message)
        except _REFUSALS as error:  # of a template or a parameter
            self._fail(number, "invalid_request", reason(error))
        else:
            self._rows[number] = row
            self._line.put(number, row.tokens.data[0].tolist(), schema=row.schema)

    def _row(self, frame: Frame) -> Row:
        tokens = prompt_tokens(self._tokenizer, frame["messages"])
        length = tokens.shape[1]
        check_fits(length, frame["sampling"]["max_tokens"], self._context_tokens)
        left = None if self._context_tokens is None else self._context_tokens - length
        schema = self._schema(frame)
        return Row(
            tokens=tokens,
            config=generation_config(self._pipeline.get_config(), frame["sampling"], room=left, schema=schema),
            stop=tuple(frame["sampling"]["stop"]),
            schema=schema,
        )

    def _schema(self, frame: Frame) -> str | None:
        """The schema that guides the answer, as JSON. Raises InvalidRequest for one that was refused before."""
        if frame["schema"] is None or not self._guided:
            return None
        schema = json.dumps(frame["schema"])
        if schema in self._refused:
            raise InvalidRequest(self._refused[schema])
        return schema

    def _cancel(self, number: int) -> None:
        row = self._rows.pop(number, None)
        if row is None:
            return
        if row.handle is None:
            self._line.remove(number)
        else:
            row.handle.cancel()
            self._line.leaves(number)

    def _add(self, number: int) -> None:
        row = self._rows[number]
        try:
            row.handle = self._pipeline.add_request(number, row.tokens, row.config)
        except _REFUSALS as error:
            self._line.leaves(number)
            del self._rows[number]
            self._fail(number, "invalid_request", reason(error))
        else:
            self._channel.send({"id": number, "input_tokens": row.input_tokens})

    def _step(self) -> None:
        """An error ends the process, and the worker starts another; that of a schema on trial is its row's alone."""
        try:
            self._pipeline.step()
        except RuntimeError as error:
            tried = None if self._line.on_trial is None else self._rows[self._line.on_trial].schema
            if tried is None:
                raise
            self._refused[tried] = f"OpenVINO refuses the schema: {reason(error)}"
            for number in [number for number, row in self._rows.items() if row.schema == tried]:
                self._cancel(number)
                self._fail(number, "invalid_request", self._refused[tried])
            self._pipeline.step()  # drops the request while it is alone; with others the step would fail again

    def _harvest(self) -> None:
        now_ns = time.monotonic_ns()
        for number, row in [(number, row) for number, row in self._rows.items() if row.handle is not None]:
            if row.first_token_ns is None and row.handle.can_read():
                row.first_token_ns = now_ns
                self._line.prompt_is_computed(number)
            status = row.handle.get_status().name
            if status != "RUNNING":
                alone = self._line.in_batch == 1
                del self._rows[number]
                self._line.leaves(number)
                if status == "FINISHED":
                    self._finish(number, row)
                else:
                    self._fail(number, *_full_cache(row.input_tokens, alone=alone))

    def _finish(self, number: int, row: Row) -> None:
        output = row.handle.read_all()[0]
        tokens = output.generated_ids
        self._channel.send(
            {
                "id": number,
                "done": True,
                "text": cut_at_stop(self._tokenizer.decode(tokens), row.stop),
                "finish_reason": _FINISH_REASONS.get(output.finish_reason.name, "stop"),
                "input_tokens": row.input_tokens,
                "output_tokens": len(tokens),
                "first_token_ns": row.first_token_ns,
            }
        )

    def _tell(self) -> None:
        """Says every half second that the batch came further, since rows may take minutes to their ends; and its last."""
        now_s, rows = time.monotonic(), self._line.in_batch or None
        if (rows != self._told_rows and rows is None) or (rows and now_s - self._told_s >= _TELL_EVERY_S):
            self._told_s, self._told_rows = now_s, rows
            self._channel.send({"figures": {"batch_rows": rows}})

    def _fail(self, number: int, kind: str, message: str) -> None:
        self._channel.send(failure(number, kind, message))


def _full_cache(input_tokens: int, *, alone: bool) -> tuple[str, str]:
    """Why OpenVINO let a row go: alone it will never fit, beside others it may the next time."""
    if alone:
        return (
            "too_long",
            f"a prompt of {input_tokens} tokens and its answer do not fit the key-value cache; {_MORE_CACHE}",
        )
    return "engine_failed", f"the key-value cache is full; {_MORE_CACHE}"


def load(configuration: Frame, channel: Channel) -> tuple[Batch, Frame]:
    """The model, loaded and warmed up by one short request, with the seconds that each took."""
    options = OpenVinoOptions(**configuration["options"])
    began = time.monotonic()
    pipeline = build_pipeline(Path(configuration["path"]), configuration["device"], options)
    if not pipeline.get_tokenizer().chat_template:
        raise ValueError("the model has no chat template; give one as options.chat_template")
    loaded = time.monotonic()
    warm_up(pipeline)
    facts = {"load_s": loaded - began, "warm_up_s": time.monotonic() - loaded, "pid": os.getpid()}
    return Batch(pipeline, channel, options, context_tokens=configuration["context_tokens"]), facts


if __name__ == "__main__":
    main()
