"""Parameters of a job's calls: which Batchmill sets itself, and which look misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from batchmill_core.errors import ConfigurationError

_OURS = frozenset({"model", "messages", "input", "stream", "stream_options", "response_format"})
_USUAL = [
    "best_of",
    "dimensions",
    "encoding_format",
    "extra_body",
    "frequency_penalty",
    "length_penalty",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_p",
    "n",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning_effort",
    "repetition_penalty",
    "seed",
    "service_tier",
    "stop",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
]


def check_params(params: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a parameter that is Batchmill's own to set."""
    for name in sorted(_OURS & params.keys()):
        raise ConfigurationError(
            f"parameter {name!r} is set by Batchmill itself; leave it out (see --schema, --stream)"
        )


def doubts(params: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on parameters that look misspelt. They are sent as they are, since a provider may have its own."""
    for name in sorted(params.keys() - set(_USUAL)):
        if close := difflib.get_close_matches(name, _USUAL, n=1, cutoff=0.8):
            yield f"parameter {name!r} is sent as it is; did you mean {close[0]!r}?"
