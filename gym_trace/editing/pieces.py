"""Parts of chunks, joined to chunks that are well filled."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gym_trace.editing.kept import STEP_ROOTS, Rows
from gym_trace.format import wire
from gym_trace.format.column_encoder import is_large
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.values import Array
from gym_trace.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK

Form = tuple[str, tuple[int, ...]] | None  # dtype and shape of a row; None: MessagePack values


class Pieces:
    """Join pieces of chunks until they fill a chunk. Fragments stay as they are.

    Pieces whose columns are not of the same types are not joined.
    """

    def __init__(self, writer: TraceWriter):
        self._writer = writer
        self._pieces: list[tuple[Array, Mapping[ColumnPath, Rows]]] = []
        self._forms: dict[ColumnPath, Form] = {}
        self._size = 0
        self._most = SMALL_CHUNK

    def add(self, fragments: Array, columns: Mapping[ColumnPath, Rows]) -> None:
        """Raises OSError."""
        forms = {path: _form(rows) for path, rows in columns.items()}
        size = fragments.nbytes + sum(map(_size, columns.values()))
        large = any(is_large(rows) for rows in columns.values() if not isinstance(rows, list))
        most = LARGE_CHUNK if large else SMALL_CHUNK
        if self._pieces and (self._size + size > max(most, self._most) or not self._fits(forms)):
            self.write()
        self._pieces.append((fragments, columns))
        self._forms |= forms
        self._size, self._most = self._size + size, max(most, self._most)

    def _fits(self, forms: dict[ColumnPath, Form]) -> bool:
        """Return True if these columns can join the present ones. Pieces without steps have no step columns."""
        ours, theirs = ({path for path in some if path[0] in STEP_ROOTS} for some in (self._forms, forms))
        same = not (ours and theirs) or ours == theirs
        return same and all(self._forms.get(path, form) == form for path, form in forms.items())

    def write(self) -> None:
        """Writes what there is. Raises OSError."""
        if not self._pieces:
            return
        tables, paths = [fragments for fragments, _ in self._pieces], self._forms
        columns = {path: _joined([piece[path] for _, piece in self._pieces if path in piece]) for path in paths}
        self._pieces, self._forms, self._size, self._most = [], {}, 0, SMALL_CHUNK
        self._writer.write(wire.join_fragments([np.ascontiguousarray(table) for table in tables]), columns)
        self._writer.seal_if_due()


def _form(rows: Rows) -> Form:
    return None if isinstance(rows, list) else (rows.dtype.str, rows.shape[1:])


def _size(rows: Rows) -> int:
    """Bytes of rows as those who read them count them."""
    if isinstance(rows, list):
        return sum(map(len, rows)) + len(rows) * (wire.VALUE_SIZE + wire.LENGTH.itemsize)
    return len(rows) * max(1, rows.itemsize * math.prod(rows.shape[1:]))


def _joined(parts: list[Rows]) -> Rows:
    if len(parts) == 1:
        return parts[0]
    arrays = [part for part in parts if not isinstance(part, list)]
    if arrays:
        return np.concatenate(arrays)
    return [value for part in parts if isinstance(part, list) for value in part]
