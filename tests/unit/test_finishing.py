"""What a command that waited for a job says at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from batchmill.finishing import finish
from batchmill.output import output_of
from batchmill_core.errors import ConfigurationError
from batchmill_core.request import RowStatus
from batchmill_ops.report import read_report
from tests.prepared_jobs import PreparedFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PreparedFolder]:
    prepared = PreparedFolder(tmp_path)
    yield prepared
    prepared.database.close()


def test_results_that_cannot_be_written_are_said_to_be_saved(folder: PreparedFolder, tmp_path: Path) -> None:
    job = folder.done()
    gone = tmp_path / "gone"
    gone.mkdir()
    to = output_of(str(gone / "out.csv"), None, None)
    gone.rmdir()

    with pytest.raises(ConfigurationError) as refused:
        finish(folder.database, read_report(folder.database, job.id), to, as_json=False)

    assert str(refused.value).endswith(
        f"job {job.public_id} is done and its answers are saved: `batchmill results {job.public_id} -o FILE` writes them"
    )


def test_one_row_that_ended_badly_is_told_as_one(folder: PreparedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    job = folder.done((RowStatus.OK, RowStatus.OK, RowStatus.OK, RowStatus.FAILED))

    with pytest.raises(typer.Exit):
        finish(folder.database, read_report(folder.database, job.id), None, as_json=False)

    assert "1 row ended badly; ask it again with: batchmill retry" in capsys.readouterr().err
