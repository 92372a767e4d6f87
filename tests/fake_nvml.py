"""A `pynvml` that answers from a file of answers, one file per kind of host, with the names and units of the real one.

A figure is one answer for ever or a list of answers in turn; ``{"error": NAME}`` is raised as ``NVMLError_NAME``.
`tests/record_nvml.py` writes such a file on a host with GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CASES = Path(__file__).parent / "cases" / "nvml"


class NVMLError(Exception):
    """As the real one: a class per error, derived from this one."""


class FakeNvml:
    """Handles are UUIDs. ``asked`` are the calls in order; ``init_error`` makes the library refuse to begin."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self, case: str, *, init_error: str | None = None, old: bool = False) -> None:
        self._answers: dict[str, Any] = json.loads((CASES / f"{case}.json").read_text())
        self.init_error = init_error
        self.asked: list[str] = []
        self.open = 0
        if old:  # nvidia-ml-py before 12.535 has the older name alone
            self.nvmlDeviceGetCurrentClocksEventReasons = None

    def nvmlInit(self) -> None:  # noqa: N802
        if self.init_error is not None:
            raise _error(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return self._known(uuid)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return next((u for u, a in self._answers.items() if a.get("index") == index), None) or self._known("")

    def nvmlDeviceGetIndex(self, handle: str) -> int:  # noqa: N802
        return int(self._answer(handle, "index"))

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:  # noqa: N802
        return len(self._answers[handle].get("parts", ()))

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        return self._answers[handle]["parts"][index] or self._known("")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        return str(self._answers[handle]["part_of"])

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=self._answer(handle, "use"))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(**self._answer(handle, "memory"))

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return int(self._answer(handle, "power_mw"))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._answer(handle, "temperature_c"))

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        assert clock == self.NVML_CLOCK_SM
        return int(self._answer(handle, "clock_mhz"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:  # noqa: N802
        return int(self._answer(handle, "reasons"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        return int(self._answer(handle, "reasons"))

    def _known(self, uuid: str) -> str:
        if uuid not in self._answers:
            raise _error("NotFound")
        return uuid

    def _answer(self, handle: str, figure: str) -> Any:
        self.asked.append(figure)
        answer = self._answers[handle][figure]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, dict) and "error" in answer:
            raise _error(answer["error"])
        return answer


def _error(name: str) -> NVMLError:
    made: type[NVMLError] = type(f"NVMLError_{name}", (NVMLError,), {})
    return made(name)
