"""What NVIDIA GPUs say about themselves, by NVML: found by UUID, since NVML does not know CUDA_VISIBLE_DEVICES.

Source of the calls and their units: https://docs.nvidia.com/deploy/nvml-api/ by way of nvidia-ml-py.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchmill_db.samples import DeviceReading

log = logging.getLogger(__name__)

_MIG = "MIG-"
_ALL = "all"  # figures of a GPU that cannot be asked
# Why a GPU is slower than it could be (nvmlClocksEventReasons). An idle one and clocks that the user set are not here.
_THROTTLES = (
    (0x04, "power_cap"),
    (0x08, "hardware_slowdown"),
    (0x20, "software_thermal"),
    (0x40, "hardware_thermal"),
    (0x80, "power_brake"),
)
# Errors after which a handle is of no use: it is looked up again at the next sample.
_FATAL = (
    "NVMLError_Uninitialized",
    "NVMLError_DriverNotLoaded",
    "NVMLError_GpuIsLost",
    "NVMLError_ResetRequired",
    "NVMLError_LibRmVersionMismatch",
)


@dataclass(slots=True)
class _Gpu:
    """One device as CUDA names it: a UUID, or a number where the user pinned by numbers."""

    name: str
    handle: Any = None
    whole: Any = None  # of a MIG part: the GPU that it is a part of, which alone knows power and heat
    index: str = ""
    uses: list[float] = field(default_factory=list)  # percents since the last sample
    told: set[str] = field(default_factory=set)


class NvmlReader:
    """Never raises: a figure that cannot be had is None, and its error is logged once.

    A driver that is gone or a GPU that is lost is asked for again at each sample, in a new session with the driver when
    none of the GPUs is left: one that was reset is not found in the old one. A part of a divided GPU (MIG) has memory of
    its own; power, temperature, clock and throttling are those of the whole GPU, and its use is not told.
    """

    def __init__(self, devices: Sequence[str], *, nvml: Any = None) -> None:
        self._nvml = nvml
        self._gpus = [_Gpu(name=name, index=name) for name in devices]
        self._began = False
        self._told: set[str] = set()

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(gpu.index for gpu in self._gpus)

    def peek(self) -> None:
        """Notes how much is in use just now: NVML's figure covers a second at most, a sample is their mean."""
        for gpu in self._gpus:
            if gpu.handle is not None and not gpu.name.startswith(_MIG):
                percent = self._ask(gpu, "use", lambda h: self._nvml.nvmlDeviceGetUtilizationRates(h).gpu, gpu.handle)
                if percent is not None:
                    gpu.uses.append(float(percent))

    def read(self) -> list[DeviceReading]:
        for gpu in self._gpus:
            self._find(gpu)
        self.peek()
        readings = [self._reading(gpu) for gpu in self._gpus]
        for gpu in self._gpus:
            if gpu.handle is not None and _ALL in gpu.told:
                gpu.told.remove(_ALL)
                log.warning("device_is_back device=%s", gpu.index)
        return readings

    def close(self) -> None:
        """Idempotent."""
        if self._began:
            self._began = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as fault:
                log.debug("nvml_not_shut_down error=%s", fault)

    def _reading(self, gpu: _Gpu) -> DeviceReading:
        nvml = self._nvml
        uses, gpu.uses = gpu.uses, []
        if gpu.handle is None:
            return DeviceReading(device=gpu.index)
        memory = self._ask(gpu, "memory", nvml.nvmlDeviceGetMemoryInfo, gpu.handle)
        milliwatts = self._ask(gpu, "power", nvml.nvmlDeviceGetPowerUsage, gpu.whole)
        reasons = self._ask(gpu, "throttling", self._reasons, gpu.whole)
        return DeviceReading(
            device=gpu.index,
            use_percent=sum(uses) / len(uses) if uses else None,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._ask(
                gpu,
                "temperature",
                lambda h: float(nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
                gpu.whole,
            ),
            clock_mhz=self._ask(
                gpu, "clock", lambda h: int(nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)), gpu.whole
            ),
            throttle=None if reasons is None else throttles(reasons) or None,
        )

    def _reasons(self, handle: Any) -> int:
        """Under its newer name where nvidia-ml-py (12.535) and the driver (535) both have it."""
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        if new is not None:
            try:
                return int(new(handle))
            except self._nvml.NVMLError as fault:
                if type(fault).__name__ != "NVMLError_FunctionNotFound":
                    raise
        return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _ask(self, gpu: _Gpu, figure: str, ask: Callable[[Any], Any], handle: Any) -> Any:
        if gpu.handle is None:  # lost while this sample was read
            return None
        try:
            return ask(handle)
        except self._nvml.NVMLError as fault:
            if type(fault).__name__ in _FATAL:
                self._lose(gpu, fault)
            else:
                self._tell(gpu, figure, fault)
            return None

    def _lose(self, gpu: _Gpu, fault: Exception) -> None:
        gpu.handle = gpu.whole = None
        self._tell(gpu, _ALL, fault)
        if all(one.handle is None for one in self._gpus):
            self.close()

    def _tell(self, gpu: _Gpu, figure: str, fault: Exception) -> None:
        if figure not in gpu.told:
            gpu.told.add(figure)
            log.warning("device_figure_missing device=%s figure=%s error=%s", gpu.index, figure, fault)

    # finding it

    def _find(self, gpu: _Gpu) -> None:
        if gpu.handle is not None or not self._begin():
            return
        try:
            gpu.handle = self._handle(gpu.name)
            part = gpu.name.startswith(_MIG)
            gpu.whole = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu.handle) if part else gpu.handle
            number = str(self._nvml.nvmlDeviceGetIndex(gpu.whole))
            gpu.index = f"{number}.{self._part(gpu)}" if part else number
        except self._nvml.NVMLError as fault:
            self._lose(gpu, fault)

    def _handle(self, name: str) -> Any:
        if name.isdigit():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def _part(self, gpu: _Gpu) -> int:
        """Which part of its GPU it is, as ``nvidia-smi -L`` numbers them."""
        nvml = self._nvml
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.whole)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu.whole, number)
            except nvml.NVMLError:  # no part has this number
                continue
            if nvml.nvmlDeviceGetUUID(part) == gpu.name:
                return number
        return 0

    def _begin(self) -> bool:
        if self._began:
            return True
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ModuleNotFoundError:
            self._tell_once("nvml_missing; for figures of GPUs: pip install 'batchmill[nvidia]'")
            return False
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as fault:
            self._tell_once(f"nvml_not_there error={fault}; work goes on without figures of GPUs")
            return False
        self._began = True
        return True

    def _tell_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.warning("%s", sentence)


def throttles(reasons: int) -> str:
    """The names of NVML's bits for what slows a GPU down, with commas; empty when nothing does."""
    return ",".join(name for bit, name in _THROTTLES if reasons & bit)
