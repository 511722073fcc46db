"""Decode the rows of many episodes: all of a trace, or parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.schema import Layouts
from gym_trace.data.values import ABSENT, Array
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk, RowRanges
from gym_trace.format.kernels import ranges
from gym_trace.playback.assembly import as_rewards
from gym_trace.playback.episode_columns import repeated_steps
from gym_trace.playback.episode_index import RecordedEpisodes, index_of, writer_agreed_on
from gym_trace.playback.episode_scan import readable_parts
from gym_trace.playback.episode_table import Columns
from gym_trace.playback.row_types import RowType, row_types
from gym_trace.playback.scan import OnDamage
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Span

Allocate = Callable[[Path, int, RowType | None], Array]  # returns an array for N rows of a column
_FLAGS = {("terminations",): wire.TERMINATED, ("truncations",): wire.TRUNCATED}
_FEW = 8  # mean rows per run below which rows are copied one by one
_VALUE_BYTES = 64  # estimate for a value of any type
_PIECE_BYTES = 192  # estimate for a run of steps in DecodedRows and Items, without its rows


class EpisodeSlices(NamedTuple):
    """Runs of steps of some episodes, in ascending order of episodes; integer arrays with one element per run.

    episode: index of the episode. offset: first step. lengths: number of steps. low, high: the range of steps to sample
    from, counted from the offset; windows may also cover the other steps.
    """

    episode: Array
    offset: Array
    lengths: Array
    low: Array
    high: Array


class DecodedRows(NamedTuple):
    """Decoded rows of n slices of episodes. The parts of an episode around damage count as episodes.

    Attributes:
        columns: by path, the rows of all slices, with one observation more for each. Values of any type are objects,
            missing ones None.
        layouts: layouts of observations and actions.
        episode: (n,) index in the trace. whole: (n,) steps of the episode. begin: (n,) its first step; not 0 after
            damage.
        offset: (n,) first decoded step, counted from begin. lengths: (n,) number of decoded steps.
        steps, seen: (n,) row of the first decoded step, and of the observation before it.
        own: (n, 2) range of steps to sample from; the others belong to a neighbour or repeat another episode.
        repeated: (n,) steps at the beginning of the episode that repeat another one.
        known: (n,) bool, False if the last observation is unknown: the one before is repeated. None: all are known.
    """

    columns: dict[Path, Array]
    layouts: Layouts
    episode: Array
    whole: Array
    offset: Array
    lengths: Array
    steps: Array
    seen: Array
    own: Array
    begin: Array
    repeated: Array
    known: Array | None


class DecodePlan:
    """Positions of the rows of a trace in its chunks. Decodes any part of it, reading each chunk once.

    Attributes:
        directory: directory of the trace. readers: readers of its writers.
        row_types: type of the rows of each wanted column; None: values of any type.
        table: columns of the episodes, or of their parts around damage.
        first: (episodes + 1,) int64, offset of the steps of each episode in all steps. A last step is skipped if it led
            to an unknown observation and did not terminate the episode.
        repeated: (episodes,) number of steps at the start of each that repeat the episode it branched from.
        step_bytes: approximate size of a decoded step.
        held: bytes of the plan itself.
    """

    def __init__(self, trace: RecordedEpisodes, roots: frozenset[str], on_damage: OnDamage | None = None):
        """on_damage: called with all damage, which is skipped; reads all chunks. None: raises CorruptTrace.

        Raises TraceError if the writers have different spaces.
        """
        self.layouts = agreed_layouts(trace)
        self.directory = trace.directory
        for damage in (damage for reader in index_of(trace).readers for damage in reader.damage):
            if on_damage is None:
                raise damage.error()
            on_damage(damage)
        skip = on_damage is not None
        self.row_types = chosen_row_types(row_types(trace, skip), roots)
        content = index_of(trace)
        # Episode index and first step of each part around damage; None without damage.
        self._parts: tuple[Array, Array] | None = None
        if on_damage is not None:
            first_steps = content["first_step"]
            content, owner = readable_parts(content, frozenset(str(path[0]) for path in self.row_types), on_damage)
            self._parts = owner, content["first_step"] - first_steps[owner]
        self.table: Columns = content
        self.readers, rows = content.readers, content.rows
        writer, steps = self.table["writer"], self.table["steps"].astype(np.int64)
        known, shorter = self.table["has_final_observation"], np.zeros(0, np.int64)
        if not known.all():
            shorter = _without_end(self.readers, writer, steps, known, rows)
            steps[shorter] -= 1
            known = known.copy()  # the table belongs to the user
            known[shorter] = True
        self._known = None if known.all() else known
        self.first = np.append(0, np.cumsum(steps))
        self.repeated = np.minimum(repeated_steps(self.table, self.readers), steps)
        self.step_bytes = sum(_VALUE_BYTES if it is None else it.row_size for it in self.row_types.values())
        is_whole = content.chosen is None
        self._stored = None if is_whole else writer.astype(np.int64) * (rows.max(initial=0) + 1) + rows
        self._writers = []
        for number, reader in enumerate(self.readers):
            indices = np.flatnonzero(writer == number)
            while len(indices):  # one _Writer per repetition: a view may have an episode several times
                mine = indices
                if not is_whole:
                    _, firsts = np.unique(rows[indices], return_index=True)
                    mine = indices[np.sort(firsts)]
                cut = rows[mine[np.isin(mine, shorter)]]
                self._writers.append(_Writer(reader, rows[mine], mine, self.first, cut))
                indices = indices[:0] if is_whole else np.setdiff1d(indices, mine)

    @property
    def total(self) -> int:
        """Number of steps."""
        return int(self.first[-1])

    @property
    def size(self) -> int:
        """Approximate bytes of all episodes, decoded."""
        return self.size_of(self.total, len(self.first) - 1)

    def size_of(self, steps: int, pieces: int) -> int:
        """Return the approximate bytes of this number of decoded steps, in this number of slices."""
        seen = sum(it.row_size for path, it in self.row_types.items() if it is not None and path[0] == "observations")
        return steps * self.step_bytes + pieces * (seen + _PIECE_BYTES)

    @property
    def held(self) -> int:
        arrays = [self.first, self.repeated, self._stored, self._known, *(self._parts or ())]
        own: int = sum(array.nbytes for array in arrays if array is not None)
        return own + sum(writer.held for writer in self._writers)

    def trace_indices(self, episodes: Array) -> Array:
        """Return the indices in the trace of these episodes, or of the episodes that they are parts of."""
        return episodes if self._parts is None else self._parts[0][episodes]

    def distinct(self) -> tuple[Array, Array]:
        """Return the distinct episodes of a view, in order; and for each episode its position in them."""
        if self._stored is None:
            return (everything := np.arange(len(self.first) - 1)), everything
        _, firsts, again = np.unique(self._stored, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return firsts[order], rank[again]

    def episodes(self, indices: Array | range | None = None) -> EpisodeSlices:
        """Return all steps of these episodes, whose indices ascend. None: all episodes."""
        indices = range(len(self.first) - 1) if indices is None else indices
        indices = np.arange(indices.start, indices.stop) if isinstance(indices, range) else indices
        lengths = self.first[indices + 1] - self.first[indices]
        none = np.zeros_like(indices)
        return EpisodeSlices(indices, none, lengths, none, lengths)

    def blocks(
        self, steps: int, back: int, ahead: int, most: int | None = None
    ) -> Iterator[Callable[[], EpisodeSlices]]:
        """Yield all steps in blocks of at most `steps` steps in whole chunks. A larger chunk is cut into parts of at
        most `most` steps (None: steps). back and ahead add neighbouring steps of the episodes.

        A block is a function that returns its slices, because all slices together take more memory than the plan.
        """
        for writer in self._writers:
            for span in writer.spans(steps, steps if most is None else most):
                yield partial(self._block, writer, span, back, ahead)

    def _block(self, writer: _Writer, span: _Span, back: int, ahead: int) -> EpisodeSlices:
        index, low, high = writer.steps_of(span)
        lengths = self.first[index + 1] - self.first[index]
        offset = np.maximum(low - back, 0)
        return EpisodeSlices(index, offset, np.minimum(high + ahead, lengths) - offset, low - offset, high - offset)

    def decode(self, pieces: Sequence[EpisodeSlices], allocate: Allocate) -> DecodedRows:
        """Return the rows of these slices. allocate: called once for each column. Raises CorruptTrace."""
        joined = EpisodeSlices(*(np.concatenate(column) for column in zip(*pieces)))
        columns, steps, seen = self._allocated(joined, allocate)
        done = 0
        for some in pieces:
            mine = slice(done, done + len(some.episode))
            done = mine.stop
            for writer in self._writers if len(some.episode) else ():
                writer.fill(columns, some, steps[mine], seen[mine])
        return self._filled(columns, joined, steps, seen)

    def decode_few(self, pieces: EpisodeSlices, most: int) -> tuple[DecodedRows | None, int]:
        """Return the rows of a few slices, and the bytes that are read for them; no rows if these are more than `most`.

        Only the blocks with these rows are read. The same episode may be in several slices, next to each other.
        Raises CorruptTrace.
        """
        columns, steps, seen = self._allocated(pieces, in_memory)
        found = [writer.few(columns, pieces, steps, seen) for writer in self._writers]
        spans = [span for some, _ in found for span in some]
        size = sum(span.length for span in spans)
        if size > most:
            return None, size
        if self._writers:
            self.readers[0].files.storage.expect(spans, gaps=False)
        for _, read in found:
            read()
        return self._filled(columns, pieces, steps, seen), size

    def _allocated(self, pieces: EpisodeSlices, allocate: Allocate) -> tuple[dict[Path, Array], Array, Array]:
        """Return columns for the rows of slices, and the first rows of steps and of observations of each."""
        steps = np.cumsum(pieces.lengths) - pieces.lengths
        total, count = int(pieces.lengths.sum()), len(steps)
        columns = {
            path: allocate(path, total + count * (path[0] == "observations"), row_type)
            for path, row_type in self.row_types.items()
        }
        return columns, steps, steps + np.arange(count)

    def _filled(self, columns: dict[Path, Array], pieces: EpisodeSlices, steps: Array, seen: Array) -> DecodedRows:
        rewards = columns.get(("rewards",))
        if rewards is not None and rewards.dtype == object:
            columns["rewards",] = as_rewards(rewards)
        found = self.rows(columns, pieces, steps, seen)
        if found.known is not None:
            last = (seen + pieces.lengths)[~found.known & (pieces.lengths > 0)]
            for path, rows in columns.items():
                if path[0] == "observations":
                    rows[last] = rows[last - 1]
        return found

    def rows(self, columns: dict[Path, Array], pieces: EpisodeSlices, steps: Array, seen: Array) -> DecodedRows:
        """Return columns as the rows of these slices. steps, seen: first row of steps and of observations of each."""
        episode, repeated = pieces.episode, self.repeated[pieces.episode]
        low = np.minimum(np.maximum(pieces.low, repeated - pieces.offset), pieces.high)
        own = np.stack([low, pieces.high], axis=1)
        whole = self.first[episode + 1] - self.first[episode]
        begin = np.zeros_like(episode) if self._parts is None else self._parts[1][episode]
        known = None if self._known is None else self._known[episode] | (pieces.offset + pieces.lengths < whole)
        index, offset, lengths = self.trace_indices(episode), pieces.offset, pieces.lengths
        return DecodedRows(
            columns, self.layouts, index, whole, offset, lengths, steps, seen, own, begin, repeated, known
        )


def agreed_layouts(trace: RecordedEpisodes) -> Layouts:
    """Return the layouts of observations and actions. Raises TraceError if the writers have different spaces."""
    layouts = writer_agreed_on(trace, "observation_space").layouts
    writer_agreed_on(trace, "action_space")
    return layouts


def chosen_row_types(found: dict[Path, RowType | None], roots: frozenset[str]) -> dict[Path, RowType | None]:
    """Return the types of the columns of these names ("annotations.value" is one annotation), and of flags.

    Raises InvalidOption for annotations that the trace does not have.
    """
    known = {f"annotations.{path[1]}" for path in found if path[0] == "annotations"}
    if missing := {root for root in roots if root.startswith("annotations.")} - known:
        raise InvalidOption(f"columns: unknown columns {sorted(missing)}; annotations are {sorted(known)}")
    chosen = {path: row_type for path, row_type in found.items() if roots & {path[0], ".".join(map(str, path))}}
    return chosen | {path: RowType(np.dtype(np.bool_), ()) for path in _FLAGS if path[0] in roots}


def without_columns(plan: DecodePlan, pieces: EpisodeSlices) -> DecodedRows:
    """Return rows without columns: enough to count items, and to find their steps."""
    none = np.zeros_like(pieces.episode)
    return plan.rows({}, pieces, none, none)


def _without_end(readers: list[WriterReader], writer: Array, steps: Array, known: Array, rows: Array) -> Array:
    """Return the indices of the episodes without their last step: it led to an unknown observation and did not
    terminate them."""
    shorter = np.flatnonzero(~known & (steps > 0))
    terminated = np.zeros(len(shorter), np.bool_)
    for number, reader in enumerate(readers):
        mine = writer[shorter] == number
        flags = reader.fragments.flags[reader.parts.last_of(rows[shorter[mine]])]
        terminated[mine] = flags & wire.TERMINATED > 0
    return shorter[~terminated]


def planned(trace: RecordedEpisodes, roots: frozenset[str], on_damage: OnDamage | None) -> DecodePlan:
    """Make a plan; look for damage in all chunks only if some is known. Raises CorruptTrace without on_damage."""
    try:
        return DecodePlan(trace, roots)
    except CorruptTrace:
        if on_damage is None:
            raise
        return DecodePlan(trace, roots, on_damage)


class _Span(NamedTuple):
    """Consecutive steps of a writer in file order: low to high of the steps of fragments begin to end."""

    begin: int
    end: int
    low: int
    high: int


class _Writer:
    """Positions of the rows of one writer, by fragment."""

    def __init__(self, reader: WriterReader, rows: Array, indices: Array, first: Array, cut: Array):
        """cut: the rows of episodes without their last step."""
        self._reader, parts = reader, reader.parts
        index_type = np.dtype(np.int32 if len(first) <= np.iinfo(np.int32).max else np.int64)
        index_of_row = np.full(len(parts) + 1, -1, index_type)
        index_of_row[rows] = indices
        sizes = np.diff(parts.first)
        own, heads = parts.fragments, parts.first[:-1]
        opens = np.zeros(len(own), np.bool_)
        opens[heads] = True
        first_step_lost = np.repeat(parts.first_step_lost, sizes)
        index = np.repeat(index_of_row[:-1], sizes)
        count = len(reader.fragments)
        self._episode_index = np.full(count, -1, index_type)
        self._episode_index[own] = index
        self._skipped = np.zeros(count, np.bool_)  # True: the first step of the fragment is skipped
        self._skipped[own[opens & first_step_lost]] = True
        self._cut = np.zeros(count, np.bool_)  # True: its last step is skipped
        self._cut[parts.last_of(cut)] = True
        steps = reader.fragments.steps[own]
        before = np.cumsum(steps, dtype=np.int64)
        before -= steps
        before -= np.repeat(before[heads], sizes)
        before -= first_step_lost & ~opens
        before += first[index]
        self._at = np.zeros(count, np.int64)  # offset of its first step in all steps
        self._at[own] = before
        self._first = first
        present = np.flatnonzero(self._episode_index >= 0)
        chunks = np.searchsorted(reader.chunk_bounds, present, side="right") - 1
        self._low = np.full(reader.chunk_count, np.iinfo(np.int64).max)  # lowest and highest episode of each chunk
        self._high = np.full(reader.chunk_count, -1)
        np.minimum.at(self._low, chunks, self._episode_index[present])
        np.maximum.at(self._high, chunks, self._episode_index[present])

    @property
    def held(self) -> int:
        """Bytes of its arrays, and of the columns of fragments that the reader cached to make them."""
        arrays = self._episode_index, self._skipped, self._cut, self._at, self._low, self._high
        own: int = sum(array.nbytes for array in arrays)
        return own + 8 * len(self._episode_index)

    def _count(self, begin: int, end: int) -> Array:
        """Return the numbers of steps of consecutive fragments."""
        steps = self._reader.fragments.steps[begin:end].astype(np.int64)
        steps -= self._skipped[begin:end]
        steps -= self._cut[begin:end]
        return steps

    def spans(self, steps: int, most: int) -> Iterator[_Span]:
        """Yield all steps in spans of at most `steps` steps of whole chunks, or `most` of one."""
        ends = self._count(0, len(self._episode_index))
        ends[self._episode_index < 0] = 0
        ends = np.append(0, np.cumsum(ends))
        for begin, end in pairwise(_cuts(np.unique(ends[self._reader.chunk_bounds]).tolist(), steps, most)):
            head = int(ends.searchsorted(begin, side="right")) - 1
            yield _Span(head, int(ends.searchsorted(end)), begin - int(ends[head]), end - int(ends[head]))

    def steps_of(self, span: _Span) -> tuple[Array, Array, Array]:
        """Return the episodes of a span, ascending, and begin and end of their steps."""
        count = self._count(span.begin, span.end)
        mine = np.flatnonzero((self._episode_index[span.begin : span.end] >= 0) & (count > 0))
        fragments, count = span.begin + mine, count[mine]
        index = self._episode_index[fragments].astype(np.int64)
        low = self._at[fragments] - self._first[index]
        at = np.cumsum(count) - count
        from_, until = low + np.maximum(span.low - at, 0), low + np.minimum(span.high - at, count)
        order = np.argsort(index, kind="stable")
        indices, heads = np.unique(index[order], return_index=True)
        return indices, np.minimum.reduceat(from_[order], heads), np.maximum.reduceat(until[order], heads)

    def fill(self, columns: dict[Path, Array], pieces: EpisodeSlices, steps: Array, seen: Array) -> None:
        """Copy the rows of this writer into columns. steps, seen: first rows of each slice. Raises CorruptTrace."""
        roots = frozenset(str(path[0]) for path in columns)
        numbers: Iterator[int] = iter(self._chunks_with(pieces))
        for number in self._reader.ahead(numbers, roots, lambda number: {number: None}):
            found = self._found(number, columns, pieces, steps, seen)
            if found is not None:
                _put_all(self._reader.chunk(number, roots), found, columns)

    def few(
        self, columns: dict[Path, Array], pieces: EpisodeSlices, steps: Array, seen: Array
    ) -> tuple[list[Span], Callable[[], None]]:
        """Return the spans of files with the rows of these slices, and a function that reads only these for fill().

        The same episode may be in several slices. Raises CorruptTrace, as does the function.
        """
        roots = frozenset(str(path[0]) for path in columns)
        numbers = self._chunks_with(pieces)
        chunks = {number: self._found(number, columns, pieces, steps, seen) for number in numbers}
        found = {number: runs for number, runs in chunks.items() if runs is not None}
        needed = {number: _ranges_of(runs) for number, runs in found.items()}

        def read() -> None:
            for number, runs in found.items():
                _put_all(self._reader.chunk(number, roots, needed[number]), runs, columns)

        return self._reader.spans(needed, roots), read

    def _chunks_with(self, pieces: EpisodeSlices) -> list[int]:
        """Return the numbers of the chunks that may have steps of these slices."""
        episode = pieces.episode
        mine: list[int] = np.flatnonzero(
            episode.searchsorted(self._low) < episode.searchsorted(self._high, side="right")
        ).tolist()
        return mine

    def _found(
        self, number: int, columns: dict[Path, Array], pieces: EpisodeSlices, steps: Array, seen: Array
    ) -> _Runs | None:
        """Return where the rows of slices are in a chunk, and fill in their flags; None without such rows."""
        episode, offset, lengths = pieces[:3]
        begin, end = self._reader.chunk_bounds[number : number + 2].tolist()
        index = self._episode_index[begin:end]
        piece = episode.searchsorted(index)  # the first slice of the episode of each fragment; then, all of them
        counts = episode.searchsorted(index, side="right") - piece
        which = np.repeat(np.arange(end - begin), counts)
        piece = ranges(piece, counts)
        del counts
        at, count = self._at[begin:end][which], self._count(begin, end)[which]
        from_ = self._first[index[which]] + offset[piece]  # offset of the slice in all steps
        low, high = np.maximum(at, from_), np.minimum(at + count, from_ + lengths[piece])
        flags = self._reader.fragments.flags[begin + which]
        # True: the first row of a fragment is the observation before its first step.
        has_initial = (flags & wire.HAS_INITIAL > 0) | self._skipped[begin:end][which]
        # An observation follows the step that led to it: steps low to high have observations low + 1 to high.
        low_seen = np.where(has_initial & (at >= from_), at, np.maximum(at, from_ - 1) + 1)
        high_seen = np.minimum(at + count, from_ + lengths[piece]) + 1
        if not ((high > low) | (high_seen > low_seen)).any():
            return None
        o, s = self._reader.offsets(number)
        in_steps = s[:-1][which] + self._skipped[begin:end][which]
        of_steps = _runs(in_steps + low - at, in_steps + high - at, steps[piece] + low - from_)
        in_seen = o[:-1][which] - ~has_initial
        of_seen = _runs(in_seen + low_seen - at, in_seen + high_seen - at, seen[piece] + low_seen - from_)
        # True: the last step of the fragment, which has its flags, is in the slice.
        ends = (high == at + count) & (high > low) & ~self._cut[begin:end][which]
        for flag, bit in _FLAGS.items():
            if flag in columns:
                columns[flag][(steps[piece] + high - from_ - 1)[ends & (flags & bit > 0)]] = True
        return of_seen, of_steps


def _put_all(chunk: Chunk, runs: _Runs, columns: dict[Path, Array]) -> None:
    for path, out in columns.items():
        if path not in _FLAGS:
            _put(chunk, path, runs[path[0] != "observations"], out)


def _ranges_of(runs: _Runs) -> RowRanges:
    observations, steps = ([(run.begin, run.end) for run in some] for some in runs)
    return RowRanges(observations, steps)


def _cuts(chunks: list[int], steps: int, most: int) -> list[int]:
    """Return where to cut: parts of several chunks have at most `steps` steps, parts of one chunk at most `most`."""
    cuts = chunks[:1]
    for begin, end in pairwise(chunks):
        if end - cuts[-1] > steps:
            parts = -(-(end - begin) // most)
            cuts += [begin + (end - begin) * part // parts for part in range(begin == cuts[-1], parts)]
    return cuts + chunks[-1:] * (chunks[-1] > cuts[-1])


class _Run(NamedTuple):
    """Consecutive rows of a chunk. shift: what to add to get their decoded rows."""

    begin: int
    end: int
    shift: int


_Runs = tuple[list[_Run], list[_Run]]  # runs of observations, and runs of steps


def _runs(begins: Array, ends: Array, targets: Array) -> list[_Run]:
    """Join ranges that are contiguous in the chunk and in the result. targets: decoded row of each begin."""
    some = ends > begins
    begins, ends = begins[some], ends[some]
    shifts = targets[some] - begins
    if not len(begins):
        return []
    cut = np.flatnonzero((shifts[1:] != shifts[:-1]) | (begins[1:] != ends[:-1])) + 1
    heads, tails = np.append(0, cut), np.append(cut - 1, len(begins) - 1)
    return [_Run(*run) for run in zip(begins[heads].tolist(), ends[tails].tolist(), shifts[heads].tolist())]


def _put(chunk: Chunk, path: Path, runs: list[_Run], out: Array) -> None:
    if not runs or path not in chunk:
        return  # some chunks have no annotations or infos
    column = chunk.columns[path]
    if chunk.is_delta_encoded(path) and out.dtype.str == column.dtype and len(runs) == 1:
        [run] = runs
        chunk.decode_rows(path, run.begin, out[run.begin + run.shift : run.end + run.shift])
        return
    array = chunk.array(path)
    if out.dtype == object:
        for run in runs:
            for row in range(run.begin, run.end):
                value = array[row]
                out[row + run.shift] = None if value is ABSENT else value
    elif len(runs) * _FEW > sum(run.end - run.begin for run in runs):
        sources = np.concatenate([np.arange(run.begin, run.end) for run in runs])
        shifts = np.repeat([run.shift for run in runs], [run.end - run.begin for run in runs])
        out[sources + shifts] = array[sources]
    else:
        for run in runs:
            out[run.begin + run.shift : run.end + run.shift] = array[run.begin : run.end]


def in_memory(path: Path, rows: int, row_type: RowType | None) -> Array:
    """Allocate a column in ordinary memory."""
    if row_type is None:
        return np.full(rows, None, object)
    if path in _FLAGS:
        return np.zeros(rows, np.bool_)
    return np.empty((rows, *row_type.shape), row_type.dtype)
