"""Rows as the wrappers append them, and how the encoder thread turns them into fragments and columns.

A block is filled by one thread and read by another without a lock: the filling thread only ever appends, a mark is
appended before the row that it belongs to, and the reading thread looks at the number of rows first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.layout import Layout, Leaf, Path, taken_apart
from gym_trace.values import ABSENT, Array, copied, pack, pack_lenient, packer, to_extension

FRAME_BYTES = 4096  # values at least this large are copied into a reused buffer, smaller ones become bytes objects
SMALL_CHUNK, FRAME_CHUNK = 1 << 20, 16 << 20  # raw bytes a chunk, without and with frames
MAX_ROWS = 32_768
VALUES_BYTES = 8 << 20  # MessagePack values that a block takes before it counts as full

_NUMPY_SCALARS = {np.dtype(code).type for code in "?bhilqBHILQefdgFD"}
ATOMS = frozenset({bool, int, float, *_NUMPY_SCALARS})  # immutable: they can be kept as they are
_PLAIN_NUMBERS = {bool, int, float, np.float64}
_EXACT_INTEGERS = 2.0**53

BEGIN, LEAD, FLAG, STOP, END = range(5)  # kinds of marks
TERMINATED, TRUNCATED, CUT, CLOSED = range(1, 5)  # outcomes, as stored


class Odd(NamedTuple):
    """A value that does not have the dtype and shape that its space says."""

    value: Any


class Start(NamedTuple):
    """What is known of an episode when it starts."""

    episode: int
    lane: int
    seed: Any
    options: Any
    rng_state: Any
    reset_info: bytes | None
    utc: int
    monotonic: int


class Block:
    """A run of rows: a flat list with as many slots a row as there are leaves, plus marks, notes and frames."""

    __slots__ = ("frames", "full", "marks", "notes", "rows", "taken", "taken_marks", "taken_notes")

    def __init__(self, frames: list[Array]):
        self.rows: list[Any] = []
        self.marks: list[tuple[int, int, Any]] = []  # row position, kind, data
        self.notes: list[tuple[int, dict[str, Any]]] = []  # row position, annotations
        self.frames = frames  # one buffer for each leaf of large values, a place for each row
        self.taken = self.taken_marks = self.taken_notes = 0  # rows, marks and notes that were encoded already
        self.full = False


class RowFormat:
    """The slots of a row: the leaves of the observation, those of the action, the reward, and the info if recorded."""

    def __init__(self, observation: Layout, action: Layout, infos: bool, use_frames: bool = True):
        self.observation, self.action, self.infos = observation, action, infos
        self.observation_leaves = list(observation.leaves())
        self.action_leaves = list(action.leaves())
        leaves = self.observation_leaves + self.action_leaves
        self.width = len(leaves) + 1 + infos
        large = [leaf for leaf in leaves if leaf.row_size >= FRAME_BYTES]
        self.frame_leaves = large if use_frames else []
        row_size = 8 + sum(leaf.row_size for leaf in leaves)
        chunk = FRAME_CHUNK if large else SMALL_CHUNK
        self.capacity = max(4, min(MAX_ROWS, chunk // row_size))
        # What follows the observation in the row of a leading observation; no step, so never looked at.
        self.filler = (None,) * (self.width - len(self.observation_leaves))
        if max((leaf.row_size for leaf in leaves), default=0) > wire.MAX_COLUMN // 4:
            raise UnstorableValue(f"one observation or action takes more than {wire.MAX_COLUMN // 4} bytes")

    def new_frames(self) -> list[Array]:
        return [np.empty((self.capacity, *leaf.shape), leaf.dtype) for leaf in self.frame_leaves]

    def packer(self, leaf: Leaf, room: Any) -> Callable[[Any], Any]:
        """A function that takes the value of a leaf to what a row keeps of it, copied. room: the recorder."""
        dtype, shape, ndarray = leaf.dtype, leaf.shape, np.ndarray
        if dtype is None:

            def pack_value(value: Any) -> bytes:
                packed = pack(value)
                room.count_values(len(packed))
                return packed

            return pack_value

        if leaf in self.frame_leaves:
            number, width = self.frame_leaves.index(leaf), self.width

            def pack_frame(value: Any) -> Any:
                if type(value) is ndarray and value.dtype == dtype and value.shape == shape:
                    block = room.block
                    block.frames[number][len(block.rows) // width] = value
                    return None
                return Odd(copied(value))

            return pack_frame

        def pack_odd(value: Any) -> Any:
            if type(value) is ndarray and value.dtype == dtype and value.shape == shape:
                return value[()] if shape == () else value.tobytes()
            return Odd(copied(value))

        if shape == ():
            return lambda value: value if type(value) in ATOMS else pack_odd(value)

        def pack_array(value: Any) -> Any:
            if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
                return value.tobytes()
            return pack_odd(value)

        return pack_array

    def tree_packer(self, layout: Layout, room: Any) -> Callable[[Any], tuple[Any, ...]]:
        """A function that takes a whole observation or action to the slots of its leaves."""
        packers = [self.packer(leaf, room) for leaf in layout.leaves()]
        if len(packers) == 1 and isinstance(layout, Leaf):
            (only,) = packers
            return lambda value: (only(value),)
        return lambda value: tuple([p(v) for p, v in zip(packers, taken_apart(layout, value))])


class Encoder:
    """Turns the rows of blocks into fragment tables and columns. Remembers the run that is open from call to call."""

    def __init__(self, row_format: RowFormat):
        self._format = row_format
        self._lane = 0
        self._episode = 0
        self._next_step = 0
        self._start: Start | None = None
        self._pack_state = packer(to_extension).pack  # generator states are plain but for large integers
        self.complaints: dict[str, str] = {}  # by column, what did not fit

    def take(self, block: Block) -> tuple[Array, dict[Path, Array | list[bytes]]] | None:
        """What was added to block since the last call, as a chunk; None if nothing was."""
        width = self._format.width
        begin, end = block.taken, len(block.rows) // width
        marks = self._marks(block, end)
        if begin == end and not marks:
            return None
        fragments, starts, leads = self._fragments(marks, begin, end)
        columns: dict[Path, Array | list[bytes]] = {}
        if starts:
            columns["starts",] = [self._packed_start(start) for start in starts]
        self._add_columns(columns, block, begin, end, leads)
        rewards = columns.get(("rewards",))
        if isinstance(rewards, np.ndarray) and rewards.ndim == 1 and rewards.dtype.kind in "biuf":
            _add_reward_sums(fragments, rewards)
        else:
            fragments["reward_sum"][fragments["steps"] > 0] = np.nan
        block.taken = end
        return fragments, columns

    def _marks(self, block: Block, end: int) -> list[tuple[int, int, Any]]:
        """The marks that can be dealt with when end rows are there."""
        marks = block.marks[block.taken_marks :]
        for i, (position, kind, _) in enumerate(marks):
            if position > end or (position == end and kind in (BEGIN, LEAD, FLAG)):
                marks = marks[:i]
                break
        block.taken_marks += len(marks)
        return marks

    def _fragments(
        self, marks: list[tuple[int, int, Any]], begin: int, end: int
    ) -> tuple[Array, list[Start], list[int]]:
        table: list[tuple[Any, ...]] = []
        starts: list[Start] = []
        leads: list[int] = []
        cursor, flags, first_step = begin, 0, self._next_step

        def close(position: int, added: int, outcome: int = 0, utc: int = 0, monotonic: int = 0) -> None:
            nonlocal cursor, flags, first_step
            flags |= added
            steps = position - cursor - bool(flags & wire.LEADS)
            start = self._start
            begun = (0, 0, 0)
            if flags & wire.STARTS and start is not None:
                begun = (_stored_seed(start.seed), start.utc, start.utc - start.monotonic)
            duration = drift = 0
            if flags & wire.ENDS and start is not None:
                duration = monotonic - start.monotonic
                drift = utc - start.utc - duration
            table.append((self._episode, first_step, steps, self._lane, flags, outcome, 0.0, *begun, duration, drift))
            cursor, flags, first_step = position, 0, first_step + steps

        for position, kind, data in marks:
            if kind == FLAG:
                said, outcome, utc, monotonic = data
                close(position + 1, said | wire.STOPS | wire.ENDS, outcome, utc, monotonic)
            elif kind == BEGIN:
                self._start, has_lead = data
                self._episode, self._lane = self._start.episode, self._start.lane
                starts.append(self._start)
                cursor, flags, first_step = position, wire.STARTS, 0
                if has_lead:
                    flags |= wire.LEADS
                    leads.append(position - begin)
                else:
                    close(position, 0)
            elif kind == LEAD:
                cursor, flags, first_step = position, wire.LEADS, data
                leads.append(position - begin)
            elif kind == STOP:
                close(position, wire.STOPS)
            else:
                close(position, wire.STOPS | wire.ENDS, *data)
        if cursor < end:
            close(end, 0)
        self._next_step = first_step
        return np.array(table, wire.FRAGMENT), starts, leads

    def _packed_start(self, start: Start) -> bytes:
        entry: dict[str, Any] = {}
        if start.options is None and start.reset_info is None and _stored_seed(start.seed) != wire.SEED_ELSEWHERE:
            return self._pack_state({} if start.rng_state is None else {"rng_state": start.rng_state})
        if _stored_seed(start.seed) == wire.SEED_ELSEWHERE:
            entry["seed"] = start.seed
        if start.options is not None:
            entry["options"] = start.options
        if start.rng_state is not None:
            entry["rng_state"] = start.rng_state
        if start.reset_info is not None:
            entry["reset_info"] = start.reset_info
        packed, replaced = pack_lenient(entry)
        if replaced:
            self.complaints["reset"] = f"a value of type {replaced[0]} given to reset cannot be stored"
        return packed

    def _add_columns(
        self, columns: dict[Path, Array | list[bytes]], block: Block, begin: int, end: int, leads: list[int]
    ) -> None:
        width, form = self._format.width, self._format
        rows = block.rows[begin * width : end * width]
        step_rows = bytearray(b"\1") * (end - begin)
        for position in leads:
            step_rows[position] = 0
        if rows:
            for slot, leaf in enumerate(form.observation_leaves):
                columns[leaf.path] = self._column(leaf, rows[slot::width], self._frame_rows(block, leaf, begin, end))
        if len(leads) < end - begin:
            after = len(form.observation_leaves)
            for slot, leaf in enumerate(form.action_leaves, after):
                frames = self._frame_rows(block, leaf, begin, end)
                if frames is not None and leads:
                    frames = frames[np.frombuffer(step_rows, np.bool_)]
                columns[leaf.path] = self._column(leaf, _kept(rows[slot::width], step_rows, leads), frames)
            slot = after + len(form.action_leaves)
            columns["rewards",] = self._rewards(_kept(rows[slot::width], step_rows, leads))
            if form.infos:
                columns["infos",] = _kept(rows[slot + 1 :: width], step_rows, leads)
        self._add_annotations(columns, block, begin, end, step_rows, leads)

    def _frame_rows(self, block: Block, leaf: Leaf, begin: int, end: int) -> Array | None:
        if leaf not in self._format.frame_leaves:
            return None
        return block.frames[self._format.frame_leaves.index(leaf)][begin:end]

    def _column(self, leaf: Leaf, slots: list[Any], frames: Array | None) -> Array | list[bytes]:
        """The rows of one leaf: typed as the space says, or as the values are."""
        dtype, shape = leaf.dtype, leaf.shape
        if dtype is None:
            return slots
        if frames is not None:
            if slots.count(None) == len(slots):
                return frames
            return self._misfits(leaf, [frames[i] if slot is None else slot for i, slot in enumerate(slots)])
        if shape == ():
            kinds = set(map(type, slots))
            if kinds == {dtype.type}:
                return np.array(slots, dtype)
            if kinds <= {int, dtype.type} and dtype.kind in "iu":
                wide = np.array(slots, object)
                if wide.min() >= np.iinfo(dtype).min and wide.max() <= np.iinfo(dtype).max:
                    return wide.astype(dtype)
            return self._misfits(leaf, slots)
        try:
            return np.frombuffer(b"".join(slots), dtype).reshape(len(slots), *shape)
        except TypeError:  # an Odd among the bytes
            arrays = [np.frombuffer(s, dtype).reshape(shape) if type(s) is bytes else s for s in slots]
            return self._misfits(leaf, arrays)

    def _misfits(self, leaf: Leaf, slots: list[Any]) -> Array | list[bytes]:
        values = [slot.value if type(slot) is Odd else slot for slot in slots]
        odd = next(value for value, slot in zip(values, slots) if type(slot) is not np.ndarray or value is not slot)
        self.complaints.setdefault(
            "/".join(map(str, leaf.path)),
            f"got {_kind_of(odd)} where the space says {leaf.dtype} of shape {leaf.shape}; recorded exactly as it is",
        )
        if leaf.shape == () and leaf.dtype is not None:  # plain integers among others: what fits the space has its type
            dtype = leaf.dtype
            values = [dtype.type(v) if type(v) is int and _fits(v, dtype) else v for v in values]
        return _typed_or_values(values)

    def _rewards(self, rewards: list[Any]) -> Array | list[bytes]:
        kinds = set(map(type, rewards))
        if kinds <= _PLAIN_NUMBERS:
            try:
                array = np.array(rewards, np.float64)
            except OverflowError:
                return [pack(reward) for reward in rewards]
            if kinds <= {float, np.float64} or not (np.abs(array) > _EXACT_INTEGERS).any():
                return array
        values = [reward.value if type(reward) is Odd else reward for reward in rewards]
        return _typed_or_values(values)

    def _add_annotations(
        self,
        columns: dict[Path, Array | list[bytes]],
        block: Block,
        begin: int,
        end: int,
        step_rows: bytearray,
        leads: list[int],
    ) -> None:
        notes = [note for note in block.notes[block.taken_notes :] if note[0] < end]
        block.taken_notes += len(notes)
        for name in dict.fromkeys(name for _, values in notes for name in values):
            rows: list[Any] = [ABSENT] * (end - begin)
            for position, values in notes:
                if name in values:
                    rows[position - begin] = values[name]
            kept = _kept(rows, step_rows, leads)
            if kept:
                columns["annotations", name] = _typed_or_values(kept)


def _kept(slots: list[Any], step_rows: bytearray, leads: list[int]) -> list[Any]:
    return list(compress(slots, step_rows)) if leads else slots


def _kind_of(value: Any) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iu" and bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)


def _stored_seed(seed: Any) -> int:
    if seed is None:
        return wire.NO_SEED
    if isinstance(seed, (int, np.integer)) and 0 <= seed < 1 << 63:
        return int(seed)
    return wire.SEED_ELSEWHERE


def _typed_or_values(values: list[Any]) -> Array | list[bytes]:
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
    return [pack(value) for value in values]


def _add_reward_sums(fragments: Array, rewards: Array) -> None:
    filled = np.flatnonzero(fragments["steps"])
    if filled.size:
        steps = fragments["steps"].astype(np.int64)
        begins = (np.cumsum(steps) - steps)[filled]
        fragments["reward_sum"][filled] = np.add.reduceat(rewards.astype(np.float64), begins)
