"""Encodes blocks of rows to segments of fragments and columns."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from gym_trace.format import wire
from gym_trace.format.wire import ENDS, LEADS, STARTS, STOPS
from gym_trace.model.deltas import DeltaRows, Nonconforming, word_of
from gym_trace.model.layout import Leaf, Path, integers_fit
from gym_trace.model.packing import pack, unpack
from gym_trace.model.values import ABSENT, Array, Misfit, Packed, unstored
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.reset_record import NOBODY, Start
from gym_trace.recording.segment import AnyRows, Rows, Segment, size_of
from gym_trace.recording.single.block import BEGIN, END, FLAG, FLOATS, LEAD, Joined, RowBlock, RowFormat, complete_marks

_PLAIN_NUMBERS = {bool, int, float, np.float64}
_EXACT_INTEGERS = 2.0**53


class RowProgress(NamedTuple):
    """How far rows are encoded."""

    block: RowBlock
    rows: int = 0  # of the block
    marks: int = 0
    notes: int = 0
    start: Start = NOBODY  # of the episode of the next row
    running: bool = False  # whether a run of steps is open
    next_step: int = 0
    last_values: Mapping[Path, Array] = {}  # of each column of deltas


class _DeltaBases(NamedTuple):
    """Of each column of deltas, the value before some rows, and the value after them where it is known."""

    before: Mapping[Path, Array]
    after: dict[Path, Array]


class RowEncoder:
    """Turns the rows of blocks into fragment tables and columns."""

    def __init__(self, row_format: RowFormat):
        self._format = row_format
        self.complaints: dict[str, str] = {}  # by column, a warning about values that do not conform

    def begun(self, block: RowBlock) -> RowProgress:
        """The progress at the start of the first block."""
        return RowProgress(block)

    def encoded(self, progress: RowProgress, blocks: list[RowBlock], partly: bool) -> tuple[RowProgress, list[Segment]]:
        """What was added to blocks since progress, one segment for each block, and the progress after it."""
        segments = []
        for block, following in zip(blocks, [*blocks[1:], None]):
            if block is not progress.block:
                progress = progress._replace(block=block, rows=0, marks=0, notes=0)
            if partly or following is not None:
                progress, segment = self._encoded(progress, following)
                segments += segment
        return progress, segments

    def _encoded(self, progress: RowProgress, following: RowBlock | None) -> tuple[RowProgress, list[Segment]]:
        block, begin = progress.block, progress.rows
        rows = block.rows  # read first: emptied as soon as .joined is set
        joined = block.joined  # read once: the block may become full meanwhile
        end = len(rows) // self._format.width if joined is None else joined.rows
        marks = block.marks[progress.marks :]
        marks = marks[: complete_marks(marks, end)]
        if not marks and (begin == end or not progress.running):
            return progress, []  # a row that came while another thread ended the run is left out
        fragments, starts, leads, next_step, running = self._fragments(progress, marks, end)
        columns: dict[Path, AnyRows] = {}
        if starts:
            columns["starts",] = [start.kept for start in starts]
        bases = _DeltaBases(progress.last_values, {} if following is None else self._last_values(following))
        if begin < end:
            if joined is None:
                added = self._format.joined(rows, block.reward_kinds, begin, end)
            else:
                added = joined.since(begin)
            self._add_columns(columns, added, leads, bases)
        notes = [note for note in block.notes[progress.notes :] if note[0] < end]
        self._add_annotations(columns, notes, begin, end, leads)
        after = progress._replace(
            rows=end,
            marks=progress.marks + len(marks),
            notes=progress.notes + len(notes),
            start=starts[-1] if starts else progress.start,
            running=running,
            next_step=next_step,
            last_values={**bases.before, **bases.after},
        )
        return after, [Segment(fragments, columns, fragments.nbytes + sum(map(size_of, columns.values())))]

    def _fragments(
        self, progress: RowProgress, marks: list[tuple[int, int, Any]], end: int
    ) -> tuple[Array, list[Start], list[int], int, bool]:
        """The fragments, their starts, the rows of leading observations, the next step, and whether a run is open."""
        begin, start, running = progress.rows, progress.start, progress.running
        table: list[bytes] = []
        starts: list[Start] = []
        leads: list[int] = []
        cursor, flags, first_step = begin, 0, progress.next_step
        following = [position for position, _, _ in marks[1:]]
        for i, ((position, kind, data), next_position) in enumerate(zip(marks, [*following, end + 1])):
            # After a Ctrl-C between a mark and its row, the next mark is for the same row.
            has_row = next_position > position
            if cursor < position and (
                kind == BEGIN or (kind == LEAD and has_row)
            ):  # Ctrl-C came before the run was stopped
                steps = position - cursor - (flags & LEADS != 0)
                table.append(_packed_fragment(start, first_step, steps, flags | STOPS, 0, 0, 0))
            stop, outcome, utc, monotonic = position, 0, 0, 0
            running = (kind in (BEGIN, LEAD) and has_row) or (running and not has_row)
            if kind == FLAG and has_row:
                said, outcome, utc, monotonic = data
                stop, flags = position + 1, flags | said | STOPS | ENDS
            elif kind == BEGIN:
                start, has_lead = data
                starts.append(start)
                cursor, flags, first_step = position, STARTS, 0
                if has_lead and has_row:
                    flags |= LEADS
                    leads.append(position - begin)
                    continue
            elif kind == LEAD:
                if has_row:
                    cursor, flags, first_step = position, LEADS, data
                    leads.append(position - begin)
                continue
            elif kind == FLAG:
                flags |= STOPS
                if marks[i + 1][1] == BEGIN:
                    flags |= ENDS
                    outcome, (utc, monotonic) = Outcome.CUT, data[2:]
            else:
                stop = min(next_position, end)  # another thread may have appended a row while the run was ended
                flags |= STOPS
                if kind == END:
                    flags |= ENDS
                    outcome, utc, monotonic = data
            steps = stop - cursor - (flags & LEADS != 0)
            table.append(_packed_fragment(start, first_step, steps, flags, outcome, utc, monotonic))
            cursor, flags, first_step = stop, 0, first_step + steps
        if cursor < end:
            steps = end - cursor - (flags & LEADS != 0)
            table.append(_packed_fragment(start, first_step, steps, flags, 0, 0, 0))
            first_step += steps
        return np.frombuffer(b"".join(table), wire.FRAGMENT).copy(), starts, leads, first_step, running

    def _add_columns(self, columns: dict[Path, AnyRows], rows: Joined, leads: list[int], bases: _DeltaBases) -> None:
        form, slots = self._format, iter(rows.columns)
        for leaf, slot in zip(form.observation_leaves, slots):
            columns[leaf.path] = self._column(leaf, slot, rows.rows, [], bases)
        if len(leads) < rows.rows:
            for leaf, slot in zip(form.action_leaves, slots):
                columns[leaf.path] = self._column(leaf, slot, rows.rows, leads, bases)
            columns["rewards",] = self._rewards(next(slots), leads)
            for infos in slots:
                columns["infos",] = _without(infos, leads)

    def _column(
        self, leaf: Leaf, slots: bytes | list[Any], count: int, leads: list[int], bases: _DeltaBases
    ) -> AnyRows:
        """The rows of one leaf: of the dtype of the space, or of the values. leads: the rows to leave out."""
        dtype, shape = leaf.dtype, leaf.shape
        if isinstance(slots, bytes):
            return _without_rows(np.frombuffer(slots, dtype).reshape(count, *shape), leads)
        slots = _without(slots, leads)
        if dtype is None:
            return slots
        if leaf in self._format.delta_leaves:
            return self._deltas(leaf, slots, bases)
        if shape == ():
            integers = _typed_integers(slots, dtype)
            return self._mixed(leaf, slots) if integers is None else integers
        return self._mixed(leaf, [np.frombuffer(s, dtype).reshape(shape) if type(s) is bytes else s for s in slots])

    def _last_values(self, following: RowBlock) -> dict[Path, Array]:
        """Of each column of deltas the last value before a block, if the block has it."""
        known = zip(self._format.observation_leaves, following.last_row) if self._format.delta_leaves else ()
        return {
            leaf.path: np.frombuffer(slot, word_of(leaf.row_size))
            for leaf, slot in known
            if leaf in self._format.delta_leaves and type(slot) is bytes
        }

    def _deltas(self, leaf: Leaf, slots: list[Any], bases: _DeltaBases) -> AnyRows:
        dtype = leaf.dtype
        assert dtype is not None
        fitting = [slot for slot in slots if type(slot) is not Nonconforming]
        rows = DeltaRows(dtype, leaf.shape, fitting, bases.before.get(leaf.path))
        if leaf.path not in bases.after and (after := rows.after()) is not None:
            bases.after[leaf.path] = after
        if len(fitting) == len(slots):
            return rows
        arrays = (array.view(dtype).reshape(leaf.shape) for array in rows.arrays(1))
        return self._mixed(leaf, [slot if type(slot) is Nonconforming else next(arrays) for slot in slots])

    def _mixed(self, leaf: Leaf, slots: list[Any]) -> Rows:
        """Rows of which some may not conform to the space: typed if all have one dtype and shape."""
        dtype = leaf.dtype
        assert dtype is not None
        values = [slot.value if type(slot) is Nonconforming else slot for slot in slots]
        fits = [type(v) is int and integers_fit(dtype, v, v) for v in values]  # plain integers of the space's dtype
        is_odd = [type(slot) is Nonconforming or (type(slot) is int and not fit) for slot, fit in zip(slots, fits)]
        if any(is_odd):
            kind = _kind_of(values[is_odd.index(True)])
            complaint = f"got {kind} where the space says {dtype} of shape {leaf.shape}; recorded exactly as it is"
            self.complaints.setdefault(leaf.column, complaint)
        if leaf.shape == ():
            values = [dtype.type(v) if fit else v for v, fit in zip(values, fits)]
        return self._typed_or_values(leaf.path, values)

    def _rewards(self, rewards: bytes | list[Any], leads: list[int]) -> Rows:
        if isinstance(rewards, bytes):
            return _without_rows(np.frombuffer(rewards), leads)
        kinds = set(map(type, rewards))
        if kinds <= _PLAIN_NUMBERS:
            try:
                array = np.array(rewards, np.float64)
            except OverflowError:
                return [pack(reward) for reward in _without(rewards, leads)]
            array = _without_rows(array, leads)
            if kinds <= FLOATS:
                return array
            with np.errstate(invalid="ignore"):  # of signalling NaN
                if not (np.abs(array) > _EXACT_INTEGERS).any():
                    return array
        return self._typed_or_values(
            ("rewards",),
            [reward.value if type(reward) is Nonconforming else reward for reward in _without(rewards, leads)],
        )

    def _add_annotations(
        self,
        columns: dict[Path, AnyRows],
        notes: list[tuple[int, dict[str, Any]]],
        begin: int,
        end: int,
        leads: list[int],
    ) -> None:
        for name in dict.fromkeys(name for _, values in notes for name in values):
            rows: list[Any] = [ABSENT] * (end - begin)
            for position, values in notes:
                if name in values:
                    rows[position - begin] = values[name]
            kept = _without(rows, leads)
            if kept:
                columns["annotations", name] = self._typed_or_values(("annotations", name), kept)

    def _typed_or_values(self, path: Path, values: list[Any]) -> Rows:
        """A typed array where all values have one NumPy dtype and shape, otherwise one MessagePack value a row."""
        kinds = set(map(type, values))
        if len(kinds) == 1:
            kind = kinds.pop()
            if kind is np.ndarray or issubclass(kind, np.generic):
                dtype, shape = values[0].dtype, values[0].shape
                plain = dtype.kind in "biufc" and dtype.str[0] in "<|"
                if plain and all(value.dtype == dtype and value.shape == shape for value in values):
                    return np.array(values, dtype)
            elif kind is float:
                return np.array(values, np.float64)
        return [value if type(value) is Packed else self._packed(path, value) for value in values]

    def _packed(self, path: Path, value: Any) -> bytes:
        packed = pack(value)
        if len(packed) + wire.LENGTH.itemsize <= wire.MAX_VALUES:
            return packed
        complaint = f"a value of {len(packed)} bytes is too large to be stored among others; its repr is kept"
        self.complaints["/".join(map(str, path))] = complaint  # whatever else there was to say
        return pack(unstored(value))


def _packed_fragment(
    start: Start, first_step: int, steps: int, flags: int, outcome: int, utc: int, monotonic: int
) -> bytes:
    """A row of the fragment table. utc, monotonic: of the end of the episode, if the flags say that it ends."""
    episode, lane, seed, _, start_utc, start_monotonic = start
    offset = start_utc - start_monotonic
    duration = drift = 0
    if flags & ENDS:
        duration = monotonic - start_monotonic
        drift = utc - monotonic - offset
    if not flags & STARTS:
        seed = start_utc = offset = 0
    return wire.pack_fragment(
        episode, first_step, steps, lane, flags, outcome, 0.0, seed, start_utc, offset, duration, drift
    )


def _typed_integers(slots: list[Any], dtype: np.dtype[Any]) -> Array | None:
    """NumPy scalars of an integer dtype, and ints that fit it, as an array; None if there are other values."""
    if dtype.kind not in "iu" or not set(map(type, slots)) <= {int, dtype.type}:
        return None
    try:
        wide = np.array(slots, np.uint64 if dtype == np.uint64 else np.int64)
    except OverflowError:
        return None
    if wide.dtype == dtype:
        return wide
    return wide.astype(dtype) if integers_fit(dtype, int(wide.min()), int(wide.max())) else None


def _without_rows(array: Array, leads: list[int]) -> Array:
    """The rows of an array without those at leads."""
    if not leads:
        return array
    kept = np.ones(len(array), np.bool_)
    kept[leads] = False
    return array[kept]


def _without(slots: list[Any], leads: list[int]) -> list[Any]:
    """Slots without those at leads."""
    if not leads:
        return slots
    kept = bytearray(b"\1") * len(slots)
    for position in leads:
        kept[position] = 0
    return list(compress(slots, kept))


def _kind_of(value: Any) -> str:
    if type(value) is Packed:
        value = unpack(value)
    if isinstance(value, Misfit):
        value = value.value
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"
