"""A writer whose episodes are in the files of another one, read as if it had files of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gym_trace.data.origins import ID_BITS, OWN_ID, Origin, origins_of, split_id
from gym_trace.data.schema import WriterSchema
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, Damage
from gym_trace.format.columns import MSGPACK, Column, ColumnEncoder, Path, Piece, Workspace, decode_rows, unpacked
from gym_trace.format.directory import WriterFiles, is_writer_id
from gym_trace.format.fragments import Fragments
from gym_trace.format.ring.pending import Pending
from gym_trace.playback.episode_table import episode_runs, step_offsets
from gym_trace.playback.ring_tail import RingTail
from gym_trace.playback.writer_reader import WriterReader

_LEVEL = 3  # of columns that are encoded again
_ROWS_AN_ORIGIN = 32  # that one counts as, of the tables of a trace


def presented(stored: WriterReader) -> list[WriterReader]:
    """The writers whose episodes are in the files of one: itself, as a rule; of compacted ones, its origins."""
    try:
        origins = origins_of(stored.about_or_empty.raw, stored.writer)
        stored.room.take(_ROWS_AN_ORIGIN * (len(origins) - origins.count(None)))
    except CorruptTrace as error:
        stored.take_damage(error)
        return [stored]
    if not origins:
        return [stored]
    file = _OriginFile(stored, origins)
    return [
        OriginReader(file, number, _named(origin, number, stored))
        for number, origin in enumerate(origins)
        if origin is not None
    ]


def _named(origin: Origin, number: int, stored: WriterReader) -> Origin:
    """With an id that is one: files are called by it, and it may be anybody's."""
    if is_writer_id(origin.writer):
        return origin
    return origin._replace(writer=f"{stored.writer[:100]}.{number}")


class _OriginFile:
    """State shared by the origins of one writer: its files, and the chunk read last."""

    def __init__(self, stored: WriterReader, origins: list[Origin | None]):
        self.stored = stored
        numbers, problem = origin_numbers(stored.fragments), origin_problem(stored.fragments, origins)
        if not is_ascending(numbers):
            numbers = numbers[:0]
        where = stored.batches[0].path if stored.batches else stored.files.where
        self.damage = [Damage(where, 0, 0, problem)] if problem else []
        self.bounds = numbers.searchsorted(np.arange(len(origins) + 1))
        rows = stored.parts["episode_id"] >> ID_BITS if len(numbers) else np.empty(0, np.int64)
        self.row_bounds = rows.searchsorted(np.arange(len(origins) + 1))
        # How much of the bytes each of them counts as its own.
        there = np.array([origin is not None for origin in origins])
        self.weights = np.append(0, np.cumsum((1 + np.diff(self.bounds)) * there))
        self._last: tuple[int, dict[frozenset[str | Path] | None, SharedChunk]] = (-1, {})

    def chunk(self, number: int, roots: frozenset[str | Path] | None) -> SharedChunk:
        """Each chunk is decoded once where origins are read one after the other."""
        known, chunks = self._last
        if known != number:
            chunks = {}
            self._last = number, chunks
        shared = chunks.get(roots)
        if shared is None:
            stored = self.stored
            chunk = stored.read_chunk(number, None) if roots is None else stored.chunk(number, roots)
            shared = chunks[roots] = SharedChunk(chunk)
        return shared


def origin_numbers(fragments: Array | Fragments) -> Array:
    numbers: Array = (fragments["episode"] >> np.uint64(ID_BITS)).astype(np.int64)
    return numbers


def is_ascending(numbers: Array) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def origin_problem(fragments: Array | Fragments, origins: list[Origin | None], least: int = 0) -> str:
    """Return the problem of the fragments of files with these origins; empty if fine. least: the origin before them."""
    numbers = origin_numbers(fragments)
    if not is_ascending(numbers) or int(numbers[:1].min(initial=least)) < least:
        return "the fragments of its origins are not in order"
    carries = (fragments["steps"] > 0) | (fragments["flags"] & wire.LEADS > 0)
    found = np.unique(numbers[carries]).tolist()
    if not all(number < len(origins) and origins[number] is not None for number in found):
        return "fragments of origins that its schema does not name"
    return ""


