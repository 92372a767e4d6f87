"""The parts of the vLLM engine that need no vLLM: options, parameters, adapters, seats, and errors in words."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError, InvalidRequest
from batchmill_core.request import Request, TaskKind
from batchmill_workers.gpu.vllm import VllmEngine, visible_devices
from batchmill_workers.gpu.vllm_errors import death, is_death, kind_of, load_failure, root_cause
from batchmill_workers.gpu.vllm_figures import Figures
from batchmill_workers.gpu.vllm_loading import prepare_environment
from batchmill_workers.gpu.vllm_lora import lora_args, reserved_rank
from batchmill_workers.gpu.vllm_options import VllmOptions
from batchmill_workers.gpu.vllm_sampling import sampling_arguments, split_params
from batchmill_workers.gpu.vllm_seats import Seats


def entry(**options: Any) -> ModelEntry:
    return ModelEntry(name="m", engine="vllm", source="x", options=options)


def chat(**params: Any) -> Request:
    return Request(messages=({"role": "user", "content": "Hi"},), params=params)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_length": 1}, "'max_model_length' is not an option of vllm; did you mean 'max_model_len'?"),
        ({"max_model_len": 0}, "max_model_len is 0; it must be a whole number of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it must be a whole number of at least 1"),
        ({"gpu_memory_utilization": 90}, "must be a number above 0 and at most 1"),
        ({"dtype": "int8"}, "must be one of auto, half, float16, bfloat16, float, float32"),
        ({"enforce_eager": "yes"}, "must be true or false"),
        ({"lora": ["a"]}, "must be a table of names and sources"),
        ({"cpu_offload_gb": -1}, "must be a number of GiB of at least 0"),
        ({"engine_args": {"dtype": "half"}}, "engine_args.dtype is an option of its own; write options.dtype"),
        ({"engine_args": {"model": "x"}}, "engine_args.model is set by Batchmill itself"),
    ],
)
def test_a_wrong_option_is_named_with_its_model(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        VllmOptions.parse(options, model="m")

    assert "[models.m] options" in str(refused.value)
    assert said in str(refused.value)


def test_only_what_is_given_reaches_vllm() -> None:
    options = VllmOptions.parse({"dtype": "bfloat16", "lora": {"a": "x"}, "engine_args": {"block_size": 32}}, model="m")

    args = options.as_engine_args(devices=2, on_cpu=False, context_tokens=None)

    assert args == {"dtype": "bfloat16", "tensor_parallel_size": 2, "block_size": 32}


@pytest.mark.parametrize(("stages", "tensor_parallel"), [(1, 4), (2, 2), (4, 1), (3, 4), (8, 4), ("2", 4), (0, 4)])
def test_devices_that_hold_other_layers_are_not_counted_twice(stages: Any, tensor_parallel: int) -> None:
    options = VllmOptions.parse({"engine_args": {"pipeline_parallel_size": stages}}, model="m")

    args = options.as_engine_args(devices=4, on_cpu=False, context_tokens=None)

    assert args == {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": stages}


def test_options_win_over_what_the_slot_and_the_entry_say() -> None:
    options = VllmOptions.parse({"tensor_parallel_size": 1, "max_model_len": 2048}, model="m")

    args = options.as_engine_args(devices=4, on_cpu=False, context_tokens=4096)

    assert args == {"tensor_parallel_size": 1, "max_model_len": 2048}


def test_the_entrys_context_is_vllms() -> None:
    args = VllmOptions().as_engine_args(devices=1, on_cpu=False, context_tokens=4096)

    assert args["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("options", "has_cache"), [({}, True), ({"gpu_memory_utilization": 0.5}, False)], ids=["default", "share given"]
)
def test_on_the_processor_the_cache_does_not_take_the_hosts_memory(options: dict[str, Any], has_cache: bool) -> None:
    args = VllmOptions.parse(options, model="m").as_engine_args(devices=1, on_cpu=True, context_tokens=None)

    assert args.get("kv_cache_memory_bytes") == (4 << 30 if has_cache else None)


@pytest.mark.parametrize(("value", "count"), [("", 1), ("GPU-1", 1), ("GPU-1,GPU-2", 2), ("0,1,", 2)])
def test_all_devices_of_a_slot_are_used_together(value: str, count: int) -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": value}) == count


def test_capacity_follows_from_the_options() -> None:
    assert VllmEngine(model=entry(max_num_seqs=7)).capacity_rows == 7


def test_the_engine_says_how_to_install_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigurationError, match=r"pip install 'batchmill\[vllm\]'"):
        VllmEngine(model=entry()).check()


def test_a_chat_template_may_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")

    engine = VllmEngine(model=entry(chat_template=str(tmp_path / "t.jinja")))

    assert engine.configuration()["chat_template"] == "{{ messages }}"


def test_a_chat_template_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"options\.chat_template names no/such\.jinja, which cannot be read"):
        VllmEngine(model=entry(chat_template="no/such.jinja")).configuration()


def test_parameters_of_vllm_are_told_apart_and_checked() -> None:
    sampling, only_vllm = split_params({"temperature": 0, "min_tokens": 3, "stop_token_ids": [7], "bad_words": None})

    assert sampling.temperature == 0
    assert only_vllm == {"min_tokens": 3, "stop_token_ids": [7]}


@pytest.mark.parametrize(
    "params",
    [
        {"min_tokens": -1},
        {"ignore_eos": 1},
        {"stop_token_ids": ["a"]},
        {"bad_words": "x"},
        {"logit_bias": {"a": 1}},
        {"structured_outputs": {"json": {}, "regex": "x"}},
        {"chat_template_kwargs": []},
        {"lora": 5},
        {"no_such_parameter": 1},
    ],
    ids=str,
)
def test_a_bad_parameter_is_named(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        split_params(params)


def arguments(params: dict[str, Any], *, room: int = 1000, schema: Any = None, **defaults: Any) -> dict[str, Any]:
    sampling, only_vllm = split_params(params)
    return sampling_arguments(sampling.as_dict(), only_vllm, defaults=defaults, room=room, schema=schema)


def test_the_models_own_settings_hold_where_nothing_is_given() -> None:
    assert arguments({"top_p": 0.5}, temperature=0.6, top_p=0.9) == {
        "temperature": 0.6,
        "top_p": 0.5,
        "max_tokens": 256,
    }


def test_an_answer_is_bounded_by_what_the_context_has_left() -> None:
    assert arguments({}, room=10)["max_tokens"] == 10
    assert arguments({"max_tokens": 5}, room=10)["max_tokens"] == 5


def test_stop_texts_are_a_list_and_none_where_there_are_none() -> None:
    assert arguments({"stop": "x"})["stop"] == ["x"]
    assert "stop" not in arguments({})


def test_a_schema_guides_the_answer() -> None:
    assert arguments({}, schema={"type": "object"})["structured_outputs"] == {"json": {"type": "object"}}


def test_a_schema_and_another_form_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        arguments({"structured_outputs": {"regex": "a+"}}, schema={})


def test_a_request_names_its_adapter() -> None:
    engine = VllmEngine(model=entry(lora={"sql": "a", "fr": "b"}))

    assert engine.message(chat(lora="fr"))["lora"] == "fr"
    assert engine.message(chat())["lora"] is None


def test_an_entry_that_is_called_as_an_adapter_is_answered_by_it() -> None:
    model = ModelEntry(name="m", model="sql", engine="vllm", source="x", options={"lora": {"sql": "a"}})

    assert VllmEngine(model=model).message(chat())["lora"] == "sql"


def test_an_unknown_adapter_is_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'sql'"):
        VllmEngine(model=entry(lora={"sql": "a"})).message(chat(lora="sqll"))


def adapter(folder: Path, rank: int) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return folder


def test_memory_for_adapters_follows_from_the_largest_rank(tmp_path: Path) -> None:
    adapters = {"a": adapter(tmp_path / "a", 4), "b": adapter(tmp_path / "b", 20)}

    assert lora_args(adapters, max_rank=None, on_cpu=False) == {
        "enable_lora": True,
        "max_lora_rank": 32,
        "max_loras": 2,
        "max_cpu_loras": 2,
    }
    assert lora_args(adapters, max_rank=64, on_cpu=False)["max_lora_rank"] == 64
    assert lora_args({}, max_rank=None, on_cpu=True) == {}
    assert reserved_rank(1000) == 1000


def test_on_the_processor_a_place_stays_empty_for_rows_without_an_adapter(tmp_path: Path) -> None:
    adapters = {"a": adapter(tmp_path / "a", 4), "b": adapter(tmp_path / "b", 4)}

    args = lora_args(adapters, max_rank=None, on_cpu=True)

    assert (args["max_loras"], args["max_cpu_loras"]) == (3, 3)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"options\.lora\.sql"):
        lora_args({"sql": tmp_path}, max_rank=None, on_cpu=True)


def test_a_pooling_model_embeds_and_does_not_chat() -> None:
    engine = VllmEngine(model=entry(runner="pooling"))

    message = engine.message(Request(task=TaskKind.EMBED, inputs=("a", "b"), params={"dimensions": 8}))

    assert message == {"inputs": ["a", "b"], "dimensions": 8, "lora": None}
    with pytest.raises(InvalidRequest, match="pooling"):
        engine.message(chat())
    with pytest.raises(InvalidRequest, match="temperature"):
        engine.message(Request(task=TaskKind.EMBED, inputs=("a",), params={"temperature": 1}))


def test_vectors_arrive_as_bytes() -> None:
    assert VllmEngine(model=entry(runner="pooling")).answer({"vectors": ["AACAPw=="]}) == {
        "vectors": (b"\x00\x00\x80?",)
    }


def test_the_oldest_calls_have_the_seats() -> None:
    seats = Seats(2)

    assert [seats.come(number) for number in (1, 2, 3, 4)] == [[1], [2], [], []]
    assert seats.leave(3) == []
    assert seats.leave(1) == [4]
    assert seats.leave(9) == []


def test_figures_are_the_last_steps_and_the_mean_batch_since_they_were_taken() -> None:
    figures = Figures()
    figures.step(running=2, waiting=5, cache_share=0.1)
    figures.step(running=4, waiting=0, cache_share=0.25)

    assert figures.take() == {"running": 4, "waiting": 0, "batch_rows": 3.0, "steps": 2, "kv_cache_percent": 25.0}
    assert figures.take()["batch_rows"] is None


def test_a_batch_that_came_further_never_has_the_figures_that_it_had() -> None:
    figures = Figures()
    told = []
    for _ in range(2):
        figures.step(running=2, waiting=5, cache_share=0.1)
        told.append(figures.take())
    idle = [figures.take(), figures.take()]

    assert told[0] != told[1]
    assert idle[0] == idle[1]


@pytest.mark.parametrize("given", [{}, {"VLLM_LOGGING_LEVEL": "DEBUG"}], ids=["unset", "set"])
def test_vllm_is_quiet_unless_the_user_wants_to_hear_it(given: dict[str, str]) -> None:
    environment = dict(given)
    prepare_environment(environment)

    assert environment["VLLM_LOGGING_LEVEL"] == given.get("VLLM_LOGGING_LEVEL", "WARNING")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment


def test_a_slots_threads_are_vllms() -> None:
    environment = {"OMP_NUM_THREADS": "2"}
    prepare_environment(environment)

    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


LOG = [
    "(EngineCore pid=7) ERROR 12-01 01:00:45 [core.py:1200] EngineCore failed to start.",
    "(EngineCore pid=7) ERROR 12-01 01:00:45 [core.py:1200] Traceback (most recent call last):",
    '(EngineCore pid=7) ERROR 12-01 01:00:45 [core.py:1200]   File "a.py", line 3, in f',
    "(EngineCore pid=7) ERROR 12-01 01:00:45 [core.py:1200] torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]


def test_the_cause_is_found_in_the_log() -> None:
    assert root_cause(LOG) == "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    assert root_cause([]) is None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("\x1b[1;36m(EngineCore_DP0 pid=7)\x1b[0;0m ERROR 12-01 01:00:45 [core.py:1] ValueError: no", "ValueError: no"),
        ("\x1b[1;36m(EngineCore_DP0 pid=7)\x1b[0;0m MemoryError", "MemoryError"),
        ("(EngineCore pid=7) numpy._core._exceptions._ArrayMemoryError: Unable to", "_ArrayMemoryError: Unable to"),
    ],
    ids=["coloured", "without a message", "of a library"],
)
def test_the_cause_is_found_in_every_versions_log(line: str, cause: str) -> None:
    assert root_cause(["(EngineCore pid=7) Process EngineCore:", line]) == cause


START_FAILED = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}"


def test_an_engine_that_was_killed_while_it_loaded_says_by_what() -> None:
    assert load_failure(RuntimeError(START_FAILED), ["loading"]) == (
        "vLLM's engine was killed by signal 9 while it loaded, as the kernel does when the host's memory is used up"
    )


def test_a_failure_without_a_cause_ends_with_the_logs_last_line() -> None:
    said = load_failure(RuntimeError("Engine core initialization failed. See root cause above."), ["a", "bad mask", ""])

    assert said.endswith("The last line of its log: bad mask")


@pytest.mark.parametrize(
    "cause", ["MemoryError", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]
)
def test_an_engine_that_ran_out_of_memory_says_what_to_lower_and_blames_the_rows(cause: str) -> None:
    reason, device_lost = death([f"(EngineCore pid=7) ERROR 12-01 01:00:45 [core.py:1200] {cause}"])

    assert reason.startswith("vLLM's engine died: the model is too big for the device; lower")
    assert not device_lost


def test_a_killed_process_of_several_is_the_cause_and_not_what_follows_from_it() -> None:
    lines = [
        "ERROR 12-01 06:35:34 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: None), end",
        "(EngineCore pid=1) ERROR 12-01 06:35:39 [core.py:1512] RuntimeError: cancelled",
    ]

    assert root_cause(lines) == "Worker proc VllmWorker-0 died unexpectedly (exit code: None)"


def test_a_device_that_is_lost_blames_no_row() -> None:
    assert death(["RuntimeError: CUDA error: uncorrectable ECC error encountered"]) == (
        "vLLM's engine died: RuntimeError: CUDA error: uncorrectable ECC error encountered",
        True,
    )


def test_an_engine_that_died_without_a_word_says_so() -> None:
    assert death(["(EngineCore pid=7) all is well"]) == ("vLLM's engine died; its log says why", False)


def test_a_model_that_is_too_big_says_what_to_lower() -> None:
    error = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")

    said = load_failure(error, LOG)

    assert said.startswith("the model is too big for the device; lower options.gpu_memory_utilization")
    assert said.endswith("CUDA out of memory. Tried 2 GiB")


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Free memory on device (3/80 GiB) on startup is less than desired", "lower options.gpu_memory_utilization"),
        ("Available memory on node 0 (3/23 GiB) on startup is less", "lower options.gpu_memory_utilization"),
        ("To serve at least one request, 9 GiB KV cache is needed, which is larger", "lower options.max_model_len"),
        ("No available memory for the cache blocks.", "lower options.max_model_len"),
    ],
)
def test_each_lack_of_memory_has_its_advice(said: str, advice: str) -> None:
    assert advice in load_failure(ValueError(said), [])


def test_an_error_that_says_enough_is_told_as_it_is() -> None:
    assert load_failure(ValueError("no such\n quantization"), LOG) == "no such quantization"
    assert load_failure(ValueError("1 error\n  too few [type=value_error, …]"), LOG) == "1 error too few"
    assert load_failure(ValueError("1 validation error for ModelConfig\n  Value error, no [type=…]"), LOG) == "no"


class EngineDeadError(Exception):
    """As vLLM's is called."""


class EngineGenerateError(Exception):
    """As vLLM's is called."""


def test_errors_of_a_request_are_told_apart_from_errors_of_the_engine() -> None:
    wrapped = EngineGenerateError()
    wrapped.__cause__ = ValueError("bad schema")

    assert kind_of(wrapped) == ("invalid_request", "bad schema")
    assert kind_of(RuntimeError("boom")) == ("engine_failed", "RuntimeError: boom")
    assert is_death(EngineDeadError())
    assert not is_death(wrapped)


def test_none_of_it_imports_vllm() -> None:
    assert "vllm" not in sys.modules
