"""What a catalogue entry may say under ``options`` for the engine ``server``."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import ConfigurationError

from .engine_options import FLAG, TEXT, Rule, every, number, parse_options, table_of, whole

PLACES = ("host", "port", "model", "source", "device", "gpus")
_PLACE = re.compile(r"\{([a-z_]+)\}")
_PINNED = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_YEAR_S = 365 * 24 * 3600.0


def _lacks_of_command(value: Any) -> str | None:
    if isinstance(value, str):
        try:
            words: Any = shlex.split(value)
        except ValueError as fault:
            return f"a command as in a shell ({fault})"
    else:
        words = value
    if not isinstance(words, list | tuple) or not all(_is_argument(word) for word in words):
        return "a text or a list of texts"
    return None if words and words[0] else "a text or a list of texts, and its first word a program"


def _is_argument(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _lacks_of_variables(value: Any) -> str | None:
    pinned = next((name for name in _PINNED if isinstance(value, Mapping) and name in value), None)
    return f"without {pinned}, which --devices sets for each slot" if pinned else _TEXTS.lacks(value)


_TEXTS = table_of(
    _is_argument,
    'a table of texts, such as { OLLAMA_HOST = "{host}:{port}" }',
    names=lambda name: bool(name) and "=" not in name and "\0" not in name,
    private=True,
)
_VARIABLES = Rule(lacks=_lacks_of_variables, private=True)
_COMMAND = Rule(
    lacks=_lacks_of_command,
    read=lambda value: tuple(shlex.split(value) if isinstance(value, str) else value),
    private=True,
    missing=('give what starts the server, such as command = "vllm serve {model} --host {host} --port {port}"'),
)
_SECONDS = number(0, _YEAR_S, above=True, unit="seconds")
_URL_PATH = every(
    lambda value: isinstance(value, str) and _PATH.fullmatch(value) is not None,
    "a path such as /v1, without a slash at its end",
)
_SIGNAL = every(
    lambda value: isinstance(value, str) and value in signal.Signals.__members__,
    "the name of a signal, such as SIGINT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the server is started, and where and when it is asked.

    ``command`` is a list of arguments, or one text split as a shell would (no shell runs). ``env`` are variables beside
    the worker's own. In both, ``{port}`` and the other ``PLACES`` are filled in. ``port`` None: a free one is chosen.
    ``ready_path`` answers 2xx once the server is ready; None: ``/health``, else ``base_path`` and ``/models``.
    ``capacity_rows`` is how many calls are in flight at most.
    """

    command: Annotated[tuple[str, ...], _COMMAND]
    env: Annotated[Mapping[str, str], _VARIABLES] = field(default_factory=dict)
    port: Annotated[int | None, whole(1, 65535)] = None
    ready_path: Annotated[str | None, _URL_PATH] = None
    base_path: Annotated[str, _URL_PATH] = "/v1"
    capacity_rows: Annotated[int, whole(1, 65536)] = 64
    start_timeout_s: Annotated[float, _SECONDS] = 1800.0
    stop_timeout_s: Annotated[float, _SECONDS] = 10.0
    stop_signal: Annotated[str, _SIGNAL] = "SIGTERM"
    warm_up: Annotated[bool, FLAG] = True
    log_file: Annotated[str | None, TEXT] = None

    @classmethod
    def parse(cls, options: Mapping[str, Any], *, model: str) -> ServerOptions:
        """Raises ConfigurationError naming the option that is unknown, missing or has a wrong value."""
        found = parse_options(cls, options, engine="server", model=model)
        _check_places(found, f"[models.{model}] options")
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
