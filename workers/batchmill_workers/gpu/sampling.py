"""A request's sampling parameters, under OpenAI's names, checked once for every local engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import InvalidRequest, TooLong

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to choose tokens. None leaves a choice to the model's own generation settings.

    ``temperature`` 0 is greedy. ``max_tokens`` None means ``DEFAULT_MAX_TOKENS``, or what the context has left if that
    is less. ``stop`` ends the answer before any of these texts.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Sampling:
        """Reads OpenAI-style parameters. Raises InvalidRequest naming the first that is unknown or out of range.

        ``max_completion_tokens`` is another name of ``max_tokens``, and ``n`` may only be 1. Null means not given.
        """
        given = {name: value for name, value in params.items() if value is not None}
        if given.pop("n", 1) != 1:
            raise InvalidRequest("parameter n: a local engine gives one answer per row; leave it out")
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        unknown = next((name for name in given if name not in _CHECKS), None)
        if unknown is not None:
            raise InvalidRequest(f"parameter {unknown!r} is not known to this engine{nearest(unknown, _CHECKS)}")
        return cls(**{name: _CHECKS[name](name, value) for name, value in given.items()})


def check_fits(prompt: int, wanted: int | None, context: int | None) -> None:
    """Raises TooLong when a prompt of so many tokens and its answer (None: one token) do not fit the context.

    ``context`` None is a context that nobody knows.
    """
    if context is None or prompt + (wanted or 1) <= context:
        return
    asked = f" and max_tokens {wanted}" if wanted else ""
    raise TooLong(f"a prompt of {prompt} tokens{asked} does not fit the context of {context} tokens")


def cut_at_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text up to the first stop text, as OpenAI returns it."""
    ends = [at for at in (text.find(one) for one in stop) if at >= 0]
    return text[: min(ends)] if ends else text


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidRequest(f"parameter {name} is {value!r}; it must be a whole number from {low} to {high}")
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], float]:
    def check(name: str, value: Any) -> float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        if not fits or (above and value == low):
            raise InvalidRequest(f"parameter {name} is {value!r}; it must be a number from {low:g} to {high:g}")
        return float(value)

    return check


def _stop_texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(one, str) and one for one in texts):
        raise InvalidRequest(f"parameter {name} is {value!r}; it must be a text or a list of texts, none empty")
    return tuple(texts)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(1, 2**31 - 1),
    "temperature": _number(0.0, 10.0),
    "top_p": _number(0.0, 1.0, above=True),
    "top_k": _integer(-1, 2**31 - 1),
    "min_p": _number(0.0, 0.999),
    "stop": _stop_texts,
    "seed": _integer(0, 2**63 - 1),
    "frequency_penalty": _number(-2.0, 2.0),
    "presence_penalty": _number(-2.0, 2.0),
    "repetition_penalty": _number(0.0, 10.0, above=True),
}
