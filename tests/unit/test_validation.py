"""Answers are checked against what was asked for, and made fit to be stored."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.errors import CallState, ConfigurationError, InvalidOutput, InvalidRequest
from batchmill_core.request import Completion, RowStatus
from batchmill_core.usage import Usage
from batchmill_workers.validation import check_output, compile_schema, sanitize, status_of

LABEL = {"type": "object", "properties": {"label": {"type": "string"}}, "required": ["label"]}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "text",
    [
        '{"label": "positive"}',
        ' \n{"label": "positive"}\n ',
        '```json\n{"label": "positive"}\n```',
        '```\n{"label": "positive"}\n```\n',
        '```JSON {"label": "positive"}```',
        '```{"label": "positive"}```',
        '~~~~json\r\n{"label": "positive"}\r\n~~~~',
    ],
)
def test_a_fence_around_the_whole_answer_is_unwrapped(text: str) -> None:
    value, stored = check_output(text, compile_schema(LABEL))

    assert value == {"label": "positive"}
    assert stored == '{"label": "positive"}'


def test_backticks_inside_a_json_string_are_data() -> None:
    value, _ = check_output('```json\n{"label": "use ```x```"}\n```', compile_schema(LABEL))

    assert value == {"label": "use ```x```"}


@pytest.mark.parametrize(
    "text",
    ["", "positive", '{"label": 3}', "{}", "[]", "null", '{"label": "cut', "NaN", "```", "``````", '```json\n{"la'],
)
def test_an_answer_that_breaks_the_schema_is_invalid_and_keeps_its_text_and_usage(text: str) -> None:
    usage = Usage(input=40, output=3)

    with pytest.raises(InvalidOutput) as caught:
        check_output(text, compile_schema(LABEL), usage=usage)

    assert caught.value.raw == text
    assert caught.value.call_state is CallState.SETTLED


def test_raw_text_of_an_invalid_answer_is_bounded() -> None:
    with pytest.raises(InvalidOutput) as caught:
        check_output("x" * 10_000, None)

    assert len(caught.value.raw or "") == 2_000


def test_json_nested_too_deep_is_invalid_not_a_crash() -> None:
    with pytest.raises(InvalidOutput):
        check_output("[" * 100_000, None)


@pytest.mark.parametrize("suffix", ["", ', "b": "\\u0000"'])
def test_long_integers_keep_their_digits_in_the_stored_text(suffix: str) -> None:
    _, stored = check_output(f'{{"a": 123456789012345678901234567890{suffix}}}', None)

    assert "123456789012345678901234567890" in stored


def test_escaped_nul_and_lone_surrogates_are_replaced_in_value_and_text() -> None:
    value, stored = check_output(r'{"a\u0000": ["\ud83d", "\ud83d\ude00", 1]}', None)

    assert value == {"a\ufffd": ["\ufffd", "\U0001f600", 1]}
    assert json.loads(stored) == value


def test_references_are_never_fetched() -> None:
    validator = compile_schema({"$ref": "http://127.0.0.1:9/schema.json"})

    with pytest.raises(InvalidRequest, match="refers to something that is not in it"):
        check_output("1", validator)


def test_references_within_the_schema_work() -> None:
    validator = compile_schema({"$defs": {"n": {"type": "integer"}}, "items": {"$ref": "#/$defs/n"}})

    assert check_output("[1, 2]", validator)[0] == [1, 2]


@pytest.mark.parametrize("schema", [{"type": "strin"}, {"pattern": "("}, {"patternProperties": {"(": {}}}])
def test_a_schema_that_is_none_is_refused(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="not a JSON schema"):
        compile_schema(schema)


def test_equal_schemas_share_one_validator() -> None:
    assert compile_schema(LABEL) is compile_schema(json.loads(json.dumps(LABEL)))


@given(JSON)
def test_every_json_answer_comes_back_as_it_is_fenced_or_not(value: object) -> None:
    text = json.dumps(value)

    assert check_output(text, None)[0] == value
    assert check_output(f"```json\n{text}\n```", None)[0] == value


@given(st.text(st.characters(codec=None, categories=None), max_size=50))
def test_sanitized_text_can_be_stored_and_is_stable(text: str) -> None:
    clean, changed = sanitize(text)

    clean.encode("utf-8")
    assert "\x00" not in clean
    assert changed == (clean != text)
    assert sanitize(clean) == (clean, False)


@pytest.mark.parametrize(
    ("text", "clean"),
    [("a\x00b", "a\ufffdb"), ("é\x00", "é\ufffd"), ("a\ud800", "a\ufffd"), ("\ud83d\ude00", "\U0001f600")],
)
def test_each_bad_character_becomes_one_replacement_character(text: str, clean: str) -> None:
    assert sanitize(text) == (clean, True)


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        (Completion(text="x", finish_reason="stop"), RowStatus.OK),
        (Completion(text="x", finish_reason=None), RowStatus.OK),
        (Completion(text=None, finish_reason="length"), RowStatus.TRUNCATED),
        (Completion(text=None, finish_reason="content_filter"), RowStatus.FILTERED),
        (Completion(text=None, refusal="no", finish_reason="stop"), RowStatus.REFUSED),
    ],
)
def test_the_status_of_a_completion_follows_how_it_finished(completion: Completion, status: RowStatus) -> None:
    assert status_of(completion) is status
