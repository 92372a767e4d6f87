"""A request's sampling parameters, under OpenAI's names, checked once for every local engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_core.errors import InvalidRequest, TooLong

from .engine_options import Rule, number, whole

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
        for name, value in given.items():
            if name not in _RULES:
                raise InvalidRequest(f"parameter {name!r} is not known to this engine{nearest(name, _RULES)}")
            refusal = _RULES[name].refusal(name, value)
            if refusal is not None:
                raise InvalidRequest(f"parameter {refusal}")
        return cls(**{name: _RULES[name].read(value) for name, value in given.items()})


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


def _lacks_of_stop(value: Any) -> str | None:
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list | tuple) and all(isinstance(one, str) and one for one in texts)
    return None if fits else "a text or a list of texts, none empty"


# At their ends OpenAI's top_p and vLLM's min_p leave the likeliest token; vLLM takes no top_p of 0, OpenVINO no min_p of 1.
_LEAST_TOP_P, _MOST_MIN_P = 1e-6, 0.999

_RULES: Mapping[str, Rule] = {
    "max_tokens": whole(1, 2**31 - 1),
    "temperature": number(0, 10),
    "top_p": Rule(lacks=number(0, 1).lacks, read=lambda value: max(float(value), _LEAST_TOP_P)),
    "top_k": whole(-1, 2**31 - 1),
    "min_p": Rule(lacks=number(0, 1).lacks, read=lambda value: min(float(value), _MOST_MIN_P)),
    "stop": Rule(lacks=_lacks_of_stop, read=lambda value: (value,) if isinstance(value, str) else tuple(value)),
    "seed": whole(0),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": number(0, 10, above=True),
}
