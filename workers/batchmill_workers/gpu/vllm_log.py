"""What vLLM and its processes write, passed on, while the last lines are kept: some causes stand nowhere else."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque

_KEPT_LINES = 400
_PROGRESS = "% Completed"  # vLLM's bar for the weights


class Log:
    """Standard output and error of this process and of those that it starts, read line by line by a thread.

    Both go on to standard error: a worker's standard output is for facts. Lines are whole only at a line feed.
    """

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=_KEPT_LINES)
        self._onward = os.dup(2)
        ours, theirs = os.pipe()
        sys.stdout.flush()
        for standard in (1, 2):
            os.dup2(theirs, standard)
        os.close(theirs)
        self._thread = threading.Thread(target=self._read, args=(ours,), name="vllm log", daemon=True)
        self._thread.start()

    def lines(self, last_s: float = math.inf) -> list[str]:
        """The last lines, oldest first; those of the last seconds, where these are given."""
        now = time.monotonic()
        return [line for at, line in list(self._lines) if now - at <= last_s]

    def close(self) -> None:
        """Lets what this process wrote so far through; what it writes from here on goes straight to standard error."""
        for standard in (1, 2):
            os.dup2(self._onward, standard)
        self._thread.join(1.0)  # a process that vLLM left behind may hold the other end

    def _read(self, source: int) -> None:
        with os.fdopen(source, errors="replace") as pipe, os.fdopen(os.dup(self._onward), "w") as onward:
            for line in pipe:
                if _PROGRESS in line:
                    continue
                self._lines.append((time.monotonic(), line.rstrip("\n")))
                onward.write(line)
                onward.flush()
