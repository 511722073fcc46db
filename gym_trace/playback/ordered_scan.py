"""Scan episodes in a given order, each one complete before the next one, in bounded memory.

Whole episodes with typed rows that end in the same chunk are cut together out of their chunks. All other episodes come
one by one, in windows of consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path
from gym_trace.data.values import Array, Misfit, objects
from gym_trace.data.vocabulary import OPTIONAL_ROOTS, SCANNED
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, RowRanges
from gym_trace.format.columns import MSGPACK
from gym_trace.format.fragments import as_slice
from gym_trace.playback.assembly import ChunkSlice, assemble, joined_leaf
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.step_runs import FLAGS, KEPT, LEFT_OUT, OnDamage, StepRuns, damage_at
from gym_trace.playback.stored_rows import StoredRows
from gym_trace.playback.writer_reader import WriterReader

_FEWEST = 4  # fewer episodes are not cut out of a chunk together
_MOST_CUT = 1 << 17  # steps after which no other chunk is added to a task
_CUT_SHARE = 64  # the typed values of several chunks of a task take at most 1/64 of the memory
_MOST_STEPS = 1024  # steps of a window
_WINDOW_SHARE = 8  # the typed values of a window take at most 1/8 of the memory
_VALUE_BYTES = 1024  # estimate for a row of values of any type


class _Task(NamedTuple):
    """Steps that are read together: the wanted episodes first to last, whole; or a window of one of them.

    Attributes:
        chunks: the rows of these steps in their chunks, by number; None: all rows.
        pieces: slices of a window, which has steps start to stop of the episode.
        opens: True for the first window of an episode.
        stored: the rows of whole episodes. None: a window.
    """

    first: int
    last: int
    chunks: Mapping[int, RowRanges | None]
    pieces: list[ChunkSlice] | None = None
    start: int = 0
    stop: int = 0
    opens: bool = True
    stored: StoredRows | None = None


class OrderedScan:
    """The wanted episodes of one writer; see Scan with order="episode".

    Args:
        reader, number: the writer, and its index in content.readers.
        episodes, rows: (k,) indices in content, and rows in the table of the writer.
        steps: the steps of each episode; a list has one slice for each of `episodes`.
        cache: decoded chunks, limited to memory bytes.
    """

    def __init__(
        self,
        reader: WriterReader,
        number: int,
        episodes: Array,
        rows: Array,
        columns: frozenset[str | Path],
        *,
        steps: slice | list[slice],
        finals: str,
        prefix: bool,
        on_damage: OnDamage | None,
        cache: ChunkCache,
        memory: int,
    ):
        self._reader, self._number, self._episodes, self._rows = reader, number, episodes, rows
        self._steps, self._finals, self._on_damage = steps, finals, on_damage
        self._cache, self._memory = cache, memory
        flags = {name for (name,) in FLAGS}
        roots = {path if isinstance(path, str) else path[0] for path in columns}
        self._roots = [root for root in SCANNED if root in roots]
        self._columns = frozenset(path for path in columns if path not in flags and path not in FLAGS)
        self._damaged: set[int] = set()  # numbers of chunks
        parts, fragments = self._reader.parts, self._reader.fragments
        chosen = as_slice(rows)
        self._first_steps = parts.column("first_step", chosen)
        self._known = parts.column("has_final_observation", chosen)
        length = parts.column("steps", chosen)
        self._prefix = 0 if prefix else self._reader.about.prefix
        self._begins = np.clip(self._prefix - self._first_steps, 0, length)
        self._ends = length
        is_plain = ~parts.first_step_lost[chosen] & (self._begins == 0)
        if finals != KEPT:
            is_plain &= self._known
        if finals == LEFT_OUT:
            terminated = fragments.flags[parts.last_of(chosen)] & wire.TERMINATED > 0
            shorter = ~self._known & ~terminated & (length > self._begins)
            self._ends, self._known = length - shorter, self._known | shorter
        self._chunk_of = np.where(
            is_plain & (steps == slice(None)), self._chunks_of(parts.last_of(chosen)), -1
        )  # the last chunk of each episode that may be cut out with others; -1 for the other episodes

    def _chunks_of(self, fragments: Array) -> Array:
        return np.searchsorted(self._reader.chunk_bounds, fragments, side="right") - 1

    def __iter__(self) -> Iterator[StepRuns]:
        for task in self._reader.ahead(self._tasks(), self._columns, lambda task: task.chunks):
            block = None if task.stored is None else self._cut_out(task, task.stored)
            if block is not None:
                yield block
                continue
            windows = iter([task]) if task.stored is None else self._windows(range(task.first, task.last))
            for window in windows:
                yield from self._read(window)

    # -- what is read together ----------------------------------------------------------------------------------------

    def _tasks(self) -> Iterator[_Task]:
        for first, last in pairwise(self._cuts()):
            if self._chunk_of[first] < 0 or last - first < _FEWEST:
                yield from self._windows(range(first, last))
            else:
                stored = StoredRows(self._reader, self._rows[first:last])
                yield _Task(first, last, dict.fromkeys(stored.chunks), stored=stored)

    def _cuts(self) -> list[int]:
        """Return where tasks begin, and the end: with the first episode that ends in another chunk, and after enough
        steps, as each task costs as much as hundreds of steps."""
        chunks = self._chunk_of
        if not len(chunks):
            return []
        enough = max(1, min(_MOST_CUT, self._memory // _CUT_SHARE // self._row_bytes()))
        changes = np.flatnonzero(np.diff(chunks)) + 1
        share = np.cumsum(self._ends - self._begins)[changes - 1] // enough
        is_cut = np.diff(share, prepend=0) > 0
        is_cut |= (chunks[changes] < 0) | (chunks[changes - 1] < 0)
        return [0, *changes[is_cut].tolist(), len(chunks)]

    def _windows(self, numbers: range) -> Iterator[_Task]:
        most = max(1, min(_MOST_STEPS, self._memory // _WINDOW_SHARE // self._row_bytes()))
        for number in numbers:
            begin = int(self._begins[number])
            steps = self._steps if isinstance(self._steps, slice) else self._steps[number]
            chosen = range(int(self._ends[number]) - begin)[steps]
            start = at = begin + chosen.start
            end = max(start, begin + chosen.stop)
            while True:
                stop = min(at + most, end)
                pieces = self._reader.pieces(int(self._rows[number]), range(at, stop))
                yield _Task(number, number + 1, self._reader.rows_of(pieces), pieces, at, stop, at == start)
                if stop == end:
                    break
                at = stop

    def _row_bytes(self) -> int:
        """Return the approximate bytes of a step in the columns."""
        layouts, size = self._reader.layouts, 1
        for layout in layouts[:2]:
            size += sum(leaf.row_size or _VALUE_BYTES for leaf in layout.leaves() if self._takes(leaf.path))
        return size + _VALUE_BYTES * ("infos" in self._columns)

    def _takes(self, path: Path) -> bool:
        return path[0] in self._columns or path in self._columns

    # -- whole episodes -----------------------------------------------------------------------------------------------

    def _cut_out(self, task: _Task, stored: StoredRows) -> StepRuns | None:
        """Return whole episodes; None if their rows cannot be used as they are stored."""
        chunks = self._plain_chunks(task.chunks)
        if chunks is None:
            return None
        columns: dict[Path, Array] = {}
        leaves = [leaf for layout in self._reader.layouts[:2] for leaf in layout.leaves() if self._takes(leaf.path)]
        paths = [*(leaf.path for leaf in leaves), *(path for chunk in chunks.values() for path in chunk.columns)]
        for path in dict.fromkeys([*paths, *(path for path in FLAGS if path[0] in self._roots)]):
            column = stored.column(path, chunks)
            if column is None or (column.dtype == object and any(isinstance(value, Misfit) for value in column)):
                return None
            columns[path] = column
        return self._runs(
            np.arange(task.first, task.last),
            np.zeros(task.last - task.first, np.int64),
            np.diff(stored.offsets(("rewards",))),
            np.ones(task.last - task.first, np.bool_),
            stored.flags[stored.first[1:] - 1],
            {path: columns[path] for path in sorted(columns, key=_sort_key)},
        )

    def _plain_chunks(self, numbers: Iterable[int]) -> dict[int, Chunk] | None:
        """Return these chunks; None if a row cannot be used as it is stored, or if chunks are too large or damaged.

        No chunk is read if no column is wanted: the index has the steps of each episode.
        """
        if not self._columns:
            return {}
        leaves = (leaf for layout in self._reader.layouts[:2] for leaf in layout.leaves())
        untyped = {("infos",), *(leaf.path for leaf in leaves if leaf.dtype is None)}
        size = 0
        try:
            for number in numbers:
                chunk = self._cache.get(self._reader, number, self._columns)
                for column in self._reader.columns_of(number) if chunk is None else chunk.described:
                    if self._takes(column.path):
                        if column.is_delta_encoded or (column.dtype == MSGPACK and column.path not in untyped):
                            return None
                        size += column.full_size
                if size > self._memory // 2:
                    return None
            return {number: self._cache.chunk(self._reader, number, self._columns) for number in numbers}
        except CorruptTrace:
            if self._on_damage is None:
                raise
            return None

    # -- windows ------------------------------------------------------------------------------------------------------

    def _read(self, task: _Task) -> list[StepRuns]:
        """Return the readable runs of a window."""
        while True:
            try:
                return [self._run(task, *stretch) for stretch in self._stretches(task)]
            except CorruptTrace as error:
                new = {piece.chunk_number for piece in task.pieces or ()} - self._damaged
                if self._on_damage is None or not new:
                    raise
                for number in [number for number in new if not self._decodes(number)] or new:
                    self._report(number, error)

    def _stretches(self, task: _Task) -> Iterator[tuple[list[ChunkSlice], int, int, bool]]:
        """Yield the readable stretches of a window, as (slices, first step, end, True if after damage)."""
        pieces: list[ChunkSlice] = []
        begin = at = task.start
        after_damage = False
        for piece in task.pieces or ():
            chunk = self._chunk(piece.chunk_number, task.chunks[piece.chunk_number])
            if chunk is None and (at > begin or (after_damage and pieces)):
                yield pieces, begin, at, after_damage
            at += piece.steps.stop - piece.steps.start
            if chunk is None:
                pieces, begin, after_damage = [], at, True
            else:
                pieces.append(piece._replace(chunk=chunk))
        if pieces and (at > begin or not after_damage):
            yield pieces, begin, at, after_damage

    def _chunk(self, number: int, rows: RowRanges | None) -> Chunk | None:
        """Return a chunk; None if it is damaged."""
        if number in self._damaged:
            return None
        try:
            return self._cache.chunk(self._reader, number, self._columns, rows)
        except CorruptTrace as error:
            if self._on_damage is None:
                raise
            self._report(number, error)
            return None

    def _report(self, number: int, error: CorruptTrace) -> None:
        assert self._on_damage is not None
        self._damaged.add(number)
        self._on_damage(damage_at(self._reader, number, error.problem))

    def _decodes(self, number: int) -> bool:
        try:
            self._reader.chunk(number, self._columns).decode_all()
        except CorruptTrace:
            return False
        return True

    def _run(self, task: _Task, pieces: list[ChunkSlice], begin: int, end: int, after_damage: bool) -> StepRuns:
        """Return one run. after_damage: the observation before its first step is lost, so this step is skipped."""
        if after_damage:
            steps = pieces[0].steps
            pieces[0] = pieces[0]._replace(steps=slice(steps.start + 1, steps.stop))
            begin += 1
        columns: dict[Path, Array] = {}
        layouts = self._reader.layouts
        for root in self._roots:
            if root in ("observations", "actions"):
                columns |= self._leaves(root, pieces)
                continue
            found = assemble(root, pieces, layouts, copy=False)
            if root in OPTIONAL_ROOTS:
                columns |= {(root, name): found[name] for name in sorted(found) if self._takes((root, name))}
            elif root != "infos":
                columns[(root,)] = found
            elif found is not None:
                columns[(root,)] = objects(found)
        closes = end == self._ends[task.first]
        if closes and not self._known[task.first] and self._finals != KEPT and end > begin:
            for path, rows in columns.items():
                if path[0] == "observations":
                    columns[path] = np.concatenate((rows[:-1], rows[-2:-1]))
        return self._runs(
            np.array([task.first]),
            np.array([begin]),
            np.array([end - begin]),
            np.array([task.opens or after_damage]),
            np.array([pieces[-1].flags if end > begin else 0]),
            columns,
        )

    def _leaves(self, root: str, pieces: list[ChunkSlice]) -> dict[Path, Array]:
        """Return the wanted leaves of observations or actions."""
        layout: Layout = getattr(self._reader.layouts, root)
        if root not in self._columns:
            leaves = [leaf for leaf in layout.leaves() if self._takes(leaf.path)]
            described = [piece.chunk.columns for piece in pieces]
            if all(leaf.path in it and it[leaf.path].dtype != MSGPACK for leaf in leaves for it in described):
                return {leaf.path: joined_leaf(pieces, leaf, copy=False) for leaf in leaves}
            # Only all leaves show whether a row has the structure of the space.
            pieces = [it._replace(chunk=self._cache.chunk(self._reader, it.chunk_number, root)) for it in pieces]
        tree = assemble(root, pieces, self._reader.layouts, copy=False)
        found = leaves_of(layout, tree, (root,))
        return {path: rows for path, rows in found.items() if path == (root,) or self._takes(path)}

    def _runs(
        self, numbers: Array, starts: Array, steps: Array, opens: Array, flags: Array, columns: dict[Path, Array]
    ) -> StepRuns:
        """Return runs. numbers: positions of their episodes in the wanted ones. starts: their first steps. flags: those
        of their last fragments."""
        closes = starts + steps == self._ends[numbers]
        step_offsets = np.append(0, np.cumsum(steps))
        return StepRuns(
            reader=self._reader,
            writer=self._number,
            row=self._rows[numbers],
            episode=self._episodes[numbers],
            first_step=self._first_steps[numbers] + starts,
            has_initial=np.ones(len(numbers), np.bool_),
            opens=opens,
            closes=closes,
            final_known=~closes | self._known[numbers],
            terminated=flags & wire.TERMINATED > 0,
            truncated=flags & wire.TRUNCATED > 0,
            step_offsets=step_offsets,
            observation_offsets=step_offsets + np.arange(len(numbers) + 1),
            columns=columns,
            starts={},
            branch_prefix=self._prefix,
        )


def leaves_of(layout: Layout, tree: object, path: Path) -> dict[Path, Array]:
    """Return the rows of each leaf of a space; all under the path of the space if they have another structure."""
    if isinstance(layout, Leaf) or isinstance(tree, np.ndarray):
        return {path: np.asarray(tree)}
    keys = range(len(layout.children)) if layout.keys is None else layout.keys
    found: dict[Path, Array] = {}
    for key, child in zip(keys, layout.children):
        found |= leaves_of(child, tree[key], (*path, key))  # type: ignore[index]
    return found


def _sort_key(path: Path) -> tuple[int, Path]:
    """Return the sort key of a column: leaves of a space keep their order, annotations are sorted by name."""
    root = str(path[0])
    return SCANNED.index(root), path[1:] if root in OPTIONAL_ROOTS else ()
