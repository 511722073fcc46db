"""The fragments of batches: tables stay encoded, and fields are decoded on access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from gym_trace.data.values import Array
from gym_trace.format import kernels, wire
from gym_trace.format.columns import Buffer, ColumnDescriptor, decode, inflated_pieces, memory_error
from gym_trace.format.encodings import SHUFFLE, ZSTD

_LEAST_ROWS = 4096  # smaller tables are decoded at once, which is faster
_SIZE = wire.FRAGMENT.itemsize
_FIELDS = {name: (dtype, offset) for name, (dtype, offset, *_) in (wire.FRAGMENT.fields or {}).items()}
_FIRST = _FIELDS["flags"][1] + _FIELDS["flags"][0].itemsize  # bytes of the fields that opening a trace needs
_ALL = slice(None)

RowIndex = slice | Array  # a slice has step 1


def as_slice(rows: Array) -> RowIndex:
    """Return consecutive rows as a slice, which is faster; any others as they are."""
    is_run = len(rows) > 0 and rows[-1] - rows[0] == len(rows) - 1 and bool((rows[1:] > rows[:-1]).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows


class Planes:
    """A fragment table as stored: one array per byte of a row. Most arrays hold one value for all rows.

    Args:
        planes: arrays of the first bytes of each row.
        rest: returns the arrays of the other bytes; called when one is needed.
    """

    def __init__(self, planes: list[Array], rest: Callable[[], list[Array]] = list):
        self._stored = planes, rest

    def __len__(self) -> int:
        return len(self._stored[0][0])

    def column(self, name: str, rows: RowIndex = _ALL) -> Array:
        """Return a field of these rows."""
        return self.narrow(name, rows).astype(_FIELDS[name][0], copy=False)

    def narrow(self, name: str, rows: RowIndex = _ALL) -> Array:
        """Return a field of these rows; integers without their upper bytes, if those are 0 everywhere."""
        dtype, offset = _FIELDS[name]
        planes, width = self._planes(offset + dtype.itemsize)[offset:], dtype.itemsize
        while dtype.kind in "iu" and width > 1 and all(map(_is_zero, planes[width // 2 : width])):
            width //= 2
        return self._decoded(offset, dtype if width == dtype.itemsize else np.dtype(f"<u{width}"), rows)

    def table(self, rows: RowIndex = _ALL) -> Array:
        """Return these rows, as wire.FRAGMENT."""
        return self._decoded(0, wire.FRAGMENT, rows)

    def part(self, begin: int, end: int) -> Planes:
        known = self._stored[0]
        return Planes(
            [plane[begin:end] for plane in known],
            lambda: [plane[begin:end] for plane in self._planes(_SIZE)[len(known) :]],
        )

    def _planes(self, count: int) -> list[Array]:
        """Return at least the first `count` planes. Several threads may call it at the same time."""
        planes, rest = self._stored
        if len(planes) < count:
            planes = [*planes, *rest()]
            self._stored = planes, list
        return planes

    def _decoded(self, offset: int, dtype: np.dtype[np.void], rows: RowIndex) -> Array:
        end = offset + dtype.itemsize
        chosen = [plane[rows] for plane in self._planes(end)[offset:end]]
        if len(chosen) == 1:
            return chosen[0]
        out = np.empty((len(chosen[0]), dtype.itemsize), np.uint8)
        kernels.undo_shuffle(np.concatenate(chosen), out, dtype.itemsize)
        found: Array = out.reshape(-1).view(dtype)
        return found


def read_fragments(column: ColumnDescriptor, blob: Buffer) -> Fragments:
    """Return the table that is stored in a column. Do not modify blob later. Raises CorruptTrace."""
    if column.rows < _LEAST_ROWS or column.encoding & ~ZSTD != SHUFFLE.bits:
        return Fragments([decode(column, blob).view(wire.FRAGMENT)])

    def planes(wanted: range) -> list[Array]:
        try:
            return [_shortened(p) for i, p in enumerate(inflated_pieces(column, blob, _SIZE)) if i in wanted]
        except MemoryError as error:
            raise memory_error(column) from error

    return Fragments([Planes(planes(range(_FIRST)), lambda: planes(range(_FIRST, _SIZE)))])


def _shortened(plane: Array) -> Array:
    """Return a copy of a plane; it takes one byte if all of its bytes are equal."""
    first = plane[:1]
    if plane[-1] == first[0]:
        words = plane[: len(plane) & ~7].view(np.uint64)  # four times as fast to compare
        if bool((words == words[:1]).all() and (plane[:8] == first).all() and (plane[-8:] == first).all()):
            return np.broadcast_to(first.copy(), plane.shape)
    return plane.copy()


def _is_zero(plane: Array) -> bool:
    return plane.strides == (0,) and not plane[:1].any()


class Fragments:
    """The rows of several fragment tables. ``fragments["steps"]`` is a field of all rows; rows are wire.FRAGMENT.

    tables: structured arrays, or tables as stored. Results may share their memory: do not modify them.
    """

    def __init__(self, tables: Iterable[Planes | Array] = ()):
        self._tables: list[Planes | Array] = []
        plain: list[Array] = []
        for table in (table for table in tables if len(table)):
            if isinstance(table, Planes):
                self._tables += [*_joined(plain), table]
                plain = []
            else:
                plain.append(table)
        self._tables += _joined(plain)
        self._bounds = [0, *accumulate(map(len, self._tables))]

    @classmethod
    def joined(cls, several: Iterable[Fragments]) -> Fragments:
        """Concatenate fragments."""
        return cls([table for fragments in several for table in fragments._tables])

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, key: str | RowIndex) -> Array:
        return self.column(key) if isinstance(key, str) else self.column(None, key)

    @cached_property
    def steps(self) -> Array:
        """The field `steps`, cached."""
        return np.ascontiguousarray(self["steps"])

    @cached_property
    def flags(self) -> Array:
        return np.ascontiguousarray(self["flags"])

    def narrow(self, name: str) -> Array:
        """Return a field of all rows; integers perhaps in a narrower type that holds them."""
        if not self._tables:
            return self[name]
        return np.concatenate([_narrow(table, name, _ALL) for table in self._tables])

    def part(self, begin: int, end: int) -> Fragments:
        """Return consecutive rows, undecoded."""
        if (begin, end) == (0, len(self)):
            return self
        return Fragments(
            table.part(low, high) if isinstance(table, Planes) else table[low:high]
            for table, low, high in self._within(begin, end)
        )

    def _within(self, begin: int, end: int) -> list[tuple[Planes | Array, int, int]]:
        """Return the tables of these rows, and the begin and end of the rows in each."""
        found = ((table, begin - at, end - at) for table, at in zip(self._tables, self._bounds))
        return [
            (table, max(low, 0), min(high, len(table))) for table, low, high in found if high > 0 and low < len(table)
        ]

    def column(self, name: str | None, rows: RowIndex = _ALL) -> Array:
        """Return a field of these rows; None: the rows."""
        dtype = wire.FRAGMENT if name is None else wire.FRAGMENT[name]
        if len(self._tables) == 1:
            return _read(self._tables[0], name, rows)
        if isinstance(rows, slice):
            begin, end, _ = rows.indices(len(self))
            within = self._within(begin, end)
            if len(within) < 2:
                return _read(within[0][0], name, slice(*within[0][1:])) if within else np.empty(0, dtype)
            if name is None:
                return wire.join_fragments([_read(table, name, slice(low, high)) for table, low, high in within])
            narrow = [_narrow(table, name, slice(low, high)) for table, low, high in within]
            return np.concatenate(narrow, dtype=dtype)
        rows = rows.nonzero()[0] if rows.dtype == np.bool_ else rows
        found = np.empty(len(rows), dtype)
        if bool((rows[1:] >= rows[:-1]).all()):  # the usual case
            cuts = np.searchsorted(rows, self._bounds).tolist()
            positions: Sequence[RowIndex] = [slice(*ends) for ends in pairwise(cuts)]
        else:
            of_table = np.searchsorted(self._bounds, rows, side="right") - 1
            positions = [np.flatnonzero(of_table == number) for number in range(len(self._tables))]
        for table, begin, targets in zip(self._tables, self._bounds, positions):
            if len(own := rows[targets]):
                found[targets] = _read(table, name, own - begin)
        return found


def _narrow(table: Planes | Array, name: str, rows: RowIndex) -> Array:
    return table.narrow(name, rows) if isinstance(table, Planes) else table[name][rows]


def _joined(tables: list[Array]) -> list[Array]:
    return tables if len(tables) < 2 else [wire.join_fragments(tables)]


def _read(table: Planes | Array, name: str | None, rows: RowIndex) -> Array:
    if isinstance(table, Planes):
        return table.table(rows) if name is None else table.column(name, rows)
    found: Array = (table if name is None else table[name])[rows]
    return found
