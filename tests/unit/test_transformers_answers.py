"""One row's answer as it grows: where it ends, and which text it then has."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from batchmill_workers.gpu.transformers_answer import Answer, Prompt
from batchmill_workers.gpu.transformers_chat import unwritten
from batchmill_workers.gpu.transformers_choice import Choice
from tests import tiny_models

TOKENIZER = tiny_models.tokenizer()  # a token a byte, so that a character may take four
MANY = 100


def decode(tokens: list[int]) -> str:
    text: str = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def tokens_of(text: str) -> list[int]:
    tokens: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return tokens


def answer(tokens: list[int], *, max_tokens: int = MANY, stop: tuple[str, ...] = ()) -> tuple[str, str | None, int]:
    """Text, finish reason and length of an answer that is offered these tokens."""
    ends = frozenset(unwritten(TOKENIZER)[text] for text in stop if text in unwritten(TOKENIZER))
    prompt = Prompt(tokens=[0], max_tokens=max_tokens, choice=Choice(), stop=stop, ends=ends)
    grown = Answer(prompt=prompt, ends=frozenset({1}) | ends)
    for token in tokens:
        if grown.add(token, 0, decode):  # type: ignore[arg-type]  # mypy takes a list's Sequence for another type
            break
    fields = grown.fields(decode)  # type: ignore[arg-type]  # as above
    return fields["text"], fields["finish_reason"], fields["output_tokens"]


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("three",), ("one two ", "stop", 13)),  # spans five tokens
        (("t", "two"), ("one ", "stop", 5)),  # one is the beginning of the other
        (("o th", "three"), ("one tw", "stop", 10)),  # they overlap
        (("four",), ("one two three", "length", 13)),
    ],
    ids=str,
)
def test_an_answer_ends_before_the_first_stop_text(stop: tuple[str, ...], expected: tuple[str, str, int]) -> None:
    assert answer(tokens_of("one two three"), max_tokens=13, stop=stop) == expected


def test_a_stop_text_of_characters_of_several_tokens_is_found() -> None:
    text, finish, _ = answer(tokens_of("ab日本語cd"), stop=("本語",))

    assert (text, finish) == ("ab日", "stop")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_half_a_character_at_the_end_of_max_tokens_is_left_out(cut: int) -> None:
    tokens = tokens_of("So 😀")

    assert answer(tokens, max_tokens=len(tokens) - cut) == ("So ", "length", len(tokens) - cut)
    assert answer(tokens, max_tokens=len(tokens)) == ("So 😀", "length", len(tokens))


def test_what_a_model_itself_ended_stays_as_it_is() -> None:
    assert answer([*tokens_of("So 😀")[:-1], 1])[:2] == ("So \ufffd", "stop")


def test_a_stop_text_that_stands_in_no_answer_s_text_ends_it_as_a_token() -> None:
    mark = TOKENIZER.convert_tokens_to_ids("<|im_end|>")

    assert answer([*tokens_of("ab"), mark, *tokens_of("cd")], stop=("<|im_end|>",)) == ("ab", "stop", 3)
