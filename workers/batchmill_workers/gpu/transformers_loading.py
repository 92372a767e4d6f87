"""Loading a model's files by transformers: what the model does, in which precision, on which device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from batchmill_core.errors import InvalidRequest
from batchmill_workers.gpu.host_memory import host_memory
from batchmill_workers.gpu.transformers_lengths import learned_positions
from batchmill_workers.gpu.transformers_options import TransformersOptions

_CHAT, _EMBED, _CLASSIFY = "chat", "embed", "classify"


def task_of(path: Path, asked: str) -> str:
    """What a model does: as asked, else as its files say. A folder of sentence-transformers embeds, GGUF files chat.

    Raises ValueError where they do not say.
    """
    if asked != "auto":
        return asked
    if path.is_file():
        return _CHAT
    if (path / "modules.json").exists():
        return _EMBED
    names = _architectures(path)
    if any(name.endswith("ForSequenceClassification") for name in names):
        return _CLASSIFY
    if any(name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names):
        return _CHAT
    if any(name.endswith(("Model", "ForMaskedLM", "Encoder")) for name in names):
        return _EMBED
    raise ValueError(f"{path} does not say what the model does; set options.task to chat, embed or classify")


def _architectures(path: Path) -> list[str]:
    try:
        config = json.loads((path / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{path} is no model folder: it has no config.json") from None
    return list(config.get("architectures") or [])


def precision(asked: str, device: str) -> torch.dtype:
    """The type of the weights: float32 on the processor, on a GPU bfloat16 where it can, else float16."""
    if asked != "auto":
        chosen: torch.dtype = getattr(torch, asked)
        return chosen
    if device == "cpu":
        return torch.float32
    # Older GPUs (V100, T4) have bfloat16 only by emulation, several times slower than float16.
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def load_tokenizer(path: Path, options: TransformersOptions) -> Any:
    """The tokenizer that lies beside the weights. Raises ValueError where none does."""
    folder, file = _place(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=options.trust_remote_code, **file)
    check_tokenizer(tokenizer)
    return tokenizer


def check_tokenizer(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that knows no words.

    In a folder without a tokenizer's files transformers 5 makes one of the model's kind from nothing: it reads every text
    as unknown tokens, and every row would be answered with nonsense.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) - _WORDS_OF_NOTHING:
        raise ValueError(
            "there is no tokenizer among the model's files; put tokenizer.json or the like beside the weights, as "
            "tokenizer.save_pretrained writes it"
        )


_WORDS_OF_NOTHING = {"\N{LOWER ONE EIGHTH BLOCK}"}  # stands for a blank in T5's, beside its marks


def load_model(kind: Any, path: Path, device: str, options: TransformersOptions) -> Any:
    """A model of an ``AutoModel…`` class, ready to compute. A slot of several GPUs gets its layers spread over them.

    Raises ValueError where its files lack weights, which transformers would draw at random.
    """
    folder, file = _place(path)
    model, told = kind.from_pretrained(
        folder,
        dtype=precision(options.dtype, device),
        device_map=device_map(device),
        trust_remote_code=options.trust_remote_code,
        output_loading_info=True,
        **attention(options),
        **file,
    )
    missing = sorted(name for name in told["missing_keys"] if name.endswith(".weight"))
    if missing:
        raise ValueError(
            f"its files lack weights of a {type(model).__name__} ({', '.join(missing[:3])}), so that its answers "
            "would be random; take a model that was trained for this task, or correct options.task"
        )
    return model.eval()


def attention(options: TransformersOptions) -> Mapping[str, Any]:
    return {} if options.attention == "auto" else {"attn_implementation": options.attention}


def device_map(device: str) -> Any:
    """Where the weights go: one device, or ``auto`` for all that the process is pinned to."""
    return "auto" if device != "cpu" and torch.cuda.device_count() > 1 else device


def _place(path: Path) -> tuple[str, Mapping[str, str]]:
    """The folder, and the argument that names a GGUF file in it."""
    return (str(path.parent), {"gguf_file": path.name}) if path.is_file() else (str(path), {})


def end_tokens(tokenizer: Any, model: Any, template: str | None = None) -> frozenset[int]:
    """All tokens that end an answer: the settings' one or several, and those by which the chat template ends a turn.

    ``template`` None is the tokenizer's own.
    """
    found: set[int] = set()
    for one in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(one, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    own = tokenizer.chat_template or ""
    texts = template or (own if isinstance(own, str) else "".join(own.values()))  # some have several, by name
    vocabulary = tokenizer.get_vocab()
    found.update(vocabulary[text] for text in _TURN_ENDS if text in texts and text in vocabulary)
    return frozenset(found)


# Files often name the end of a text as the only end and forget the end of a turn, which then is never recognised.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_turn|>", "<|eot|>", "<|return|>")


def known_tokens(model: Any) -> int | None:
    """How many tokens the model reads, which may be fewer than its tokenizer writes; None where it does not say."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return None


def check_known(tokens: Sequence[int], known: int | None) -> None:
    """Raises InvalidRequest for a token that the model has no vector for.

    On a processor it would end the batch in which it is, on a GPU the whole process.
    """
    if known is not None and tokens and max(tokens) >= known:
        raise InvalidRequest(
            f"the text has token {max(tokens)}, but the model knows {known} tokens only: its tokenizer is another model's, "
            "or was given tokens that the model was not"
        )


def settle_padding(tokenizer: Any, model: Any) -> int:
    """`pad_token`, by which the tokenizer pads from now on: on the right where the model has a table of positions.

    Padding on the left would move a text to other positions, so that its answer hung on the longest text of its batch.
    """
    pad = pad_token(tokenizer, model)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    if learned_positions(model) is not None:
        tokenizer.padding_side = "right"
    return pad


def pad_token(tokenizer: Any, model: Any) -> int:
    """A token to fill rows up with; what it is does not matter, as it is masked."""
    for one in (tokenizer.pad_token_id, getattr(model.config, "pad_token_id", None), tokenizer.eos_token_id):
        if isinstance(one, int) and one >= 0:
            return one
    return 0


def row_token_bytes(model: Any) -> int:
    """About how many bytes one token of one row takes up while a batch runs: its keys and values, and its activations.

    Keys and values are two vectors of every key-value head in every layer; four intermediate layers' widths at once
    stand for the activations. Only a first guess: sizes that do not fit are halved, see ``batching_sizes``.
    """
    config = model.config.get_text_config()
    hidden = int(getattr(config, "hidden_size", 1024))
    heads = int(getattr(config, "num_attention_heads", 0) or 1)
    kv_heads = int(getattr(config, "num_key_value_heads", 0) or heads)
    head = int(getattr(config, "head_dim", 0) or hidden // heads)
    layers = int(getattr(config, "num_hidden_layers", 1))
    wide = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    return int((2 * layers * kv_heads * head + 4 * (hidden + wide)) * model.dtype.itemsize)


def free_bytes(device: str) -> int:
    """Memory that is free for batches, after the weights: the least of the slot's GPUs, or a quarter of `host_memory`."""
    if device != "cpu":
        return int(min(torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())) * 0.8)
    host = host_memory()
    return 2 << 30 if host is None else host.free_bytes // 4
