"""A request's parameters in vLLM's words: what all local engines know, and what only vLLM has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchmill_core.errors import InvalidRequest

from .engine_options import FLAG, TEXT, Rule, every, is_number, table_of, whole
from .sampling import DEFAULT_MAX_TOKENS, Sampling

_GRAMMARS = ("json", "regex", "choice", "grammar", "json_object")


def split_params(params: Mapping[str, Any]) -> tuple[Sampling, dict[str, Any]]:
    """The parameters that every local engine has, and those that only vLLM has, both checked.

    Raises InvalidRequest naming the first that is unknown or has a wrong value.
    """
    only_vllm = {name: params[name] for name in params if name in _RULES and params[name] is not None}
    for name, value in only_vllm.items():
        refusal = _RULES[name].refusal(name, value)
        if refusal is not None:
            raise InvalidRequest(f"parameter {refusal}")
    return Sampling.from_params({name: value for name, value in params.items() if name not in _RULES}), only_vllm


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


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and not any(_TOKEN.lacks(one) for one in value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) and one for one in value)


def _token_name(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _grammar(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _GRAMMARS


NOT_SAMPLING = frozenset({"lora", "chat_template_kwargs"})  # they choose the weights and the prompt
_TOKEN = whole(0, 2**31 - 1)
_TOKENS = every(_token_ids, "a list of token ids")
_RULES: Mapping[str, Rule] = {
    "min_tokens": whole(0, 2**31 - 1),
    "ignore_eos": FLAG,
    "stop_token_ids": _TOKENS,
    "bad_words": every(_texts, "a list of texts, none empty"),
    "allowed_token_ids": _TOKENS,
    "logit_bias": table_of(is_number, "a table of token ids and numbers", names=_token_name),
    "skip_special_tokens": FLAG,
    "include_stop_str_in_output": FLAG,
    "structured_outputs": every(_grammar, f"a table with one of {', '.join(_GRAMMARS)}"),
    "chat_template_kwargs": every(lambda value: isinstance(value, Mapping), "a table"),
    "lora": TEXT,
}
