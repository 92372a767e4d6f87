"""The keywords of JSON schema that search with regular expressions, within the time that one answer may take.

``unevaluatedProperties`` beside ``patternProperties`` still searches property names by Python's ``re``: the library offers
no place for another way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

from batchmill_core.patterns import found

PATTERNS_S = 0.5  # for all searches of one answer: meanwhile the event loop stands still
_deadline: ContextVar[float] = ContextVar("deadline")


@contextmanager
def search_time(seconds: float = PATTERNS_S) -> Iterator[None]:
    """All searches of the block together may take so long; one that is over it raises `patterns.TooSlow`."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


@lru_cache(maxsize=16)
def bounded(cls: type[Validator]) -> type[Validator]:
    """The validator class of a draft, with searches that end."""
    known: dict[str, Any] = dict(getattr(cls, "VALIDATORS", {}))
    ours = {"pattern": _pattern, "patternProperties": _pattern_properties}
    if "additionalProperties" in known:
        ours["additionalProperties"] = _additional_properties(known["additionalProperties"])
    made: type[Validator] = extend(cls, {n: rule for n, rule in ours.items() if n in known})  # type: ignore[no-untyped-call]  # its stub has no types
    return made


def _found(pattern: str, text: str) -> bool:
    return found(pattern, text, timeout_s=_deadline.get(time.monotonic() + PATTERNS_S) - time.monotonic())


def _pattern(validator: Any, pattern: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, part in patterns.items():
        for name, value in instance.items():
            if _found(pattern, name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(usual: Any) -> Any:
    def check(validator: Any, rule: Any, instance: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
        """The library's own rule, told of the properties that no pattern covers."""
        patterns = schema.get("patternProperties")
        if not patterns or not validator.is_type(instance, "object"):
            yield from usual(validator, rule, instance, schema)
            return
        known = schema.get("properties", {})
        rest = {n: v for n, v in instance.items() if n not in known and not any(_found(p, n) for p in patterns)}
        without = {name: value for name, value in schema.items() if name != "patternProperties"}
        yield from usual(validator, rule, rest, without)

    return check
