"""Columns of all chunks in the index of a batch, to read them without the headers of the chunks (docs/FORMAT.md, 4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import ColumnDescriptor, Path
from gym_trace.format.records import columns_of

COLUMNS = ("columns",)
_MOST_FORMS, _LARGEST = 1 << 16, 1 << 32
_Form = tuple[Path, str, tuple[int, ...]]


class ColumnTable:
    """Collects the columns of the chunks of a batch, for its index."""

    def __init__(self) -> None:
        self._forms: dict[_Form, int] = {}
        self._entries: list[tuple[int, ...]] = []
        self._fits = True  # False if an entry is too large

    def add(self, chunk: int, offset: int, columns: Iterable[ColumnDescriptor]) -> None:
        """Add the columns of the next chunk. offset: of the first one in the file."""
        for column in columns:
            form = self._forms.setdefault((column.path, column.dtype, column.shape), len(self._forms))
            numbers = (column.rows, column.stored, column.raw, column.crc)
            self._fits = self._fits and form < _MOST_FORMS and max(numbers) < _LARGEST
            self._entries.append((offset, chunk, form, column.encoding, *numbers))
            offset += wire.aligned(column.stored)

    def metadata(self) -> dict[str, Any]:
        """Return what the metadata of the index has of the columns: nothing if there are too many."""
        forms = [[list(path), dtype, list(shape)] for path, dtype, shape in self._forms]
        return {"forms": forms} if self._is_listed else {}

    def tables(self) -> dict[Path, Array]:
        """Return the table of the index, by its path: nothing if there are too many columns."""
        return {COLUMNS: np.array(self._entries, wire.COLUMN_ENTRY)} if self._is_listed else {}

    @property
    def _is_listed(self) -> bool:
        return self._fits and len(self._entries) <= wire.MAX_TABLE


class StoredColumns:
    """The columns of the chunks of a batch, as its index lists them."""

    def __init__(self, table: Array, forms: Any, chunks: Array):
        """Check what columns_in() relies on. Raises CorruptTrace."""
        numbers = table["chunk"]
        has_forms = isinstance(forms, list) and all(isinstance(form, list) and len(form) == 3 for form in forms)
        if len(table) and not (
            has_forms
            and (numbers[:-1] <= numbers[1:]).all()
            and numbers[-1] < len(chunks)
            and table["form"].max() < len(forms)
        ):
            raise CorruptTrace("malformed columns in the index")
        self._table, self._forms, self._chunks = table, forms, chunks

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
        described = [[*self._forms[form], count, encoding, *sizes] for _, _, form, encoding, count, *sizes in rows]
        found = list(columns_of(header, {"columns": described}))
        if [at for _, at in found] != [row[0] for row in rows]:
            raise CorruptTrace("malformed columns in the index")
        return found
