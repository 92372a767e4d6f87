"""The check of a model that a server of the user's own serves: its options, its command, its source, its port."""

from __future__ import annotations

import shutil
import socket

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.server_options import ServerOptions, named_places
from batchmill_workers.gpu.sources import resolve_source

from .doctor_check import Check, fail, ok, refused, warn

_HUB = "hf:"
_HOST = "127.0.0.1"


def check_server(model: ModelEntry) -> Check:
    """Whether the server could be started here; it is not."""
    name = f"model {model.name}"
    try:
        options = ServerOptions.parse(model.options, model=model.name)
        if "source" in named_places(options.texts):
            _check_source(model)
    except ConfigurationError as fault:
        return refused(name, fault)
    program = options.command[0]
    if not named_places([program]) and shutil.which(program) is None:
        return fail(name, f"its command {program!r} is not to be found", "install it, or give its path in command")
    if options.port is not None and _somebody_listens(options.port):
        return warn(name, f"somebody listens on its port {options.port}", "fine if that is its own worker's server")
    return ok(name, f"server, by {program}")


def _check_source(model: ModelEntry) -> None:
    if model.source is None:
        raise ConfigurationError("its command has {source}, but no source is given; add source beside engine")
    if not model.source.startswith(_HUB):  # which is looked up when it is loaded
        resolve_source(model.source)


def _somebody_listens(port: int) -> bool:
    with socket.socket() as ours:
        ours.settimeout(1.0)
        return ours.connect_ex((_HOST, port)) == 0
