"""One loaded model as vLLM runs it: a call's message in, its answer out."""

from __future__ import annotations

import asyncio
import base64
import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from batchmill_core.errors import EngineFailed, InvalidRequest
from batchmill_workers.gpu.chat_template import prompt_tokens
from batchmill_workers.gpu.frames import Frame
from batchmill_workers.gpu.sampling import check_fits
from batchmill_workers.gpu.vllm_sampling import sampling_arguments

T = TypeVar("T")
HandedOn = Callable[[int], None]  # told the tokens of a prompt just before vLLM gets it


class VllmModel:
    """vLLM's engine and tokenizer, and what the configuration says about prompts and adapters.

    A call's message is what ``VllmEngine.message`` made. Errors are CallErrors of our own checks, or vLLM's.
    """

    def __init__(self, engine: Any, tokenizer: Any, configuration: Frame) -> None:
        self.engine = engine
        self.context_tokens: int = engine.model_config.max_model_len
        self.capacity_rows: int = engine.vllm_config.scheduler_config.max_num_seqs
        self._tokenizer = tokenizer
        self._pooling: bool = configuration["pooling"]
        self._template: str | None = configuration["chat_template"]
        self._adapters: dict[str, str] = configuration["lora"]
        self._defaults: Frame = {} if self._pooling else engine.model_config.get_diff_sampling_param()
        self._thread = ThreadPoolExecutor(1, "tokenizer")  # a long prompt must not hold up the others' answers

    async def answer(self, name: str, frame: Frame, handed_on: HandedOn) -> Frame:
        """The fields of a call's last message; ``name`` is the call's among all that vLLM has."""
        return await (self._embed if self._pooling else self._generate)(name, frame, handed_on)

    async def _generate(self, name: str, frame: Frame, handed_on: HandedOn) -> Frame:
        ids = await self._prompt(frame)
        self._check_length(ids, frame["sampling"]["max_tokens"])
        params = self._sampling_params(frame, room=self.context_tokens - len(ids))
        handed_on(len(ids))
        first_token_ns, parts = None, []
        async for output in self.engine.generate(
            tokens_prompt(ids), params, request_id=name, lora_request=self._adapter(frame["lora"])
        ):
            first_token_ns = first_token_ns or time.monotonic_ns()
            parts.append(output.outputs[0])
        reason = parts[-1].finish_reason
        if reason not in {"stop", "length"}:
            raise EngineFailed(f"vLLM ended the request: {reason}")
        return {
            "text": "".join(part.text for part in parts),
            "finish_reason": reason,
            "input_tokens": len(ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "output_tokens": sum(len(part.token_ids) for part in parts),
            "first_token_ns": first_token_ns,
        }

    async def _embed(self, name: str, frame: Frame, handed_on: HandedOn) -> Frame:
        prompts: list[list[int]] = await self._in_thread(lambda: [self._tokenizer.encode(x) for x in frame["inputs"]])
        for ids in prompts:
            self._check_length(ids, None)
        tokens = sum(len(ids) for ids in prompts)
        handed_on(tokens)
        vectors = await asyncio.gather(*(self._vector(f"{name}-{at}", ids, frame) for at, ids in enumerate(prompts)))
        return {"vectors": vectors, "input_tokens": tokens}

    async def _vector(self, name: str, ids: Sequence[int], frame: Frame) -> str:
        params = importlib.import_module("vllm").PoolingParams(task="embed", dimensions=frame["dimensions"])
        adapter = self._adapter(frame["lora"])
        async for output in self.engine.encode(tokens_prompt(ids), params, request_id=name, lora_request=adapter):
            found = output.outputs.data
        return base64.b64encode(found.float().numpy().astype("<f4").tobytes()).decode()

    async def _prompt(self, frame: Frame) -> list[int]:
        def make() -> list[int]:
            return prompt_tokens(
                self._tokenizer, frame["messages"], template=self._template, variables=frame["template_kwargs"]
            )

        return await self._in_thread(make)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check_length(self, ids: Sequence[int], wanted: int | None) -> None:
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        check_fits(len(ids), wanted, self.context_tokens)

    def _sampling_params(self, frame: Frame, *, room: int) -> Any:
        module = importlib.import_module("vllm.sampling_params")
        arguments = sampling_arguments(
            frame["sampling"], frame["only_vllm"], defaults=self._defaults, room=room, schema=frame["schema"]
        )
        if "structured_outputs" in arguments:
            arguments["structured_outputs"] = module.StructuredOutputsParams(**arguments["structured_outputs"])
        return module.SamplingParams.from_optional(**arguments, output_kind=module.RequestOutputKind.DELTA)

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        number = list(self._adapters).index(name) + 1
        return importlib.import_module("vllm.lora.request").LoRARequest(name, number, self._adapters[name])


def tokens_prompt(ids: Sequence[int]) -> Frame:
    """Token ids as vLLM's TokensInput, which older versions read as their TokensPrompt."""
    return {"type": "token", "prompt_token_ids": ids}
