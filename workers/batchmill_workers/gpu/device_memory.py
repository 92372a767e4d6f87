"""How much memory GPUs have free, and which processes hold the rest."""

from __future__ import annotations

import csv
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from batchmill_core.errors import ConfigurationError

from .listing import DriverFault, available_devices, run_smi

log = logging.getLogger(__name__)

_MIB = 1 << 20
_MEMORY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_HOLDERS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
_XML = ("nvidia-smi", "-q", "-x")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process with memory on a device; ``mib`` is None where the driver does not tell."""

    pid: int
    mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device. ``name`` is for people."""

    name: str
    total_bytes: int
    free_bytes: int
    gpu: bool = False
    holders: tuple[Holder, ...] = ()


def gpus_memory(pinned: Sequence[str]) -> list[DeviceMemory]:
    """Of each of these GPUs, by UUID or number as in CUDA_VISIBLE_DEVICES; those whose memory is not told are left out.

    nvidia-smi fails for all GPUs when one is lost. That one must not keep the others from starting again: then none is
    told. Raises ConfigurationError for one that is missing.
    """
    try:
        known = available_devices()
        memory = parse_memory(run_smi(*_MEMORY))
        if any("." in device.index for device in known):
            memory |= parse_parts(run_smi(*_XML))
        holders = parse_holders(run_smi(*_HOLDERS))
    except DriverFault as fault:
        log.warning("gpu_memory_not_checked devices=%s error=%s", ",".join(pinned), fault)
        return []
    found = []
    for wanted in pinned:
        device = next((d for d in known if wanted in (d.uuid, d.index)), None)
        if device is None:
            has = ", ".join(f"{d.index} ({d.uuid})" for d in known)
            raise ConfigurationError(
                f"device {wanted} of this worker is missing: the driver lists {has}; look at the system's log (dmesg) "
                "and start the worker again with the devices there are"
            )
        if device.index in memory:
            total, free = memory[device.index]
            name = f"device {device.index} ({device.name})"
            mine = tuple(holders.get(device.uuid, ()))
            found.append(DeviceMemory(name=name, total_bytes=total, free_bytes=free, gpu=True, holders=mine))
    return found


def parse_memory(text: str) -> dict[str, tuple[int, int]]:
    """Total and free bytes by index, out of nvidia-smi's CSV of index, uuid, total and free MiB."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == 4]
    return {
        index: (int(total) * _MIB, int(free) * _MIB)
        for index, _, total, free in rows
        if total.isdigit() and free.isdigit()
    }


def parse_holders(text: str) -> dict[str, list[Holder]]:
    """Processes by the UUID of their GPU, out of nvidia-smi's CSV of gpu_uuid, pid, MiB."""
    holders: dict[str, list[Holder]] = {}
    for row in csv.reader(text.splitlines()):
        cells = [cell.strip() for cell in row]
        if len(cells) == 3 and cells[1].isdigit():
            mib = int(cells[2]) if cells[2].isdigit() else None
            holders.setdefault(cells[0], []).append(Holder(pid=int(cells[1]), mib=mib))
    return holders


def parse_parts(text: str) -> dict[str, tuple[int, int]]:
    """Total and free bytes of the parts of divided GPUs (MIG) by index, as 0.1, out of nvidia-smi's XML."""
    try:
        gpus = ET.fromstring(text).findall("gpu")
    except ET.ParseError:
        return {}
    found = {}
    for index, gpu in enumerate(gpus):  # listed by their numbers
        for part in gpu.iterfind("mig_devices/mig_device"):
            total, free = (_mib(part.findtext(f"fb_memory_usage/{kind}", "")) for kind in ("total", "free"))
            if total is not None and free is not None:
                found[f"{index}.{part.findtext('index', '')}"] = (total * _MIB, free * _MIB)
    return found


def _mib(text: str) -> int | None:
    found = re.match(r"(\d+) MiB", text)
    return int(found[1]) if found else None
