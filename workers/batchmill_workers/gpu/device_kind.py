"""What kind of device a process computes on: a name that is the same on every host that has such a device.

What was learned on one device holds for all of its kind, so numbers and UUIDs stay out of it: ``NVIDIA H200 140 GiB``,
``2 x NVIDIA H200 140 GiB``, ``MIG 1g.18gb``, ``cpu 23 GiB``. A processor is told by the memory that the process may
use, since that is what bounds a batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from batchmill_core.errors import ConfigurationError

from .devices import CPU, Device
from .host_memory import memory_in_use
from .listing import available_devices

_MIB_PER_GIB = 1024


def device_kind(device: str, environment: Mapping[str, str] | None = None) -> str:
    """The kind of an engine's device (``cpu``, ``cuda:0``) in a process that is pinned by its environment.

    Where the driver lists no such device it is ``device`` itself.
    """
    if device.lower() == CPU:
        memory = memory_in_use()
        return kind_of_processor(memory.total_bytes >> 20 if memory is not None else 0)
    pinned = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES", "")
    try:
        return kind_of(pinned.split(","), available_devices()) or device
    except ConfigurationError:
        return device


def kind_of_processor(mib: int) -> str:
    return f"{CPU} {_gib(mib)}"


def kind_of(pinned: Sequence[str], available: Sequence[Device]) -> str:
    """The kind of the devices that a process sees, by UUID or index; of all of them where none is named."""
    wanted = [one.strip() for one in pinned if one.strip()]
    seen = [d for d in available if d.uuid in wanted or d.index in wanted] if wanted else available
    kinds = sorted(f"{d.name} {_gib(d.memory_mib)}" if d.memory_mib else d.name or d.uuid for d in seen)
    return " + ".join(f"{n} x {kind}" if (n := kinds.count(kind)) > 1 else kind for kind in sorted(set(kinds)))


def _gib(mib: int) -> str:
    return f"{round(mib / _MIB_PER_GIB)} GiB"
