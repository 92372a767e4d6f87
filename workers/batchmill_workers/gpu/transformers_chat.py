"""Chat by a causal language model: messages in the model's template, read as token ids once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

from batchmill_core.errors import InvalidRequest
from batchmill_workers.gpu.batching import Item
from batchmill_workers.gpu.chat_template import prompt_tokens
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.sampling import DEFAULT_MAX_TOKENS, check_fits
from batchmill_workers.gpu.transformers_answer import Guide, Prompt
from batchmill_workers.gpu.transformers_choice import Choice
from batchmill_workers.gpu.transformers_decoding import Decoder, DecodingRun
from batchmill_workers.gpu.transformers_guided import Grammars, available, vocabulary_of
from batchmill_workers.gpu.transformers_lengths import learned_positions, least_length, rope_turn
from batchmill_workers.gpu.transformers_loading import (
    check_known,
    end_tokens,
    known_tokens,
    load_model,
    load_tokenizer,
    pad_token,
)
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.transformers_work import Piece

_PREFIX_TOKENS = 16
_BUILD_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # where xgrammar's own source raised
# What ``generate`` would do and this engine does not: values that change nothing are left out.
_LEFT_OUT = (
    *("bad_words_ids", "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
    *("forced_eos_token_id", "guidance_scale", "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams"),
    *("sequence_bias", "stop_strings", "suppress_tokens", "top_h", "typical_p"),
)
_CHANGE_NOTHING: tuple[Any, ...] = (None, 0, 1, [], {})
_DEFAULTS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Chat:
    """A loaded chat model."""

    task = "chat"

    def __init__(
        self, model: Any, tokenizer: Any, *, context_tokens: int | None, template: str, guided: bool = False
    ) -> None:
        self.model = model
        self.context_tokens = context_tokens
        self._tokenizer = tokenizer
        self._template = template or None
        self._defaults = generation_defaults(model)
        ends = end_tokens(tokenizer, model, self._template)
        self._known, self._unwritten, self._turn = known_tokens(model), unwritten(tokenizer), rope_turn(model)
        self._decoder = Decoder(model, ends=ends, pad=pad_token(tokenizer, model), decode=self._decode)
        self._asked_to_guide, self._said_unguided = guided, False
        can = guided and available()
        self._grammars = Grammars(tokenizer, vocabulary=vocabulary_of(model), ends=ends) if can else None

    def read(self, frame: Frame) -> list[Piece]:
        sampling = frame["sampling"]
        tokens = prompt_tokens(self._tokenizer, frame["messages"], template=self._template)
        if not tokens:
            raise InvalidRequest("the model's chat template makes an empty prompt of the messages")
        check_known(tokens, self._known)
        max_tokens = room(len(tokens), sampling["max_tokens"], self.context_tokens)
        prompt = Prompt(
            tokens=tokens,
            max_tokens=max_tokens,
            choice=Choice.of(sampling, self._defaults),
            stop=tuple(sampling["stop"]),
            ends=frozenset(self._unwritten[text] for text in sampling["stop"] if text in self._unwritten),
            guide=self._guide(frame["schema"]),
        )
        prefix = ",".join(map(str, tokens[:_PREFIX_TOKENS]))
        group = self._group(len(tokens), max_tokens)
        return [Piece(tokens=len(tokens), wanted=max_tokens, group=group, prefix=prefix, payload=prompt)]

    def begin(self, items: Sequence[Item]) -> DecodingRun:
        return DecodingRun(self._decoder, items)

    def _group(self, prompt: int, wanted: int) -> str | None:
        """Rows run beside those alone that turn to other positions when they do, see ``rope_turn``."""
        if self._turn is None or prompt + wanted <= self._turn:
            return None
        return "turned" if prompt > self._turn else "turns"

    def merge(self, parts: Sequence[Frame]) -> Frame:
        return parts[0]

    def _guide(self, schema: Mapping[str, Any] | None) -> Callable[[], Guide] | None:
        if schema is None:
            return None
        if self._grammars is None:
            self._say_unguided()
            return None
        try:
            return self._grammars.guide(schema)
        except RuntimeError as error:
            reason = _BUILD_PLACE.sub("", str(error).strip().splitlines()[-1])
            raise InvalidRequest(
                f"answers cannot be held to this schema: {reason}; options.guided = false validates them afterwards"
            ) from error

    def _say_unguided(self) -> None:
        """Once a process, into the worker's log."""
        if self._asked_to_guide and not self._said_unguided:
            self._said_unguided = True
            _log(
                "xgrammar is not installed, so answers under a schema are validated afterwards only; pip install xgrammar"
            )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def load_chat(path: Path, device: str, options: TransformersOptions, context_tokens: int | None) -> Chat:
    """Raises ValueError when the model has no chat template and none is given."""
    tokenizer = load_tokenizer(path, options)
    if not tokenizer.chat_template and not options.chat_template:
        raise ValueError("the model has no chat template; give one as options.chat_template")
    model = load_model(transformers.AutoModelForCausalLM, path, device, options)
    if left := settings_left_out(model):
        _log(f"the model's generation settings ask for {', '.join(left)}, which this engine does not do")
    asked = context_tokens or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = least_length(asked, learned_positions(model))
    return Chat(model, tokenizer, context_tokens=context, template=options.chat_template, guided=options.guided)


def settings_left_out(model: Any) -> list[str]:
    """The names of the generation settings in the model's files that ``generate`` would follow and this engine does not."""
    settings = getattr(model, "generation_config", None)
    return [name for name in _LEFT_OUT if getattr(settings, name, None) not in _CHANGE_NOTHING]


def _log(said: str) -> None:
    """Into the worker's log."""
    print(f"transformers: {said}", file=sys.stderr, flush=True)  # noqa: T201


def unwritten(tokenizer: Any) -> Mapping[str, int]:
    """The tokens that stand in no answer's text, by their own: as a stop text such a one ends an answer as a token."""
    return {added.content: token for token, added in tokenizer.added_tokens_decoder.items() if added.special}


def generation_defaults(model: Any) -> Mapping[str, Any]:
    """The sampling that the model's own generation settings ask for; None where they say nothing."""
    settings = getattr(model, "generation_config", None)
    return {name: getattr(settings, name, None) for name in _DEFAULTS}


def room(prompt: int, wanted: int | None, context: int | None) -> int:
    """How many tokens may be answered. Raises TooLong when a prompt of so many tokens and the answer do not fit."""
    check_fits(prompt, wanted, context)
    left = DEFAULT_MAX_TOKENS if context is None else context - prompt
    return wanted or min(DEFAULT_MAX_TOKENS, left)
