"""Batch sizes go from the database to an engine and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from batchmill_core.request import Completion, Request
from batchmill_db import batch_sizes, migrate
from batchmill_db.session import Database
from batchmill_workers.gpu.batching_remembered import RememberedSizes
from batchmill_workers.gpu.device_kind import device_kind
from tests.integration.harness import until

MODEL = "smollm2"


class PlainEngine:
    """An engine that learns nothing of its device."""

    capacity_rows = 1
    context_tokens: int | None = None

    async def start(self) -> None:
        raise NotImplementedError

    async def complete(self, request: Request) -> Completion:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class LearningEngine(PlainEngine):
    def __init__(self) -> None:
        self.used: Mapping[int, int] | None = None
        self.learned: dict[int, int] = {}

    def use_batch_sizes(self, sizes: Mapping[int, int]) -> None:
        self.used = sizes

    def batch_sizes(self) -> Mapping[int, int]:
        return self.learned


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'batchmill.db'}")
    migrate.upgrade(database)
    yield database
    database.close()


def remembered(database: Database) -> dict[int, int]:
    return database.read(lambda conn: batch_sizes.load(conn, MODEL, device_kind("cpu")))


def test_an_engine_is_given_what_another_learned_on_the_same_kind_of_device(database: Database) -> None:
    first, second = LearningEngine(), LearningEngine()
    first.learned = {7: 64}
    RememberedSizes(database, {MODEL: first}, "cpu").save()
    RememberedSizes(database, {MODEL: second}, "cpu").load()

    assert second.used == {7: 64}


def test_what_is_new_is_saved_while_the_engine_runs(database: Database) -> None:
    engine = LearningEngine()
    sizes = RememberedSizes(database, {MODEL: engine}, "cpu", save_every_s=0.01)
    sizes.load()
    sizes.start()
    engine.learned = {7: 64, 8: 30}
    until("both sizes are saved", lambda: remembered(database) == {7: 64, 8: 30}, timeout_s=30)
    engine.learned = {7: 80, 8: 30}
    until("the better one is saved", lambda: remembered(database) == {7: 80, 8: 30}, timeout_s=30)
    sizes.stop()

    assert engine.used == {}


def test_a_size_that_was_halved_is_saved_at_once(database: Database) -> None:
    engine = LearningEngine()
    sizes = RememberedSizes(database, {MODEL: engine}, "cpu", save_every_s=3600)
    sizes.load()
    sizes.start()
    engine.learned = {7: 64}
    until("the first size is saved", lambda: remembered(database) == {7: 64}, timeout_s=30)
    engine.learned = {7: 32}
    until("the halved one is saved", lambda: remembered(database) == {7: 32}, timeout_s=30)
    engine.learned = {7: 48}
    sizes.stop()

    assert remembered(database) == {7: 48}


def test_what_was_learned_last_is_saved_at_the_end(database: Database) -> None:
    engine = LearningEngine()
    sizes = RememberedSizes(database, {MODEL: engine}, "cpu", save_every_s=3600)
    sizes.start()
    engine.learned = {9: 3}
    sizes.stop()
    sizes.stop()

    assert remembered(database) == {9: 3}


def test_sizes_that_are_saved_already_are_not_written_again(database: Database) -> None:
    engine = LearningEngine()
    engine.learned = {7: 64}
    sizes = RememberedSizes(database, {MODEL: engine}, "cpu")
    sizes.save()
    database.run(lambda conn: batch_sizes.remember(conn, MODEL, device_kind("cpu"), {7: 1}))
    sizes.save()

    assert remembered(database) == {7: 1}


def test_engines_that_learn_nothing_are_passed_over(database: Database) -> None:
    sizes = RememberedSizes(database, {MODEL: PlainEngine()}, "cpu", save_every_s=0.01)
    sizes.load()
    sizes.start()
    sizes.stop()

    assert remembered(database) == {}


def test_a_database_that_is_away_harms_no_engine_and_is_tried_again(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = LearningEngine()
    engine.learned = {7: 64}
    nowhere = Database(f"sqlite:///{tmp_path / 'none' / 'batchmill.db'}")
    sizes = RememberedSizes(nowhere, {MODEL: engine}, "cpu")
    with caplog.at_level(logging.WARNING):
        sizes.load()
        sizes.save()
    (tmp_path / "none").mkdir()
    migrate.upgrade(nowhere)
    sizes.save()

    assert [r.getMessage().split()[0] for r in caplog.records] == ["batch_sizes_not_loaded", "batch_sizes_not_saved"]
    assert remembered(nowhere) == {7: 64}
    nowhere.close()
