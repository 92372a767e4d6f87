"""What a catalogue entry may say for a server of the user's own, and how its command is filled in."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu.server_options import ServerOptions, fill, named_places

COMMAND = "vllm serve {model} --port {port}"
PLACES = {"host": "127.0.0.1", "port": "8123", "model": "org/m", "source": "/m", "device": "cuda:0", "gpus": "2"}


def parse(**options: Any) -> ServerOptions:
    return ServerOptions.parse({"command": COMMAND, **options}, model="x")


def test_a_command_is_split_as_a_shell_would_and_a_list_is_taken_as_it_is() -> None:
    text = parse(command="serve --name 'two words' {port}")
    words = parse(command=["serve", "--name", "two words", "{port}"])

    assert text.command == words.command == ("serve", "--name", "two words", "{port}")


def test_places_are_filled_in_and_other_braces_stay() -> None:
    filled = fill('{model}:{port} {"a": {"b": 1}} {} {Port}', PLACES)

    assert filled == 'org/m:8123 {"a": {"b": 1}} {} {Port}'
    assert named_places(["{host}", "{port}{model}", "{"]) == {"host", "port", "model"}


def test_the_port_may_stand_in_a_variable_or_be_fixed() -> None:
    in_env = parse(command="ollama serve", env={"OLLAMA_HOST": "{host}:{port}"})
    fixed = parse(command="ollama serve", port=11434)

    assert in_env.port is None
    assert fixed.port == 11434
    assert parse(stop_signal="SIGINT").signal_number == signal.SIGINT


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"command": []}, "command is .*; it must be a text or a list of texts"),
        ({"command": "serve 'open"}, "it must be a command as in a shell"),
        ({"command": [1]}, "it must be a text or a list of texts"),
        ({"command": "serve --port {prot}"}, r"\{prot\} is not a placeholder; did you mean 'port'\?"),
        ({"command": "serve"}, r"neither command nor env has \{port\}"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "without CUDA_VISIBLE_DEVICES, which --devices sets"),
        ({"env": {"A": 1}}, "it must be a table of texts"),
        ({"port": 0}, "it must be a whole number from 1 to 65535"),
        ({"port": True}, "it must be a whole number from 1 to 65535"),
        ({"ready_path": "health"}, "it must be a path such as /v1"),
        ({"base_path": "/v1/"}, "it must be a path such as /v1"),
        ({"capacity_rows": 0}, "it must be a whole number from 1"),
        ({"start_timeout_s": 0}, "it must be a number of seconds above 0"),
        ({"stop_signal": "TERM"}, "it must be the name of a signal, such as SIGINT"),
        ({"warm_up": "yes"}, "it must be true or false"),
        ({"log_file": ""}, "it must be a text"),
        ({"capcity_rows": 4}, "'capcity_rows' is not an option of server; did you mean 'capacity_rows'?"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_with_what_it_must_be(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"\[models\.x\] options: .*{sentence}"):
        parse(**options)


def test_a_server_without_a_command_is_told_what_one_looks_like() -> None:
    with pytest.raises(ConfigurationError, match=r'command is missing; .*command = "vllm serve'):
        ServerOptions.parse({}, model="x")
