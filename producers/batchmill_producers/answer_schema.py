"""Whether the schema that answers have to keep can be checked at all, seen before any call is paid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]  # ships no types
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from batchmill_core.errors import ConfigurationError
from batchmill_core.patterns import with_our_patterns


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for what is no JSON schema, refers to what is not in it, or has a pattern that is none.

    References are looked up as workers do: within the schema only, nothing is fetched.
    """
    try:
        orjson.dumps(schema, default=dict)  # as workers get it
        _check(schema)
    except RecursionError as fault:
        raise ConfigurationError("the schema is nested too deep to be checked; put parts of it under $defs") from fault
    except TypeError as fault:
        raise ConfigurationError(f"the schema cannot be written as JSON: {fault}") from fault


def _check(schema: Mapping[str, Any]) -> None:
    try:
        cls = validator_for(schema, default=Draft202012Validator)
        cls.check_schema(dict(schema), format_checker=with_our_patterns(cls.FORMAT_CHECKER))  # type: ignore[call-arg]  # not in its stub
    except SchemaError as fault:
        raise ConfigurationError(f"the schema is not a JSON schema: at {fault.json_path}: {fault.message}") from fault
    root = specification_with(str(schema.get("$schema", "")), default=DRAFT202012).create_resource(schema)
    resolver = SPECIFICATIONS.with_resource("", root).resolver_with_root(root)
    for part, where in _parts(root, resolver):
        _look_up(part, where)


def _parts(resource: Any, resolver: Any) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """Each subschema, with what looks up its references."""
    if isinstance(resource.contents, Mapping):  # else it is true or false
        yield resource.contents, resolver
    for part in resource.subresources():
        yield from _parts(part, resolver.in_subresource(part))


def _look_up(part: Mapping[str, Any], resolver: Any) -> None:
    reference = part.get("$ref")
    if isinstance(reference, str):
        try:
            resolver.lookup(reference)
        except Unresolvable as fault:
            raise ConfigurationError(
                f"the schema refers to {reference!r}, which is not in it; put it under $defs (nothing is fetched)"
            ) from fault
