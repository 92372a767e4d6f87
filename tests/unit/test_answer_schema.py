"""A schema that cannot be checked is refused at submit, before any call is paid."""

from __future__ import annotations

from typing import Any

import pytest

from batchmill_core.errors import ConfigurationError
from batchmill_producers.answer_schema import check_schema


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("levels", [200, 2000])
def test_a_schema_that_is_nested_too_deep_is_told_as_such(levels: int) -> None:
    with pytest.raises(ConfigurationError, match=r"nested too deep|cannot be written as JSON"):
        check_schema(nested(levels))


def test_a_number_that_json_libraries_do_not_hold_is_told() -> None:
    with pytest.raises(ConfigurationError, match="cannot be written as JSON: Integer exceeds 64-bit range"):
        check_schema({"type": "integer", "maximum": 10**30})


def test_a_schema_of_usual_depth_passes() -> None:
    check_schema(nested(20))
