"""Decode the rows of many episodes, one after the other: all of a trace, or parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.model.layout import Path
from gym_trace.model.schema import Layouts
from gym_trace.model.values import ABSENT, Array
from gym_trace.reading.assembly import as_rewards
from gym_trace.reading.content import Recorded
from gym_trace.reading.episode_columns import repeated_steps
from gym_trace.reading.episode_scan import OnDamage, without_damage
from gym_trace.reading.episode_table import Parts, step_offsets
from gym_trace.reading.forms import Form, forms_of
from gym_trace.reading.writer_reader import WriterReader

Room = Callable[[Path, int, Form | None], Array]  # makes an array for N rows of a column
_FLAGS = {("terminations",): wire.TERMINATED, ("truncations",): wire.TRUNCATED}
_FEW = 8  # mean rows per run below which rows are copied one by one
_VALUE_BYTES = 64  # estimate for a value of any kind


class Pieces(NamedTuple):
    """Runs of steps of some episodes, whose indices ascend; integer arrays with one element per run.

    episode: its place. offset: its first step. lengths: number of steps. low, high: the range of them to sample from,
    counted from the offset; windows also cover the others.
    """

    episode: Array
    offset: Array
    lengths: Array
    low: Array
    high: Array


class Rows(NamedTuple):
    """Decoded rows of n pieces of episodes. The parts of an episode around damage count as episodes.

    Attributes:
        columns: by path, the rows of all pieces, with one observation more for each. Values of any kind are objects,
            missing ones None.
        layouts: of observations and actions.
        episode: (n,) index in the trace. whole: (n,) steps of the episode. begin: (n,) its first step; not 0 after
            damage.
        offset: (n,) first step that is here, counted from begin. lengths: (n,) number of steps that are here.
        steps, seen: (n,) the rows of that first step, and of the observation before it.
        own: (n, 2) the range of these steps to sample from; others belong to a neighbour or repeat another episode.
        repeated: (n,) steps at the beginning of the episode that repeat another one.
        known: (n,) bool, False if the last observation is unknown, and the one before is repeated. None: all are known.
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


