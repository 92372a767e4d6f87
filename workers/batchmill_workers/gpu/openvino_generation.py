"""Our words in OpenVINO GenAI's: prompts as tokens, sampling as a GenerationConfig, its errors as a sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchmill_workers.gpu.sampling import DEFAULT_MAX_TOKENS

_SAME_NAME = ("top_p", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
_SOURCE_LINE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # of xgrammar's messages


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Any:
    """The tokens (a tensor of one row) of the messages in the model's chat template, applied once.

    The template writes the special tokens itself, so that none is added: a second start token changes answers. Where it
    knows no system message, OpenVINO puts that message's text before the first user message's.
    """
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False).input_ids


def generation_config(base: Any, sampling: Mapping[str, Any], *, room: int | None, schema: str | None = None) -> Any:
    """``base`` (the model's own GenerationConfig) changed to what ``Sampling.as_dict`` gave.

    ``room`` is how many tokens the context has left, which bounds the default of ``max_tokens``; ``schema`` is JSON.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    base.num_beams = base.num_return_sequences = 1
    base.max_new_tokens = given.get("max_tokens") or min(DEFAULT_MAX_TOKENS, room or DEFAULT_MAX_TOKENS)
    base.stop_strings = set(given["stop"])
    base.include_stop_str_in_output = True  # it drops whole tokens; we cut the text at the exact place
    base.do_sample = _samples(base.do_sample, given)
    for name in _SAME_NAME:
        if name in given and (name != "temperature" or base.do_sample):
            setattr(base, name, given[name])
    if given.get("top_k", 0) > 0:
        base.top_k = given["top_k"]
    if "seed" in given:
        base.rng_seed = given["seed"]
    if schema is not None:
        base.structured_output_config = _guided_by(schema)
    return base


def reason(error: BaseException) -> str:
    """What an error of OpenVINO says, without the source lines of the machine that built it."""
    lines = [_SOURCE_LINE.sub("", line.strip()) for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("Check '", "Exception from"))]
    return " ".join(told or lines) or type(error).__name__


def _samples(by_default: bool, given: Mapping[str, Any]) -> bool:
    if "temperature" in given:
        return bool(given["temperature"] > 0)
    return by_default or not given.keys().isdisjoint({"top_p", "top_k", "min_p"})


def _guided_by(schema: str) -> Any:
    from openvino_genai import StructuredOutputConfig

    guided = StructuredOutputConfig()
    guided.json_schema = schema
    return guided
