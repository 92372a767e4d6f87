"""Ending the processes that an engine's process started and left behind, such as vLLM's own."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

_PATIENCE_S = 2.0
_LOOK_EVERY_S = 0.02
_TRACKER = "multiprocessing.resource_tracker"


def end_group(leader: int) -> None:
    """Ends the group of a process that is gone. What is ending by itself has 2 s for it; the rest is killed."""
    if not _ends(leader):
        kill_members(leader)
        if not _ends(leader):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)


def kill_members(leader: int) -> None:
    """Kills the processes of a group but for the caller's own, and for Python's resource tracker.

    The tracker ends by itself when they are gone, and then frees the shared memory that they could not: vLLM's over
    several devices holds hundreds of MiB, which no other process would ever free.
    """
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if pid != os.getpid() and os.getpgid(pid) == leader and not _is_tracker(pid):
                os.kill(pid, signal.SIGKILL)


def _ends(leader: int) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(_LOOK_EVERY_S)
    except ProcessLookupError:
        return True
    return False


def _is_tracker(pid: int) -> bool:
    return any(_TRACKER in part for part in psutil.Process(pid).cmdline())
