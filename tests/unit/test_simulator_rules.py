"""What the simulated provider decides without a connection: its config, chance, limits, labels and JSON."""

from __future__ import annotations

import json
import statistics
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchmill_core.errors import ConfigurationError
from batchmill_ops.simulator import (
    LatencyShape,
    SimulatorConfig,
    parse_faults,
    parse_latency,
)
from batchmill_ops.simulator.chance import Chance
from batchmill_ops.simulator.command import main
from batchmill_ops.simulator.connection import HttpRequest
from batchmill_ops.simulator.limits import RateLimits, go_duration
from batchmill_ops.simulator.provider import Provider
from batchmill_ops.simulator.sentiment import sentiment
from batchmill_ops.simulator.structured import instance


@pytest.mark.parametrize(("text", "seconds"), [("100ms", 0.1), ("1.5s", 1.5), ("0", 0.0), (" 2 S ", 2.0), (".5s", 0.5)])
def test_latencies_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["100", "fast", "-1s", "1m", "", "1e3ms"])
def test_a_latency_without_a_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"100ms or 1\.5s"):
        parse_latency(text)


def test_faults_are_read_as_kind_and_probability() -> None:
    faults = parse_faults("429:0.05, 500:0.01,cut:.01,hang:0.001,")

    assert [(f.kind, f.probability) for f in faults] == [("429", 0.05), ("500", 0.01), ("cut", 0.01), ("hang", 0.001)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hnag:0.1", "did you mean 'hang'"),
        ("200:0.1", "neither an HTTP status from 400 to 599"),
        ("429", "has no probability"),
        ("429:often", "'often' is not a number"),
        ("429:1.5", "outside 0 to 1"),
        ("429:nan", "outside 0 to 1"),
        ("429:0.1,429:0.2", "given twice"),
        ("429:0.6,500:0.6", "sum to 1.2"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        parse_faults(text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"latency_s": -1.0}, "latency is -1"),
        ({"latency_jitter": -0.1}, "latency-jitter"),
        ({"latency_jitter": 2.0, "latency_shape": LatencyShape.UNIFORM}, "uniform"),
        ({"requests_per_minute": 0}, "rpm is 0"),
        ({"tokens_per_minute": -5}, "tpm is -5"),
        ({"kept_calls": -1}, "kept-calls is -1"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        SimulatorConfig(**given)


def test_the_key_is_not_shown_with_the_config() -> None:
    assert "sk-planted" not in repr(SimulatorConfig(api_key="sk-planted"))


def test_a_wrong_option_of_the_module_exits_with_2_and_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--latency", "soon"])

    assert code == 2
    assert "latency 'soon' is not a duration" in capsys.readouterr().err


@pytest.mark.parametrize("shape", list(LatencyShape))
def test_latencies_spread_around_their_mean(shape: LatencyShape) -> None:
    chance = Chance(SimulatorConfig(latency_s=0.2, latency_jitter=0.3, latency_shape=shape, seed=1))

    drawn = [chance.latency_s() for _ in range(5000)]

    assert min(drawn) > 0
    assert statistics.mean(drawn) == pytest.approx(0.2, rel=0.03)
    expected = 0.06 if shape is LatencyShape.LOGNORMAL else 0.06 / 3**0.5
    assert statistics.stdev(drawn) == pytest.approx(expected, rel=0.1)


def test_the_same_seed_meets_the_same_faults_whatever_the_latency() -> None:
    faults = parse_faults("429:0.2,cut:0.1")
    slow = Chance(SimulatorConfig(faults=faults, seed=7, latency_jitter=0.5))
    fast = Chance(SimulatorConfig(faults=faults, seed=7, latency_s=0.0))
    other = Chance(SimulatorConfig(faults=faults, seed=8))

    drawn = [[(chance.latency_s(), chance.fault())[1] for _ in range(2000)] for chance in (slow, fast, other)]

    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0].count("429") == pytest.approx(400, rel=0.2)
    assert drawn[0].count("cut") == pytest.approx(200, rel=0.25)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.35, "350ms"), (0.0001, "1ms"), (1, "1s"), (7.66, "7.66s"), (179.56, "2m59.56s"), (360, "6m0s"),
     (3600, "1h0m0s"), (0.9999, "1s")],
)  # fmt: skip
def test_durations_are_written_as_go_writes_them(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


def test_a_request_limit_refuses_with_the_wait_that_suffices() -> None:
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=None)
    passed = [limits.admit(tokens=1, now_s=100.0) for _ in range(60)]

    refused = limits.admit(tokens=1, now_s=100.0)

    assert passed == [None] * 60
    assert refused is not None
    assert refused.wait_s == pytest.approx(1.0)
    assert limits.admit(tokens=1, now_s=100.0 + refused.wait_s) is None


