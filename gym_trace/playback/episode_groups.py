"""Episodes of a scan that end in the same chunk: a column is put together once for all of them, and then cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.values import Array, Misfit
from gym_trace.data.vocabulary import OPTIONAL_ROOTS
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.assembly import ChunkSlice, assemble, cut_down
from gym_trace.playback.on_demand import STARTS, Asked, ChunkOnDemand, with_column
from gym_trace.playback.opened import InMemory
from gym_trace.playback.step_runs import FLAGS
from gym_trace.playback.writer_reader import WriterReader

_Join = Callable[[Iterator[Array]], Any]
_Column = tuple[_Join | None, Any, list[int], list[int]]


class Places(Protocol):
    """Positions of several episodes in their chunks; see StoredRows."""

    chunks: list[int]

    def slices(self, episode: int, chunks: Mapping[int, Chunk]) -> list[ChunkSlice]:
        """Return the rows of an episode as slices of chunks."""

    def column(self, path: Path, chunks: Mapping[int, Chunk]) -> Array | None:
        """Return an array with a column of all episodes; None if a chunk lacks it, or if types differ."""

    def bounds(self, path: Path) -> tuple[list[int], list[int]]:
        """Return where the rows of each episode begin and end in that array."""


class InOneChunk:
    """Episodes that are stored in one fragment each, of the same chunk. Their rows stay where they are."""

    def __init__(self, number: int, at: Array, offsets: tuple[Array, Array], flags: Array):
        """number: of the chunk. at: positions of their fragments in it. offsets, flags: those of all its fragments."""
        self.chunks = [number]
        self._at, self._offsets, self._flags = at, offsets, flags

    def slices(self, episode: int, chunks: Mapping[int, Chunk]) -> list[ChunkSlice]:
        (number,), at = self.chunks, int(self._at[episode])
        observations, steps = (slice(*offsets[at : at + 2].tolist()) for offsets in self._offsets)
        return [ChunkSlice(chunks[number], number, observations, steps, int(self._flags[at]))]

    def column(self, path: Path, chunks: Mapping[int, Chunk]) -> Array | None:
        if path in FLAGS:
            ends = self._offsets[1][1:]
            column = np.zeros(int(ends[-1]), np.bool_)
            column[ends[self._at][self._flags[self._at] & FLAGS[path] > 0] - 1] = True
            return column
        chunk = chunks[self.chunks[0]]
        return chunk.array(path) if path in chunk else None

    def bounds(self, path: Path) -> tuple[list[int], list[int]]:
        offsets, at = self._offsets[path[0] != "observations"], self._at
        if at[-1] - at[0] < len(at):  # consecutive ones, as those of a single environment
            found = offsets[at[0] : at[-1] + 2].tolist()
            return found[:-1], found[1:]
        return offsets[at].tolist(), offsets[at + 1].tolist()


class EpisodeGroup:
    """Some episodes of a writer, in the order of their rows.

    Attributes:
        reader: the reader of the writer, without damaged chunks.
        rows: (n,) their rows in reader.parts.
        roots: the columns that may be read.
    """

    def __init__(
        self,
        reader: WriterReader,
        rows: Array,
        places: Places,
        chunks: dict[int, Chunk],
        roots: frozenset[str],
        asked: Asked | None,
        is_joined: bool,
    ):
        """chunks: those of the episodes, by number; ChunkOnDemand if asked is not None. is_joined: False: each column
        of an episode is assembled by itself."""
        self.reader, self.rows, self.roots = reader, rows, roots
        self._places, self._chunks, self._asked, self._is_joined = places, chunks, asked, is_joined
        self._bounds: dict[bool, tuple[list[int], list[int]]] = {}
        # By name: the function that joins arrays into the structure of a space, or None if there is one array; arrays
        # with the rows of all episodes; where those of each begin, and end. None: the column is assembled for each
        # episode, because its values have no dtype, or several, or because it stores changes.
        self._columns: dict[str, _Column | None] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def each(self, name: str) -> Iterable[Any]:
        """Return a column of each episode."""
        found = self._found(name)
        if found is None:
            return map(partial(self.column, name), range(len(self)))
        join, arrays, begins, ends = found
        if join is None:
            return (arrays[begin:end] for begin, end in zip(begins, ends))
        return (join(iter([array[begin:end] for array in arrays])) for begin, end in zip(begins, ends))

    def column(self, name: str, i: int, steps: range | None = None) -> Any:
        """Return a column of episode i, or a copy of its rows for these steps."""
        found = self._columns.get(name)
        if found is None or steps is not None:
            found = self._found(name) if steps is None else None
            if found is None:
                return self._assembled(name, steps, i)
        join, arrays, begins, ends = found
        if join is None:
            return arrays[begins[i] : ends[i]]
        begin, end = begins[i], ends[i]
        return join(iter([array[begin:end] for array in arrays]))

    def start(self, i: int) -> dict[str, Any]:
        """Return the reset record of episode i. Raises CorruptTrace."""
        if self._asked is not None:
            self._asked.add(STARTS)
        return self.reader.start_of(int(self.rows[i]))

    def pending(self, i: int) -> Any:
        """Return the action without a result at the end of episode i."""
        return self.reader.pending_action(int(self.rows[i]))

    def decode(self) -> None:
        """Decode the chunks and release their stored bytes. Raises CorruptTrace."""
        for chunk in self._chunks.values():
            chunk.decode()

    def release(self) -> None:
        """Release chunks that can be read again. Columns that were used stay."""
        if self._asked is not None:
            asked = Asked()
            self._chunks = {number: ChunkOnDemand(self.reader, number, asked) for number in self._chunks}

    def _assembled(self, name: str, steps: range | None, i: int) -> Any:
        if name not in self.roots:
            raise TraceError(f"{name} not requested; name them in scan(columns=...)")
        slices = self._places.slices(i, self._chunks)
        if steps is not None:
            slices = cut_down(slices, steps.start, steps.stop)
        if self._asked is not None:
            chunks = self._read(name, {it.chunk_number: it.chunk for it in slices})
            slices = [it._replace(chunk=chunks[it.chunk_number]) for it in slices]
        return assemble(name, slices, self.reader.layouts, copy=steps is not None)

    def _found(self, name: str) -> _Column | None:
        if name not in self._columns:
            self._columns[name] = None
            if self._is_joined and name in self.roots:
                with suppress(CorruptTrace):  # raised again for the episodes that it concerns
                    self._columns[name] = self._joined(name)
        return self._columns[name]

    def _joined(self, name: str) -> _Column | None:
        chunks, layouts = self._read(name, self._chunks), self.reader.layouts
        join: _Join | None = None
        untyped: set[Path] = set()  # leaves whose values are objects in any case
        paths: list[Path] = [(name,)]
        if name in ("observations", "actions"):
            layout: Layout = getattr(layouts, name)
            paths = [leaf.path for leaf in layout.leaves()]
            untyped = {leaf.path for leaf in layout.leaves() if leaf.dtype is None}
            join = None if isinstance(layout, Leaf) else layout.join
        elif name in OPTIONAL_ROOTS:
            paths, *others = ([path for path in chunk.columns if path[0] == name] for chunk in chunks.values())
            if any(other != paths for other in others) or any(len(path) != 2 for path in paths):
                return None
            join = partial(_named, [path[1] for path in paths])
        elif name == "infos":
            return None
        arrays: list[Array] = []
        for path in paths:
            if path not in FLAGS and any(path in it and it.is_delta_encoded(path) for it in chunks.values()):
                return None
            array = self._places.column(path, chunks)
            if array is None or (array.dtype == object and path not in untyped):
                return None
            if array.dtype == object and not arrays and any(isinstance(value, Misfit) for value in array):
                return None
            arrays.append(array)
        return join, arrays if join else arrays[0], *self._bounds_of(name)

    def _bounds_of(self, name: str) -> tuple[list[int], list[int]]:
        is_step = name != "observations"
        if is_step not in self._bounds:
            self._bounds[is_step] = self._places.bounds((name,))
        return self._bounds[is_step]

    def _read(self, name: str, chunks: dict[int, Chunk]) -> dict[int, Chunk]:
        """Return chunks that have this column. Raises CorruptTrace."""
        if self._asked is None or (name,) in FLAGS:
            return chunks
        self._asked.add(name)
        return with_column(name, chunks, self.reader)


def _named(names: list[Any], arrays: Iterator[Array]) -> dict[Any, Array]:
    return dict(zip(names, arrays))


class Scanned:
    """An episode of a scan. A pickled one contains its arrays."""

    __slots__ = ("_group", "_i", "_skip")

    def __init__(self, group: EpisodeGroup, i: int, skip: bool):
        """i: its number in the group. skip: True if a damaged start counts as an empty one."""
        self._group, self._i, self._skip = group, i, skip

    def column(self, name: str, steps: range | None) -> Any:
        return self._group.column(name, self._i, steps)

    def start(self) -> dict[str, Any]:
        try:
            return self._group.start(self._i)
        except CorruptTrace:
            if self._skip:
                return {}
            raise

    def pending(self) -> Any:
        return self._group.pending(self._i)

    def __reduce__(self) -> Any:
        columns = {name: self.column(name, None) for name in sorted(self._group.roots)}
        return InMemory, (columns, self.start(), self.pending())
