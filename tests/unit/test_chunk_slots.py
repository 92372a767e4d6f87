"""Slots for chunks: so many and no more, however many threads want the last one."""

from __future__ import annotations

import threading

from batchmill_workers.chunk_slots import ChunkSlots

RACERS = 16


def test_of_threads_that_race_for_the_last_slots_only_as_many_get_one_as_there_are() -> None:
    slots = ChunkSlots(3)
    start = threading.Barrier(RACERS)
    got: list[bool] = []

    def race() -> None:
        start.wait()
        got.append(slots.try_take())

    racers = [threading.Thread(target=race) for _ in range(RACERS)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    assert got.count(True) == 3
    assert slots.busy == 3


def test_a_message_waits_for_a_slot_that_the_dispatcher_took() -> None:
    slots = ChunkSlots(1)
    assert slots.try_take()
    taken = threading.Event()

    def wait() -> None:
        slots.take()
        taken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    before = taken.is_set()
    slots.give()
    waiter.join(10)

    assert not before
    assert taken.is_set()
    assert slots.busy == 1


def test_who_waits_for_idle_slots_is_told_when_some_stay_busy() -> None:
    slots = ChunkSlots(1)
    slots.take()

    assert not slots.wait_idle(0.01)
    slots.give()
    assert slots.wait_idle(0.01)


def test_a_chunk_whose_rows_are_all_on_their_way_makes_room_for_the_next_until_it_ends() -> None:
    sizes: list[int] = []
    slots = ChunkSlots(1, most=3, on_size=sizes.append)
    slots.take()
    full = slots.try_take()
    made_room = slots.lend()
    taken = slots.try_take()
    slots.end_loan()
    slots.give()

    assert (full, made_room, taken) == (False, True, True)
    assert sizes == [2, 1]
    assert not slots.try_take()  # the other chunk has the place now


def test_no_more_is_lent_than_a_process_works_on_at_most() -> None:
    slots = ChunkSlots(1, most=2)
    lent = []
    for _ in range(2):
        slots.take()
        lent.append(slots.lend())

    assert lent == [True, False]
    assert not slots.try_take()
    slots.end_loan()
    slots.give()
    assert slots.try_take()


def test_nothing_is_lent_where_every_thread_is_a_slot() -> None:
    slots = ChunkSlots(1)
    slots.take()

    assert not slots.lend()
    assert not slots.try_take()
