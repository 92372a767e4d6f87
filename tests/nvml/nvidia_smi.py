"""nvidia-smi as far as we ask it, over the library that this process finds: the formats of the real one (580)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pynvml as nvml

MIB = 1 << 20


def main(arguments: list[str]) -> int:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibRmVersionMismatch:
        print("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.159")
        return 18
    except nvml.NVMLError:
        print(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n"
        )
        return 9
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError_GpuIsLost:
        print("Unable to determine the device handle for GPU0: 0000:1B:00.0: GPU is lost.  Reboot the system")
        return 15
    if not handles:
        print("No devices were found")
        return 6
    if arguments == ["-L"]:
        listing(handles)
    elif arguments == ["-q", "-x"]:
        xml(handles)
    elif arguments[0].startswith("--query-gpu="):
        query(handles, arguments[0].partition("=")[2].split(","))
    elif arguments[0].startswith("--query-compute-apps="):
        apps(handles)
    else:
        print(f"Invalid combination of input arguments: {arguments}")
        return 2
    return 0


def listing(handles: list[Any]) -> None:
    for number, handle in enumerate(handles):
        print(f"GPU {number}: {nvml.nvmlDeviceGetName(handle)} (UUID: {nvml.nvmlDeviceGetUUID(handle)})")
        for at, part in parts(handle):
            profile = nvml.nvmlDeviceGetName(part).rpartition(" ")[2]
            print(f"  MIG {profile:<12}Device {at:>2}: (UUID: {nvml.nvmlDeviceGetUUID(part)})")


def query(handles: list[Any], wanted: list[str]) -> None:
    for number, handle in enumerate(handles):
        memory = figure(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
        known = {
            "index": str(number),
            "uuid": nvml.nvmlDeviceGetUUID(handle),
            "name": nvml.nvmlDeviceGetName(handle),
            "memory.total": "[N/A]" if memory is None else str(memory.total // MIB),
            "memory.free": "[N/A]" if memory is None else str(memory.free // MIB),
        }
        print(", ".join(known[name] for name in wanted))


def apps(handles: list[Any]) -> None:
    for handle in handles:
        for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            used = "[N/A]" if one.usedGpuMemory is None else one.usedGpuMemory // MIB
            print(f"{nvml.nvmlDeviceGetUUID(handle)}, {one.pid}, {used}")


def xml(handles: list[Any]) -> None:
    print("<nvidia_smi_log>")
    for number, handle in enumerate(handles):
        print(f'<gpu id="0000000{number}:1B:00.0"><mig_devices>')
        for at, part in parts(handle):
            memory = nvml.nvmlDeviceGetMemoryInfo(part)
            total, free = memory.total // MIB, memory.free // MIB
            print(
                f"<mig_device><index>{at}</index><fb_memory_usage><total>{total} MiB</total>"
                f"<free>{free} MiB</free></fb_memory_usage></mig_device>"
            )
        print("</mig_devices></gpu>")
    print("</nvidia_smi_log>")


def parts(handle: Any) -> Iterator[tuple[int, Any]]:
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            yield number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError_NotFound:
            continue


def figure(ask: Any, *arguments: Any) -> Any:
    try:
        return ask(*arguments)
    except nvml.NVMLError:
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
