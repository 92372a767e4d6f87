"""What only the vLLM engine does. Too large for CI: ``ops/vllm-check`` runs it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError, EngineLost
from batchmill_core.request import Request
from batchmill_workers.gpu.vllm import VllmEngine
from tests.conformance.engine_host import VLLM_MODEL, EngineCase, EngineHost, chat

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or VLLM_MODEL not in os.environ,
    reason="vllm is not installed: ops/vllm-check runs it",
)
SMALL: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
START, START_ID = "<|endoftext|>", 0  # a start token that means nothing else to the model
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a tokenizer that writes a start token by itself, and a template that writes one too."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    shutil.copytree(os.environ[VLLM_MODEL], folder)
    start = {"SpecialToken": {"id": START, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {START: {"id": START, "ids": [START_ID], "tokens": [START]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = folder / "chat_template.jinja"
    template.write_text(START + template.read_text())
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """A LoRA adapter of random weights, large enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], 4
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(heads * config["head_dim"], rank, generator=generator)
    path = tmp_path_factory.mktemp("adapter")
    save_file(weights, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM"}))
    return path


@pytest.fixture(scope="module")
def host(folder: Path, adapter: Path) -> Iterator[EngineHost]:
    options = {**SMALL, "max_num_seqs": 16, "max_model_len": 2048, "lora": {"noise": str(adapter)}}
    entry = ModelEntry(name="m", engine="vllm", source=str(folder), options=options)
    host = EngineHost(EngineCase(name="vllm", make=lambda: VllmEngine(model=entry)))
    try:
        host.run(host.engine.start())
        yield host
    finally:
        host.close()


def test_the_options_say_what_the_engine_can(host: EngineHost) -> None:
    assert host.engine.capacity_rows == 16
    assert host.engine.context_tokens == 2048


def test_a_prompt_has_one_start_token(host: EngineHost, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    request = chat("Hi", max_tokens=1)
    text = tokenizer.apply_chat_template(list(request.messages), tokenize=False, add_generation_prompt=True)
    twice = tokenizer.encode(text)
    (answer,) = host.answer(request)

    assert twice[:2] == [START_ID, START_ID]
    assert answer.usage is not None
    assert answer.usage.input == len(twice) - 1


def test_an_answer_follows_the_schema(host: EngineHost) -> None:
    schema = {
        "type": "object",
        "properties": {"label": {"enum": ["positive", "negative"]}, "stars": {"type": "integer"}},
        "required": ["label", "stars"],
        "additionalProperties": False,
    }
    question = ({"role": "user", "content": "Rate this review: I love it. Answer in JSON."},)
    answers = host.answer(
        *(Request(messages=question, params={"max_tokens": 60, "seed": seed}, schema=schema) for seed in range(4))
    )

    for answer in answers:
        found = json.loads(str(answer.text))
        assert found.keys() == {"label", "stars"}
        assert found["label"] in {"positive", "negative"}


def test_an_adapter_answers_the_requests_that_name_it(host: EngineHost) -> None:
    question = "Write two sentences about the sea."
    (alone,) = host.answer(chat(question, **GREEDY))
    plain, noisy, again = host.answer(
        chat(question, **GREEDY), chat(question, lora="noise", **GREEDY), chat(question, **GREEDY)
    )

    assert plain.text == again.text == alone.text
    assert noisy.text != alone.text


def test_a_prompt_that_was_read_before_is_counted_as_cached(host: EngineHost) -> None:
    request = chat("The same beginning. " * 60, max_tokens=1)
    host.answer(request)
    (answer,) = host.answer(request)

    assert answer.usage is not None
    assert 0 < answer.usage.cached_input < answer.usage.input


def test_parameters_of_vllm_reach_it(host: EngineHost) -> None:
    words = {"structured_outputs": {"choice": ["blue", "green"]}}
    chosen, long = host.answer(
        chat("Which colour?", **words), chat("Say hi.", min_tokens=30, max_tokens=30, temperature=0)
    )

    assert chosen.text in {"blue", "green"}
    assert long.usage is not None
    assert long.usage.output == 30


def test_the_first_token_is_timed(host: EngineHost) -> None:
    (answer,) = host.answer(chat("Write a long story.", **GREEDY))

    assert answer.ttft_ms is not None
    assert 0 <= answer.ttft_ms <= answer.latency_ms
    assert answer.device_ns


def test_when_vllm_dies_its_calls_are_lost_and_the_next_one_starts_it_again(host: EngineHost) -> None:
    async def kill_vllm_while_it_answers() -> None:
        call = asyncio.create_task(host.engine.complete(chat("Write a long story.", max_tokens=1500)))
        while not host.engine.figures().running:  # type: ignore[attr-defined]  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0.05)
        for pid in children(host.engine.facts["pid"], "EngineCore"):  # type: ignore[attr-defined]  # a HostedEngine
            os.kill(pid, signal.SIGKILL)
        await call

    with pytest.raises(EngineLost):
        host.run(kill_vllm_while_it_answers())

    (answer,) = host.answer(chat("Hi", max_tokens=2))
    assert answer.text


def test_a_cache_that_does_not_fit_is_told_in_one_sentence(host: EngineHost) -> None:
    options = {**SMALL, "kv_cache_memory_bytes": 16 << 20}
    entry = ModelEntry(name="big", engine="vllm", source=os.environ[VLLM_MODEL], options=options)

    with pytest.raises(ConfigurationError, match=r"model big .*lower options\.max_model_len") as refused:
        host.run(VllmEngine(model=entry).start())

    assert "\n" not in str(refused.value)


def test_an_argument_that_vllm_does_not_have_is_named(host: EngineHost) -> None:
    entry = ModelEntry(
        name="m", engine="vllm", source=os.environ[VLLM_MODEL], options={"engine_args": {"blok_size": 32}}
    )

    with pytest.raises(ConfigurationError, match=r"has no argument 'blok_size'.*did you mean 'block_size'"):
        host.run(VllmEngine(model=entry).start())


def children(parent: int, name: str) -> list[int]:
    """The children of a process whose command line holds ``name``."""
    found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in found if name in Path(f"/proc/{pid}/cmdline").read_text()]
