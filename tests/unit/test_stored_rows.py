"""The rows of a chunk out of payload frames, some of which are damaged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.job import Rows
from batchmill_core.payload import encode_frame
from batchmill_workers.stored_rows import stored_rows

LINES = [b'{"messages":[%d]}' % n for n in range(6)]
GOOD = (0, 3, encode_frame(LINES[:3]))


def test_wanted_rows_come_in_order_with_their_requests() -> None:
    found = stored_rows([GOOD, (3, 3, encode_frame(LINES[3:]))], Rows.of([1, 2, 4]))

    assert found.lines == [(1, LINES[1]), (2, LINES[2]), (4, LINES[4])]
    assert found.damaged == []


def test_only_the_wanted_rows_of_a_damaged_payload_are_damaged() -> None:
    found = stored_rows([GOOD, (3, 3, b"not a frame")], Rows.of([0, 3, 5]))

    assert found.lines == [(0, LINES[0])]
    assert [row for row, _ in found.damaged] == [3, 5]
    assert "damaged" in found.damaged[0][1]


def test_a_payload_with_other_rows_than_it_says_is_damaged() -> None:
    found = stored_rows([(0, 3, encode_frame(LINES[:2]))], Rows.span(0, 3))

    assert found.lines == []
    assert [row for row, _ in found.damaged] == [0, 1, 2]
    assert "2 of 3 rows" in found.damaged[0][1]


@given(st.data())
def test_whatever_a_disk_makes_of_a_frame_each_row_is_either_read_or_damaged(data: st.DataObject) -> None:
    frame = bytearray(GOOD[2])
    at = data.draw(st.integers(0, len(frame) - 1))
    harm = data.draw(st.sampled_from(["flip", "cut", "zeros"]))
    if harm == "flip":
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
    elif harm == "cut":
        del frame[at:]
    else:
        frame[at:] = bytes(len(frame) - at)

    found = stored_rows([(0, 3, bytes(frame))], Rows.span(0, 3))

    assert sorted([row for row, _ in found.lines] + [row for row, _ in found.damaged]) == [0, 1, 2]
