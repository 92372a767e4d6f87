"""Flower as a child process: started, started again when it died, ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time

from batchmill_core.errors import ConfigurationError
from batchmill_core.settings import HOME_VARIABLE, Settings
from batchmill_workers.parentage import PARENT_FD_VARIABLE

from .flower import Place
from .flower_folder import FlowerFolder
from .stack_folder import tail

log = logging.getLogger(__name__)

_START_S = 60.0
_END_S = 10.0
_POLL_S = 0.05
_FIRST_BACKOFF_S = 1.0
_MOST_BACKOFF_S = 60.0
_STEADY_S = 60.0


class FlowerChild:
    """One Flower. It watches a pipe to this process and ends when that closes, so that a kill leaves none behind."""

    def __init__(self, settings: Settings, place: Place) -> None:
        self._settings = settings
        self._place = place
        self._broker_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = os.pipe()  # the child holds the first and sees the second close
        self._started = self._start_at = self._backoff_s = 0.0
        self._log_file = settings.state_folder / "logs" / "flower.log"

    def start(self, broker_url: str) -> None:
        """Returns once Flower listens. Raises ConfigurationError with what it said when it does not."""
        begin = self._log_file.stat().st_size if self._log_file.exists() else 0
        process = self._spawn(broker_url)
        folder = FlowerFolder(path=self._settings.state_folder)
        deadline = time.monotonic() + _START_S
        while (running := folder.running()) is None or running.pid != process.pid:
            if process.poll() is not None or time.monotonic() > deadline:
                said = tail(self._log_file, begin=begin).splitlines()[-1:]
                self.stop()
                raise ConfigurationError(said[0] if said else f"Flower does not start; see {self._log_file}")
            time.sleep(_POLL_S)

    def _spawn(self, broker_url: str) -> subprocess.Popen[bytes]:
        place, settings = self._place, self._settings
        command = [sys.executable, "-P", "-m", "batchmill_ops.flower_process", str(settings.home)]
        with self._log_file.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, str(place.port), place.address, place.prefix],
                cwd=settings.home,
                env={
                    **os.environ,
                    HOME_VARIABLE: str(settings.home),
                    "BATCHMILL_BROKER_URL": broker_url,
                    PARENT_FD_VARIABLE: str(self._ends[0]),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(self._ends[0],),
                start_new_session=True,
            )
        self._broker_url, self._started = broker_url, time.monotonic()
        return self._process

    def keep(self, broker_url: str) -> None:
        """Starts Flower again when it has died, or when the broker has moved. Called often; does not wait for it."""
        if self._process is not None and self._process.poll() is None:
            if broker_url != self._broker_url:
                log.info("flower_follows_broker")
                self._process.terminate()
            return
        if self._process is not None:
            steady = time.monotonic() - self._started > _STEADY_S
            self._backoff_s = 0.0 if steady else min(max(2 * self._backoff_s, _FIRST_BACKOFF_S), _MOST_BACKOFF_S)
            self._start_at = time.monotonic() + self._backoff_s
            log.error("flower_died code=%s starts_again_s=%.0f", self._process.returncode, self._backoff_s)
            self._process = None
        if time.monotonic() >= self._start_at:
            self._spawn(broker_url)

    def stop(self) -> None:
        """Ends Flower, which saves its history. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
