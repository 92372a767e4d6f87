"""What an engine's error says of its device: memory ran out, which a smaller batch cures, or it needs a new process.

Errors are told by the sentences that CUDA, torch, OpenVINO and the C library document, so that torch need not be there.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

# torch appends hints to every error of CUDA, and one of them names device-side assertions.
_HINTS = "CUDA kernel errors might"

_MEMORY = re.compile(
    r"""out[ _]of[ _]memory          # CUDA (CUDA_ERROR_OUT_OF_MEMORY too) and HIP, MPS, OpenVINO, OpenCL
      | (can't|cannot)\ allocate\ memory  # torch's DefaultCPUAllocator; ENOMEM
      | not\ enough\ memory          # torch's DefaultCPUAllocator elsewhere
      | std::bad_alloc
      | (failed|unable)\ to\ allocate
      | STATUS_ALLOC_FAILED          # cuBLAS, cuDNN, cuFFT (CUFFT_ALLOC_FAILED), cuSOLVER, cuSPARSE
      | CUFFT_ALLOC_FAILED
      | CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED
      | NVML_SUCCESS\ ==\ .*CUDACachingAllocator  # torch asks NVML who holds the memory, which is not there
      | CL_OUT_OF_RESOURCES | CL_MEM_OBJECT_ALLOCATION_FAILURE
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Errors after which "the process must be terminated and relaunched" (CUDA Runtime API, error types). What ran then may
# have been their cause.
_STICKY = re.compile(
    r"""illegal\ (memory\ access|address|instruction|barrier)
      | misaligned\ address
      | (invalid|wrong)\ address\ space | operation\ not\ supported\ on\ global/shared\ address\ space
      | invalid\ program\ counter
      | hardware\ stack\ error
      | unspecified\ launch\ failure
      | device-side\ assert
      | launch\ timed\ out
      | \bxid\b                      # NVIDIA's driver: the number says what happened
      | cuda\ error:\ (unknown\ error|context\ is\ destroyed)
      | (CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(EXECUTION_FAILED|MAPPING_ERROR|NOT_INITIALIZED)
      | (CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_INTERNAL_ERROR(?!_(DEVICE|HOST)_ALLOCATION)
      | NCCL\ error
    """,
    re.IGNORECASE | re.VERBOSE,
)
# The device itself is gone or broken (the same page; NVML's NVML_ERROR_GPU_IS_LOST): no row can be the cause.
_LOST = re.compile(
    r"""uncorrectable\ (ecc|nvlink)
      | contained\ .*error
      | external\ device\ error
      | (gpu|device)\ (is\ lost|has\ fallen\ off\ the\ bus)
      | no\ cuda-capable\ device | no\ nvidia\ driver
      | device\S*\ (is/are|are|is)\ busy\ or\ unavailable
      | cuda\ error:\ (initialization\ error|driver\ shutting\ down|system\ not\ yet\ initialized)
    """,
    re.IGNORECASE | re.VERBOSE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host ran out: less at once may fit. Never so for a sticky error."""
    return not is_sticky(error) and any(_memory(one) for one in _chain(error))


def is_sticky(error: BaseException) -> bool:
    """Whether the device is of no more use to this process: it must end, so that another starts clean."""
    return _says(_STICKY, error) or is_device_lost(error)


def is_device_lost(error: BaseException) -> bool:
    """Whether the device itself is at fault, so that no chunk must be blamed for the end of the process.

    Such an error is answered with ``failure(number, "engine_down", …)`` for every row before the process ends; any other
    sticky one is left to end the process, since halving has to find the row that may have caused it.
    """
    return _says(_LOST, error)


def _says(pattern: re.Pattern[str], error: BaseException) -> bool:
    return any(isinstance(one, RuntimeError) and pattern.search(_said(one)) is not None for one in _chain(error))


def _memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):  # numpy's too
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _MEMORY.search(_said(error)) is not None


def _said(error: BaseException) -> str:
    return str(error).partition(_HINTS)[0]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__
