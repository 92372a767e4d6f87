"""A chat model with random weights, made here: as much work for a device as a real one, and no download.

``python -m batchmill_ops.gpu_check.local_model FOLDER SHAPE DEVICE`` prints its parameters last.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 4096
_MARKS = ["<s>", "</s>", "<pad>", "<|im_end|>"]
_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a Llama model, and of the prompts for it. Heads are 64 wide, every fourth has keys and values of its
    own.
    """

    name: str
    hidden: int
    layers: int
    prompt_bytes: int  # a token each

    @property
    def heads(self) -> int:
        return max(4, self.hidden // 64)

    @property
    def disk_bytes(self) -> int:
        """What the check writes: the weights, and a database and logs of some hundred MB."""
        return int(1.1 * 2 * self.layers * 14.5 * self.hidden**2) + (200 << 20)


# Few wide layers and prompts of a thousand tokens: work that keeps a large GPU busy. With 17 layers of a quarter of the
# size, the same parameters, Python could not start kernels as fast as an H200 computes them, whoever calls them.
_BILLION = Shape(name="billion", hidden=4096, layers=4, prompt_bytes=1000)
_TINY = Shape(name="tiny", hidden=64, layers=2, prompt_bytes=100)
SHAPES = {one.name: one for one in (_BILLION, _TINY)}


def build(folder: Path, size: Shape, *, device: str) -> int:
    """Writes the model in bfloat16 with its tokenizer; answers its parameters. Its answers never end by themselves."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = _tokenizer()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 4,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[
            : len(_MARKS)
        ].zero_()  # their logits are 0; among hundreds of others some are always above
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def _tokenizer() -> Any:
    """A token per byte, and a few marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + len(_MARKS), special_tokens=_MARKS, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=CONTEXT_TOKENS,
    )
    made.chat_template = _TEMPLATE
    return made


def prompts(count: int, shape: Shape) -> list[str]:
    """Prompts of nearly the same length: whoever sorts them by length first gains nothing by it."""
    texts = (f"Tell me about thing number {n:06}: " for n in range(count))
    return [
        text + "more, " * ((shape.prompt_bytes - len(text)) // 6) + "!" * (n * 7 % 35) for n, text in enumerate(texts)
    ]


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), SHAPES[sys.argv[2]], device=sys.argv[3]))  # noqa: T201
