"""The calls in flight in a vLLM engine's process: taken from the channel, cancelled, answered, seated."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from batchmill_core.errors import CallError
from batchmill_workers.gpu.frames import Channel, Frame, deliver_frames
from batchmill_workers.gpu.hosted_process import failure
from batchmill_workers.gpu.vllm_errors import is_death, kind_of
from batchmill_workers.gpu.vllm_figures import Figures
from batchmill_workers.gpu.vllm_model import VllmModel
from batchmill_workers.gpu.vllm_seats import Seats

_TOLD_EVERY_S = 1.0
_LOG_LAGS_S = 0.2  # the log is read by a thread


class EngineDied(Exception):
    """vLLM's engine is gone; its process ends, so that the worker starts another one."""


class Requests:
    """The calls by their numbers. Belongs to one event loop."""

    def __init__(
        self, model: VllmModel, channel: Channel, figures: Figures, cause: Callable[[], tuple[str, bool]]
    ) -> None:
        self._model = model
        self._channel = channel
        self._figures = figures
        self._cause = cause  # of vLLM's death, and whether the device is lost
        self._seats = Seats(model.capacity_rows)
        self._input_tokens: dict[int, int] = {}  # of the calls that vLLM has
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._died = asyncio.Event()

    async def serve(self) -> None:
        """Ends only with an error: EngineDied, or EOFError or an OSError when the worker is gone."""
        parts = [
            asyncio.ensure_future(one) for one in (deliver_frames(self._channel, self._take), self._tell(), self._die())
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            left = [*parts, *self._tasks.values()]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _take(self, frame: Frame) -> None:
        number = frame["id"]
        if not frame.get("cancel"):
            self._tasks[number] = task = asyncio.ensure_future(self._answer(number, frame))
            task.add_done_callback(lambda _done: self._leave(number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, frame: Frame) -> None:
        try:
            answer = await self._model.answer(str(number), frame, lambda tokens: self._handed_on(number, tokens))
            self._channel.send({"id": number, "done": True, **answer})
        except CallError as error:
            self._channel.send(failure(number, error.kind, error.message))
        except Exception as error:  # noqa: BLE001  # vLLM raises what it likes for a request; all of it is told
            if is_death(error):
                self._died.set()
            else:
                self._channel.send(failure(number, *kind_of(error)))

    def _handed_on(self, number: int, tokens: int) -> None:
        self._input_tokens[number] = tokens
        self._tell_seated(self._seats.come(number))

    def _leave(self, number: int) -> None:
        del self._tasks[number]
        self._input_tokens.pop(number, None)
        self._tell_seated(self._seats.leave(number))

    def _tell_seated(self, numbers: Iterable[int]) -> None:
        """A call's first message says that the device works on it from now on."""
        for number in numbers:
            self._channel.send({"id": number, "input_tokens": self._input_tokens[number]})

    async def _tell(self) -> None:
        """Sends the figures when they changed, and notices that vLLM died while nobody asked it for anything."""
        told: Frame = {}
        while not self._model.engine.errored:
            await asyncio.sleep(_TOLD_EVERY_S)
            figures = self._figures.take()
            if figures != told:
                self._channel.send({"figures": figures})
                told = figures
        self._died.set()
        await asyncio.sleep(_TOLD_EVERY_S)

    async def _die(self) -> None:
        await self._died.wait()
        await asyncio.sleep(_LOG_LAGS_S)
        reason, device_lost = self._cause()
        self._channel.send({"died": reason, "device_lost": device_lost})
        raise EngineDied(reason)
