"""How a server is launched: its command filled in, a port that is free, its environment, and its last words if it fails."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError

from .listing import pin_by_numbers
from .server_life import HOST, LifeTerms, ServerLife
from .server_log import last_words, log_path, size_of
from .server_options import ServerOptions, fill, named_places
from .server_process import ServerLost, ServerProcess
from .sources import resolve_source

_PORT_TRIES = 3
_PORT_TAKEN = ("already in use", "EADDRINUSE")
_NOT_PASSED_ON = "BATCHMILL_"  # holds the addresses and passwords of the database and the broker


# A flag or a variable whose name ends as one of a secret, and what it is given.
_SECRET = re.compile(
    r"""((?:-{1,2}[\w-]*(?:key|token|secret|password)(?:=|\s+))|(?:\b\w*(?:key|token|secret|password)=))('[^']*'|"[^"]*"|\S+)""",
    re.IGNORECASE,
)


def shown(command: Sequence[str]) -> str:
    """The command as one would type it, without the keys and passwords in it."""
    return _SECRET.sub(r"\1***", shlex.join(command))


class Launcher:
    """Launches one model's server on one slot, time and again."""

    def __init__(self, model: ModelEntry, device: str, options: ServerOptions, *, call_timeout_s: float) -> None:
        self._model = model
        self._device = device
        self._options = options
        self._terms = LifeTerms(
            model=model.name,
            upstream=model.upstream,
            base_path=options.base_path,
            ready_path=options.ready_path,
            capacity_rows=options.capacity_rows,
            call_timeout_s=call_timeout_s,
            start_timeout_s=options.start_timeout_s,
            warm_up=options.warm_up,
        )
        self._source = ""
        self.log = Path()

    def prepare(self) -> None:
        """Finds the model's files and the place of the log. Blocks. Raises ConfigurationError."""
        name, source = self._model.name, self._model.source
        self.log = Path(self._options.log_file) if self._options.log_file else log_path(name, os.environ)
        if "source" not in named_places(self._options.texts):
            return
        if source is None:
            raise ConfigurationError(f"model {name}: its command has {{source}}, but no source is given")
        self._source = str(resolve_source(source))

    async def begin(self) -> ServerLife:
        """A server that is ready, on another port if somebody took the chosen one meanwhile.

        Raises ServerLost with the reason, the command and the server's last words.
        """
        for tries_left in reversed(range(_PORT_TRIES)):
            port = self._free_port()
            begin = size_of(self.log)
            try:
                return await self._begin_at(port)
            except ServerLost as fault:
                said = last_words(self.log, begin)
                taken = self._options.port is None and any(sign in said for sign in _PORT_TAKEN)
                if not (taken and tries_left):
                    ending = f"; its log {self.log} ends: {said}" if said else f"; its log {self.log} is empty"
                    raise ServerLost(f"{fault} (command: {shown(self._options.command)}){ending}") from fault
        raise AssertionError("unreachable")

    async def end(self, life: ServerLife) -> None:
        """Ends a server as its options say; returns when nothing of it is left. Idempotent."""
        await life.end(grace_s=self._options.stop_timeout_s, number=self._options.signal_number)

    async def _begin_at(self, port: int) -> ServerLife:
        places = self._places(port)
        command = [fill(word, places) for word in self._options.command]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
        await asyncio.to_thread(pin_by_numbers, inherited)  # `vllm serve` takes no UUIDs
        own = {name: fill(text, places) for name, text in self._options.env.items()}
        process = await ServerProcess.start(command, environment={**inherited, **own}, log=self.log)
        life = ServerLife(self._terms, process, port)
        try:
            await life.begin()
        except BaseException:  # cancelled as well
            await asyncio.shield(self.end(life))
            raise
        return life

    def _places(self, port: int) -> Mapping[str, str]:
        return {
            "host": HOST,
            "port": str(port),
            "model": self._model.upstream,
            "source": self._source,
            "device": self._device,
            "gpus": str(len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])),
        }

    def _free_port(self) -> int:
        fixed = self._options.port
        if fixed is None:
            with socket.create_server((HOST, 0)) as listener:
                return int(listener.getsockname()[1])
        if not _is_free(fixed):
            raise ServerLost(
                f"port {fixed} is taken by another program on this host; end that program, give another port, or leave "
                "port out and write {port} in the command"
            )
        return fixed


def _is_free(port: int) -> bool:
    """Whether nobody listens there; a port that a server left a moment ago is free."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
