"""What reaches vLLM of a catalogue entry's options and of a request, recorded by modules called as vLLM's are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.request import Request, TaskKind
from batchmill_workers.gpu.vllm import VllmEngine
from batchmill_workers.gpu.vllm_figures import Figures, stat_logger
from batchmill_workers.gpu.vllm_loading import build_engine
from batchmill_workers.gpu.vllm_model import VllmModel

SCHEMA = {"type": "object"}


@dataclass
class Arguments:
    """As vLLM's AsyncEngineArgs: a dataclass of what it knows."""

    model: str
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True
    stream_interval: int = 1
    max_model_len: int | None = None


@dataclass
class OldArguments:
    """As that of vLLM 0.11, which has no stream_interval."""

    model: str
    disable_log_stats: bool = False
    max_model_len: int | None = None


@dataclass
class Engine:
    """As vLLM's AsyncLLM: keeps what it is asked, answers each request at once."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    model_config: Any = field(
        default_factory=lambda: SimpleNamespace(max_model_len=100, get_diff_sampling_param=lambda: {"top_p": 0.9})
    )
    vllm_config: Any = field(default_factory=lambda: SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=7)))

    async def generate(self, prompt: Any, params: Any, **named: Any) -> AsyncIterator[Any]:
        self.asked.append({"prompt": prompt, "params": params, **named})
        part = SimpleNamespace(text="yes", token_ids=[5], finish_reason="stop")
        yield SimpleNamespace(outputs=[part], num_cached_tokens=None)


class Tokenizer:
    """Writes its template's start token, and none of its own unless it is asked to."""

    chat_template = "template"

    def apply_chat_template(self, messages: Any, **_named: Any) -> str:
        return f"<s>{messages[-1]['content']}"

    def __call__(self, text: str, *, add_special_tokens: bool, **_named: Any) -> dict[str, list[int]]:
        return {"input_ids": [1] * (text.count("<s>") + add_special_tokens) + [9] * len(text.replace("<s>", ""))}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules called as vLLM's; what its engine is built of is kept in the table."""
    built: dict[str, Any] = {}

    def put(name: str, **contents: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)

    def build(arguments: Any, **named: Any) -> Engine:
        built.update(arguments=arguments, **named)
        return Engine()

    put("vllm", __version__="0.99.0")
    put("vllm.engine.arg_utils", AsyncEngineArgs=Arguments)
    put("vllm.v1.engine.async_llm", AsyncLLM=SimpleNamespace(from_engine_args=build))
    put("vllm.usage.usage_lib", UsageContext=SimpleNamespace(LLM_CLASS="throughput"))
    put("vllm.v1.metrics.loggers", StatLoggerBase=object)
    put("vllm.lora.request", LoRARequest=lambda *given: ("adapter", *given))
    put(
        "vllm.sampling_params",
        StructuredOutputsParams=lambda **form: ("form", form),
        SamplingParams=SimpleNamespace(from_optional=lambda **given: given),
        RequestOutputKind=SimpleNamespace(DELTA="delta"),
    )
    return built


@pytest.mark.parametrize(
    "option",
    [
        {"max_model_len": 64},
        {"gpu_memory_utilization": 0.5},
        {"kv_cache_memory_bytes": 1 << 20},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 3},
        {"dtype": "half"},
        {"enforce_eager": False},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 5},
        {"max_num_batched_tokens": 512},
        {"kv_cache_dtype": "fp8"},
        {"cpu_offload_gb": 2.5},
        {"trust_remote_code": True},
        {"seed": 0},
        {"runner": "pooling"},
    ],
    ids=lambda option: next(iter(option)),
)
def test_each_option_is_an_argument_of_vllm_as_it_is(option: dict[str, Any]) -> None:
    engine = VllmEngine(model=ModelEntry(name="m", engine="vllm", source="x", options=option), device="cuda:0")

    assert engine.configuration()["args"].items() >= option.items()


def test_any_other_argument_goes_beside_the_options() -> None:
    entry = ModelEntry(name="m", engine="vllm", source="x", options={"engine_args": {"block_size": 32}})

    assert VllmEngine(model=entry, device="cuda:0").configuration()["args"]["block_size"] == 32


