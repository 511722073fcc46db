"""The one walk over the steps of a trace: blocks of runs of steps, each chunk read once.

Every function that reads steps of many episodes takes them from a Scan. It reads ahead from URLs, skips damage, and
settles what is lost or unknown, so that its callers see only steps and the observations before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import ABSENT, Array, objects
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, Damage
from gym_trace.playback.content import Content
from gym_trace.playback.episode_table import Parts
from gym_trace.playback.on_demand import Asked, ChunkOnDemand
from gym_trace.playback.writer_reader import Block, WriterReader

OnDamage = Callable[[Damage], None]

# What becomes of the last observation of an episode where it is unknown (Episode.has_final_observation is False).
KEPT = "kept"  # the stored placeholder is handed on
OMITTED = "omitted"  # it is left out: its run has one observation less
REPEATED = "repeated"  # the observation before it stands in
LEFT_OUT = (
    "left out"  # the step that led to it is left out; a terminated one stays, with the observation before it again
)

STARTS = ("starts",)
FLAGS = {("terminations",): wire.TERMINATED, ("truncations",): wire.TRUNCATED}


@dataclass
class StepRuns:
    """n runs of steps, each of one episode, column by column. A longer episode continues in a later block.

    Attributes:
        reader: reader of the writer that recorded them all. writer: its index in content.readers.
        row: (n,) int64, row of the episode in reader.parts.
        episode: (n,) int64, index of the episode in the content that is scanned.
        first_step: (n,) int64, index in the whole episode of the first step of a run.
        has_initial: (n,) bool, True if the first observation of a run is the one before its first step. False: that one
            was the last of a run in an earlier block. With overlap=True, it is True for all.
        opens: (n,) bool, True if no earlier block had the steps right before: the first run of an episode, or the first
            one after damage.
        closes: (n,) bool, True for the last run of an episode.
        final_known: (n,) bool, False if a run ends with the unknown final observation of its episode.
        terminated, truncated: (n,) bool, flags of the last step of a run.
        step_offsets, observation_offsets: (n + 1,) int64, where the rows of each run begin in columns; the last element
            is the number of rows.
        columns: (rows, ...) arrays by path: ("observations", ...), ("actions", ...), ("rewards",), ("infos",),
            ("annotations", name), ("terminations",), ("truncations",). Values of any type are objects; an annotation
            that a row lacks is ABSENT. Columns without rows are left out. Read-only: they are shared with the chunk.
        starts: packed reset records of the episodes that begin here, by row of reader.parts.
    """

    reader: WriterReader
    writer: int
    row: Array
    episode: Array
    first_step: Array
    has_initial: Array
    opens: Array
    closes: Array
    final_known: Array
    terminated: Array
    truncated: Array
    step_offsets: Array
    observation_offsets: Array
    columns: dict[Path, Array]
    starts: dict[int, bytes]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def size(self) -> int:
        """Number of steps."""
        return int(self.step_offsets[-1])

    @property
    def lengths(self) -> Array:
        """(n,) int64, number of steps of each run."""
        return np.diff(self.step_offsets)

    @property
    def run_of_step(self) -> Array:
        """(steps,) int64, the run of each step."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def step(self) -> Array:
        """(steps,) int64, index of each step in its whole episode."""
        step: Array = np.repeat(self.first_step - self.step_offsets[:-1], self.lengths) + np.arange(self.size)
        return step

    @property
    def rows_after(self) -> Array:
        """(steps,) int64, the row of the observation after each step. The row before it has the observation before the
        step, if overlap=True."""
        shift = self.observation_offsets[:-1] + self.has_initial - self.step_offsets[:-1]
        after: Array = np.repeat(shift, self.lengths) + np.arange(self.size)
        return after

    def offsets(self, path: Path) -> Array:
        """Return where the rows of each run begin in a column, with one element more."""
        return self.observation_offsets if path[0] == "observations" else self.step_offsets

    def place(self, path: Path, row: int) -> tuple[int, int]:
        """Return the episode and the step of a row of a column; the observation before the first step is step -1."""
        offsets = self.offsets(path)
        run = int(np.searchsorted(offsets, row, side="right")) - 1
        step = int(self.first_step[run]) + row - int(offsets[run])
        return int(self.episode[run]), step - (path[0] == "observations" and bool(self.has_initial[run]))


