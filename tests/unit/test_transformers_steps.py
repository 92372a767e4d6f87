"""A step of the decoding loop asks the device for as much whatever the number of rows, and waits for it once.

On a GPU each call is a kernel to launch or a copy, and each number that comes back makes Python wait until all before it
is computed: a loop over rows would be what bounds the device. Counted here on a processor, where the calls are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; make test installs it")

from torch.overrides import TorchFunctionMode  # noqa: E402

from batchmill_workers.gpu.batching import Item  # noqa: E402
from batchmill_workers.gpu.transformers_answer import Guide, Prompt  # noqa: E402
from batchmill_workers.gpu.transformers_choice import Choice  # noqa: E402
from batchmill_workers.gpu.transformers_decoding import Decoder, DecodingRun  # noqa: E402
from batchmill_workers.gpu.transformers_guided import held, held_by_table  # noqa: E402
from tests import tiny_models  # noqa: E402

# What makes Python wait for a number of a tensor.
WAITS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "unique"}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
}
VOCABULARY = 260
MANY = 24


class Calls(TorchFunctionMode):  # type: ignore[misc]  # mypy leaves torch out
    """Counts what is asked of torch, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))

    @property
    def waits(self) -> int:
        return sum(self.names[name] for name in WAITS)


class EvenTokens:
    """A guide of a schema that allows every second token."""

    def fill(self, allowed: Any, row: int) -> bool:
        allowed[row] = 0x55555555
        return True

    def accept(self, token: int) -> bool:
        return False


def step(rows: int, settings: dict[str, Any], guide: Callable[[], Guide] | None = None) -> Calls:
    """What one step asks for after the first, the model left out."""
    decoder = Decoder(tiny_models.llama().eval(), ends=frozenset(), pad=2, decode=str)
    prompt = Prompt(tokens=[5, 6, 7], max_tokens=50, choice=Choice(**settings), guide=guide)
    run = DecodingRun(decoder, [Item(number=n, tokens=3, wanted=50, arrived_ns=0, payload=prompt) for n in range(rows)])
    answer = decoder.model(torch.full((rows, 1), 5), use_cache=True)
    with torch.inference_mode():
        run.step(lambda _item, _fields: None)
        decoder.forward = lambda *_: (answer.logits[:, -1], None)  # type: ignore[method-assign]
        with Calls() as calls:
            run.step(lambda _item, _fields: None)
    return calls


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_asks_the_device_as_often_for_many_rows_as_for_few(kind: str) -> None:
    assert step(MANY, SETTINGS[kind]).names == step(2, SETTINGS[kind]).names


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_step_waits_for_the_device_once(kind: str) -> None:
    assert step(MANY, SETTINGS[kind]).waits == 1


def test_rows_held_to_a_schema_go_to_the_device_as_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = step(2, {}, EvenTokens), step(MANY, {}, EvenTokens)
    filled = "__setitem__"  # the guide's own, on the processor

    assert many.names - Counter({filled: many.names[filled]}) == few.names - Counter({filled: few.names[filled]})
    assert many.waits == 1


def test_a_table_of_what_schemas_allow_is_the_same_by_torch_alone_as_by_xgrammar() -> None:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed; make test installs it")
    logits = torch.randn(3, VOCABULARY)
    table = torch.full((3, 9), -1, dtype=torch.int32)
    table[1] = 0x55555555
    table[2] = -0x7FFFFFFF
    guides = {row: Rows(table[row]) for row in (1, 2)}

    assert torch.equal(held_by_table(logits, table), held(logits.clone(), guides))


class Rows:
    """A guide that allows what it was given."""

    def __init__(self, bits: Any) -> None:
        self._bits = bits

    def fill(self, allowed: Any, row: int) -> bool:
        allowed[row] = self._bits
        return True

    def accept(self, token: int) -> bool:
        return False