def test_a_call_that_one_limit_refuses_takes_nothing_from_the_other() -> None:
    limits = RateLimits(requests_per_minute=2, tokens_per_minute=100)
    limits.admit(tokens=90, now_s=0.0)

    refused = limits.admit(tokens=50, now_s=0.0)
    passed = limits.admit(tokens=10, now_s=0.0)

    assert refused is not None
    assert refused.name == "tokens"
    assert passed is None


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Absolutely love it, works perfectly.", "positive"),
        ("Broke after two days, want a refund.", "negative"),
        ("It arrived on Tuesday in a box.", "neutral"),
        ("This is not good", "negative"),
        ("Sehr zufrieden, klare Empfehlung!", "positive"),
        ("Leider kaputt, bin enttäuscht", "negative"),
        ("Très déçue, article cassé", "negative"),
        ("Lo recomiendo, excelente calidad", "positive"),
        ("Отличный товар, рекомендую", "positive"),
        ("质量很差,非常失望", "negative"),
        ("とても満足しています。おすすめ", "positive"),
        ("배송도 빠르고 정말 좋아요", "positive"),
        ("منتج ممتاز", "positive"),
        ("बहुत खराब", "negative"),
        ("5/5", "positive"),
        ("★ meh", "negative"),
        ("", "neutral"),
    ],
)
def test_reviews_are_labelled_by_their_words(text: str, label: str) -> None:
    assert sentiment(text) == label


SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["negative", "positive", "mixed"]},
        "topic": {"type": "string", "enum": ["price", "size"]},
        "why": {"type": "string", "maxLength": 5},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "confidence": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "recommend": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "string"}]},
        "author": {"$ref": "#/$defs/person"},
        "version": {"const": 3},
        "maybe": {"type": ["string", "null"]},
        "even": {"type": "integer", "multipleOf": 2, "minimum": 3},
        "both": {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
    },
    "required": ["label", "stars"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 30}, "friend": {"$ref": "#/$defs/person"}},
            "required": ["name"],
        }
    },
}


@pytest.mark.parametrize("label", ["positive", "negative", "neutral"])
def test_structured_answers_satisfy_their_schema(label: str) -> None:
    built = instance(SCHEMA, label=label, text="a review")

    jsonschema.validate(built, SCHEMA)
    assert set(built) == set(SCHEMA["properties"])  # type: ignore[call-overload]  # a dict of the test's own
    assert built["label"] == label or label == "neutral"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
MESSAGE = JSON | st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": JSON})
BODY = st.fixed_dictionaries(
    {"model": st.sampled_from(["sim-chat", "sim-embed"])},
    optional={
        "messages": JSON | st.lists(MESSAGE, min_size=1, max_size=3),
        "input": JSON,
        "max_tokens": JSON,
        "stream": JSON,
        "stream_options": JSON,
        "dimensions": st.integers(-1, 20) | JSON,
        "encoding_format": st.sampled_from(["float", "base64", "x", None]),
        "response_format": JSON,
    },
)
KEYWORDS = st.sampled_from(
    "type enum const properties items required anyOf oneOf allOf $ref minimum maximum exclusiveMinimum multipleOf "  # noqa: SIM905
    "minItems maxItems minLength maxLength".split()
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null", "#", "#/properties/a"])
ODD_SCHEMA = st.recursive(
    JSON | TYPES,
    lambda inner: st.dictionaries(KEYWORDS, inner | TYPES | st.lists(inner, max_size=3), max_size=5),
    max_leaves=15,
)


@given(BODY, st.sampled_from(["/v1/chat/completions", "/v1/embeddings"]))
def test_whatever_json_is_asked_there_is_an_answer(body: dict[str, Any], path: str) -> None:
    provider = Provider(SimulatorConfig(latency_s=0.0), now_s=lambda: 0.0)

    reply = provider.respond(HttpRequest("POST", path, {}, json.dumps(body).encode()))

    assert reply.parts[0].startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))


@given(st.dictionaries(KEYWORDS, ODD_SCHEMA, max_size=6))
@example({"type": "integer", "maximum": {}})
def test_whatever_schema_is_given_there_is_an_instance(schema: dict[str, Any]) -> None:
    built = instance(schema, label="positive", text="a")

    assert json.loads(json.dumps(built)) == built
