"""Fragment tables that stay as they are stored give the rows that decoding gives."""

from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_trace.errors import CorruptTrace
from gym_trace.format import fragments, wire
from gym_trace.format.columns import ColumnDescriptor, ColumnEncoder, Workspace
from gym_trace.format.encodings import SHUFFLE, ZSTD
from gym_trace.format.fragments import Fragments, Planes, read_fragments

NAMES = wire.FRAGMENT.names or ()


def a_table(rows: int, seed: int) -> Any:
    """Return rows of which some fields are constant, some differ in one byte, and some in all."""
    random = np.random.default_rng(seed)
    table = np.frombuffer(random.bytes(rows * wire.FRAGMENT.itemsize), wire.FRAGMENT).copy()
    table["lane"], table["seed"], table["flags"] = 7, -1, np.arange(rows) % 3
    table["episode"] = np.arange(rows) + (1 << 40)
    return table


def stored(table: Any) -> tuple[ColumnDescriptor, bytes]:
    return ColumnEncoder(("fragments",), Workspace(1)).encode(table)


def as_planes(table: Any) -> Planes:
    flat = table.view(np.uint8).reshape(len(table), -1)
    planes = [fragments._shortened(np.ascontiguousarray(plane)) for plane in flat.T]
    return Planes(planes[: fragments._FIRST], lambda: planes[fragments._FIRST :])


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5), st.integers(0, 99), st.data())
def test_fields_and_rows_are_those_of_the_joined_tables(
    kinds: list[tuple[int, bool]], seed: int, data: st.DataObject
) -> None:
    tables = [a_table(rows, seed + i) for i, (rows, _) in enumerate(kinds)]
    whole = np.concatenate([np.empty(0, wire.FRAGMENT), *tables])
    found = Fragments([as_planes(t) if planes and len(t) else t for t, (_, planes) in zip(tables, kinds)])
    begin = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    places = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=12)) if len(whole) else [], np.int64)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(whole), max_size=len(whole))), np.bool_)
    assert len(found) == len(whole)
    for rows in (slice(None), slice(begin, end), places, np.sort(places), mask):
        assert found[rows].tobytes() == whole[rows].tobytes()
        for name in NAMES:
            assert found.column(name, rows).tobytes() == whole[name][rows].tobytes()
            assert found.column(name, rows).dtype == whole.dtype[name]
    part = found.part(begin, end)
    assert part[:].tobytes() == whole[begin:end].tobytes()
    assert part.steps.tolist() == whole["steps"][begin:end].tolist()
    assert part.flags.tolist() == whole["flags"][begin:end].tolist()
    assert Fragments.joined([part, found])[:].tobytes() == whole[begin:end].tobytes() + whole.tobytes()


def test_a_large_table_stays_encoded_and_shared_bytes_take_no_memory() -> None:
    table = a_table(fragments._LEAST_ROWS, 0)
    column, blob = stored(table)
    assert column.encoding == SHUFFLE.bits | ZSTD
    found = read_fragments(column, blob)
    ((planes),) = found._tables
    assert isinstance(planes, Planes)
    assert found["flags"].tolist() == table["flags"].tolist()
    assert len(planes._stored[0]) == fragments._FIRST  # the fields up to the flags
    assert found[:].tobytes() == table.tobytes()
    assert all(plane.strides == (0,) for plane in planes._planes(0)[20:24])  # the lane


@pytest.mark.parametrize("rows", [0, 1, 5, fragments._LEAST_ROWS - 1])
def test_a_small_table_is_decoded_at_once(rows: int) -> None:
    table = a_table(rows, 0)
    assert read_fragments(*stored(table))[:].tobytes() == table.tobytes()


@pytest.mark.parametrize("rows", [fragments._LEAST_ROWS, 9])
def test_a_table_of_equal_rows_is_read(rows: int) -> None:
    table = np.repeat(a_table(1, 0), rows)
    assert read_fragments(*stored(table))[:].tobytes() == table.tobytes()


@pytest.mark.parametrize("spoil", ["cut", "longer", "other size", "not zstd"])
def test_a_large_table_that_does_not_decompress_to_its_size_is_damage(spoil: str) -> None:
    rows = fragments._LEAST_ROWS
    column, blob = stored(a_table(rows, 0))
    if spoil == "cut":
        blob = blob[:-20]
    elif spoil == "not zstd":
        blob = blob[:8] + bytes(len(blob) - 8)
    elif spoil == "longer":
        _, blob = stored(a_table(rows + 1, 0))
    else:
        column = column._replace(rows=rows + 1, raw=column.raw + wire.FRAGMENT.itemsize)
    with pytest.raises(CorruptTrace, match=r"compressed column|decompressing"):
        read_fragments(column._replace(stored=len(blob), crc=crc32(blob)), blob)
