"""Columns of all chunks in the index of a batch, to read them without the headers of the chunks (docs/FORMAT.md, 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import ColumnDescriptor, Path, parse_column
from gym_trace.format.encodings import BLOCKS
from gym_trace.format.records import columns_of

COLUMNS, BLOCK_TABLE = ("columns",), ("blocks",)
_MOST_FORMS, _LARGEST = 1 << 16, 1 << 32
ColumnForm = tuple[Path, str, tuple[int, ...]]  # path, dtype and shape of a row
_Form = tuple[Path, str, tuple[int, ...], int]  # the last item is the number of rows of a block; 0: no blocks


class ColumnTable:
    """Collects the columns of the chunks of a batch, for its index."""

    def __init__(self) -> None:
        self._forms: dict[_Form, int] = {}
        self._entries: list[tuple[int, ...]] = []
        self._blocks: list[bytes] = []
        self._fits = True  # False if an entry is too large

    def add(self, chunk: int, offset: int, columns: Iterable[ColumnDescriptor]) -> None:
        """Add the columns of the next chunk. offset: of the first one in the file."""
        for column in columns:
            rows, table = column.blocks or (0, b"")
            form = self._forms.setdefault((column.path, column.dtype, column.shape, rows), len(self._forms))
            self._blocks.append(table)
            numbers = (column.rows, column.stored, column.raw, column.crc)
            self._fits = self._fits and form < _MOST_FORMS and max(numbers) < _LARGEST
            self._entries.append((offset, chunk, form, column.encoding, *numbers))
            offset += wire.aligned(column.stored)

    def for_index(self) -> tuple[dict[Path, Array], dict[str, Any]]:
        """Return the tables of the index, by their paths, and its metadata: nothing if there are too many columns."""
        blocks = np.frombuffer(b"".join(self._blocks), wire.BLOCK)
        if not self._fits or max(len(self._entries), len(blocks)) > wire.MAX_TABLE:
            return {}, {}
        tables: dict[Path, Array] = {COLUMNS: np.array(self._entries, wire.COLUMN_ENTRY)}
        if len(blocks):
            tables[BLOCK_TABLE] = blocks
        forms = [[list(path), dtype, list(shape), *[rows][: rows > 0]] for path, dtype, shape, rows in self._forms]
        return tables, {"forms": forms}


class StoredColumns:
    """The columns of the chunks of a batch, as its index lists them."""

    def __init__(self, table: Array, forms: Any, chunks: Array, blocks: Array):
        """Check what columns_in() relies on. Raises CorruptTrace."""
        numbers = table["chunk"]
        has_forms = isinstance(forms, list) and all(map(_is_form, forms))
        if len(table) and not (
            has_forms
            and (numbers[:-1] <= numbers[1:]).all()
            and numbers[-1] < len(chunks)
            and table["form"].max() < len(forms)
        ):
            raise CorruptTrace("malformed columns in the index")
        sizes = [form[3] if len(form) > 3 else _LARGEST for form in forms] if len(table) else []
        counts = -(-table["rows"].astype(np.int64) // np.array(sizes, np.int64)[table["form"]])
        counts[table["encoding"] & BLOCKS == 0] = 0
        self._table, self._forms, self._chunks, self._blocks = table, forms, chunks, blocks
        self._bounds = np.concatenate([[0], np.cumsum(counts)])  # column i has the blocks from bound i to bound i + 1
        if self._bounds[-1] != len(blocks):
            raise CorruptTrace("malformed blocks in the index")

    def columns_in(self, chunk: int) -> list[tuple[ColumnDescriptor, int]]:
        """Return the columns of a chunk with the offsets of their blobs. Raises CorruptTrace."""
        begin, end = np.searchsorted(self._table["chunk"], (chunk, chunk + 1)).tolist()
        offset, length, *_ = self._chunks[chunk].tolist()
        rows = self._table[begin:end].tolist()
        body = rows[0][0] if rows else offset + length
        if body < offset + wire.HEADER_SIZE:
            raise CorruptTrace("malformed columns in the index")
        # The header that the chunk has, as far as it is needed.
        metadata, blobs = body - offset - wire.HEADER_SIZE, offset + length - body
        header = wire.RecordHeader(wire.CHUNK, 0, metadata, blobs, offset, 0, 0)
        described = []
        for number, (_, _, form, encoding, count, *sizes) in enumerate(rows, begin):
            path, dtype, shape, *together = self._forms[form]
            described.append([path, dtype, shape, count, encoding, *sizes])
            if encoding & BLOCKS:
                blocks = self._blocks[slice(*self._bounds[number : number + 2].tolist())]
                described[-1].append([*together, blocks.tobytes()])
        found = list(columns_of(header, {"columns": described}))
        if [at for _, at in found] != [row[0] for row in rows]:
            raise CorruptTrace("malformed columns in the index")
        return found

    def forms_in(self, chunks: Sequence[int]) -> Iterator[tuple[ColumnForm, int]]:
        """Yield the forms of the columns with rows in these chunks, and how many of the chunks have each.

        Raises CorruptTrace.
        """
        mine = self._table["form"][np.isin(self._table["chunk"], chunks) & (self._table["rows"] > 0)]
        forms, first, counts = np.unique(mine, return_index=True, return_counts=True)
        order = np.argsort(first)
        for form, count in zip(forms[order].tolist(), counts[order].tolist()):
            # A column without rows has this form, and is checked like all others.
            yield parse_column([*self._forms[form][:3], 0, 0, 0, 0, 0])[:3], count


def _is_form(form: Any) -> bool:
    """Return True if it is a list of path, dtype, shape, and the number of rows of a block, if any."""
    is_list = isinstance(form, list) and len(form) in (3, 4)
    return is_list and all(type(rows) is int and 0 < rows < _LARGEST for rows in form[3:])
