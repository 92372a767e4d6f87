"""A request's parameters in vLLM's words: what all local engines know, and what only vLLM has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from batchmill_core.errors import InvalidRequest

from .sampling import DEFAULT_MAX_TOKENS, Sampling

_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object")


def split_params(params: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """The parameters that every local engine has, and those that only vLLM has, both checked.

    Raises InvalidRequest naming the first that is unknown or has a wrong value.
    """
    only_vllm = {name: params[name] for name in params if name in _CHECKS and params[name] is not None}
    for name, value in only_vllm.items():
        wrong = _CHECKS[name](value)
        if wrong:
            raise InvalidRequest(f"parameter {name} is {value!r}; it must be {wrong}")
    return Sampling.from_params({name: value for name, value in params.items() if name not in _CHECKS}), only_vllm


def sampling_arguments(
    sampling: Mapping[str, Any], only_vllm: Mapping[str, Any], *, defaults: Mapping[str, Any], room: int, schema: Any
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams; ``structured_outputs`` is still a table.

    ``sampling`` is what ``Sampling.as_dict`` gave, ``defaults`` the model's own generation settings, ``room`` how many
    tokens the context has left. Raises InvalidRequest when an answer should follow a schema and another form too.
    """
    given = {name: value for name, value in sampling.items() if value is not None and name != "stop"}
    arguments = {**{name: value for name, value in defaults.items() if name != "max_tokens"}, **given, **only_vllm}
    arguments.setdefault("max_tokens", min(DEFAULT_MAX_TOKENS, room))
    if sampling.get("stop"):
        arguments["stop"] = list(sampling["stop"])
    if schema is not None:
        if "structured_outputs" in arguments:
            raise InvalidRequest("parameter structured_outputs: the job has a schema; leave one of the two out")
        arguments["structured_outputs"] = {"json": schema}
    return arguments


def _whole(value: Any) -> str | None:
    return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else "a whole number"


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value else "a text"


def _tokens(value: Any) -> str | None:
    return None if isinstance(value, list) and not any(_whole(one) for one in value) else "a list of token ids"


def _texts(value: Any) -> str | None:
    return None if isinstance(value, list) and not any(_text(one) for one in value) else "a list of texts"


def _biases(value: Any) -> str | None:
    fits = isinstance(value, Mapping) and all(
        str(token).isdigit() and isinstance(bias, int | float) for token, bias in value.items()
    )
    return None if fits else "a table of token ids and numbers"


def _table(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "a table"


def _grammar(value: Any) -> str | None:
    fits = isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _GRAMMARS
    return None if fits else f"a table with one of {', '.join(_GRAMMARS)}"


NOT_SAMPLING = frozenset({"lora", "chat_template_kwargs"})  # they choose the weights and the prompt
_CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "min_tokens": _whole,
    "ignore_eos": _flag,
    "stop_token_ids": _tokens,
    "bad_words": _texts,
    "allowed_token_ids": _tokens,
    "logit_bias": _biases,
    "skip_special_tokens": _flag,
    "include_stop_str_in_output": _flag,
    "structured_outputs": _grammar,
    "chat_template_kwargs": _table,
    "lora": _text,
}
