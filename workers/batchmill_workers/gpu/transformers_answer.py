"""One row's answer as it grows: its tokens, and when it is at its end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.sampling import cut_at_stop
from batchmill_workers.gpu.transformers_choice import Choice, Chooser

Decode = Callable[[Sequence[int]], str]
_TAIL_TOKENS = 8
_NO_NUMBERS = (
    "the model's logits are not finite: its weights are broken, or it overflows in its dtype "
    "(try options.dtype = float32)"
)
_NOTHING_ALLOWED = "the schema allows no token that the model has, or its logits are not finite"


class Guide(Protocol):
    """What a schema allows next, see ``transformers_guided``."""

    def fill(self, allowed: Any, row: int) -> bool:
        """Clears in this row of a table of bits (int32, a bit a token) what the schema forbids; False: nothing."""

    def accept(self, token: int) -> bool:
        """Notes a token; True when the answer is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request as the decoding loop takes it; ``max_tokens`` bounds the answer, and ``ends`` are tokens that end this
    one beside those that end any.
    """

    tokens: list[int]
    max_tokens: int
    choice: Choice
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    guide: Callable[[], Guide] | None = None


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a row has answered so far. ``ends`` are the tokens that end an answer."""

    prompt: Prompt
    ends: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    first_token_ns: int | None = None
    chooser: Chooser = field(init=False)
    guide: Guide | None = field(init=False)

    def __post_init__(self) -> None:
        """From the start each time: a row that runs again, after memory ran out, answers the same."""
        choice = self.prompt.choice
        numbers = random.Random(choice.seed)
        self.chooser = Chooser(choice=choice, prompt=self.prompt.tokens, answer=self.tokens, random=numbers)
        self.guide = None if self.prompt.guide is None else self.prompt.guide()

    def add(self, token: int, now_ns: int, decode: Decode) -> bool:
        """Takes the next token; True when it was the last."""
        if self.first_token_ns is None:
            self.first_token_ns = now_ns
        self.tokens.append(token)
        complete = self.guide is not None and self.guide.accept(token)
        if token in self.ends or complete or self._stopped(decode):
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.prompt.max_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def fields(self, decode: Decode) -> Frame:
        """The answer as the last message of its call has it. Tokens are counted as they were computed, the end too."""
        written = self.tokens[:-1] if self.tokens and self.tokens[-1] in self.ends else self.tokens
        text = cut_at_stop(decode(written), self.prompt.stop)
        return {
            "text": _without_half_a_character(text) if self.finish_reason == "length" else text,
            "finish_reason": self.finish_reason,
            "output_tokens": len(self.tokens),
            "first_token_ns": self.first_token_ns,
        }

    def without_token(self) -> str:
        """Why no token could be chosen."""
        return _NO_NUMBERS if self.guide is None else _NOTHING_ALLOWED

    def _stopped(self, decode: Decode) -> bool:
        """Looks at the end only, which holds any stop text that the last token completed: a token has a character."""
        if not self.prompt.stop:
            return False
        longest = max(len(text.encode()) for text in self.prompt.stop)
        tail = decode(self.tokens[-(longest + _TAIL_TOKENS) :])
        return any(text in tail for text in self.prompt.stop) and any(
            text in decode(self.tokens) for text in self.prompt.stop
        )


def _without_half_a_character(text: str) -> str:
    """The end of max_tokens may be in the middle of a character, of at most three bytes that a tokenizer writes as U+FFFD."""
    return text[:-3] + text[-3:].rstrip("\ufffd")
