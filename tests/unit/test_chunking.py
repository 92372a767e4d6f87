"""Groups, frames and digests: rows come out of storage as they went in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchmill_core.catalog import Account, Limits, ModelEntry
from batchmill_core.errors import BatchmillError, SourceError
from batchmill_core.payload import (
    RowOrigin,
    decode_frame,
    decode_request,
    digest,
    encode_frame,
    encode_input,
    encode_request,
    split_input,
)
from batchmill_core.request import Request, Row, TaskKind
from batchmill_producers.chunking import PackedRow, default_chunk_size, pack_payload, pack_row, size_chunks


def packed(size: int) -> PackedRow:
    return PackedRow(request=b"r" * size, input=b"")


def sizes(groups: list[list[PackedRow]]) -> list[list[int]]:
    return [[row.n_bytes for row in group] for group in groups]


def test_groups_end_at_so_many_rows() -> None:
    assert sizes(list(size_chunks([packed(1)] * 5, rows_per_chunk=2))) == [[1, 1], [1, 1], [1]]


def test_groups_end_before_they_pass_the_bytes() -> None:
    rows = [packed(n) for n in (4, 4, 4, 11, 1, 9)]

    assert sizes(list(size_chunks(rows, rows_per_chunk=99, max_bytes=10))) == [[4, 4], [4], [11], [1, 9]]


def test_no_rows_give_no_groups() -> None:
    assert list(size_chunks([], rows_per_chunk=2)) == []


@given(st.lists(st.integers(1, 30)), st.integers(1, 5), st.integers(1, 40))
def test_every_row_is_in_one_group_in_order(numbers: list[int], rows_per_chunk: int, max_bytes: int) -> None:
    groups = sizes(list(size_chunks(map(packed, numbers), rows_per_chunk=rows_per_chunk, max_bytes=max_bytes)))

    assert [n for group in groups for n in group] == numbers
    assert all(len(g) <= rows_per_chunk and (len(g) == 1 or sum(g) <= max_bytes) for g in groups)


@given(st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line)))
def test_frame_gives_back_its_lines(lines: list[bytes]) -> None:
    assert decode_frame(encode_frame(lines)) == lines


def test_damaged_frame_is_an_error_of_ours() -> None:
    frame = bytearray(encode_frame([b"some line of text"] * 10))
    frame[-1] ^= 0xFF

    with pytest.raises(BatchmillError, match="payload is damaged"):
        decode_frame(bytes(frame))


def test_digest_is_of_the_content() -> None:
    assert digest([b"a", b"b"], [b"c"]) == digest([b"a", b"b"], [b"c"])
    assert len({digest(*x) for x in (([b"a"], [b"b"]), ([b"b"], [b"a"]), ([b"a", b"b"], []), ([], [b"a", b"b"]))}) == 4


@pytest.mark.parametrize(
    "request_",
    [
        Request(messages=({"role": "user", "content": "line\nbreak \u2028 é"},), params={"max_tokens": 5}),
        Request(task=TaskKind.EMBED, inputs=("a", "b")),
        Request(messages=({"role": "user", "content": "x"},), params={"seed": 2**70}),
    ],
)
def test_request_survives_storage(request_: Request) -> None:
    line = encode_request(request_)

    assert b"\n" not in line
    assert decode_request(line, task=request_.task) == request_


@pytest.mark.parametrize(
    "value",
    [
        {"text": 'a "quoted" ,"input":{} trap\n'},
        {"big": 2**70, "nested": [{"input": {"input": 1}}]},
        {"deep": json.loads("[" * 300 + "]" * 300)},
        {},
    ],
)
def test_input_is_spliced_out_of_storage_unparsed(value: dict[str, Any]) -> None:
    row = Row(index=3, input=value, source='odd ,"input": name', line=7, custom_id=',"input":', sanitized=True)

    origin, raw = split_input(encode_input(row))

    assert json.loads(raw) == value
    assert origin == RowOrigin(line=7, source='odd ,"input": name', custom_id=',"input":', sanitized=True)


def test_row_nested_too_deeply_to_store_is_named() -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    row = Row(index=2, input={"deep": deep}, source="r.jsonl", line=9)

    with pytest.raises(SourceError, match=r"r\.jsonl line 9: the row is nested too deeply"):
        pack_row(row, Request())


def test_payload_holds_its_rows() -> None:
    rows = [pack_row(Row(index=i, input={"i": i}), Request(inputs=(str(i),))) for i in range(3)]

    payload = pack_payload(40, rows)

    assert (payload.first_row, payload.n_rows) == (40, 3)
    assert decode_frame(payload.requests) == [r.request for r in rows]
    assert decode_frame(payload.inputs) == [r.input for r in rows]
    assert payload.digest == digest([r.request for r in rows], [r.input for r in rows])


def api(entry_limits: Limits | None = None, **account: Any) -> int:
    entry = ModelEntry(name="m", account="a", limits=entry_limits or Limits())
    return default_chunk_size(entry, Account(name="a", base_url="http://host", **account))


def test_chunk_size_is_seconds_of_what_the_narrowest_limit_lets_through() -> None:
    assert api() == 960
    assert api(limits=Limits(requests_per_minute=600)) == 75
    assert api(limits=Limits(requests_per_second=10)) == 75
    assert api(max_in_flight=8) == 30
    assert api(Limits(tokens_per_minute=200_000)) == 50


def test_chunk_size_has_a_floor_and_a_ceiling() -> None:
    assert api(limits=Limits(requests_per_minute=1)) == 8
    assert api(max_in_flight=100_000) == 1000


def test_device_gets_at_least_what_fills_its_engine() -> None:
    entry = ModelEntry(name="m", engine="openvino", source="x")

    assert default_chunk_size(entry, None, capacity_rows=8) == 64
    assert default_chunk_size(entry, None, capacity_rows=256) == 256
