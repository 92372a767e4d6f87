"""The NVIDIA GPUs of this host, as ``nvidia-smi`` lists them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Mapping, MutableMapping

from batchmill_core.errors import ConfigurationError

from .devices import Device, Slot, by_numbers, needs_listing, no_gpu, parse_devices

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 30.0  # the driver may need seconds to wake a GPU
_GPU_LINE = re.compile(r"^GPU (\d+):")
_MIG_LINE = re.compile(r"^\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)")


class DriverFault(ConfigurationError):
    """nvidia-smi is there and cannot say what GPUs there are: as a rule because one of them is lost."""


def slots(text: str, environment: Mapping[str, str] | None = None) -> tuple[Slot, ...]:
    """The slots that ``--devices`` asks for on this host, among the GPUs that CUDA_VISIBLE_DEVICES leaves to it.

    SLURM, Kubernetes and users set it to share a host out. Raises ConfigurationError.
    """
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    return parse_devices(text, available_devices() if needs_listing(text) else (), visible=visible)


def pin_by_numbers(environment: MutableMapping[str, str]) -> None:
    """Turns UUIDs in CUDA_VISIBLE_DEVICES into numbers, for vLLM, which takes no others: vllm-project/vllm#13815, #46132.

    Leaves the variable alone where the driver cannot be asked.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if "GPU-" not in visible:
        return
    try:
        environment["CUDA_VISIBLE_DEVICES"] = by_numbers(visible, available_devices())
    except ConfigurationError:
        return


def available_devices() -> tuple[Device, ...]:
    """This host's GPUs; one that is divided (MIG) stands as its parts. Raises ConfigurationError if there is none."""
    devices = with_parts(parse_query(run_smi(*_QUERY)), run_smi("nvidia-smi", "-L"))
    if not devices:
        raise no_gpu("--devices", "nvidia-smi lists none")
    return devices


def parse_query(text: str) -> tuple[Device, ...]:
    """Devices out of nvidia-smi's CSV of index, uuid, name, memory in MiB."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == 4]
    return tuple(
        Device(index=index, uuid=uuid, name=name, memory_mib=int(memory) if memory.isdigit() else None)
        for index, uuid, name, memory in rows
    )


def with_parts(gpus: tuple[Device, ...], listing: str) -> tuple[Device, ...]:
    """Puts the MIG parts that ``nvidia-smi -L`` lists in place of the GPU that they divide."""
    parts: dict[str, list[Device]] = {}
    gpu = ""
    for line in listing.splitlines():
        if found := _GPU_LINE.match(line):
            gpu = found[1]
        elif found := _MIG_LINE.match(line):
            parts.setdefault(gpu, []).append(Device(index=f"{gpu}.{found[2]}", uuid=found[3], name=f"MIG {found[1]}"))
    return tuple(device for whole in gpus for device in parts.get(whole.index, [whole]))


def run_smi(*command: str) -> str:
    """What nvidia-smi says. Raises DriverFault where it fails, ConfigurationError where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=True)
    except FileNotFoundError:
        raise no_gpu("--devices", "nvidia-smi is not installed") from None
    except OSError as error:
        raise no_gpu("--devices", f"nvidia-smi cannot be run: {error.strerror or error}") from error
    except subprocess.TimeoutExpired:
        raise DriverFault(f"nvidia-smi gave no answer within {_TIMEOUT_S:.0f} s: check the GPU driver") from None
    except subprocess.CalledProcessError as error:
        said = (error.stdout or error.stderr).strip().splitlines()
        why = said[0] if said else f"nvidia-smi exited with {error.returncode}"
        raise DriverFault(str(no_gpu("--devices", why))) from error
    return done.stdout
