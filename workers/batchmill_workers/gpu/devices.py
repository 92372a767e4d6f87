"""Which devices a worker's processes are pinned to: ``--devices`` read into slots, one process each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchmill_core.errors import ConfigurationError

CPU = "cpu"
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator of this host as NVML lists it. ``index`` is ``0``, or ``0.1`` for the second MIG part of GPU 0."""

    index: str
    uuid: str
    name: str = ""
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One worker process's device: a GPU, several GPUs used together, or this host's processor.

    ``devices`` are the UUIDs of its GPUs, in the order given; empty for the processor, where ``threads`` says how many
    threads it may compute with.
    """

    name: str
    devices: tuple[str, ...] = ()
    threads: int = 0

    @property
    def engine_device(self) -> str:
        """What an engine of this slot is constructed with: a pinned process sees its first GPU as number 0."""
        return "cuda:0" if self.devices else CPU

    def environment(self) -> dict[str, str]:
        """Variables that pin a process to this slot, to be set before it imports anything that looks for GPUs."""
        pinned = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        if self.devices:
            return pinned
        # Read by OpenMP (torch) and by our OpenVINO engine for its own thread count.
        return {**pinned, "OMP_NUM_THREADS": str(self.threads)}

    def worker_name(self, host: str) -> str:
        """A name that stays the same over restarts, such as ``gpu0@host``."""
        return f"{self.name}@{host}"


def pinned(environment: Mapping[str, str], engine_device: str) -> str:
    """What a worker's process is pinned to, as a user can look it up: the UUIDs of its GPUs, else ``engine_device``."""
    return (environment.get("CUDA_VISIBLE_DEVICES") if engine_device != CPU else "") or engine_device


def needs_listing(text: str) -> bool:
    """Whether ``--devices`` names anything but the processor, so that the host's GPUs must be listed first."""
    return any(part != CPU for part in _parts(text))


def parse_devices(
    text: str, available: Sequence[Device] = (), *, cores: int | None = None, visible: str | None = None
) -> tuple[Slot, ...]:
    """The slots that ``--devices`` asks for: ``all``, ``cpu``, or a list such as ``0,1`` or ``0+1,GPU-uuid``.

    ``available`` are this host's GPUs, of which ``visible`` (CUDA_VISIBLE_DEVICES; None: all) leaves some to the slots,
    ``cores`` the cores that processor slots may use. Raises ConfigurationError.
    """
    if visible is not None and needs_listing(text):
        return _among_visible(text, available, visible, cores)
    parts = _parts(text)
    if not parts:
        raise ConfigurationError("--devices is empty; give all, cpu, or GPU numbers such as 0,1")
    if _ALL in parts:
        if len(parts) > 1:
            raise ConfigurationError(f"--devices {text}: 'all' stands alone")
        parts = [device.index for device in available]
        if not parts:
            raise no_gpu("--devices all")
    _refuse_twice([one for part in parts for one in _members(part, available)], text)
    threads = max(1, cores or usable_cores())
    return tuple(_slot(part, available, threads) for part in parts)


def visible_devices(visible: str, available: Sequence[Device]) -> tuple[Device, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; numbers as nvidia-smi lists GPUs, or UUIDs' beginnings.

    A divided GPU (MIG) stands for its parts. As for CUDA, -1 ends the list. Raises ConfigurationError for another
    that the host does not have, where CUDA would leave out that one and all that follow without a word.
    """
    found: list[Device] = []
    for one in (part.strip() for part in visible.split(",") if part.strip()):
        if one == "-1":
            break
        parts = [device for device in available if device.index.split(".")[0] == one]
        found += parts or [_find(one, available, asked="CUDA_VISIBLE_DEVICES")]
    return tuple(dict.fromkeys(found))


def _among_visible(text: str, available: Sequence[Device], visible: str, cores: int | None) -> tuple[Slot, ...]:
    seen = visible_devices(visible, available)
    said = f"CUDA_VISIBLE_DEVICES={visible} is set here"
    if not seen and available:
        raise ConfigurationError(f"--devices {text}: {said} and leaves no GPU; unset it, or use --devices cpu")
    try:
        return parse_devices(text, seen, cores=cores)
    except ConfigurationError as error:
        if len(seen) == len(available):
            raise
        raise ConfigurationError(f"{error} ({said}: it leaves these of the host's {len(available)})") from error


def by_numbers(visible: str, available: Sequence[Device]) -> str:
    """CUDA_VISIBLE_DEVICES with whole GPUs by their numbers in the order of PCI_BUS_ID, which is the driver's own.

    Parts of a divided GPU (MIG) stay as they are: CUDA knows them by UUID only.
    """
    numbers = {device.uuid: device.index for device in available if device.index.isdigit()}
    return ",".join(numbers.get(one.strip(), one.strip()) for one in visible.split(","))


def no_gpu(asked: str, why: str = "") -> ConfigurationError:
    detail = f" ({why})" if why else ""
    return ConfigurationError(
        f"{asked}: no NVIDIA GPU was found on this host{detail}; to compute on the processor use --devices cpu"
    )


def usable_cores() -> int:
    """Cores that this process may use: its affinity mask and its container's CPU quota, whichever is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = cores_of_quota(Path("/sys/fs/cgroup/cpu.max").read_text())
    except OSError:
        quota = None
    return min(allowed, quota or allowed)


def cores_of_quota(cpu_max: str) -> int | None:
    """Whole cores (rounded up) of a cgroup v2 ``cpu.max`` such as ``200000 100000``; None means no limit."""
    quota, _, period = cpu_max.strip().partition(" ")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return max(1, -(-int(quota) // int(period)))


def _parts(text: str) -> list[str]:
    """Without blanks, also around a plus; the two words in any case."""
    parts = ["+".join(one.strip() for one in part.split("+")) for part in text.split(",") if part.strip()]
    return [part.lower() if part.lower() in {CPU, _ALL} else part for part in parts]


def _slot(part: str, available: Sequence[Device], threads: int) -> Slot:
    if part == CPU:
        return Slot(name="cpu0", threads=threads)
    members = [_find(one, available) for one in part.split("+")]
    name = "gpu" + "+".join(device.index for device in members)
    return Slot(name=name, devices=tuple(device.uuid for device in members))


def _members(part: str, available: Sequence[Device]) -> Iterable[str]:
    return [CPU] if part == CPU else [_find(one, available).uuid for one in part.split("+")]


def _find(wanted: str, available: Sequence[Device], asked: str = "--devices") -> Device:
    if wanted.lower() in {"", CPU, _ALL}:
        raise ConfigurationError(f"{asked}: a plus joins GPUs, as 0+1; {wanted!r} is none")
    if not available:
        raise no_gpu(f"{asked} {wanted}")
    for device in available:
        if wanted in (device.index, device.uuid):
            return device
    by_uuid = wanted.upper().startswith(("GPU-", "MIG-"))
    begun = [device for device in available if by_uuid and device.uuid.lower().startswith(wanted.lower())]
    if len(begun) == 1 and len(wanted) > len("GPU-"):  # the beginning of a UUID is enough for CUDA too
        return begun[0]
    known = ", ".join(f"{d.index} ({d.uuid if by_uuid else d.name or d.uuid})" for d in available)
    raise ConfigurationError(f"{asked}: this host has no device {wanted!r}; it has {known}")


def _refuse_twice(uuids: Sequence[str], text: str) -> None:
    twice = next((uuid for uuid in uuids if uuids.count(uuid) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"--devices {text}: {twice} is named more than once; name each device once")
