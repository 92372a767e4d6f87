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
    r"""out\ of\ memory              # CUDA and HIP (cudaErrorMemoryAllocation), MPS, OpenVINO, OpenCL
      | (can't|cannot)\ allocate\ memory  # torch's DefaultCPUAllocator; ENOMEM
      | not\ enough\ memory          # torch's DefaultCPUAllocator elsewhere
      | std::bad_alloc
      | (failed|unable)\ to\ allocate
      | STATUS_ALLOC_FAILED          # cuBLAS, cuDNN, cuFFT (CUFFT_ALLOC_FAILED), cuSOLVER, cuSPARSE
      | CUFFT_ALLOC_FAILED
      | CL_OUT_OF_RESOURCES | CL_MEM_OBJECT_ALLOCATION_FAILURE
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Errors after which "the process must be terminated and relaunched" (CUDA Runtime API, error types), and those that
# say that the device itself is gone or broken (the same page; NVIDIA's Xid errors).
_STICKY = re.compile(
    r"""illegal\ (memory\ access|address|instruction|barrier)
      | misaligned\ address
      | (invalid|wrong)\ address\ space | operation\ not\ supported\ on\ global/shared\ address\ space
      | invalid\ program\ counter
      | hardware\ stack\ error
      | unspecified\ launch\ failure
      | device-side\ assert
      | launch\ timed\ out
      | uncorrectable\ (ecc|nvlink)
      | contained\ .*error | contained\ memory
      | external\ device\ error
      | \bxid\b
      | (gpu|device)\ (is\ lost|has\ fallen\ off\ the\ bus)
      | no\ cuda-capable\ device | no\ nvidia\ driver
      | device\S*\ (is/are|are|is)\ busy\ or\ unavailable
      | cuda\ error:\ (unknown\ error|initialization\ error|driver\ shutting\ down|context\ is\ destroyed)
      | (CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_INITIALIZED)
      | NCCL\ error
    """,
    re.IGNORECASE | re.VERBOSE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or of the host ran out: less at once may fit. Never so for a sticky error."""
    return not is_sticky(error) and any(_memory(one) for one in _chain(error))


def is_sticky(error: BaseException) -> bool:
    """Whether the device is of no more use to this process: it must end, so that another starts clean."""
    return any(isinstance(one, RuntimeError) and _STICKY.search(_said(one)) is not None for one in _chain(error))


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
