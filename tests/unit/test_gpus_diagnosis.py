"""What bounds a device, as a table of cases; and that advice names things that there are."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from typer.main import get_command

from batchmill.cli import app
from batchmill_core.settings import Settings
from batchmill_ops.gpus_advice import Place, advice
from batchmill_ops.gpus_diagnosis import ALARMS, Seen, Thresholds, Verdict, diagnose
from batchmill_workers.gpu.openvino_options import OpenVinoOptions
from batchmill_workers.gpu.server_options import ServerOptions
from batchmill_workers.gpu.transformers_options import TransformersOptions
from batchmill_workers.gpu.vllm_options import VllmOptions

LIMITS = Thresholds()
WORKING = {"use_percent": 60.0, "memory_percent": 80.0, "running": 8.0, "waiting": 0.0, "bubble_share": 0.0}

CASES: dict[str, tuple[dict[str, object], list[str]]] = {
    "steady": ({}, ["steady"]),
    # use
    "kept busy": ({"use_percent": 80.0}, ["compute-bound"]),
    "hardly below": ({"use_percent": 79.9}, ["steady"]),
    "busy with full memory": ({"use_percent": 95.0, "memory_percent": 99.0}, ["compute-bound"]),
    # starved
    "used little while rows wait": ({"use_percent": 29.9, "waiting": 5.0}, ["starved"]),
    "used little while chunks are ready": ({"use_percent": 10.0, "ready": True}, ["starved"]),
    "used little with bubbles": ({"use_percent": 10.0, "bubble_share": 0.4}, ["starved"]),
    "used little and nothing waits": ({"use_percent": 10.0}, ["steady"]),
    "a bubble too small to count": ({"use_percent": 10.0, "bubble_share": 0.02}, ["steady"]),
    "used enough while rows wait": ({"use_percent": 30.0, "waiting": 5.0}, ["steady"]),
    "starved with full memory": ({"use_percent": 10.0, "waiting": 5.0, "memory_percent": 95.0}, ["starved"]),
    "idle at first, with chunks ready": ({"use_percent": 0.0, "running": 0.0, "ready": True}, ["starved"]),
    # memory
    "memory full": ({"memory_percent": 90.1}, ["memory-bound"]),
    "memory at the bound": ({"memory_percent": 90.0}, ["steady"]),
    "memory half empty": ({"memory_percent": 69.9}, ["room for more"]),
    "memory at the lower bound": ({"memory_percent": 70.0}, ["steady"]),
    "memory unknown": ({"memory_percent": None}, ["steady"]),
    # work
    "nothing to do": ({"use_percent": 0.0, "running": 0.0}, ["out of work"]),
    "nothing to do, used by others": ({"use_percent": 90.0, "running": 0.0}, ["out of work"]),
    "an engine that tells nothing, idle": (
        {"use_percent": 1.0, "running": None, "waiting": None, "bubble_share": None},
        ["out of work"],
    ),
    "an engine that tells nothing, busy": (
        {"use_percent": 90.0, "running": None, "waiting": None, "bubble_share": None},
        ["compute-bound"],
    ),
    # latency
    "late and steady": ({"p99_ms": 501.0}, ["latency over target"]),
    "in time": ({"p99_ms": 500.0}, ["steady"]),
    "late and busy": ({"p99_ms": 900.0, "use_percent": 95.0}, ["compute-bound", "latency over target"]),
    "late with room: more at once would be later": ({"p99_ms": 900.0, "memory_percent": 20.0}, ["latency over target"]),
    "late and starved": (
        {"p99_ms": 900.0, "use_percent": 5.0, "waiting": 9.0},
        ["starved", "latency over target"],
    ),
    "late some time ago, idle now": ({"p99_ms": 900.0, "use_percent": 0.0, "running": 0.0}, ["out of work"]),
    # heat
    "hot and busy": ({"thermal": True, "use_percent": 99.0}, ["thermal throttling"]),
    "hot and steady": ({"thermal": True}, ["thermal throttling", "steady"]),
    "hot and memory full": ({"thermal": True, "memory_percent": 95.0}, ["thermal throttling", "memory-bound"]),
    # no figures
    "use not told": ({"use_percent": None}, ["use unknown"]),
    "no sample": ({"silent_s": 40.0}, ["no samples"]),
    "no sample, no worker": ({"silent_s": 40.0, "has_worker": False}, ["no worker"]),
    "samples of a worker that has just ended": ({"has_worker": False}, ["steady"]),
    "no sample, hot before": ({"silent_s": 40.0, "thermal": True}, ["no samples"]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_bounds_a_device(case: str) -> None:
    changed, verdicts = CASES[case]

    found = diagnose(Seen(**{**WORKING, **changed}), LIMITS)  # type: ignore[arg-type]  # a table of figures

    assert [f.verdict.value for f in found] == verdicts


def test_thresholds_are_settings() -> None:
    settings = Settings(
        gpu_use_percent=50.0,
        gpu_starved_percent=20.0,
        gpu_memory_low_percent=10.0,
        gpu_memory_high_percent=60.0,
        gpu_p99_ms=9000.0,
    )
    limits = Thresholds.of(settings)

    assert diagnose(Seen(use_percent=55.0, running=1.0), limits)[0].verdict is Verdict.COMPUTE_BOUND
    assert diagnose(Seen(use_percent=25.0, running=1.0, waiting=5.0), limits)[0].verdict is Verdict.STEADY
    assert diagnose(Seen(use_percent=25.0, running=1.0, memory_percent=61.0), limits)[0].verdict is Verdict.MEMORY_BOUND
    assert (
        diagnose(Seen(use_percent=25.0, running=1.0, memory_percent=50.0, p99_ms=8999.0), limits)[0].is_alarm is False
    )


def test_the_defaults_of_thresholds_are_those_of_the_settings() -> None:
    assert Thresholds.of(Settings()) == Thresholds()


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (Seen(use_percent=12.0, waiting=512.0, running=3.0), "used 12 % while 512 rows wait"),
        (Seen(use_percent=12.0, ready=True, running=0.0), "used 12 % while chunks are ready for it"),
        (Seen(use_percent=12.0, bubble_share=0.4, running=1.0), "used 12 % while rows waited 40 % of the time"),
        (Seen(use_percent=55.0, memory_percent=93.0, running=1.0), "used 55 % with its memory 93 % full"),
        (Seen(silent_s=41.2), "its worker lives, but sent none for 41 s"),
        (Seen(silent_s=90.0, has_worker=False), "its worker ended 1 min 30 s ago"),
    ],
)
def test_a_finding_says_why(seen: Seen, why: str) -> None:
    assert diagnose(seen, LIMITS)[0].why == why


# advice

ENGINES = ("vllm", "openvino", "transformers", "server", None)
OPTIONS = (VllmOptions, OpenVinoOptions, TransformersOptions, ServerOptions)


def place(engine: str | None = None, *, device: str = "0") -> Place:
    return Place(host="node", device=device, model="small", engine=engine, gpu_slots=2, elsewhere=("other",))


def every_advice() -> str:
    said = [advice(v, place(e, device=d)) for v in Verdict for e in ENGINES for d in ("0", "cpu")]
    return "\n".join(x for x in said if x)


@pytest.mark.parametrize("verdict", sorted(ALARMS))
@pytest.mark.parametrize("engine", ENGINES)
def test_every_alarm_has_advice(verdict: Verdict, engine: str | None) -> None:
    assert advice(verdict, place(engine))


def test_settings_that_advice_names_are_settings_or_options_of_engines() -> None:
    named = set(re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", every_advice()))
    known = {f.name for holder in (Settings, *OPTIONS) for f in fields(holder)}

    assert {"gpu_slots", "max_num_seqs", "cache_gb"} <= named
    assert named - known - {"max_tokens"} == set()


def test_options_that_advice_names_are_options() -> None:
    named = set(re.findall(r"--([a-z-]+)", every_advice()))
    top: Any = get_command(app)
    commands = [top.commands["run"], top.commands["worker"].commands["gpu"]]
    known = {option.removeprefix("--") for c in commands for p in c.params for option in p.opts}

    assert {"chunk-size", "devices"} <= named <= known


@pytest.mark.parametrize(
    ("engine", "option"),
    [("vllm", "max_model_len"), ("openvino", "capacity_rows"), ("transformers", "max_batch_tokens")],
)
def test_advice_about_memory_is_about_the_engine(engine: str, option: str) -> None:
    assert option in (advice(Verdict.MEMORY_BOUND, place(engine)) or "")


def test_advice_on_latency_reads_well_where_several_models_share_a_device() -> None:
    said = advice(Verdict.LATENCY, place(None)) or ""

    assert said.startswith(
        "lower gpu_slots, or how many rows its models run at once, or ask for less with --param max_tokens"
    )


def test_a_device_out_of_work_is_told_of_the_rows_that_nobody_serves() -> None:
    assert "`batchmill worker gpu --model other`" in (advice(Verdict.OUT_OF_WORK, place()) or "")
    assert advice(Verdict.OUT_OF_WORK, Place(host="node", device="0")) is None
    assert advice(Verdict.STEADY, place()) is None


def test_a_processor_is_not_told_what_only_gpus_can() -> None:
    said = [advice(v, place("openvino", device="cpu")) or "" for v in (Verdict.MEMORY_BOUND, Verdict.THROTTLED)]

    assert "nvidia-smi" not in "".join(said)
    assert "0+1" not in "".join(said)