class Plan:
    """Positions of the rows of a trace in its chunks, to decode any part of it, reading each chunk once.

    Attributes:
        directory: of the trace. readers: of its writers.
        forms: form of each wanted column; None: values of any kind.
        table: the episodes, or their parts around damage, without a last step that led to an unknown observation and
            did not terminate the episode. place: index of each in the trace. begin: its first step there.
        first: (episodes + 1,) int64, where the steps of each episode begin among all.
        repeated: (episodes,) how many steps at its begin repeat the episode that it branches from.
        step_bytes: approximate size of a decoded step.
    """

    def __init__(
        self, trace: Recorded, roots: frozenset[str], on_damage: OnDamage | None = None, to_the_end: bool = False
    ):
        """on_damage: called with damage, which is searched for in all chunks, and skipped. None: raises CorruptTrace.
        to_the_end: include all steps that led to an unknown observation.

        Raises TraceError if the writers have different spaces.
        """
        self.layouts = trace.writer_agreed_on("observation_space").layouts
        trace.writer_agreed_on("action_space")
        self.directory, self.readers = trace.directory, trace.readers
        for damage in (damage for reader in self.readers for damage in reader.damage):
            if on_damage is None:
                raise damage.error()
            on_damage(damage)
        skip = on_damage is not None
        forms = forms_of(trace, skip)
        self.forms = {path: form for path, form in forms.items() if roots & {path[0], ".".join(map(str, path))}}
        noted = {f"annotations.{path[1]}" for path in forms if path[0] == "annotations"}
        if missing := {root for root in roots if root.startswith("annotations.")} - noted:
            raise InvalidOption(f"columns: unknown columns {sorted(missing)}; annotations are {sorted(noted)}")
        self.forms |= {path: Form(np.dtype(np.bool_), ()) for path in _FLAGS if path[0] in roots}
        table, rows = trace.episodes.view(np.ndarray), trace.rows
        self.table, self.place, parts = table, np.arange(len(table)), [reader.parts for reader in self.readers]
        if on_damage is not None:
            read = frozenset(str(path[0]) for path in self.forms)
            self.table, self.place, rows, parts = _left(self.readers, read, table, rows, on_damage)
        self.begin = self.table["first_step"] - table["first_step"][self.place]
        self._all_known, shorter = True, np.zeros(len(self.table), np.bool_)
        if not self.table["has_final_observation"].all():
            if not to_the_end:
                shorter = _without_end(self.readers, parts, self.table, rows)
                self.table = self.table.copy()
                self.table["steps"][shorter] -= 1
                self.table["has_final_observation"][shorter] = True
            self._all_known = bool(self.table["has_final_observation"].all())
        self.first = np.append(0, np.cumsum(self.table["steps"], dtype=np.int64))
        self.repeated = repeated_steps(self.table, self.readers)
        self.step_bytes = sum(_VALUE_BYTES if form is None else form.row_size for form in self.forms.values())
        self._stored = self.table["writer"].astype(np.int64) * (rows.max(initial=0) + 1) + rows
        self._writers = []
        for number, reader in enumerate(self.readers):
            places = np.flatnonzero(self.table["writer"] == number)
            while len(places):  # an episode that a view has several times is stored once for each
                _, firsts = np.unique(rows[places], return_index=True)
                mine = places[np.sort(firsts)]
                cut = rows[mine[shorter[mine]]]
                self._writers.append(_Writer(reader, parts[number], rows[mine], mine, self.first, cut))
                places = np.setdiff1d(places, mine)

    @property
    def total(self) -> int:
        """Number of steps."""
        return int(self.first[-1])

    @property
    def size(self) -> int:
        """Approximate bytes of all decoded steps."""
        return self.total * self.step_bytes

    def distinct(self) -> tuple[Array, Array]:
        """Return places in order that have each episode of a view once; and for each episode the index of its place."""
        _, firsts, again = np.unique(self._stored, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return firsts[order], rank[again]

    def episodes(self, places: Array | None = None) -> Pieces:
        """All steps of these episodes, whose places ascend. None: of all."""
        places = np.arange(len(self.first) - 1) if places is None else places
        lengths = self.first[places + 1] - self.first[places]
        none = np.zeros_like(places)
        return Pieces(places, none, lengths, none, lengths)

    def blocks(self, steps: int, back: int, ahead: int, most: int | None = None) -> Iterator[Pieces]:
        """Yield all steps in blocks of at most `steps` steps that are stored together: whole chunks. A larger chunk is
        cut into parts of at most `most` steps (None: steps). back and ahead add neighbouring steps of the episodes."""
        for writer in self._writers:
            for place, low, high in writer.blocks(steps, steps if most is None else most):
                lengths = self.first[place + 1] - self.first[place]
                offset = np.maximum(low - back, 0)
                yield Pieces(place, offset, np.minimum(high + ahead, lengths) - offset, low - offset, high - offset)

    def decode(self, pieces: Sequence[Pieces], room: Room) -> Rows:
        """The rows of pieces. room: called once for each column. Raises CorruptTrace."""
        episode, offset, lengths, low, high = (np.concatenate(column) for column in zip(*pieces))
        steps = np.cumsum(lengths) - lengths
        seen = steps + np.arange(len(lengths))
        total = int(lengths.sum())
        columns = {
            path: room(path, total + len(lengths) * (path[0] == "observations"), form)
            for path, form in self.forms.items()
        }
        done = 0
        for some in pieces:
            mine = slice(done, done + len(some.episode))
            done = mine.stop
            for writer in self._writers if len(some.episode) else ():
                writer.fill(columns, some, steps[mine], seen[mine])
        rewards = columns.get(("rewards",))
        if rewards is not None and rewards.dtype == object:
            columns["rewards",] = as_rewards(rewards)
        found = self.rows(columns, Pieces(episode, offset, lengths, low, high), steps, seen)
        if found.known is not None:
            last = (seen + lengths)[~found.known & (lengths > 0)]
            for path, rows in columns.items():
                if path[0] == "observations":
                    rows[last] = rows[last - 1]
        return found

    def rows(self, columns: dict[Path, Array], pieces: Pieces, steps: Array, seen: Array) -> Rows:
        """Columns with the rows of these pieces. steps, seen: where those of each begin."""
        episode, repeated = pieces.episode, self.repeated[pieces.episode]
        low = np.minimum(np.maximum(pieces.low, repeated - pieces.offset), pieces.high)
        own = np.stack([low, pieces.high], axis=1)
        whole, begin = np.diff(self.first)[episode], self.begin[episode]
        reach = pieces.offset + pieces.lengths
        known = None if self._all_known else self.table["has_final_observation"][episode] | (reach < whole)
        place, offset = self.place[episode], pieces.offset
        lengths = pieces.lengths
        return Rows(columns, self.layouts, place, whole, offset, lengths, steps, seen, own, begin, repeated, known)


def _left(
    readers: list[WriterReader], roots: frozenset[str], table: Array, rows: Array, on_damage: OnDamage
) -> tuple[Array, Array, Array, list[Parts]]:
    """Return the table without damage; for each row its place in the table with damage, and its row in the parts of its
    writer; and these parts."""
    everything, tables, places, found = [], [table[:0]], [np.arange(0)], [np.arange(0)]
    for number, reader in enumerate(readers):
        mine = np.flatnonzero(table["writer"] == number)
        wanted = np.zeros(len(reader.parts), np.bool_)
        wanted[rows[mine]] = True
        parts = without_damage(reader, roots, wanted, on_damage)
        owner = reader.parts.of_fragment[parts.first_of(slice(None))]
        order = np.argsort(owner, kind="stable")
        low, high = (np.searchsorted(owner[order], rows[mine], side=side) for side in ("left", "right"))
        counts = high - low
        chosen = order[np.arange(counts.sum()) + np.repeat(low - np.cumsum(counts) + counts, counts)]
        part = parts.table(chosen)
        part["writer"] = number
        everything.append(parts)
        tables.append(part)
        places.append(np.repeat(mine, counts))
        found.append(chosen)
    left, place = np.concatenate(tables), np.concatenate(places)
    order = np.lexsort((left["first_step"], place))
    return left[order], place[order], np.concatenate(found)[order], everything


def _without_end(readers: list[WriterReader], parts: list[Parts], table: Array, rows: Array) -> Array:
    """Return which episodes lose their last step: it led to an unknown observation and did not terminate them."""
    shorter = ~table["has_final_observation"] & (table["steps"] > 0)
    for number, reader in enumerate(readers):
        mine = np.flatnonzero(shorter & (table["writer"] == number))
        flags = reader.fragments.flags[parts[number].last_of(rows[mine])]
        shorter[mine[flags & wire.TERMINATED > 0]] = False
    return shorter


def planned(trace: Recorded, roots: frozenset[str], on_damage: OnDamage | None) -> Plan:
    """Make a plan that searches for damage only if some is known. Raises CorruptTrace without on_damage."""
    try:
        return Plan(trace, roots)
    except CorruptTrace:
        if on_damage is None:
            raise
        return Plan(trace, roots, on_damage)


class _Writer:
    """Positions of the rows of one writer, by fragment."""

    def __init__(self, reader: WriterReader, parts: Parts, rows: Array, places: Array, first: Array, cut: Array):
        """cut: the rows of episodes that do without their last step."""
        self._reader = reader
        place_of = np.full(len(parts) + 1, -1)
        place_of[rows] = places
        owner = np.repeat(np.arange(len(parts)), np.diff(parts.first))
        own = parts.fragments
        steps, leads = reader.fragments.steps.astype(np.int64), reader.fragments.flags & wire.LEADS > 0
        opens = np.zeros(len(own), np.bool_)
        opens[parts.first[:-1]] = True
        trimmed = parts.trimmed[owner] if len(own) else opens
        place = place_of[owner]
        count = len(steps)
        self._place = np.full(count, -1)
        self._place[own] = place
        self._skipped = np.zeros(count, np.int64)  # steps at its begin that are left out
        self._skipped[own[opens & trimmed]] = 1
        before = np.cumsum(steps[own]) - steps[own]
        before -= np.repeat(before[parts.first[:-1]], np.diff(parts.first)) if len(own) else 0
        self._at = np.zeros(count, np.int64)  # its first step among all
        self._at[own] = first[place] + before - (trimmed & ~opens)
        self._count = steps - self._skipped
        self._count[parts.last_of(cut)] -= 1
        self._row_before = leads | (self._skipped > 0)  # whether its first row is the observation before its steps
        self._first = first
        chunks = np.repeat(np.arange(reader.chunk_count), np.diff(reader.chunk_bounds))
        taken = self._place >= 0
        self._low = np.full(reader.chunk_count, np.iinfo(np.int64).max)  # of each chunk, the places of its episodes
        self._high = np.full(reader.chunk_count, -1)
        np.minimum.at(self._low, chunks[taken], self._place[taken])
        np.maximum.at(self._high, chunks[taken], self._place[taken])

    def blocks(self, steps: int, most: int) -> Iterator[tuple[Array, Array, Array]]:
        """Return the ascending episodes of each block, with begin and end of their steps."""
        fragments = np.flatnonzero((self._place >= 0) & (self._count > 0))
        place, count = self._place[fragments], self._count[fragments]
        low = self._at[fragments] - self._first[place]
        ends = np.append(0, np.cumsum(count))
        cuts = _cuts(np.unique(ends[np.searchsorted(fragments, self._reader.chunk_bounds)]).tolist(), steps, most)
        for begin, end in pairwise(cuts):
            here = slice(int(ends.searchsorted(begin, side="right")) - 1, int(ends.searchsorted(end)))
            from_ = low[here] + np.maximum(begin - ends[here], 0)
            until = low[here] + np.minimum(end - ends[here], count[here])
            order = np.argsort(place[here], kind="stable")
            places, heads = np.unique(place[here][order], return_index=True)
            yield places, np.minimum.reduceat(from_[order], heads), np.maximum.reduceat(until[order], heads)

    def fill(self, columns: dict[Path, Array], pieces: Pieces, steps: Array, seen: Array) -> None:
        """Copy its rows of these pieces. steps, seen: their first rows. Raises CorruptTrace."""
        episode, offset, lengths = pieces[:3]
        head, last = int(episode[0]), int(episode[-1])
        roots = frozenset(str(path[0]) for path in columns)
        numbers: Iterator[int] = iter(np.flatnonzero((self._low <= last) & (self._high >= head)).tolist())
        for number in self._reader.ahead(numbers, roots, int):
            begin, end = self._reader.chunk_bounds[number : number + 2].tolist()
            place = self._place[begin:end]
            found = np.minimum(np.searchsorted(episode, place), len(episode) - 1)
            which = np.flatnonzero(episode[found] == place)
            piece = found[which]
            at, count = self._at[begin:end][which], self._count[begin:end][which]
            from_ = self._first[place[which]] + offset[piece]  # among all steps, where the piece begins
            low, high = np.maximum(at, from_), np.minimum(at + count, from_ + lengths[piece])
            lead = self._row_before[begin:end][which]
            # Observations lie behind the step that led to them: of steps low to high those from low + 1 to high.
            low_seen = np.where(lead & (at >= from_), at, np.maximum(at, from_ - 1) + 1)
            high_seen = np.minimum(at + count, from_ + lengths[piece]) + 1
            if not ((high > low) | (high_seen > low_seen)).any():
                continue
            o, s = step_offsets(self._reader.fragments[begin:end])
            in_steps = s[:-1][which] + self._skipped[begin:end][which]
            of_steps = _runs(in_steps + low - at, in_steps + high - at, steps[piece] + low - from_)
            in_seen = o[:-1][which] - ~lead
            of_seen = _runs(in_seen + low_seen - at, in_seen + high_seen - at, seen[piece] + low_seen - from_)
            ends = (high == at + count) & (high > low)  # the last step of the fragment is there
            flags = self._reader.fragments.flags[begin + which]
            for flag, bit in _FLAGS.items():
                if flag in columns:
                    columns[flag][(steps[piece] + high - from_ - 1)[ends & (flags & bit > 0)]] = True
            chunk = self._reader.chunk(number, roots)
            for path, out in columns.items():
                if path not in _FLAGS:
                    _put(chunk, path, of_seen if path[0] == "observations" else of_steps, out)


def _cuts(chunks: list[int], steps: int, most: int) -> list[int]:
    """Return where to cut: parts of several chunks have at most `steps` steps, parts of one chunk at most `most`."""
    cuts = chunks[:1]
    for begin, end in pairwise(chunks):
        if end - cuts[-1] > steps:
            parts = -(-(end - begin) // most)
            cuts += [begin + (end - begin) * part // parts for part in range(begin == cuts[-1], parts)]
    return cuts + chunks[-1:] * (chunks[-1] > cuts[-1])


class _Run(NamedTuple):
    """Consecutive rows of a chunk, and what to add to get their decoded rows."""

    begin: int
    end: int
    shift: int


def _runs(begins: Array, ends: Array, targets: Array) -> list[_Run]:
    """Join rows that stay together. targets: where the row of each begin goes."""
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
        return  # a chunk may have no annotations and infos
    column = chunk.columns[path]
    if chunk.is_walked(path) and out.dtype.str == column.dtype and len(runs) == 1:
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


def in_memory(path: Path, rows: int, form: Form | None) -> Array:
    """Room for a column in ordinary memory."""
    if form is None:
        return np.full(rows, None, object)
    if path in _FLAGS:
        return np.zeros(rows, np.bool_)
    return np.empty((rows, *form.shape), form.dtype)