class Scan:
    """The steps of a trace or a view, as an iterable of StepRuns.

    ``for block in Scan(trace.content, {"rewards"}): total += block.columns["rewards",].sum()``

    Args:
        content: episodes of a trace or a view: trace.content.
        columns: names of columns ("observations"), or paths of leaves (("observations", "image")); "starts" adds
            reset records.
        episodes: (k,) int64, indices of the wanted episodes in content. None: all.
        finals: what becomes of unknown final observations: KEPT, OMITTED, REPEATED or LEFT_OUT; the last two imply
            overlap.
        prefix: False: leave out the steps that a branch has in common with the episode that it was made from.
        overlap: give every run the observation before its first step, so that a run of k steps has k + 1 observations.
        on_damage: called with each damaged part of a file, whose steps are skipped. So is the step right after, as its
            observation is lost. None: raise CorruptTrace.

    Each episode comes once, however often a view has it; its index is the last one there.
    """

    def __init__(
        self,
        content: Content,
        columns: Collection[str | Path],
        episodes: Array | None = None,
        *,
        finals: str = KEPT,
        prefix: bool = True,
        overlap: bool = False,
        on_damage: OnDamage | None = None,
    ):
        self._content, self._on_damage = content, on_damage
        self._finals, self._prefix = finals, prefix
        self._overlap = overlap or finals in (REPEATED, LEFT_OUT)
        self._flags = [path for path in FLAGS if path[0] in columns or path in columns]
        self._columns = frozenset(columns) - {name for path in FLAGS for name in (path[0], path)}
        self._index = np.full(int(content.bounds[-1]), -1)  # of each episode of the whole trace, in content
        wanted = np.arange(len(content)) if episodes is None else episodes
        self._index[wanted if content.chosen is None else content.chosen[wanted]] = wanted
        self._is_all = content.chosen is None and episodes is None

    def __iter__(self) -> Iterator[StepRuns]:
        content = self._content
        for number, reader in enumerate(content.writers):
            index = self._index[int(content.bounds[number]) : int(content.bounds[number + 1])]
            if not self._is_all and not (index >= 0).any():
                continue
            raise_or_report(reader, self._on_damage)
            runs = _Runs(self, number if content.chosen is None else content.readers.index(reader), reader, index)
            for block, chunk in read_chunks(reader, self._columns, index >= 0, self._on_damage):
                if chunk is None:
                    runs.skip(block)
                else:
                    yield runs.of(block, chunk)


def raise_or_report(reader: WriterReader, on_damage: OnDamage | None) -> None:
    """Report the missing and unreadable files of a writer. Without on_damage, raise CorruptTrace for the first."""
    for damage in reader.damage:
        if on_damage is None:
            raise damage.error()
        on_damage(damage)


def read_chunks(
    reader: WriterReader,
    columns: frozenset[str | Path],
    wanted: Array | None = None,
    on_damage: OnDamage | None = None,
    *,
    parts: Parts | None = None,
    first: int = 0,
    asked: Asked | None = None,
) -> Iterator[tuple[Block, Chunk | None]]:
    """Yield the chunks with wanted episodes in their order, with the fragments in them; the next ones are fetched.

    Args:
        wanted: mask over the rows of parts. None: all.
        on_damage: called with each damaged chunk, for which None is yielded. None: raise CorruptTrace.
        parts: the episodes. None: those of the reader.
        first: number of the first chunk.
        asked: columns that the episodes before were asked for: the chunks are ChunkOnDemand then.
    """
    blocks = reader.blocks(wanted, first, parts)
    for block in reader.ahead(blocks, columns if asked is None else asked, attrgetter("number")):
        chunk: Chunk | None
        try:
            if asked is None:
                chunk = reader.chunk(block.number, columns)
            else:
                asked.turn()
                chunk = ChunkOnDemand(reader, block.number, asked)
            if on_damage is not None:
                for path in chunk.columns:  # starts are handed on as they are packed
                    chunk.packed(path) if path == STARTS else chunk.array(path)
        except CorruptTrace as error:
            if on_damage is None:
                raise
            on_damage(_damage_at(reader, block.number, error.problem))
            chunk = None
        yield block, chunk
        del chunk  # before the next one takes memory


def _damage_at(reader: WriterReader, number: int, problem: str) -> Damage:
    batch, i = reader.chunk_places[number]
    start, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
    return Damage(str(batch.path), start, start + length, problem)


