"""The decoding loop against ``generate``: rows of different lengths together, for every way a model remembers its past."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

import transformers  # noqa: E402

from batchmill_workers.gpu.batching import Item  # noqa: E402
from batchmill_workers.gpu.transformers_answer import Prompt  # noqa: E402
from batchmill_workers.gpu.transformers_choice import Choice  # noqa: E402
from batchmill_workers.gpu.transformers_decoding import Decoder, DecodingRun  # noqa: E402

END, PAD, VOCABULARY = 1, 2, 100
PROMPT_LENGTHS, MAX_TOKENS = (3, 20, 11, 7, 16), (25, 4, 12, 18, 25)


def modern(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=PAD,
        **settings,
    )


def older(name: str, **settings: Any) -> Any:
    return getattr(transformers, name)(
        vocab_size=VOCABULARY, initializer_range=0.3, bos_token_id=0, eos_token_id=END, **settings
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "keys and values": lambda: modern("LlamaConfig"),
    "a sliding window": lambda: modern("MistralConfig", sliding_window=8),
    "windows in some layers": lambda: modern("Gemma3TextConfig", head_dim=8, sliding_window=8),
    "learned positions": lambda: older("GPT2Config", n_embd=32, n_layer=2, n_head=4),
    "distances": lambda: older("BloomConfig", hidden_size=32, n_layer=2, n_head=4),
    "a state": lambda: older("MambaConfig", hidden_size=32, num_hidden_layers=2, state_size=8),
    "states and keys": lambda: modern("Lfm2Config", full_attn_idxs=[1, 3]),
}


def generated(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=END,
        pad_token_id=PAD,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("ahead", [False, True], ids=["", "one step ahead"])
@pytest.mark.parametrize("remembers", CONFIGS)
def test_a_batch_gives_what_generate_gives_for_each_row_alone(remembers: str, ahead: bool) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[remembers]()).eval()
    numbers = random.Random(2)
    prompts = [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
    expected = [generated(model, prompt, most) for prompt, most in zip(prompts, MAX_TOKENS, strict=True)]
    texts: dict[int, str] = {}
    decoder = Decoder(model, ends=frozenset({END}), pad=PAD, decode=lambda tokens: " ".join(map(str, tokens)))
    decoder.ahead = ahead  # as on a GPU
    items = [
        Item(number=n, tokens=len(p), arrived_ns=0, payload=Prompt(tokens=p, max_tokens=most, choice=Choice()))
        for n, (p, most) in enumerate(zip(prompts, MAX_TOKENS, strict=True))
    ]
    run = DecodingRun(decoder, items)
    with torch.inference_mode():
        while run.live:
            run.step(lambda item, fields: texts.update({item.number: fields["text"]}))

    for number, tokens in enumerate(expected):
        assert texts[number] == " ".join(str(token) for token in tokens if token != END)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_more_is_computed_only_where_a_row_may_have_a_token_more(ahead: bool) -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["keys and values"]()).eval()
    decoder = Decoder(model, ends=frozenset(), pad=PAD, decode=str)
    decoder.ahead = ahead
    forward, computed = decoder.forward, 0

    def counted(*tensors: Any) -> Any:
        nonlocal computed
        computed += 1
        return forward(*tensors)

    decoder.forward = counted  # type: ignore[method-assign]
    payloads = [Prompt(tokens=[5, 6], max_tokens=most, choice=Choice()) for most in (3, 6)]
    answers: dict[int, int] = {}
    run = DecodingRun(decoder, [Item(number=n, tokens=2, arrived_ns=0, payload=p) for n, p in enumerate(payloads)])
    with torch.inference_mode():
        while run.live:
            run.step(lambda item, fields: answers.update({item.number: fields["output_tokens"]}))

    assert answers == {0: 3, 1: 6}
    assert computed == 6
