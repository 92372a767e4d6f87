"""What a worker process and whoever started it agree on: the pipe between them, the device, the exit code.

Imports nothing heavy, so that starting workers does not load what only workers need.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

log = logging.getLogger(__name__)

# Of sysexits.h. A worker that ends with another code has died: it is started again, after a pause that grows.
DOWN_EXIT_CODE = 69  # EX_UNAVAILABLE: its engine or the database cannot be had now
RENEW_EXIT_CODE = 75  # EX_TEMPFAIL: it has done enough; a fresh one is to start at once
UNFIT_EXIT_CODE = 78  # EX_CONFIG: starting again will not help
PARENT_FD_VARIABLE = "BATCHMILL_PARENT_FD"
DEVICE_VARIABLE = "BATCHMILL_DEVICE"
SLOTS_VARIABLE = "BATCHMILL_CHUNK_SLOTS"  # where it is not the number of Celery's threads


def watch_parent() -> None:
    """Drains this process when the parent that started it is gone: the pipe that it holds open then closes."""
    fd = os.environ.get(PARENT_FD_VARIABLE)
    if fd is None:
        return

    def wait() -> None:
        while os.read(int(fd), 1):
            continue
        log.warning("parent_gone; draining")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def exit_with(code: int, fault: BaseException) -> None:
    """Ends the process at once, with one sentence on stderr and a code that tells whoever started it what to do."""
    sys.stderr.write(f"batchmill worker: {fault}\n")
    sys.stderr.flush()
    os._exit(code)
