"""docs/gpus.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from batchmill_core.settings import Settings
from batchmill_db.samples import DEVICE_FIGURES
from batchmill_ops.gpus_diagnosis import ALARMS, Verdict

PAGE = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    table = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]
    return cells[2:]


def test_every_verdict_is_listed() -> None:
    listed = [verdict for verdict, _ in rows("Verdicts")]

    assert sorted(listed) == sorted(v.value for v in Verdict)
    assert {Verdict(v) for v in listed[:4]} | {Verdict.LATENCY} == ALARMS


def test_every_setting_is_listed_with_its_default() -> None:
    listed = {name.strip("`"): float(default) for name, default, _ in rows("Settings")}
    ours = {f.name: f.default for f in fields(Settings) if f.name.startswith(("sample_", "gpu_"))}

    assert listed == {name: default for name, default in ours.items() if name != "gpu_slots"}


def test_settings_and_metrics_that_are_named_are_there() -> None:
    named = set(re.findall(r"`(gpu_[a-z0-9_]+)`", PAGE))
    metrics = set(re.findall(r"batchmill_device_([a-z_]+)", PAGE))

    assert named <= {f.name for f in fields(Settings)}
    assert metrics <= set(DEVICE_FIGURES)
