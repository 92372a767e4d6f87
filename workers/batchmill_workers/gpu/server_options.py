"""What a catalogue entry may say under ``options`` for the engine ``server``."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

PLACES = ("host", "port", "model", "source", "device", "gpus")
_PLACE = re.compile(r"\{([a-z_]+)\}")
_PINNED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server is started, and where and when it is asked.

    ``command`` is a list of arguments, or one text split as a shell would (no shell runs). ``env`` are variables beside
    the worker's own. In both, ``{port}`` and the other ``PLACES`` are filled in. ``port`` None: a free one is chosen.
    ``ready_path`` answers 2xx once the server is ready; None: ``/health``, else ``base_path`` and ``/models``.
    ``capacity_rows`` is how many calls are in flight at most.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    ready_path: str | None = None
    base_path: str = "/v1"
    capacity_rows: int = 64
    start_timeout_s: float = 1800.0
    stop_timeout_s: float = 10.0
    stop_signal: str = "SIGTERM"
    warm_up: bool = True
    log_file: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> ServerOptions:
        """Raises ConfigurationError naming the option that is unknown, missing or has the wrong kind of value."""
        where = f"[models.{model}] options"
        names = [one.name for one in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise ConfigurationError(f"{where}: {name!r} is not an option of server{nearest(name, names)}")
            wrong = _CHECKS[name](value)
            if wrong:
                raise ConfigurationError(f"{where}: {name} is {value!r}; it must be {wrong}")
        command = _words(options.get("command", ()))
        if not command:
            raise ConfigurationError(
                f"{where}: command is missing; give what starts the server, such as "
                'command = "vllm serve {model} --host {host} --port {port}"'
            )
        found = cls(**{**options, "command": command})
        _check_places(found, where)
        return found

    @property
    def texts(self) -> tuple[str, ...]:
        """Everything in which places are filled in."""
        return (*self.command, *self.env.values())

    @property
    def signal_number(self) -> int:
        return signal.Signals[self.stop_signal].value


def fill(text: str, places: Mapping[str, str]) -> str:
    """``text`` with its places filled in; other braces, such as those of JSON, stay as they are."""
    return _PLACE.sub(lambda found: places[found[1]], text)


def named_places(texts: Sequence[str]) -> frozenset[str]:
    return frozenset(name for text in texts for name in _PLACE.findall(text))


def _check_places(options: ServerOptions, where: str) -> None:
    named = named_places(options.texts)
    for name in sorted(named - set(PLACES)):
        raise ConfigurationError(f"{where}: {{{name}}} is not a placeholder{nearest(name, PLACES)}")
    if options.port is None and "port" not in named:
        raise ConfigurationError(
            f"{where}: neither command nor env has {{port}}, so the server would not learn on which port to listen; "
            "put {port} where its port belongs, or set port to the one that it always takes"
        )


def _words(command: Any) -> tuple[str, ...]:
    return tuple(shlex.split(command)) if isinstance(command, str) else tuple(command)


def _command(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            return None if shlex.split(value) else "a command"
        except ValueError as fault:
            return f"a command as in a shell ({fault})"
    fits = isinstance(value, list | tuple) and value and all(isinstance(word, str) for word in value)
    return None if fits else "a text or a list of texts"


def _variables(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        return 'a table of texts, such as { OLLAMA_HOST = "{host}:{port}" }'
    pinned = next((name for name in _PINNED if name in value), None)
    return None if pinned is None else f"without {pinned}, which --devices sets for each slot"


def _whole(least: int, most: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        return None if fits else f"a whole number from {least} to {most}"

    return check


def _seconds(value: Any) -> str | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    return None if fits else "a number of seconds above 0"


def _path(value: Any) -> str | None:
    fits = isinstance(value, str) and _PATH.fullmatch(value)
    return None if fits else "a path such as /v1, without a slash at its end"


def _signal(value: Any) -> str | None:
    fits = isinstance(value, str) and value in signal.Signals.__members__
    return None if fits else "the name of a signal, such as SIGINT"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a text"


_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "command": _command,
    "env": _variables,
    "port": _whole(1, 65535),
    "ready_path": _path,
    "base_path": _path,
    "capacity_rows": _whole(1, 65536),
    "start_timeout_s": _seconds,
    "stop_timeout_s": _seconds,
    "stop_signal": _signal,
    "warm_up": _flag,
    "log_file": _text,
}