class _Runs:
    """Makes StepRuns of the chunks of one writer."""

    def __init__(self, scan: Scan, writer: int, reader: WriterReader, index: Array):
        self._scan, self._writer, self._reader, self._index = scan, writer, reader, index
        self._last_fragments = reader.parts.last
        self._after_damage = np.zeros(len(reader.parts), np.bool_)  # rows that continue behind a damaged chunk
        self._last_rows: dict[int, dict[Path, Array]] = {}  # last observations so far of rows that continue

    def skip(self, block: Block) -> None:
        """Leave out a damaged chunk."""
        self._after_damage[block.rows[block.rows >= 0]] = True

    def of(self, block: Block, chunk: Chunk) -> StepRuns:
        scan, parts, table, rows = self._scan, self._reader.parts, block.table, block.rows
        flags = np.ascontiguousarray(table["flags"])
        steps, first_step = table["steps"].astype(np.int64), table["first_step"].astype(np.int64)
        has_initial = flags & wire.LEADS > 0
        observations = steps + has_initial
        step_begins, observation_begins = np.cumsum(steps) - steps, np.cumsum(observations) - observations
        sizes = int(steps.sum()), int(observations.sum())
        is_first = parts.first_of(rows) == block.begin + np.arange(len(rows))
        lost = is_first & ~has_initial
        if self._after_damage.any():
            heads = np.zeros(len(rows), np.bool_)
            heads[np.unique(rows, return_index=True)[1]] = True
            lost |= heads & self._after_damage[rows] & ~has_initial
            self._after_damage[rows[rows >= 0]] = False
        # Without the observation before it a step is of no use: the observation after it leads.
        steps -= lost
        step_begins += lost
        first_step += lost
        has_initial = has_initial | lost
        opens = is_first | lost
        unknown = (flags & wire.PLACEHOLDER > 0) & (observations > 0)
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
        is_next = mine[1:] != mine[:-1]
        if (mine[1:] < mine[:-1]).any() and len(np.unique(mine)) <= np.count_nonzero(is_next):
            # Fragments of an episode lie apart.
            order = np.argsort(mine, kind="stable")
            wanted, mine = wanted[order], mine[order]
            is_next = mine[1:] != mine[:-1]
        begins = np.append(0, np.flatnonzero(is_next) + 1)[: len(mine)]
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
        )
        if STARTS in chunk:
            begun = rows[table["flags"] & wire.STARTS > 0].tolist()
            runs.starts = {row: entry for row, entry in zip(begun, chunk.packed(STARTS)) if row >= 0}
        in_steps = _Taken(step_begins[wanted], steps[wanted], sizes[0])
        in_observations = _Taken(observation_begins[wanted], observations[wanted], sizes[1])
        for path in chunk.columns:
            if path != STARTS:
                rows_of = in_observations if path[0] == "observations" else in_steps
                if rows_of.count:
                    runs.columns[path] = rows_of.of(chunk.array(path))
        for path in scan._flags if runs.size else ():
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
        lasts = {row: self._last_rows.pop(row, {}) for row in runs.row.tolist()}
        continuing = np.flatnonzero(~runs.closes)
        paths = [*runs.columns, *(path for row in runs.row[missing].tolist() for path in lasts[row])]
        for path in dict.fromkeys(path for path in paths if path[0] == "observations"):
            column = runs.columns.get(path)
            if len(missing):
                initial = [lasts[row].get(path) for row in runs.row[missing].tolist()]
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


class _Taken:
    """Rows of a chunk that are in runs."""

    def __init__(self, begins: Array, counts: Array, size: int):
        """begins, counts: of each fragment. size: number of rows in the chunk."""
        ends = np.cumsum(counts)
        self.count = int(ends[-1]) if len(ends) else 0
        self._rows: Array | None = None  # None: all, as they are
        if self.count != size or not np.array_equal(begins, ends - counts):
            self._rows = np.repeat(begins - ends + counts, counts) + np.arange(self.count)

    def of(self, column: Array) -> Array:
        return column if self._rows is None else column.take(self._rows, axis=0)


def _inserted(rows: Array | None, at: Array, inserted: list[Array | None]) -> Array:
    """Return rows with others inserted before these positions; objects where their types differ. None: ABSENT."""
    known = [row for row in inserted if row is not None]
    first = known[0] if rows is None else rows
    count = 0 if rows is None else len(rows)
    is_new = np.zeros(count + len(at), np.bool_)
    is_new[at + np.arange(len(at))] = True
    is_same = all(row.dtype == first.dtype and row.shape[1:] == first.shape[1:] for row in known)
    if len(known) == len(inserted) and is_same and first.dtype != object:
        out = np.empty((len(is_new), *first.shape[1:]), first.dtype)
        out[is_new] = np.concatenate(known)
    else:
        out = np.empty(len(is_new), object)
        out[is_new] = objects([ABSENT if row is None else row[0] for row in inserted])
        rows = None if rows is None else objects(list(rows))
    if rows is not None:
        out[~is_new] = rows
    return out
