"""Loading a model into OpenVINO GenAI's continuous batching, under our options."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchmill_workers.gpu.openvino_generation import prompt_tokens
from batchmill_workers.gpu.openvino_options import OpenVinoOptions


def build_pipeline(path: Path, device: str, options: OpenVinoOptions) -> Any:
    """The bare ContinuousBatchingPipeline under our options."""
    import openvino_genai

    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(path), _scheduler(openvino_genai.SchedulerConfig(), options), device, device_properties(options, device)
    )
    if options.chat_template:
        pipeline.get_tokenizer().set_chat_template(options.chat_template)
    return pipeline


def warm_up(pipeline: Any) -> None:
    """Answers one short request, so that the first real one finds everything in place."""
    config = pipeline.get_config()
    config.max_new_tokens = 1
    tokens = prompt_tokens(pipeline.get_tokenizer(), [{"role": "user", "content": "Hello"}])
    handle = pipeline.add_request(0, tokens, config)
    while pipeline.has_non_finished_requests():
        pipeline.step()
    handle.read_all()  # held until here: a request whose handle is gone is dropped


def _scheduler(config: Any, options: OpenVinoOptions) -> Any:
    config.max_num_seqs = options.capacity_rows
    config.max_num_batched_tokens = options.max_batched_tokens
    config.cache_size = options.cache_gb
    config.enable_prefix_caching = options.prefix_caching
    config.dynamic_split_fuse = options.split_prompts
    return config


def device_properties(options: OpenVinoOptions, device: str) -> dict[str, Any]:
    """OpenVINO's properties of the device; its GPU plugin refuses those that are the processor's."""
    if device != "CPU":
        return {}
    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": options.inference_precision,
        "KV_CACHE_PRECISION": options.kv_cache_precision,
    }
    if not options.dynamic_quantization:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    threads = options.threads or int(os.environ.get("OMP_NUM_THREADS") or 0)
    return {**properties, "INFERENCE_NUM_THREADS": threads} if threads else properties
