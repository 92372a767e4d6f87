"""Patterns of schemas: searched as Python's re does, and given up in time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema.validators import Draft4Validator, Draft7Validator, Draft202012Validator

from batchmill_core.errors import ConfigurationError, InvalidOutput
from batchmill_core.patterns import TooSlow, found
from batchmill_producers.answer_schema import check_schema
from batchmill_workers.schema_keywords import bounded, search_time
from batchmill_workers.validation import check_output, compile_schema

# Minutes to years in Python's re. The library sees through some of them at once; the last two it searches for years too.
HARD = {
    r"^(a+)+$": "a" * 60 + "!",
    r"^(\w+\s?)*$": "word " * 40 + "!",
    r"(x+x+)+y": "x" * 5_000,
    r"^(a|aa)+$": "a" * 90 + "!",
}
SLOW = r"^(a|aa)+$"
PIECES = st.sampled_from(["a", "b", "^", "$", ".", "a*", "[ab]", r"\d", r"\w+", "(a|b)", "a?", "{", r"\.", "é"])
SCHEMA = {
    "type": "object",
    "properties": {"known": {"type": "string", "pattern": "^k"}},
    "patternProperties": {"^n_": {"type": "integer"}, r"^t_\w+$": {"pattern": "x"}},
    "additionalProperties": False,
}
OBJECTS = st.dictionaries(
    st.sampled_from(["known", "n_1", "n_", "t_a", "t_", "other", ""]),
    st.sampled_from([1, "k", "x", "kx", None, True, []]),
    max_size=5,
)


@pytest.mark.parametrize("pattern", HARD)
def test_an_answer_whose_check_might_not_end_is_invalid_and_says_which_pattern(pattern: str) -> None:
    validator = compile_schema({"type": "string", "pattern": pattern})

    with pytest.raises(InvalidOutput, match=r"takes too long|breaks the schema") as refused:
        check_output(json.dumps(HARD[pattern]), validator)

    assert pattern in refused.value.message.replace("\\\\", "\\")


def test_a_pattern_that_backtracks_is_given_up() -> None:
    with pytest.raises(TooSlow, match="repetition in a repetition"):
        found(SLOW, HARD[SLOW], timeout_s=0.05)


def test_searches_of_one_answer_share_their_time() -> None:
    validator = bounded(Draft202012Validator)({"items": {"pattern": SLOW}})

    with search_time(0.0), pytest.raises(TooSlow):
        list(validator.iter_errors(["a short text"]))


@pytest.mark.parametrize("where", ["patternProperties", "additionalProperties"])
def test_property_names_are_searched_within_the_time_too(where: str) -> None:
    schema: dict[str, Any] = {"patternProperties": {SLOW: {}}}
    if where == "additionalProperties":
        schema = {"additionalProperties": False, **schema}

    with pytest.raises(InvalidOutput, match="takes too long"):
        check_output(json.dumps({HARD[SLOW]: 1}), compile_schema(schema))


@given(pattern=st.lists(PIECES, max_size=4).map("".join), text=st.text("ab1.é{ \n", max_size=6))
def test_what_re_finds_is_found(pattern: str, text: str) -> None:
    try:
        expected = re.search(pattern, text) is not None
    except re.error:
        return

    assert found(pattern, text, timeout_s=5) == expected


@pytest.mark.parametrize("cls", [Draft4Validator, Draft7Validator, Draft202012Validator])
@given(value=OBJECTS)
def test_objects_are_judged_as_the_library_judges_them(cls: Any, value: dict[str, Any]) -> None:
    ours = [(e.json_path, e.validator) for e in bounded(cls)(SCHEMA).iter_errors(value)]
    theirs = [(e.json_path, e.validator) for e in cls(SCHEMA).iter_errors(value)]

    assert sorted(map(str, ours)) == sorted(map(str, theirs))


def test_classes_of_characters_by_their_unicode_property_are_known() -> None:
    schema = {"type": "string", "pattern": r"^\p{Lu}\p{L}+$"}

    check_schema(schema)
    assert check_output('"Ärger"', compile_schema(schema))[0] == "Ärger"
    with pytest.raises(InvalidOutput):
        check_output('"ärger"', compile_schema(schema))


@pytest.mark.parametrize(
    "schema", [{"pattern": "("}, {"patternProperties": {"[": {}}}, {"items": {"pattern": "a{2,1}"}}]
)
def test_what_is_no_pattern_is_refused_before_any_call_is_paid(schema: dict[str, Any]) -> None:
    for check in (check_schema, compile_schema):
        with pytest.raises(ConfigurationError, match=r"(\(|\[|a\{2,1\})' is not a 'regex'"):
            check(schema)


@given(st.text("ab()[]{}*+?|^$.,0123\\pL<>=!:", max_size=12))
def test_any_text_is_a_pattern_or_is_refused(pattern: str) -> None:
    try:
        searched = found(pattern, "ab", timeout_s=5)
    except ConfigurationError:
        searched = False

    assert searched in (True, False)
