"""The steps of many episodes at a time, column by column, so that episodes cost no work of their own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gym_trace.format import wire
from gym_trace.format.columns import CHANGES, MSGPACK
from gym_trace.formats.steps.choice import Choice
from gym_trace.formats.steps.windows import KEPT, step_windows
from gym_trace.model.layout import Path
from gym_trace.model.values import Array, Misfit
from gym_trace.playback.trace import Trace
from gym_trace.reading.episode_table import step_offsets
from gym_trace.reading.writer_reader import WriterReader

_FEWEST = 4  # episodes that are worth reading a chunk for
_MOST_BYTES = 32 << 20  # of a chunk that is decoded as a whole
_FLAGS = {"terminations": wire.TERMINATED, "truncations": wire.TRUNCATED}


class Block(NamedTuple):
    """Runs of steps, one after the other: a run is all steps of an episode, or some that follow each other.

    Attributes:
        episodes: (runs,) the place in the trace of the episode that each run is of.
        starts: (runs,) which step of the episode it begins with, counted from the first that is there.
        steps: (runs,) how many it has.
        opens, closes: (runs,) bool: whether it has the first of the steps that are asked for, the last of the episode.
        columns: by path, the rows of all runs one after the other; of observations one more for each run, which is the
            one before its first step. Values of any kind are an array of objects. Annotations may be missing.
    """

    episodes: Array
    starts: Array
    steps: Array
    opens: Array
    closes: Array
    columns: dict[Path, Array]

    @property
    def size(self) -> int:
        """Number of steps."""
        return int(self.steps.sum())

    @property
    def first_observations(self) -> Array:
        """(runs,) where in the rows of observations those of each run begin."""
        counts = self.steps + 1
        first: Array = np.cumsum(counts) - counts
        return first

    @property
    def last_observations(self) -> Array:
        """(runs,) where in the rows of observations the last one of each run is."""
        return self.first_observations + self.steps

    @property
    def before(self) -> Array:
        """Which rows of observations are those before a step, of all steps: (size,) integers."""
        chosen = np.ones(self.size + len(self.steps), np.bool_)
        chosen[self.last_observations] = False
        return np.flatnonzero(chosen)


def step_blocks(trace: Trace, choice: Choice, finals: str = KEPT, steps: slice = slice(None)) -> Iterator[Block]:
    """The chosen columns of all episodes in their order, some at a time, in memory that does not grow.

    Whole episodes that lie in one chunk are cut out of it together, all else comes in windows. finals and steps: as of
    step_windows. Raises CorruptTrace.
    """
    if steps != slice(None):
        yield from _windows(trace, range(len(trace)), choice, finals, steps)
        return
    writers, rows = trace.episodes["writer"], trace.rows
    chunks = np.full(len(trace), -1, np.int64)
    fragments = np.zeros(len(trace), np.int64)
    for number, reader in enumerate(trace.readers):
        mine = np.flatnonzero(writers == number)
        parts, row = reader.parts, rows[mine]
        fragments[mine] = parts.fragments[parts.first[row]]
        alone = (np.diff(parts.first)[row] == 1) & ~parts.trimmed[row]
        if finals != KEPT:
            alone &= trace.episodes["has_final_observation"][mine]
        chunks[mine[alone]] = np.searchsorted(reader.chunk_bounds, fragments[mine[alone]], side="right") - 1
    changes = np.flatnonzero((np.diff(writers) != 0) | (np.diff(chunks) != 0)) + 1
    bounds = [0, *changes.tolist(), len(trace)]
    begin = 0  # of the episodes that are to come in windows
    for first, last in pairwise(bounds):
        chunk, reader = int(chunks[first]), trace.readers[int(writers[first])]
        if chunk < 0 or last - first < _FEWEST or not _is_plain(reader, chunk, choice):
            continue
        block = _block_of(reader, chunk, np.arange(first, last), fragments[first:last], choice)
        if block is None:
            continue
        yield from _windows(trace, range(begin, first), choice, finals)
        yield block
        begin = last
    yield from _windows(trace, range(begin, len(trace)), choice, finals)


def _windows(trace: Trace, places: range, choice: Choice, finals: str, steps: slice = slice(None)) -> Iterator[Block]:
    for window in step_windows(trace, places, choice, steps, finals=finals) if places else ():
        facts = (window.episode.index, window.start, window.steps, window.opens, window.closes)
        place, start, count, opens, closes = (np.array([fact]) for fact in facts)
        yield Block(place, start, count, opens, closes, window.columns)


def _is_plain(reader: WriterReader, chunk: int, choice: Choice) -> bool:
    """Return True if the rows of a chunk equal those of its episodes, and are not too large."""
    anything = {leaf.path for root in reader.layouts[:2] for leaf in root.leaves() if leaf.dtype is None}
    size = 0
    for column in reader.columns_of(chunk):
        if column.path[0] in choice.roots:
            of_any_kind = column.dtype == MSGPACK and column.path not in anything and column.path[0] != "infos"
            if of_any_kind or column.encoding & CHANGES:
                return False
            size += column.full_size
    return size <= _MOST_BYTES


def _block_of(reader: WriterReader, number: int, episodes: Array, fragments: Array, choice: Choice) -> Block | None:
    """The episodes of these fragments of a chunk; None where they are not to be had like this."""
    begin, end = reader.chunk_bounds[number : number + 2].tolist()
    table = reader.fragments[begin:end]
    chunk = reader.chunk(number, frozenset(choice.roots))
    observed, stepped = step_offsets(table)
    mine = fragments - begin
    steps = table["steps"][mine].astype(np.int64)
    leaves = [leaf.path for root in reader.layouts[:2] for leaf in root.leaves() if choice.takes(leaf.path)]
    paths = [*leaves, *(path for path in chunk.columns if path not in leaves and choice.takes(path))]
    of_observations, of_steps = _rows(observed, mine), _rows(stepped, mine)
    columns: dict[Path, Array] = {}
    for path in paths:
        if path not in chunk:
            return None
        rows = chunk.array(path)[of_observations if path[0] == "observations" else of_steps]
        if rows.dtype == object and any(isinstance(value, Misfit) for value in rows):
            return None
        columns[path] = rows
    ends = np.cumsum(steps)
    for name, bit in _FLAGS.items():
        if name in choice.roots:
            flagged = (table["flags"][mine] & bit > 0) & (steps > 0)
            columns[(name,)] = np.zeros(int(ends[-1]), np.bool_)
            columns[(name,)][ends[flagged] - 1] = True
    whole = np.ones(len(mine), np.bool_)
    return Block(episodes, np.zeros(len(mine), np.int64), steps, whole, whole, columns)


def _rows(offsets: Array, mine: Array) -> Array | slice:
    """Return the positions of the rows of some fragments; a slice if they are contiguous."""
    begins, counts = offsets[mine], offsets[mine + 1] - offsets[mine]
    if bool((np.diff(mine) == 1).all()):
        return slice(int(begins[0]), int(begins[-1] + counts[-1]))
    firsts = np.cumsum(counts) - counts
    where: Array = np.repeat(begins - firsts, counts) + np.arange(int(counts.sum()))
    return where
