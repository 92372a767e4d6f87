"""Is an answer what was asked for: its status, its JSON, its schema, its characters."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import orjson
from jsonschema import exceptions as schema_errors
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from jsonschema_specifications import REGISTRY as SPECIFICATIONS  # type: ignore[import-untyped]  # ships no types
from referencing.exceptions import Unresolvable

from batchmill_core.errors import ConfigurationError, InvalidOutput, InvalidRequest
from batchmill_core.patterns import TooSlow, with_our_patterns
from batchmill_core.request import Completion, RowStatus
from batchmill_core.usage import Usage

from .schema_keywords import bounded, search_time

RAW_CHARS = 2_000
_NUL = "\x00"
_REPLACEMENT = "\ufffd"
_FENCE = re.compile(r"`{3,}|~{3,}")
_LANGUAGE = re.compile(r"(?:[A-Za-z][\w+.-]*)?")
# escapes that JSON allows and PostgreSQL (NUL) or UTF-8 (lone surrogates) does not
_SUSPECT_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")


def status_of(completion: Completion) -> RowStatus:
    """The final status that a completion gives its row, before any schema is checked."""
    if completion.refusal:
        return RowStatus.REFUSED
    if completion.finish_reason == "content_filter":
        return RowStatus.FILTERED
    if completion.finish_reason == "length":
        return RowStatus.TRUNCATED
    return RowStatus.OK


def sanitize(text: str) -> tuple[str, bool]:
    """Replaces NUL and lone surrogates by U+FFFD, and says whether it had to.

    PostgreSQL cannot store NUL and UTF-8 cannot carry lone surrogates. Halves of a surrogate pair become one character.
    """
    if text.isascii():
        return (text.replace(_NUL, _REPLACEMENT), True) if _NUL in text else (text, False)
    try:
        text.encode()
    except UnicodeEncodeError:
        joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return joined.replace(_NUL, _REPLACEMENT), True
    return (text.replace(_NUL, _REPLACEMENT), True) if _NUL in text else (text, False)


def compile_schema(schema: Mapping[str, Any]) -> Validator:
    """The validator of ``schema``, cached by its content. Raises ConfigurationError if it is no JSON schema.

    References are resolved within the schema only: nothing is ever fetched, because schemas come from submitters.
    """
    return _compiled(orjson.dumps(schema, default=dict))


@lru_cache(maxsize=64)
def _compiled(schema_json: bytes) -> Validator:
    schema = orjson.loads(schema_json)
    cls = validator_for(schema, default=Draft202012Validator)
    try:
        cls.check_schema(schema, format_checker=with_our_patterns(cls.FORMAT_CHECKER))  # type: ignore[call-arg]  # not in its stub
    except schema_errors.SchemaError as e:
        raise ConfigurationError(f"the schema is not a JSON schema: {e.message} (at {e.json_path})") from e
    validator: Validator = bounded(cls)(schema, registry=SPECIFICATIONS)
    return validator


def check_output(
    text: str, validator: Validator | None, *, usage: Usage | None = None, request_id: str | None = None
) -> tuple[Any, str]:
    """The JSON value of an answer, and its text without a fence around it, fit to be stored.

    Numbers keep the model's digits in the text. ``validator`` None asks for JSON of any shape. Raises InvalidOutput,
    which carries ``usage`` (so that the call is settled) and the start of the answer.
    """
    try:
        value, clean = _parse(text)
        with search_time():
            fault = None if validator is None else next(validator.iter_errors(value), None)
    except TooSlow as e:
        raise InvalidOutput(
            f"the answer cannot be checked: {e}", usage=usage, request_id=request_id, raw=_raw(text)
        ) from e
    except ConfigurationError as e:
        raise InvalidRequest(str(e), usage=usage) from e
    except (ValueError, RecursionError) as e:
        raise InvalidOutput(f"the answer is not JSON: {e}", usage=usage, request_id=request_id, raw=_raw(text)) from e
    except Unresolvable as e:
        raise InvalidRequest(f"the schema refers to something that is not in it: {e.ref}", usage=usage) from e
    if fault is not None:
        message = f"the answer breaks the schema at {fault.json_path}: {fault.message[:300]}"
        raise InvalidOutput(message, usage=usage, request_id=request_id, raw=_raw(text))
    return value, clean


def _parse(text: str) -> tuple[Any, str]:
    bare = _unfenced(text.strip())
    if _SUSPECT_ESCAPE.search(bare) is None:
        return orjson.loads(bare), bare
    value = _sanitized(json.loads(bare, parse_constant=_refuse_constant))
    return value, json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _unfenced(text: str) -> str:
    """What is inside a Markdown fence around the whole text; any other text unchanged."""
    opening = _FENCE.match(text)
    if opening is None:
        return text
    fence = opening.group()
    if not text.endswith(fence) or len(text) < 2 * len(fence):
        return text
    inner = text[len(fence) : -len(fence)]
    language = _LANGUAGE.match(inner)
    return inner[language.end() if language else 0 :].strip()


def _sanitized(value: Any) -> Any:
    if isinstance(value, str):
        return sanitize(value)[0]
    if isinstance(value, list):
        return [_sanitized(v) for v in value]
    if isinstance(value, dict):
        return {sanitize(k)[0]: _sanitized(v) for k, v in value.items()}
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _raw(text: str) -> str:
    return sanitize(text)[0][:RAW_CHARS]
