"""Batch sizes that worked, by model, kind of device and length class."""

from __future__ import annotations

from sqlalchemy import select

from batchmill_db import batch_sizes
from batchmill_db.schema import batch_size
from tests.conformance.db.world import World

MODEL, DEVICE = "smollm2", "cpu 16 GiB"


def remember(world: World, sizes: dict[int, int], *, model: str = MODEL, device: str = DEVICE) -> None:
    world.database.run(lambda conn: batch_sizes.remember(conn, model, device, sizes))


def load(world: World, *, model: str = MODEL, device: str = DEVICE) -> dict[int, int]:
    return world.database.read(lambda conn: batch_sizes.load(conn, model, device))


def changes(world: World) -> dict[int, int]:
    with world.database.reading() as conn:
        return {row.length_class: row.changed_ms for row in conn.execute(select(batch_size))}


def test_nothing_is_known_of_a_model_that_never_ran(world: World) -> None:
    assert load(world) == {}


def test_sizes_come_back_as_they_were_remembered(world: World) -> None:
    remember(world, {7: 64, 10: 8})

    assert load(world) == {7: 64, 10: 8}


def test_a_model_and_a_kind_of_device_know_nothing_of_another(world: World) -> None:
    remember(world, {7: 64})
    remember(world, {7: 3}, device="NVIDIA H200 140 GiB")
    remember(world, {7: 5}, model="other")

    assert load(world) == {7: 64}
    assert load(world, device="NVIDIA H200 140 GiB") == {7: 3}
    assert load(world, model="other") == {7: 5}


def test_a_later_size_replaces_that_of_its_class_alone(world: World) -> None:
    remember(world, {7: 64, 10: 8})
    remember(world, {10: 4, 11: 2})

    assert load(world) == {7: 64, 10: 4, 11: 2}


def test_remembering_the_same_again_changes_nothing(world: World) -> None:
    remember(world, {7: 64})
    with world.database.transaction() as conn:
        conn.execute(batch_size.update().values(changed_ms=1))
    remember(world, {7: 64})

    assert changes(world) == {7: 1}


def test_remembering_nothing_is_no_error(world: World) -> None:
    remember(world, {})

    assert load(world) == {}
