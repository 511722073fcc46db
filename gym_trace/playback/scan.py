"""Scan the steps of a trace: blocks of runs of steps, each chunk read once.

Statistics, lint, exports, tables and searches take steps from a Scan. It reads ahead from URLs, skips damage, and
handles lost and unknown observations, so that its callers see only steps and the observations before and after them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import ABSENT, Array, objects
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, RowRanges
from gym_trace.format.kernels import ranges
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.on_demand import Asked, ChunkOnDemand
from gym_trace.playback.opened import ChunkCache
from gym_trace.playback.ordered_scan import OrderedScan
from gym_trace.playback.step_runs import (
    FLAGS,
    KEPT,
    LEFT_OUT,
    OMITTED,
    REPEATED,
    STARTS,
    OnDamage,
    StepRuns,
    damage_at,
    raise_or_report,
)
from gym_trace.playback.writer_reader import ChunkRows, WriterReader

__all__ = ["KEPT", "LEFT_OUT", "OMITTED", "REPEATED", "OnDamage", "Scan", "StepRuns"]

FILE, EPISODE = "file", "episode"
_MEMORY = 64 << 20  # bytes


class Scan:
    """The steps of a trace or a view, as an iterable of StepRuns.

    ``for block in Scan(index_of(trace), {"rewards"}): total += block.columns["rewards",].sum()``

    Args:
        content: episodes of a trace or a view: index_of(trace).
        columns: names of columns ("observations"), or paths of leaves (("observations", "image")). With order="file",
            "starts" adds reset records.
        episodes: (k,) int64, indices of the wanted episodes in content. None: all.
        order: "file": chunk by chunk as stored; an episode comes once, even if a view has it twice. "episode": in the
            order of `episodes`, each complete before the next one, with overlap; long episodes in windows, and one
            without steps as an empty run. Rows without the structure of their space are under the path of the
            space, ("observations",); missing annotations are None.
        steps: with order="episode", the steps of each episode, as in episode[steps]; a list has one slice for each of
            `episodes`.
        finals: policy for unknown final observations: KEPT, OMITTED (in file order), REPEATED or LEFT_OUT; the last
            two imply overlap.
        prefix: False: skip the steps that a branch repeats of the episode it branched from.
        overlap: True: add the observation before its first step to every run: k steps have k + 1 observations.
        on_damage: called with each damaged part of a file. Its steps are skipped, and so is the step right after them,
            whose observation is lost. None: raise CorruptTrace.
        memory: with order="episode", bytes of decoded chunks in memory.
    """

    def __init__(
        self,
        content: EpisodeIndex,
        columns: Collection[str | Path],
        episodes: Array | None = None,
        *,
        order: str = FILE,
        steps: slice | list[slice] = slice(None),
        finals: str = KEPT,
        prefix: bool = True,
        overlap: bool = False,
        on_damage: OnDamage | None = None,
        memory: int = _MEMORY,
    ):
        self._content, self._columns, self._on_damage = content, frozenset(columns), on_damage
        self._wanted = np.arange(len(content)) if episodes is None else episodes
        self._is_all = content.chosen is None and episodes is None
        self._order, self._steps, self._memory = order, steps, memory
        self._finals, self._prefix = finals, prefix
        self._overlap = overlap or finals in (REPEATED, LEFT_OUT)

    def __iter__(self) -> Iterator[StepRuns]:
        return self._in_file_order() if self._order == FILE else self._in_given_order()

    def _in_file_order(self) -> Iterator[StepRuns]:
        content, wanted = self._content, self._wanted
        flags = {name for path in FLAGS for name in (path[0], path)}
        index = np.full(int(content.bounds[-1]), -1)  # index in content of each episode of the whole trace
        index[wanted if content.chosen is None else content.chosen[wanted]] = wanted
        for number, reader in enumerate(content.all_readers):
            mine = index[int(content.bounds[number]) : int(content.bounds[number + 1])]
            if not self._is_all and not (mine >= 0).any():
                continue
            raise_or_report(reader, self._on_damage)
            runs = _Runs(self, content.readers.index(reader), reader, mine)
            for block, chunk in read_chunks(reader, self._columns - flags, mine >= 0, self._on_damage):
                if chunk is None:
                    runs.skip(block)
                else:
                    yield runs.of(block, chunk)

    def _in_given_order(self) -> Iterator[StepRuns]:
        content, wanted = self._content, self._wanted
        writers, rows = content["writer"][wanted].astype(np.int64), content.rows[wanted]
        cache, reported = ChunkCache(self._memory), set[int]()
        bounds = [0, *(np.flatnonzero(np.diff(writers)) + 1).tolist(), len(wanted)]
        for first, last in pairwise(bounds if len(wanted) else []):
            number = int(writers[first])
            if number not in reported:
                raise_or_report(content.readers[number], self._on_damage)
                reported.add(number)
            yield from OrderedScan(
                content.readers[number],
                number,
                wanted[first:last],
                rows[first:last],
                self._columns,
                steps=self._steps if isinstance(self._steps, slice) else self._steps[first:last],
                finals=self._finals,
                prefix=self._prefix,
                on_damage=self._on_damage,
                cache=cache,
                memory=self._memory,
            )


def read_chunks(
    reader: WriterReader,
    columns: frozenset[str | Path],
    wanted: Array | None = None,
    on_damage: OnDamage | None = None,
    *,
    first: int = 0,
    asked: Asked | None = None,
) -> Iterator[tuple[ChunkRows, Chunk | None]]:
    """Yield the chunks with wanted episodes in file order, and their fragments, while the next ones are fetched.

    Args:
        wanted: mask over the rows of reader.parts. None: all.
        on_damage: called with each damaged chunk, for which None is yielded. None: raise CorruptTrace.
        first: number of the first chunk.
        asked: the columns that were used before; then chunks are ChunkOnDemand.
    """
    blocks = reader.blocks(wanted, first)

    roots = columns if asked is None else asked

    def rows_of(block: ChunkRows) -> RowRanges | None:
        return block.wanted_rows if reader.share is None else None  # origins share whole chunks

    for block in reader.ahead(blocks, roots, lambda block: {block.number: rows_of(block)}):
        chunk: Chunk | None
        try:
            if asked is None:
                chunk = reader.chunk(block.number, columns, rows_of(block))
            else:
                asked.next_chunk()
                chunk = ChunkOnDemand(reader, block.number, asked, rows_of(block))
            if on_damage is not None:
                for path in chunk.columns:  # starts stay packed
                    chunk.packed(path) if path == STARTS else chunk.array(path)
        except CorruptTrace as error:
            if on_damage is None:
                raise
            on_damage(damage_at(reader, block.number, error.problem))
            chunk = None
        yield block, chunk
        del chunk  # free memory before the next chunk is read


class _Runs:
    """Makes StepRuns of the chunks of one writer."""

    def __init__(self, scan: Scan, writer: int, reader: WriterReader, index: Array):
        self._scan, self._writer, self._reader, self._index = scan, writer, reader, index
        self._last_fragments = reader.parts.last
        self._after_damage = np.zeros(len(reader.parts), np.bool_)  # rows that continue after a damaged chunk
        self._last_rows: dict[int, dict[Path, Array]] = {}  # latest observation of each row that continues

    def skip(self, block: ChunkRows) -> None:
        """Note that a damaged chunk was skipped."""
        self._after_damage[block.rows[block.rows >= 0]] = True

    def of(self, block: ChunkRows, chunk: Chunk) -> StepRuns:
        scan, parts, table, rows = self._scan, self._reader.parts, block.table, block.rows
        flags = np.ascontiguousarray(table["flags"])
        steps, first_step = table["steps"].astype(np.int64), table["first_step"].astype(np.int64)
        has_initial = flags & wire.HAS_INITIAL > 0
        observations = steps + has_initial
        before = block.rows_before
        step_begins = np.cumsum(steps) - steps + before[1]
        observation_begins = np.cumsum(observations) - observations + before[0]
        is_first = parts.opens(rows, block.begin)
        lost = is_first & ~has_initial
        if self._after_damage.any():
            is_head = np.zeros(len(rows), np.bool_)
            is_head[np.unique(rows, return_index=True)[1]] = True
            lost |= is_head & self._after_damage[rows] & ~has_initial
            self._after_damage[rows[rows >= 0]] = False
        opens, is_changed = is_first | lost, bool(lost.any())
        if is_changed:  # a step without its observation is skipped: the run begins with the observation after it
            steps -= lost
            step_begins += lost
            first_step += lost
            has_initial = has_initial | lost
        unknown = (flags & wire.PLACEHOLDER > 0) & (observations > 0)
        is_changed |= scan._finals in (OMITTED, LEFT_OUT) and bool(unknown.any())
        if scan._finals == OMITTED:
            observations -= unknown
        elif scan._finals == LEFT_OUT:
            dropped = unknown & (flags & wire.TERMINATED == 0) & (steps > 0)
            steps, observations, unknown = steps - dropped, observations - dropped, unknown & ~dropped
            flags = np.where(dropped, flags & ~np.uint32(wire.TRUNCATED), flags)
        is_wanted = rows >= 0
        branch_prefix = 0 if scan._prefix else self._reader.about.prefix
        if branch_prefix:
            cut = np.maximum(branch_prefix - first_step, 0)
            cut_observations = np.maximum(cut - ~has_initial, 0)
            is_wanted &= cut <= steps
            opens, has_initial = opens | (cut > 0), has_initial | (cut > 0)
            first_step, step_begins, steps = first_step + cut, step_begins + cut, steps - cut
            observation_begins, observations = observation_begins + cut_observations, observations - cut_observations
        wanted = np.flatnonzero(is_wanted)
        mine = rows[wanted]
        begins = _run_begins(mine)
        firsts = np.sort(mine[begins])
        if (firsts[1:] == firsts[:-1]).any():  # fragments of an episode lie apart
            order = np.argsort(mine, kind="stable")
            wanted, mine, is_changed = wanted[order], mine[order], True
            begins = _run_begins(mine)
        heads, tails = wanted[begins], wanted[np.append(begins[1:], len(mine))[: len(begins)] - 1]
        bounds = np.append(begins, len(mine))
        runs = StepRuns(
            reader=self._reader,
            writer=self._writer,
            row=rows[heads],
            episode=self._index[rows[heads]],
            first_step=first_step[heads],
            has_initial=has_initial[heads],
            opens=opens[heads],
            closes=self._last_fragments[rows[heads]] == block.begin + tails,
            final_known=~unknown[tails],
            terminated=flags[tails] & wire.TERMINATED > 0,
            truncated=flags[tails] & wire.TRUNCATED > 0,
            step_offsets=np.append(0, np.cumsum(steps[wanted]))[bounds],
            observation_offsets=np.append(0, np.cumsum(observations[wanted]))[bounds],
            columns={},
            starts={},
            branch_prefix=branch_prefix,
        )
        if STARTS in chunk:
            begun = rows[table["flags"] & wire.STARTS > 0].tolist()
            runs.starts = {row: entry for row, entry in zip(begun, chunk.packed(STARTS)[before[2] :]) if row >= 0}
        is_changed |= len(wanted) < len(rows) or branch_prefix > 0
        in_steps = _RunRows(step_begins, steps, wanted, is_changed)
        in_observations = _RunRows(observation_begins, observations, wanted, is_changed)
        for path in chunk.columns:
            if path != STARTS:
                rows_of = in_observations if path[0] == "observations" else in_steps
                if rows_of.count:
                    runs.columns[path] = rows_of.of(chunk.array(path))
        for path in FLAGS if runs.size else ():
            if path not in scan._columns and path[0] not in scan._columns:
                continue
            flagged = (flags[wanted] & FLAGS[path] > 0) & (steps[wanted] > 0)
            runs.columns[path] = np.zeros(runs.size, np.bool_)
            runs.columns[path][np.cumsum(steps[wanted])[flagged] - 1] = True
        if scan._overlap:
            self._join(runs, repeats=scan._finals in (REPEATED, LEFT_OUT))
        return runs

    def _join(self, runs: StepRuns, repeats: bool) -> None:
        """Give each run the observation before its first step."""
        before = runs.observation_offsets
        missing = np.flatnonzero(~runs.has_initial)
        runs.observation_offsets = before + np.append(0, np.cumsum(~runs.has_initial))
        ends = runs.observation_offsets[1:]
        again = ends[~runs.final_known & (runs.lengths > 0)] - 1 if repeats else ends[:0]
        lasts = [self._last_rows.pop(row, {}) for row in runs.row[missing].tolist()]
        continuing = np.flatnonzero(~runs.closes)
        paths = [*runs.columns, *(path for last in lasts for path in last)]
        for path in dict.fromkeys(path for path in paths if path[0] == "observations"):
            column = runs.columns.get(path)
            if len(missing):
                initial = [_alike(last.get(path), column) for last in lasts]
                column = _inserted(column, before[missing], initial)
            assert column is not None
            if len(again):
                column = column.copy()
                column[again] = column[again - 1]
            runs.columns[path] = column
            for run in continuing.tolist():
                end = int(ends[run])
                self._last_rows.setdefault(int(runs.row[run]), {})[path] = column[end - 1 : end].copy()
        runs.has_initial = np.ones(len(runs), np.bool_)


def _run_begins(values: Array) -> Array:
    """Return where each run of equal values begins."""
    return np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)[: len(values)]


class _RunRows:
    """Rows of a chunk that are in runs."""

    def __init__(self, begins: Array, counts: Array, wanted: Array, is_changed: bool):
        """begins, counts: rows of each fragment. wanted: the fragments, in order. is_changed: False: take all rows."""
        self._rows: Array | None = None
        if is_changed:
            begins, counts = begins[wanted], counts[wanted]
            self._rows = ranges(begins, counts)
        self.count = int(counts.sum())
        self._begin = int(begins[0]) if len(begins) else 0

    def of(self, column: Array) -> Array:
        if self._rows is not None:
            return column.take(self._rows, axis=0)
        # Other writers may have rows in the chunk, too.
        return column if len(column) == self.count else column[self._begin : self._begin + self.count]


def _alike(row: Array | None, rows: Array | None) -> Array | None:
    """Return a row that is an object with the type of the others if its value has that type."""
    if row is None or rows is None or row.dtype != object or rows.dtype == object:
        return row
    value, form = row[0], (rows.dtype, rows.shape[1:])
    is_alike = isinstance(value, (np.ndarray, np.generic)) and (value.dtype, value.shape) == form
    return np.asarray(value)[None] if is_alike else row


def _inserted(rows: Array | None, at: Array, inserted: list[Array | None]) -> Array:
    """Return rows with others inserted before these positions; as objects if their types differ. None: ABSENT."""
    known = [row for row in inserted if row is not None]
    first = known[0] if rows is None else rows
    is_same = all(row.dtype == first.dtype and row.shape[1:] == first.shape[1:] for row in known)
    if len(known) < len(inserted) or not is_same or first.dtype == object:
        known = [objects([ABSENT if row is None else row[0]]) for row in inserted]
        rows = None if rows is None else objects(list(rows))
    if rows is None:
        return np.concatenate(known)
    between = np.split(rows, at)
    return np.concatenate([between[0], *(part for pair in zip(known, between[1:]) for part in pair)])
