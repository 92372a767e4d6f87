"""A host with the GPUs that a test describes: a driver's library and an nvidia-smi, as near to the real ones as can be.

The library is compiled from `library.c` and loaded by the real nvidia-ml-py; the command asks that. Both answer from
one file, which a test may write anew while they run.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILE_VARIABLE = "NVML_HOST_FILE"
GIB = 1 << 30
A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"
PART_1, PART_2 = "MIG-cccccccc-1111-2222-3333-444444444444", "MIG-dddddddd-1111-2222-3333-444444444444"


def gpu(index: int, uuid: str, **figures: str | float) -> str:
    """A line of an H200 that is well, but for the figures given; ``use="!3"`` answers error 3."""
    usual = {
        "name": "NVIDIA_H200",
        "total": 140 * GIB,
        "used": GIB,
        "use": 50,
        "power": 300_000,
        "temp": 60,
        "clock": 1980,
        "reasons": 0,
    }
    return _line("gpu", {"index": index, "uuid": uuid, **usual, **figures})


def part(number: int, uuid: str, *, of: int = 0, **figures: str | float) -> str:
    """A MIG part, which tells its memory alone."""
    usual = {"name": "NVIDIA_H200_MIG_1g.18gb", "profile": "1g.18gb", "total": 16 * GIB, "used": GIB}
    refused = {"use": "!3", "power": "!3", "temp": "!3", "clock": "!3", "reasons": "!3"}
    return _line("mig", {"of": of, "number": number, "uuid": uuid, **usual, **refused, **figures})


def process(of: str, pid: int, used: float) -> str:
    return _line("process", {"of": of, "pid": pid, "used": used})


def _line(kind: str, figures: dict[str, str | float]) -> str:
    return " ".join([kind, *(f"{name}={value}" for name, value in figures.items())])


class Host:
    """``environment`` is what a process needs so that it is on this host."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "host"
        command = folder / "nvidia-smi"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -P {HERE / "nvidia_smi.py"} "$@"\n')
        command.chmod(0o755)

    def has(self, *lines: str) -> None:
        """What the host is from now on."""
        fresh = self.folder / "host.new"
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        return {
            FILE_VARIABLE: str(self._file),
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.folder), os.environ.get("LD_LIBRARY_PATH", "")]),
            "PATH": os.pathsep.join([str(self.folder), os.environ["PATH"]]),
        }


def host_in(folder: Path, *, old_driver: bool = False) -> Host:
    """Compiles the library. Skips the test where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler is here, which the library of a driver is made with")
    folder.mkdir(exist_ok=True)
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *(["-DOLD_DRIVER"] if old_driver else [])]
    command = [compiler, *flags, "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "library.c")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return Host(folder)


def move_in(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process one of the host's: the real nvidia-ml-py finds the host's library, a shell its nvidia-smi."""
    binding = importlib.import_module("pynvml")
    monkeypatch.setattr(binding, "nvmlLib", ctypes.CDLL(str(host.folder / "libnvidia-ml.so.1")))
    monkeypatch.setattr(binding, "_nvmlGetFunctionPointer_cache", {})
    for name, value in host.environment.items():
        monkeypatch.setenv(name, value)
