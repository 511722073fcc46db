"""Episodes of a scan that end in the same chunk: a column is put together once for all of them, and then cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.values import Array, Misfit
from gym_trace.data.vocabulary import OPTIONAL_ROOTS
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.assembly import assemble, cut_down
from gym_trace.playback.on_demand import STARTS, Asked, ChunkOnDemand, with_column
from gym_trace.playback.opened import InMemory
from gym_trace.playback.step_runs import FLAGS
from gym_trace.playback.stored_rows import StoredRows
from gym_trace.playback.writer_reader import WriterReader

_FEWEST = 4  # fewer episodes are not joined together
_JOINED_BYTES = 1 << 20  # bytes of episodes joined together, which is what a user keeps in memory by keeping one array
_VALUE_BYTES = 64  # estimate for a value without a dtype
_REWARD_BYTES = 8
_Source = Any  # an array, or a _Structure
_Column = tuple[list[_Source | None], list[int], list[int]]  # sources; where the rows of each episode begin and end


class _Structure:
    """Rows of a Dict or Tuple. join: makes it of one array per leaf."""

    __slots__ = ("_arrays", "_join")

    def __init__(self, join: Callable[[Iterator[Array]], Any], arrays: list[Array]):
        self._join, self._arrays = join, arrays

    def __getitem__(self, rows: slice) -> Any:
        return self._join(iter([array[rows] for array in self._arrays]))


class EpisodeGroup:
    """Episodes of a writer, or parts of them, that end in the same chunk, in order.

    A column of episodes that are one fragment of that chunk is cut out of the chunk; other episodes are joined first.
    An episode is assembled by itself if the column has no dtype, or several, or is stored as changes; or if the episode
    has no steps, as its columns then have the dtypes of its spaces.

    Attributes:
        reader: the reader of the writer, without damaged chunks.
        rows: (n,) their rows in reader.parts.
        roots: the columns that may be read.
    """

    def __init__(
        self,
        reader: WriterReader,
        rows: Array,
        chunks: Mapping[int, Chunk],
        roots: frozenset[str],
        asked: Asked | None,
        skip: bool,
    ):
        """chunks: those of the episodes, by number; ChunkOnDemand if asked is not None. skip: True if a damaged reset
        record counts as an empty one."""
        self.reader, self.rows, self.roots = reader, rows, roots
        self._stored, self._asked, self._skip = StoredRows(reader, rows), asked, skip
        self._chunks = {number: chunks[number] for number in self._stored.chunks}
        self._columns: dict[str, _Column | None] = {}  # None: all episodes are assembled
        self._bounds: dict[bool, tuple[list[int], list[int]]] = {}  # bounds of steps (True), and of observations
        steps, is_alone = self._stored.lengths, self._stored.is_alone
        others = np.flatnonzero(~is_alone & (steps > 0))
        leaves = [leaf for layout in reader.layouts[:2] for leaf in layout.leaves()]
        row_bytes = _REWARD_BYTES + sum(leaf.row_size or _VALUE_BYTES for leaf in leaves)
        runs = [others[run] for run in _runs((steps[others] + 1) * row_bytes)]
        self._joined = [(some, StoredRows(reader, rows[some])) for some in runs if len(some) >= _FEWEST]
        source_of = np.where(is_alone & (steps > 0), 1, 0)  # 0: assembled; 1: alone in the last chunk; others: joined
        for number, (some, _) in enumerate(self._joined):
            source_of[some] = 2 + number
        self._source_of: list[int] = source_of.tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def each(self, name: str) -> Iterator[Any]:
        """Return a column of each episode."""
        found = self._found(name)
        if found is None:
            yield from map(partial(self._assembled, name, None), range(len(self)))
            return
        sources, begins, ends = found
        for i, source, begin, end in zip(range(len(self)), map(sources.__getitem__, self._source_of), begins, ends):
            yield self._assembled(name, None, i) if source is None else source[begin:end]

    def column(self, name: str, i: int, steps: range | None = None) -> Any:
        """Return a column of episode i, or a copy of its rows for these steps."""
        found = (self._columns.get(name) or self._found(name)) if steps is None else None
        if found is None or (source := found[0][self._source_of[i]]) is None:
            return self._assembled(name, steps, i)
        return source[found[1][i] : found[2][i]]

    def start(self, i: int) -> dict[str, Any]:
        """Return the reset record of episode i. Raises CorruptTrace."""
        if self._asked is not None:
            self._asked.add(STARTS)
        try:
            return self.reader.start_of(int(self.rows[i]))
        except CorruptTrace:
            if self._skip:
                return {}
            raise

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
        slices = self._stored.slices(i, self._chunks)
        if steps is not None:
            slices = cut_down(slices, steps.start, steps.stop)
        if self._asked is not None:
            chunks = self._read(name, {it.chunk_number: it.chunk for it in slices})
            slices = [it._replace(chunk=chunks[it.chunk_number]) for it in slices]
        return assemble(name, slices, self.reader.layouts, copy=steps is not None)

    def _found(self, name: str) -> _Column | None:
        if name not in self._columns:
            self._columns[name] = None
            if name in self.roots and name != "infos":
                with suppress(CorruptTrace):  # raised again for the episodes that it concerns
                    self._columns[name] = self._sources(name), *self._bounds_of(name)
        return self._columns[name]

    def _sources(self, name: str) -> list[_Source | None]:
        """Return what has the rows of episodes, by the numbers in _source_of. Raises CorruptTrace."""
        if (name,) in FLAGS:
            return [self._stored.column((name,), {})] * (2 + len(self._joined))
        chunks, last = self._read(name, self._chunks), self._stored.chunks[-1]
        joined = (self._source(name, {it: chunks[it] for it in stored.chunks}, stored) for _, stored in self._joined)
        return [None, self._source(name, {last: chunks[last]}, None), *joined]

    def _source(self, name: str, chunks: dict[int, Chunk], stored: StoredRows | None) -> _Source | None:
        """Return the rows of a column; None if they cannot be cut. stored: episodes to join. None: those of a chunk."""
        join: Callable[[Iterator[Array]], Any] | None = None
        untyped: set[Path] = set()  # leaves whose values are objects in any case
        paths: list[Path] = [(name,)]
        if name in ("observations", "actions"):
            layout: Layout = getattr(self.reader.layouts, name)
            paths = [leaf.path for leaf in layout.leaves()]
            untyped = {leaf.path for leaf in layout.leaves() if leaf.dtype is None}
            join = None if isinstance(layout, Leaf) else layout.join
        elif name in OPTIONAL_ROOTS:
            paths, *others = ([path for path in chunk.columns if path[0] == name] for chunk in chunks.values())
            if any(other != paths for other in others) or any(len(path) != 2 for path in paths):
                return None
            join = partial(_named, [path[1] for path in paths])
        arrays: list[Array] = []
        for path in paths:
            if any(path not in it or it.is_delta_encoded(path) for it in chunks.values()):
                return None
            array = next(iter(chunks.values())).array(path) if stored is None else stored.column(path, chunks)
            if array is None or (array.dtype == object and path not in untyped):
                return None
            if array.dtype == object and not arrays and any(isinstance(value, Misfit) for value in array):
                return None
            arrays.append(array)
        return arrays[0] if join is None else _Structure(join, arrays)

    def _bounds_of(self, name: str) -> tuple[list[int], list[int]]:
        """Return where the rows of each episode begin and end in its source."""
        if (name,) in FLAGS:
            offsets = self._stored.offsets((name,)).tolist()
            return offsets[:-1], offsets[1:]
        is_step = name != "observations"
        if is_step not in self._bounds:
            begins, ends = self._stored.in_chunks((name,))
            for some, stored in self._joined:
                offsets = stored.offsets((name,))
                begins[some], ends[some] = offsets[:-1], offsets[1:]
            self._bounds[is_step] = begins.tolist(), ends.tolist()
        return self._bounds[is_step]

    def _read(self, name: str, chunks: dict[int, Chunk]) -> dict[int, Chunk]:
        """Return chunks that have this column. Raises CorruptTrace."""
        if self._asked is None or (name,) in FLAGS:
            return chunks
        self._asked.add(name)
        return with_column(name, chunks, self.reader)


def _runs(sizes: Array) -> Iterator[slice]:
    """Yield runs of items with at most _JOINED_BYTES; a larger item is a run of its own."""
    total = np.cumsum(sizes)
    begin = 0
    while begin < len(sizes):
        until = _JOINED_BYTES + (int(total[begin - 1]) if begin else 0)
        end = max(begin + 1, int(np.searchsorted(total, until, side="right")))
        yield slice(begin, end)
        begin = end


def _named(names: list[Any], arrays: Iterator[Array]) -> dict[Any, Array]:
    return dict(zip(names, arrays))


class Scanned:
    """An episode of a group. A pickled one contains its arrays."""

    __slots__ = ("_group", "_i")

    def __init__(self, group: EpisodeGroup, i: int):
        self._group, self._i = group, i

    def column(self, name: str, steps: range | None) -> Any:
        return self._group.column(name, self._i, steps)

    def start(self) -> dict[str, Any]:
        return self._group.start(self._i)

    def pending(self) -> Any:
        return self._group.pending(self._i)

    def __reduce__(self) -> Any:
        columns = {name: self.column(name, None) for name in sorted(self._group.roots)}
        return InMemory, (columns, self.start(), self.pending())
