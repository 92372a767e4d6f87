"""docs/devices.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from batchmill_core.settings import Settings
from batchmill_ops.gpu_check.__main__ import NO_GPU_EXIT_CODE
from batchmill_ops.gpu_check.items import LEAST_SHARE, LEAST_USE_PERCENT
from batchmill_workers import parentage
from batchmill_workers.deaths import LIMIT
from batchmill_workers.gpu.engine_options import CHECK_MEMORY

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()


def test_every_exit_code_that_a_supervisor_knows_is_on_the_page() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}

    assert told == {parentage.DOWN_EXIT_CODE, parentage.RENEW_EXIT_CODE, parentage.UNFIT_EXIT_CODE}


def test_the_settings_of_the_page_exist_and_are_off_by_default() -> None:
    told = re.findall(r"^\| `(\w+)` \| none \|", PAGE, re.MULTILINE)

    assert told == ["worker_max_chunks", "worker_max_memory_mb"]
    assert all(getattr(Settings(), name) is None for name in told)


def test_its_numbers_are_those_of_the_code() -> None:
    assert f"died {LIMIT} times" in PAGE
    assert f"`options.{CHECK_MEMORY} = false`" in PAGE
    assert f"over {LEAST_USE_PERCENT:.0f} %" in PAGE
    assert f"{LEAST_SHARE:.0%}".replace("%", " %") in PAGE
    assert f"{NO_GPU_EXIT_CODE} where there is no GPU" in PAGE
