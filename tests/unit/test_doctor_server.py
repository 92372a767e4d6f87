"""What the doctor says of a model that a server of the user's own serves."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_ops.doctor_check import Check, Level
from batchmill_ops.doctor_models import check_model


def check(source: str | None = None, **options: Any) -> Check:
    return check_model(ModelEntry(name="m", engine="server", source=source, options=options))


def test_a_server_that_could_be_started_is_ok() -> None:
    found = check(command=[sys.executable, "{port}", "{source}"], source="hf:org/name")

    assert found.level is Level.OK
    assert sys.executable in found.detail


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": "no-such-server {port}"}, "its command 'no-such-server' is not to be found"),
        ({"command": f"{sys.executable} {{port}} {{source}}"}, "no source is given"),
        ({"command": f"{sys.executable} {{port}} {{source}}", "source": "/no/such/file"}, "no such file or folder"),
        ({"command": f"{sys.executable} {{port}}", "capcity_rows": 2}, "did you mean 'capacity_rows'?"),
    ],
    ids=["command", "no source", "source", "option"],
)
def test_a_server_that_cannot_be_started_is_told(options: dict[str, Any], words: str) -> None:
    found = check(**options)

    assert found.level is Level.FAIL
    assert words in f"{found.detail}; {found.advice}"


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = check(command=sys.executable, port=other.getsockname()[1])

    assert found.level is Level.WARN
    assert "somebody listens on its port" in found.detail
