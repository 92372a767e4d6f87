"""Models of a few kilobytes with random weights, made here: real files for engines that load Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

LABELS = {0: "bad", 1: "fair", 2: "good"}
CONTEXT = 128
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Gemma's: it refuses a system message.
NO_SYSTEM_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)


def tokenizer(*, template: str | None = TEMPLATE, pad: bool = True) -> PreTrainedTokenizerFast:
    """Bytes and a few marks. Like Llama's it writes a start token before every text that it is to mark."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks = ["<s>", "</s>", "<pad>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([], trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        **({"pad_token": "<pad>"} if pad else {}),
        model_max_length=CONTEXT,
    )
    made.chat_template = template
    return made


def llama(**settings: Any) -> LlamaForCausalLM:
    """A chat model whose answers mean nothing but are always the same."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


def save_llama(folder: Path, *, template: str | None = TEMPLATE, pad: bool = True) -> Path:
    llama().save_pretrained(folder)
    tokenizer(template=template, pad=pad).save_pretrained(folder)
    return folder


def save_classifier(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(3)
    config = _bert(num_labels=len(LABELS), id2label=LABELS, label2id={v: k for k, v in LABELS.items()}, **settings)
    model = BertForSequenceClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_encoder(folder: Path) -> Path:
    """A plain encoder without modules of sentence-transformers."""
    torch.manual_seed(5)
    BertModel(_bert()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def _bert(**settings: Any) -> BertConfig:
    return BertConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=2,
        initializer_range=0.3,
        **settings,
    )
