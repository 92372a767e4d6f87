"""Instances of simple JSON schemas: what the simulated model answers under ``response_format``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

_MAX_DEPTH = 12
_MAX_ITEMS = 1000  # more than a schema in earnest asks for; a provider refuses such ones
_MAX_CHARS = 100_000


def instance(schema: Mapping[str, Any], *, label: str, text: str) -> Any:
    """A value that satisfies ``schema``, the same for the same text.

    ``label`` is used wherever it fits (an enum that has it, a plain string); other choices follow a hash of ``text``.
    Knows type, enum, const, properties, items, anyOf/oneOf/allOf, local $ref, default lengths and bounds. ``pattern``
    and ``format`` are ignored. Recursion ends by leaving out what is optional.
    """
    return _Builder(root=schema, label=label, text=text).build(schema, "", 0)


class _Builder:
    def __init__(self, *, root: Mapping[str, Any], label: str, text: str) -> None:
        self._root = root
        self._label = label
        self._text = text
        self._seed = crc32(text.encode("utf-8"))

    def build(self, schema: Any, path: str, depth: int) -> Any:
        if not isinstance(schema, Mapping):
            return self._label
        schema = self._resolve(schema)
        if "const" in schema:
            return schema["const"]
        if isinstance(schema.get("enum"), list) and schema["enum"]:
            return self._choice(schema["enum"], path)
        return self._typed(schema, path, depth)

    def _typed(self, schema: Mapping[str, Any], path: str, depth: int) -> Any:
        match _type_of(schema):
            case "object":
                return self._object(schema, path, depth)
            case "array":
                return self._array(schema, path, depth)
            case "boolean":
                return self._label == "positive" if self._label != "neutral" else bool(self._hash(path) & 1)
            case "integer":
                return int(self._number(schema, path, integral=True))
            case "number":
                return self._number(schema, path, integral=False)
            case "null":
                return None
            case _:
                return self._string(schema)

    def _resolve(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        for _ in range(_MAX_DEPTH):
            if isinstance(schema.get("$ref"), str):
                schema = self._referenced(schema["$ref"])
            elif branch := next(
                (b for key in ("anyOf", "oneOf") for b in _mappings(schema.get(key)) if not _is_null(b)), None
            ):
                schema = branch
            elif parts := _mappings(schema.get("allOf")):
                schema = _merged([{k: v for k, v in schema.items() if k != "allOf"}, *map(self._resolve, parts)])
            else:
                break
        return schema

    def _referenced(self, ref: str) -> Mapping[str, Any]:
        found: Any = self._root
        for step in ref.removeprefix("#").strip("/").split("/"):
            if step:
                found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _object(self, schema: Mapping[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        required = schema.get("required")
        names = required if depth >= _MAX_DEPTH // 2 and isinstance(required, list) else properties
        if depth >= _MAX_DEPTH:
            return {}
        names = [name for name in names if isinstance(name, str)]
        return {name: self.build(properties.get(name, {}), f"{path}/{name}", depth + 1) for name in names}

    def _array(self, schema: Mapping[str, Any], path: str, depth: int) -> list[Any]:
        least, most = _int(schema.get("minItems"), 0), _int(schema.get("maxItems"), 1)
        count = 0 if depth >= _MAX_DEPTH // 2 else max(least, min(1, most))
        count = min(max(least, count), _MAX_ITEMS)
        return [self.build(schema.get("items", {}), f"{path}/{i}", depth + 1) for i in range(count)]

    def _number(self, schema: Mapping[str, Any], path: str, *, integral: bool) -> float:
        low, high = _bounds(schema, step=1 if integral else 0.01)
        share = {"positive": 0.9, "negative": 0.1}.get(self._label, 0.5)
        value: float = low + (high - low) * share
        step = schema.get("multipleOf")
        if isinstance(step, int | float) and step > 0:
            value = -(-low // step) * step
        if not math.isfinite(value):
            return low
        return round(value) if integral else round(value, 2)

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _int(schema.get("minLength"), 0), _int(schema.get("maxLength"), 1 << 20)
        return self._label.ljust(min(least, _MAX_CHARS), ".")[:most]

    def _choice(self, options: Sequence[Any], path: str) -> Any:
        same = next((o for o in options if isinstance(o, str) and o.lower() == self._label), None)
        return options[self._hash(path) % len(options)] if same is None else same

    def _hash(self, path: str) -> int:
        return crc32(path.encode("utf-8"), self._seed)


def _type_of(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((k for k in kind if k != "null"), "null")
    if isinstance(kind, str):
        return kind
    return "object" if "properties" in schema else "array" if "items" in schema else "string"


def _bounds(schema: Mapping[str, Any], *, step: float) -> tuple[float, float]:
    low, high = (
        _limit(schema, "minimum", "exclusiveMinimum", step),
        _limit(schema, "maximum", "exclusiveMaximum", -step),
    )
    if low is None:
        low = 0 if high is None else high - 1
    return low, low + 1 if high is None else high


def _limit(schema: Mapping[str, Any], inclusive: str, exclusive: str, step: float) -> float | None:
    """A bound that values may reach; what is no number bounds nothing."""
    value, beyond = schema.get(inclusive), schema.get(exclusive)
    if isinstance(value, int | float):
        return value
    return beyond + step if isinstance(beyond, int | float) else None


def _merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = merged.get(key)
            merged[key] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _is_null(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "null"


def _int(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
