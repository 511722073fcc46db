"""The steps of a trace as rules get them: whole columns of runs of steps, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np

from gym_trace.data.layout import Leaf, Path, PlainSpace
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, Damage
from gym_trace.playback.episode_scan import damage_at
from gym_trace.playback.writer_reader import Block, WriterReader
from gym_trace.tools.statistics.columns import leaves_with_spaces

_STARTS = ("starts",)
_WIDE = 512  # numbers of the rows that are reduced together


class WriterSteps:
    """Facts that the blocks of one writer share.

    Attributes:
        number: of the writer, an index of trace.readers.
        reader: its files.
        episodes: (parts,) index of the episode of each row of reader.parts in the whole trace; -1: not wanted.
        leaves: leaves of the spaces, by path.
    """

    def __init__(self, number: int, reader: WriterReader, episodes: Array):
        self.number, self.reader, self.episodes = number, reader, episodes

    @cached_property
    def leaves(self) -> dict[Path, tuple[Leaf, PlainSpace]]:
        return {leaf.path: (leaf, space) for leaf, space in leaves_with_spaces(self.reader)}


class StepBlock:
    """n runs of steps, each of one episode, column by column. A longer episode goes on in a later block.

    Attributes:
        writer: what the blocks of one writer share.
        part: (n,) row of the episode in writer.reader.parts.
        episode: (n,) index of the episode in the whole trace.
        first_step: (n,) step in the episode that a run begins with.
        leads: (n,) True if a run has the observation before its first step. False: it goes on from an earlier block.
        ends: (n,) True if no later block has more of the episode.
        terminated, truncated: (n,) flags of the last step of a run; those of all others are False.
        steps, observations: (n + 1,) where the rows of a run begin; last comes the number of rows. Unknown
            observations are left out.
        columns: (rows, ...) arrays by path: ("observations", ...), ("actions", ...), ("rewards",), ("infos",),
            ("annotations", name). Columns without rows are left out. Do not change them.
        starts: packed reset records of the episodes that begin here, by row of the table.
    """

    def __init__(self, writer: WriterSteps, block: Block, chunk: Chunk, seen: Array):
        """seen: fragments of each part in the blocks before; brought up to date."""
        self.writer = writer
        parts, table = writer.reader.parts, block.table
        flags, steps = table["flags"], table["steps"].astype(np.int64)
        observations = steps + (flags & wire.LEADS > 0)
        observation_begins, step_begins = (offsets[:-1].copy() for offsets in block.offsets)
        first_step = table["first_step"].astype(np.int64)
        leads = flags & wire.LEADS > 0
        trimmed = parts.fragments[parts.first[:-1][parts.trimmed]] - block.begin
        trimmed = trimmed[(trimmed >= 0) & (trimmed < len(table))]
        if len(trimmed):  # the observation of the first step leads, because the one before it is lost
            steps[trimmed] -= 1
            step_begins[trimmed] += 1
            first_step[trimmed] += 1
            leads = leads.copy()
            leads[trimmed] = True
        unknown = flags & wire.PLACEHOLDER > 0
        observations -= unknown
        wanted = np.flatnonzero(block.rows >= 0)
        rows = block.rows[wanted]
        is_whole = len(wanted) == len(table) and not len(trimmed) and not unknown.any()
        if len(np.unique(rows)) <= np.count_nonzero(rows[1:] != rows[:-1]):  # pieces of an episode lie apart
            order = np.argsort(rows, kind="stable")
            wanted, rows, is_whole = wanted[order], rows[order], False
        opens = np.ones(len(rows), bool)
        opens[1:] = rows[1:] != rows[:-1]
        begin = np.flatnonzero(opens)
        last = np.append(begin[1:], len(rows)) - 1
        self.part, self.episode = rows[begin], writer.episodes[rows[begin]]
        self.first_step, self.leads = first_step[wanted[begin]], leads[wanted[begin]]
        self.terminated = flags[wanted[last]] & wire.TERMINATED > 0
        self.truncated = flags[wanted[last]] & wire.TRUNCATED > 0
        np.add.at(seen, rows, 1)
        self.ends = seen[self.part] == np.diff(parts.first)[self.part]
        bounds = np.append(begin, len(rows))
        self.steps = np.append(0, np.cumsum(steps[wanted]))[bounds]
        self.observations = np.append(0, np.cumsum(observations[wanted]))[bounds]
        columns = {path: chunk.array(path) for path in chunk.columns if path != _STARTS}
        if not is_whole:
            of_steps = _rows_from(step_begins[wanted], steps[wanted])
            of_observations = _rows_from(observation_begins[wanted], observations[wanted])
            columns = {
                path: rows[of_observations if path[0] == "observations" else of_steps]
                for path, rows in columns.items()
                if len(rows)
            }
        self.columns: dict[Path, Array] = {path: rows for path, rows in columns.items() if len(rows)}
        packed = chunk.packed(_STARTS) if _STARTS in chunk else []
        begun = block.rows[flags & wire.STARTS > 0].tolist()
        self.starts = {row: entry for row, entry in zip(begun, packed) if row >= 0}

    def bounds(self, path: Path) -> Array:
        """Return where the rows of each run begin in a column, with one element more."""
        bounds: Array = self.observations if path[0] == "observations" else self.steps
        return bounds

    def place(self, path: Path, row: int) -> tuple[int, int]:
        """Return the episode and the step of a row of a column; the observation before the first step is step -1."""
        bounds = self.bounds(path)
        run = int(np.searchsorted(bounds, row, side="right")) - 1
        step = int(self.first_step[run]) + row - int(bounds[run])
        return int(self.episode[run]), step - (path[0] == "observations" and bool(self.leads[run]))


def by_dimension(ufunc: np.ufunc, rows: Array) -> Array:
    """Reduce rows, (rows, ...), to one: ufunc.reduce() over the rows, several times faster where these are short."""
    flat = rows.reshape(len(rows), -1)
    together = _WIDE // max(1, flat.shape[1])
    if together > 1 and len(flat) > together:
        whole = len(flat) - len(flat) % together
        wide = ufunc.reduce(flat[:whole].reshape(-1, together * flat.shape[1]), axis=0)
        flat = np.concatenate([wide.reshape(together, -1), flat[whole:]])
    reduced: Array = ufunc.reduce(flat, axis=0).reshape(rows.shape[1:])
    return reduced


def _rows_from(begins: Array, counts: Array) -> Array:
    """Return the rows from begins[i] on, counts[i] of them, for all i."""
    ends = np.cumsum(counts)
    rows: Array = np.repeat(begins - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
    return rows


def step_blocks(writer: WriterSteps, roots: frozenset[str], on_damage: Callable[[Damage], None]) -> Iterator[StepBlock]:
    """Yield the wanted steps of a writer. on_damage: called with each damaged chunk, which is skipped."""
    seen = np.zeros(len(writer.reader.parts), np.int64)
    for block in writer.reader.blocks(writer.episodes >= 0):
        try:
            steps = StepBlock(writer, block, writer.reader.chunk(block.number, roots), seen)
        except CorruptTrace as error:
            on_damage(damage_at(writer.reader, block.number, error.problem))
        else:
            yield steps
