"""A chunk that several writers have rows in, and what one of them has of it."""

from __future__ import annotations

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.columns import MSGPACK, Column, ColumnEncoder, Path, Piece, Workspace, decode_rows, unpacked
from gym_trace.model.values import Array, dtype_from

_LEVEL = 3


class SharedChunk:
    """A chunk whose columns are decoded once, for all whose rows are in it: they are given copies."""

    def __init__(self, chunk: Chunk):
        self.chunk = chunk
        self._packed: dict[Path, list[bytes]] = {}

    def packed(self, path: Path) -> list[bytes]:
        """The rows of a msgpack column as they were packed. Raises CorruptTrace."""
        if path not in self._packed:
            self._packed[path] = self.chunk.packed(path)
        return self._packed[path]


class ChunkShare(Chunk):
    """Some consecutive fragments of a chunk, as if they were a chunk of their own.

    Args:
        fragments, observations, steps, starts: which rows of the shared one they have.
    """

    def __init__(self, shared: SharedChunk, fragments: slice, observations: slice, steps: slice, starts: slice):
        self._shared: SharedChunk | None = shared
        self._slices = {"fragments": fragments, "observations": observations, "starts": starts}
        self._steps = steps
        blobs: dict[Path, tuple[Column, Piece]] = {}
        for path, column in shared.chunk.columns.items():
            piece = shared.chunk.encoded(path)[1] if shared.chunk.is_walked(path) else b""
            blobs[path] = column._replace(rows=self._length(path, column.rows)), piece
        described = [column._replace(rows=self._length(column.path, column.rows)) for column in shared.chunk.described]
        super().__init__(blobs, described, shared.chunk.located)
        self._whole = {path: shared.chunk.columns[path] for path in blobs if shared.chunk.is_walked(path)}

    def _slice(self, path: Path) -> slice:
        return self._slices.get(str(path[0]), self._steps)

    def _length(self, path: Path, rows: int) -> int:
        return len(range(*self._slice(path).indices(rows)))

    def array(self, path: Path) -> Array:
        if path not in self._decoded:
            try:
                self._decoded[path] = self._rows(path)
            except CorruptTrace as error:
                raise error if error.path else self.located(error) from error
        return self._decoded[path]

    def _rows(self, path: Path) -> Array:
        column = self._blobs[path][0]
        if path in self._whole:
            out = np.empty((column.rows, *column.shape), dtype_from(column.dtype))
            self.decode_rows(path, 0, out)
            return out
        assert self._shared is not None, "decode() has decoded the others"
        if column.dtype == MSGPACK:
            return unpacked(self._shared.packed(path)[self._slice(path)])
        return self._shared.chunk.array(path)[self._slice(path)].copy()

    def decode(self) -> None:
        super().decode()
        self._shared = None  # which is large

    def decode_rows(self, path: Path, begin: int, out: Array) -> None:
        if not len(out):
            return
        try:
            decode_rows(self._whole[path], self._blobs[path][1], self._slice(path).start + begin, out)
        except CorruptTrace as error:
            raise self.located(error) from error

    def packed(self, path: Path) -> list[bytes]:
        assert self._shared is not None, "packed values must be read before decode()"
        return self._shared.packed(path)[self._slice(path)]

    def encoded(self, path: Path) -> tuple[Column, Piece]:
        """Return a column encoded again, because it is stored together with the columns of others."""
        encoder = ColumnEncoder(path, Workspace(_LEVEL))
        column = self._blobs[path][0]
        return encoder.encode_values(self.packed(path)) if column.dtype == MSGPACK else encoder.encode(self.array(path))
