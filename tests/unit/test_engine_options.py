"""The options of every engine are checked by one set of rules: a value that does not fit is named, whatever it is."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.errors import ConfigurationError, InvalidRequest
from batchmill_workers.gpu.engine_options import rules_of, short
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.sampling import Sampling
from batchmill_workers.gpu.server_options import ServerOptions
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.vllm_options import VllmOptions
from batchmill_workers.gpu.vllm_sampling import split_params

KINDS: Mapping[str, Any] = {
    "openvino": OpenVinoOptions,
    "transformers": TransformersOptions,
    "vllm": VllmOptions,
    "server": ServerOptions,
}
NEEDED: Mapping[str, Mapping[str, Any]] = {"server": {"command": "serve {port}"}}
HUGE = int("f" * 5000, 16)  # TOML may write it, and Python does not print it

texts = st.text(max_size=12) | st.sampled_from(
    ["", "\0", "auto", "f16", "float16", "SIGINT", "/v1", "/v1/", "{port}", "a 'b", "~", "0", "true"]
)
scalars = (
    st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400])
    | st.floats()
    | texts
    | st.datetimes()
    | st.dates()
    | st.times()
)
toml_values = st.recursive(
    scalars, lambda one: st.lists(one, max_size=4) | st.dictionaries(texts, one, max_size=4), max_leaves=8
)
choices = st.sampled_from([(engine, name) for engine, kind in KINDS.items() for name in rules_of(kind)])


def refusal(engine: str, options: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigurationError) as refused:
        KINDS[engine].parse({**NEEDED.get(engine, {}), **options}, model="m")
    return str(refused.value)


@given(choices, toml_values)
def test_any_value_of_any_option_is_read_or_refused_by_name(choice: tuple[str, str], value: Any) -> None:
    engine, name = choice
    said = ""
    try:
        read = getattr(KINDS[engine].parse({**NEEDED.get(engine, {}), name: value}, model="m"), name)
    except ConfigurationError as error:
        said = str(error)

    if said:
        assert re.match(rf"\[models\.m\] options: .*{name}", said)
        assert len(said) < 1000
    else:
        assert read == value or name == "command"
        assert isinstance(read, bool) == isinstance(value, bool)
        orjson.dumps(read)  # it goes to the engine's process as a message


@given(st.sampled_from(sorted(KINDS)), st.text(max_size=12), toml_values)
def test_any_other_name_is_no_option(engine: str, name: str, value: Any) -> None:
    if name in rules_of(KINDS[engine]):
        return

    assert repr(name) in refusal(engine, {name: value})


@given(st.dictionaries(st.sampled_from(["min_tokens", "bad_words", "logit_bias", "lora", "stop", "seed"]), toml_values))
def test_any_value_of_a_parameter_is_read_or_refused_by_name(params: dict[str, Any]) -> None:
    said = ""
    try:
        sampling, only_vllm = split_params(params)
    except InvalidRequest as error:
        said = str(error)
    else:
        orjson.dumps({**sampling.as_dict(), **only_vllm})

    assert not said or any(name in said for name in params)


@pytest.mark.parametrize("engine", KINDS)
def test_every_option_has_a_rule_that_its_default_keeps(engine: str) -> None:
    found = KINDS[engine].parse(NEEDED.get(engine, {}), model="m")

    for name, rule in rules_of(KINDS[engine]).items():
        default = getattr(found, name)
        assert default in (None, "") or rule.lacks(default) is None, name


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("openvino", {"cache_gb": -1}, "cache_gb is -1; it must be a whole number of at least 0"),
        ("openvino", {"threads": True}, "threads is True; it must be a whole number of at least 0"),
        ("openvino", {"threads": 2**63}, "it must be a whole number from 0 to 9223372036854775807"),
        ("transformers", {"max_rows": 2.0}, "max_rows is 2.0; it must be a whole number of at least 0"),
        ("transformers", {"chat_template": ""}, "chat_template is ''; it must be a text, and not an empty one"),
        ("vllm", {"gpu_memory_utilization": float("nan")}, "is nan; it must be a number above 0 and at most 1"),
        (
            "vllm",
            {"cpu_offload_gb": float("inf")},
            "it must be a number of GiB of at least 0 and at most 1000000000000",
        ),
        ("vllm", {"cpu_offload_gb": HUGE}, "it must be a number of GiB of at least 0"),
        ("vllm", {"lora": {"": "a"}}, "a table of names and sources, .*; '' cannot be a name"),
        ("vllm", {"lora": {"sql": {"path": "a"}}}, r"; 'sql' is \{'path': 'a'\}"),
        ("vllm", {"engine_args": {"since": datetime.date(2026, 1, 1)}}, r"; 'since' is datetime\.date"),
        ("vllm", {"engine_args": {"x": {"y": [float("nan")]}}}, r"; 'x' is \{'y': \[nan\]\}"),
        ("server", {"start_timeout_s": 1e300}, "a number of seconds above 0 and at most 31536000"),
        ("server", {"env": {"A=B": "c"}}, "'A=B' cannot be a name"),
        ("server", {"command": ["", "x"]}, "its first word a program"),
        ("server", {"log_file": "a\0b"}, "log_file is 'a.x00b'; it must be a text"),
        ("vllm", {"chek_memory": False}, "did you mean 'check_memory'"),
    ],
)
def test_what_does_not_fit_is_told_with_its_value_and_what_it_must_be(
    engine: str, options: dict[str, Any], said: str
) -> None:
    assert re.search(said, refusal(engine, options))


@pytest.mark.parametrize(
    "options",
    [
        {"env": {"TOKEN": "very-secret", "A": 1}},
        {"env": "TOKEN=very-secret"},
        {"env": {"TOKEN": "very-secret\0"}},
        {"command": "serve --key very-secret 'open"},
        {"command": ["serve", "--key", "very-secret", 1]},
    ],
    ids=str,
)
def test_a_key_in_a_servers_command_or_variables_is_in_no_message(options: dict[str, Any]) -> None:
    assert "very-secret" not in refusal("server", options)


def test_a_float_may_be_written_as_a_whole_number() -> None:
    parsed = VllmOptions.parse(tomllib.loads("gpu_memory_utilization = 1\ncpu_offload_gb = 4"), model="m")

    assert (parsed.gpu_memory_utilization, parsed.cpu_offload_gb) == (1.0, 4.0)
    assert isinstance(parsed.gpu_memory_utilization, float)
    assert Sampling.from_params({"temperature": 1}).temperature == 1.0


def test_a_long_or_deep_value_is_shown_short() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    assert len(short("x" * 10_000)) < 100
    assert len(short(deep)) < 100
    assert len(short(HUGE)) < 100