def test_the_engine_is_built_for_throughput_of_the_arguments(vllm: dict[str, Any]) -> None:
    build_engine("folder", {"max_model_len": 64}, str, pooling=False)

    assert vllm["arguments"] == Arguments(
        model="folder", disable_log_stats=True, use_tqdm_on_load=False, stream_interval=1 << 20, max_model_len=64
    )
    assert vllm["usage_context"] == "throughput"
    assert vllm["stat_loggers"] == [str]


def test_a_pooling_engine_streams_nothing(vllm: dict[str, Any]) -> None:
    build_engine("folder", {}, str, pooling=True)

    assert vllm["arguments"].stream_interval == 1


def test_what_an_older_vllm_does_not_know_is_left_out(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.engine.arg_utils"], "AsyncEngineArgs", OldArguments)
    build_engine("folder", {"max_model_len": 64}, str, pooling=False)

    assert vllm["arguments"] == OldArguments(model="folder", disable_log_stats=True, max_model_len=64)


@pytest.mark.usefixtures("vllm")
def test_an_argument_that_the_installed_vllm_lacks_is_named_with_its_version() -> None:
    with pytest.raises(ValueError, match=r"^vLLM 0\.99\.0 has no argument 'max_modl_len'.*'max_model_len'"):
        build_engine("folder", {"max_modl_len": 64}, str, pooling=False)


@pytest.mark.parametrize("named", [{"mm_cache_stats": None, "engine_idx": 0}, {"engine_idx": 0}], ids=["new", "0.11"])
@pytest.mark.usefixtures("vllm")
def test_vllms_statistics_are_the_figures(named: dict[str, Any]) -> None:
    figures = Figures()
    logger = stat_logger(figures)(SimpleNamespace(), 0)
    logger.record(
        scheduler_stats=SimpleNamespace(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5),
        iteration_stats=None,
        **named,
    )
    logger.record(scheduler_stats=None, iteration_stats=None, **named)

    assert figures.take() == {"running": 3, "waiting": 2, "batch_rows": 3.0, "steps": 1, "kv_cache_percent": 50.0}


def ask(tmp_path: Path, params: dict[str, Any], schema: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vLLM is asked for one request, and the answer's fields."""
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    entry = ModelEntry(name="m", engine="vllm", source="x", options={"lora": {"sql": str(adapter)}})
    host = VllmEngine(model=entry, device="cuda:0")
    vllm_engine = Engine()
    model = VllmModel(vllm_engine, Tokenizer(), host.configuration())
    request = Request(task=TaskKind.CHAT, messages=({"role": "user", "content": "Hi"},), params=params, schema=schema)
    answer = asyncio.run(model.answer("7", host.message(request), lambda tokens: None))
    return vllm_engine.asked[0], answer


@pytest.mark.usefixtures("vllm")
def test_a_prompt_is_sent_as_tokens_with_one_start_token(tmp_path: Path) -> None:
    asked, answer = ask(tmp_path, {})

    assert asked["prompt"] == {"type": "token", "prompt_token_ids": [1, 9, 9]}
    assert (asked["request_id"], asked["lora_request"]) == ("7", None)
    assert (answer["input_tokens"], answer["cached_tokens"], answer["output_tokens"]) == (3, 0, 1)


@pytest.mark.usefixtures("vllm")
def test_parameters_schema_and_adapter_reach_vllm(tmp_path: Path) -> None:
    asked, _ = ask(tmp_path, {"temperature": 0, "max_tokens": 5, "min_tokens": 2, "stop": "x", "lora": "sql"}, SCHEMA)

    assert asked["params"] == {
        "temperature": 0.0,
        "top_p": 0.9,
        "max_tokens": 5,
        "min_tokens": 2,
        "stop": ["x"],
        "structured_outputs": ("form", {"json": SCHEMA}),
        "output_kind": "delta",
    }
    assert asked["lora_request"] == ("adapter", "sql", 1, str(tmp_path / "sql"))
