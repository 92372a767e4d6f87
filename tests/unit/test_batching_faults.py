"""What errors of engines and drivers are taken for. The texts are those that the libraries print."""

from __future__ import annotations

import errno

import pytest

from batchmill_workers.gpu.batching_faults import is_device_lost, is_out_of_memory, is_sticky

HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)


class OutOfMemoryError(RuntimeError):
    """As torch has it."""


class AcceleratorError(RuntimeError):
    """As torch has it."""


MEMORY = [
    MemoryError(),
    MemoryError("Unable to allocate 8.00 GiB for an array"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 5.28 GiB is "
        "free. Process 1 has 134.4 GiB memory in use."
    ),
    OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 96.00 KB)"),
    RuntimeError("CUDA error: out of memory" + HINTS),
    AcceleratorError("CUDA error: out of memory" + HINTS),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED: CUDA driver error: out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4000000000 bytes."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    RuntimeError(
        'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/'
        'CUDACachingAllocator.cpp":1090, please report a bug to PyTorch.'
    ),
    RuntimeError("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    RuntimeError("std::bad_alloc"),
    RuntimeError("Exception from src/inference/src/cpp/infer_request.cpp:223:\n[GPU] CL_OUT_OF_RESOURCES"),
]

STICKY = [
    RuntimeError("CUDA error: an illegal memory access was encountered" + HINTS),
    AcceleratorError("CUDA error: an illegal memory access was encountered" + HINTS),
    RuntimeError("CUDA error: an illegal instruction was encountered" + HINTS),
    RuntimeError("CUDA error: misaligned address" + HINTS),
    RuntimeError("CUDA error: invalid program counter" + HINTS),
    RuntimeError("CUDA error: hardware stack error" + HINTS),
    RuntimeError("CUDA error: operation not supported on global/shared address space" + HINTS),
    RuntimeError("CUDA error: device-side assert triggered" + HINTS),
    RuntimeError("CUDA error: unspecified launch failure" + HINTS),
    RuntimeError("CUDA error: the launch timed out and was terminated" + HINTS),
    RuntimeError("CUDA error: unknown error" + HINTS),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    RuntimeError("NVRM: Xid (PCI:0000:65:00): 31, MMU Fault: ENGINE GRAPHICS"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error"),
]

LOST = [
    RuntimeError("CUDA error: uncorrectable ECC error encountered" + HINTS),
    RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution" + HINTS),
    RuntimeError("CUDA error: no CUDA-capable device is detected" + HINTS),
    RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable" + HINTS),
    RuntimeError("CUDA error: initialization error" + HINTS),
    RuntimeError("GPU is lost. Reboot the system to recover this GPU"),
    RuntimeError("NVRM: Xid (PCI:0000:65:00): 79, GPU has fallen off the bus."),
]

NEITHER = [
    RuntimeError("CUDA error: invalid argument" + HINTS),
    RuntimeError("CUDA error: invalid configuration argument" + HINTS),
    RuntimeError("CUDA error: no kernel image is available for execution on the device" + HINTS),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1"),
    ValueError("a prompt that speaks of CUDA out of memory and an illegal memory access"),
    IndexError("index out of range in self"),
    OSError(errno.ENOENT, "No such file or directory"),
    RuntimeError("max_id out of range"),
    RuntimeError(""),
    KeyError("xid"),
]


def said(error: BaseException) -> str:
    return f"{type(error).__name__}-{str(error).splitlines()[0][:60] if str(error) else ''}"


@pytest.mark.parametrize("error", MEMORY, ids=said)
def test_memory_ran_out(error: BaseException) -> None:
    assert is_out_of_memory(error)
    assert not is_sticky(error)


@pytest.mark.parametrize("error", [*STICKY, *LOST], ids=said)
def test_the_device_needs_a_new_process(error: BaseException) -> None:
    assert is_sticky(error)
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("error", LOST, ids=said)
def test_the_device_itself_is_at_fault(error: BaseException) -> None:
    assert is_device_lost(error)


@pytest.mark.parametrize("error", [*STICKY, *MEMORY, *NEITHER], ids=said)
def test_a_row_may_be_at_fault(error: BaseException) -> None:
    assert not is_device_lost(error)


@pytest.mark.parametrize("error", NEITHER, ids=said)
def test_an_error_of_another_kind(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert not is_sticky(error)


def test_what_an_error_was_raised_from_counts() -> None:
    error = ValueError("could not build the batch")
    error.__cause__ = MemoryError()

    assert is_out_of_memory(error)


def test_torch_itself_is_told() -> None:
    torch = pytest.importorskip("torch", reason="torch is an extra")
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**50, dtype=torch.uint8)

    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