class _OriginFiles(WriterFiles):
    """The files of another writer, with the lines of the manifest that an origin had."""

    def __init__(self, stored: WriterReader, origin: Origin):
        super().__init__(stored.files.storage, origin.writer)
        self.manifest = stored.files.manifest
        self._entries = [{"type": "writer", **origin.schema}, *origin.entries]

    def is_alive(self) -> bool:
        return False

    def listed_again(self) -> WriterFiles:
        return self

    def entries(self) -> Iterator[dict[str, Any]]:
        return iter(self._entries)


class OriginReader(WriterReader):
    """The data of one writer in the files of another: its chunks are the parts of chunks in which it has rows.

    Attributes:
        stored: that other one. number: that it has there. first_row: which of its rows is the first one here.
    """

    def __init__(self, file: _OriginFile, number: int, origin: Origin):
        stored, self._file, self.number = file.stored, file, number
        self.stored, self.first_row = stored, int(file.row_bounds[number])
        self.writer = origin.writer
        self.key = f"{origin.writer} ({stored.writer}:{number})"
        self.alive = stored.alive
        self.files = _OriginFiles(stored, origin)
        self.extent = stored.extent
        self.tail = RingTail()
        self._starts = {}
        self._about = WriterSchema.of(origin.schema)
        self._numbers, self._begins = [0], [0]
        begin, end = file.bounds[number : number + 2].tolist()
        self.is_headless = stored.is_headless[begin:end]
        if begin == end:
            self.fragments, self.parts, self.chunk_bounds = _NONE, _NO_PARTS, _NO_CHUNKS
            self.chunk_places, self.batches = [], []
            return
        table = stored.fragments[begin:end].copy()
        table["episode"] &= np.uint64(OWN_ID)
        self.fragments = Fragments([table])
        bounds = stored.chunk_bounds
        first, last = int(np.searchsorted(bounds, begin, side="right")) - 1, int(np.searchsorted(bounds, end))
        self._first_chunk, self._begin = first, begin
        self.chunk_bounds = bounds[first : last + 1].clip(begin, end) - begin
        self.chunk_places = stored.chunk_places[first:last]
        self.batches = list(dict.fromkeys(batch for batch, _ in self.chunk_places))
        self.parts = stored.parts.share(self.fragments, begin, *file.row_bounds[number : number + 2].tolist())

    def refreshed(self, files: WriterFiles) -> WriterReader:
        return self

    @property
    def damage(self) -> list[Damage]:
        return [*self._file.stored.damage, *self._file.damage]

    @property
    def size(self) -> int:
        weights, size = self._file.weights, self._file.stored.size
        before, after = (size * int(weights[i]) // int(weights[-1]) for i in (self.number, self.number + 1))
        return after - before

    @property
    def has_own_files(self) -> bool:
        return False

    @property
    def pending(self) -> list[Pending]:
        mine = [(one, *split_id(one.episode)) for one in self._file.stored.pending]
        return [one._replace(episode=episode) for one, number, episode in mine if number == self.number]

    def read_chunk(self, number: int, roots: frozenset[str | Path] | None = None) -> ChunkShare:
        stored, whole = self._file.stored, self._first_chunk + number
        shared = self._file.chunk(whole, roots)
        begin, end = stored.chunk_bounds[whole : whole + 2].tolist()
        table = stored.fragments[begin:end]
        first, last = (int(at) + self._begin - begin for at in self.chunk_bounds[number : number + 2])
        observations, steps = (slice(*offsets[[first, last]].tolist()) for offsets in step_offsets(table))
        begun = table["flags"] & wire.STARTS > 0
        starts = slice(*(int(np.count_nonzero(begun[:at])) for at in (first, last)))
        return ChunkShare(shared, slice(first, last), observations, steps, starts)


_NONE = Fragments()
_NO_PARTS, _NO_CHUNKS = episode_runs(_NONE, False), np.zeros(1, np.int64)


# -- chunks that several writers have rows in --------------------------------------------------------------------------


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
