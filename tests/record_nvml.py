"""Writes what this host's GPUs answer, as a case for `tests/fake_nvml.py`: ``python tests/record_nvml.py > CASE.json``.

UUIDs are replaced: they name somebody's hardware.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable
from typing import Any

import pynvml


def answer(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except pynvml.NVMLError as fault:
        return {"error": type(fault).__name__.removeprefix("NVMLError_")}


def memory(handle: Any) -> dict[str, int]:
    found = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return {"used": found.used, "total": found.total}


def parts(handle: Any) -> list[Any]:
    count = answer(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    found = (
        [answer(lambda n=n: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n)) for n in range(count)]
        if isinstance(count, int)
        else []
    )
    return [None if isinstance(part, dict) else part for part in found]


def figures(handle: Any) -> dict[str, Any]:
    return {
        "use": answer(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "memory": answer(lambda: memory(handle)),
        "power_mw": answer(lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
        "temperature_c": answer(lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "clock_mhz": answer(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        "reasons": answer(lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
    }


def main() -> None:
    pynvml.nvmlInit()
    case: dict[str, Any] = {}
    names = iter(string.ascii_lowercase)
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu = f"GPU-{next(names) * 4}"
        case[gpu] = {"index": index, **figures(handle)}
        named = [(part, f"MIG-{next(names) * 4}" if part is not None else None) for part in parts(handle)]
        if named:
            case[gpu]["parts"] = [name for _, name in named]
        case |= {name: {"part_of": gpu, **figures(part)} for part, name in named if name is not None}
    json.dump(case, sys.stdout, indent=2)


if __name__ == "__main__":
    main()
