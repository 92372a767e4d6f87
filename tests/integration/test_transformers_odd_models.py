"""Models whose files do not fit together, and texts at a model's edges: told by one sentence, and no other row suffers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

import sentence_transformers  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer  # noqa: E402
from tokenizers import processors  # noqa: E402

from batchmill_core.errors import InvalidRequest, TooLong  # noqa: E402
from batchmill_workers.gpu.transformers_process import reason  # noqa: E402
from batchmill_workers.gpu.transformers_work import BROKEN  # noqa: E402
from tests import tiny_models  # noqa: E402
from tests.loaded_models import asking, computed, floats, loaded  # noqa: E402

EXTRA = "<extra>"
POSITIONS = 34


def with_an_extra_token(folder: Path) -> Path:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_tokens([EXTRA])
    tokenizer.save_pretrained(folder)
    return folder


def saved(folder: Path, model: Any, *, bare: bool = False) -> Path:
    """A model with our tokenizer; ``bare``: one that adds no token to a text, and has none to pad with."""
    model.save_pretrained(folder)
    tokenizer = tiny_models.tokenizer(pad=not bare)
    tokenizer.model_max_length = 1 << 40  # as files have it that do not say
    if bare:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save_pretrained(folder)
    return folder


def gpt2(kind: str = "GPT2LMHeadModel", **settings: Any) -> Any:
    torch.manual_seed(4)
    config = transformers.GPT2Config(
        vocab_size=260,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        **settings,
    )
    return getattr(transformers, kind)(config)


def roberta(kind: str) -> Any:
    config = transformers.RobertaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        pad_token_id=2,
    )
    return getattr(transformers, kind)(config)


# numbers that are none


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_a_chat_model_that_computes_no_numbers_answers_with_one_error(
    tmp_path: Path, sampling: dict[str, float]
) -> None:
    work = loaded(tiny_models.save_llama(tmp_path / "model"))
    work.model.lm_head.weight.data.fill_(float("nan"))
    (answer,) = computed(work, asking("Hi", max_tokens=4, seed=1, **sampling))

    assert answer["error"]["kind"] == BROKEN
    assert "not finite" in answer["error"]["message"]


def test_a_model_that_overflows_in_float16_says_to_try_float32(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny_models.llama()
    model.model.norm.weight.data.fill_(6e4)
    saved(folder, model)
    (half,) = computed(loaded(folder, dtype="float16"), asking("Hi", max_tokens=4, temperature=0.0))
    (whole,) = computed(loaded(folder), asking("Hi", max_tokens=4, temperature=0.0))

    assert "options.dtype = float32" in half["error"]["message"]
    assert whole["output_tokens"] == 4


def test_only_the_row_whose_numbers_are_none_fails(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_llama(tmp_path / "model"))
    embeddings = work.model.model.embed_tokens
    unread = work.read(asking("%"))[0].payload.tokens[-13]  # the mark "%" itself
    assert work._tokenizer.decode([unread]) == "%"
    embeddings.weight.data[unread] = float("nan")
    broken, whole = computed(work, *(asking(text, max_tokens=4, temperature=0.0) for text in ("%", "Hi")))

    assert "error" in broken
    assert whole["output_tokens"] == 4


def test_a_classifier_that_computes_no_numbers_answers_with_one_error(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_classifier(tmp_path / "model"))
    work.model.classifier.weight.data.fill_(float("nan"))
    (answer,) = computed(work, {"inputs": ["a cat"]})

    assert "not finite" in answer["error"]["message"]


def test_an_embedder_that_computes_no_numbers_answers_with_one_error(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_encoder(tmp_path / "model"))
    next(work.model.parameters()).data.fill_(float("nan"))
    (answer,) = computed(work, {"inputs": ["a cat"]})

    assert "not finite" in answer["error"]["message"]


# tokens that the model does not know


@pytest.mark.parametrize("save", [tiny_models.save_llama, tiny_models.save_classifier, tiny_models.save_encoder])
def test_a_token_that_the_model_does_not_know_is_refused_before_it_is_in_a_batch(tmp_path: Path, save: Any) -> None:
    work = loaded(with_an_extra_token(save(tmp_path / "model")))
    text = f"a {EXTRA}"

    with pytest.raises(InvalidRequest, match="token 260, but the model knows 260 tokens only"):
        work.read(asking(text) | {"inputs": [text]})


# a model's positions


@pytest.mark.parametrize("kind", ["RobertaForSequenceClassification", "RobertaModel"])
def test_a_text_may_have_as_many_tokens_as_the_model_has_positions_for(tmp_path: Path, kind: str) -> None:
    work = loaded(saved(tmp_path / "model", roberta(kind)))
    most = POSITIONS - 3  # RoBERTa's first position is that after padding's, 2 here
    (answer,) = computed(work, {"inputs": ["a" * (most - 1)]})

    assert work.context_tokens == most
    assert "error" not in answer
    with pytest.raises(TooLong, match=f"{most + 1} tokens"):
        work.read({"inputs": ["a" * most]})


def test_a_context_beyond_the_models_positions_is_that_of_its_positions(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", gpt2())

    assert loaded(folder, context_tokens=64).context_tokens == POSITIONS
    assert loaded(folder, context_tokens=16).context_tokens == 16


def xlnet(kind: str, **settings: Any) -> Any:
    config = transformers.XLNetConfig(vocab_size=260, d_model=32, n_layer=2, n_head=4, d_inner=64, **settings)
    return getattr(transformers, kind)(config)


@pytest.mark.parametrize("kind", ["XLNetForSequenceClassification", "XLNetModel"])
def test_a_model_without_a_longest_length_takes_texts_of_any(tmp_path: Path, kind: str) -> None:
    work = loaded(saved(tmp_path / "model", xlnet(kind, pad_token_id=2)))
    (answer,) = computed(work, {"inputs": ["a cat " * 30]})

    assert work.context_tokens is None  # its files say -1 and 2**40
    assert "error" not in answer


# texts without tokens, tokenizers without padding


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_text_without_tokens_is_refused(tmp_path: Path, task: str) -> None:
    work = loaded(saved(tmp_path / "model", gpt2("GPT2ForSequenceClassification"), bare=True), task=task)

    with pytest.raises(InvalidRequest, match=r"number 2 of 2 in its call\) has no tokens"):
        work.read({"inputs": ["a", ""]})


def test_an_embedder_whose_tokenizer_has_no_padding_embeds_texts_of_different_lengths(tmp_path: Path) -> None:
    work = loaded(saved(tmp_path / "model", gpt2("GPT2Model"), bare=True))
    (both,) = computed(work, {"inputs": ["a cat", "a longer text"]})
    (alone,) = computed(work, {"inputs": ["a cat"]})

    first, second = (floats(base64.b64decode(one)) for one in (both["vectors"][0], alone["vectors"][0]))
    assert first == pytest.approx(second, abs=1e-5)


def padding_on_the_left(folder: Path) -> Path:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "padding_side": "left"}))
    return folder


def test_a_vector_does_not_hang_on_the_longest_text_beside_it_where_a_tokenizer_pads_on_the_left(
    tmp_path: Path,
) -> None:
    work = loaded(padding_on_the_left(tiny_models.save_encoder(tmp_path / "model")))
    (both,) = computed(work, {"inputs": ["a cat", "a longer text about a cat"]})
    (alone,) = computed(work, {"inputs": ["a cat"]})

    first, second = (floats(base64.b64decode(one)) for one in (both["vectors"][0], alone["vectors"][0]))
    assert first == pytest.approx(second, abs=1e-5)


def test_a_label_does_not_hang_on_the_longest_text_beside_it_where_a_tokenizer_pads_on_the_left(tmp_path: Path) -> None:
    model = gpt2("GPT2ForSequenceClassification", num_labels=3, pad_token_id=2)
    work = loaded(padding_on_the_left(saved(tmp_path / "model", model)))
    first, _ = computed(work, {"inputs": ["a cat"]}, {"inputs": ["a longer text about a cat"]})
    (alone,) = computed(work, {"inputs": ["a cat"]})

    assert json.loads(first["text"])["scores"] == pytest.approx(json.loads(alone["text"])["scores"], abs=1e-5)


# models that the engine cannot run


def test_a_model_of_static_embeddings_is_told_by_its_first_module(tmp_path: Path) -> None:
    words = StaticEmbedding(tiny_models.tokenizer().backend_tokenizer, embedding_dim=8)
    sentence_transformers.SentenceTransformer(modules=[words], device="cpu").save_pretrained(str(tmp_path / "model"))

    with pytest.raises(ValueError, match="first module is a StaticEmbedding"):
        loaded(tmp_path / "model")


def test_a_model_that_is_no_causal_one_is_told_without_the_list_of_all_models(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=260, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    folder = saved(tmp_path / "model", transformers.T5ForConditionalGeneration(config))
    with pytest.raises(ValueError, match="AutoModelForCausalLM") as told:
        loaded(folder)

    assert reason(told.value).endswith("AutoModelForCausalLM.")


# embeddings of a model with a prompt


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("template", [None, tiny_models.TEMPLATE], ids=["", "in a chat template"])
def test_a_default_prompt_is_read_and_pooled_as_by_sentence_transformers(
    tmp_path: Path, template: str | None, include_prompt: bool
) -> None:
    tiny_models.save_encoder(tmp_path / "encoder")
    (tmp_path / "encoder" / "chat_template.jinja").unlink()
    tiny_models.tokenizer(template=template).save_pretrained(tmp_path / "encoder")
    encoder = Transformer(str(tmp_path / "encoder"))
    pooling = Pooling(32, pooling_mode="mean", include_prompt=include_prompt)
    model = sentence_transformers.SentenceTransformer(
        modules=[encoder, pooling], device="cpu", prompts={"ask": "Represent this: "}, default_prompt_name="ask"
    )
    folder = tmp_path / "model"
    model.save_pretrained(str(folder))
    texts = ["a cat", "The cat sat on the mat."]
    (answer,) = computed(loaded(folder), {"inputs": texts})

    for vector, expected in zip(answer["vectors"], model.encode(texts).tolist(), strict=True):
        assert floats(base64.b64decode(vector)) == pytest.approx(expected, abs=1e-5)


# labels


def test_of_two_labels_with_one_name_the_better_score_is_told(tmp_path: Path) -> None:
    folder = tiny_models.save_classifier(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {str(n): "same" for n in range(3)}
    (folder / "config.json").write_text(json.dumps(config))
    (answer,) = computed(loaded(folder), {"inputs": ["a cat"]})
    best = transformers.pipeline("text-classification", model=str(folder), device="cpu")(["a cat"])[0]["score"]

    assert json.loads(answer["text"])["score"] == pytest.approx(best, abs=1e-5)
