"""Write rows and log entries of a single environment to a slab as they happen."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np

from gym_trace.data.layout import Leaf, integer_bytes
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.format import wire
from gym_trace.format.ring.log import (
    ENTRY,
    FLAG,
    START,
    START_HAS_INITIAL,
    LogEntry,
    LogFull,
    clear,
    entries,
    in_use,
    put,
    size_of,
)
from gym_trace.format.ring.memory import SLAB_HEADER, begin
from gym_trace.format.ring.row_layout import RowLayout

RESERVE = 4 * ENTRY.size  # log bytes reserved per row for its flag
_NEVER = 1 << 62
EXACT_INTEGERS = 1 << 53  # float64 holds integers up to this exactly
_MARK = struct.Struct("<Q")


class RowSlab:
    """The slab that is being filled with rows.

    record_action(), record_result() and start() are the fast path: one fixed-size value each for observation and
    action. Other rows go through record_packed_action(), record_packed_result(), record_initial() and append().
    _core.RowSlab is the C twin; its fast path also takes dicts, tuples, texts, and large values, see follow().

    Args:
        fast_actions, fast_results: enable the fast path of record_action() and record_result().
        result_bytes: log bytes that record_action() reserves for the result.

    Attributes:
        ended: True if record_result() has flagged the last row as the end of its episode.
        logged: number of rows before the last log entry; -1: no entries.
        initial: row of the last initial observation, set by start() or the caller; negative: in an earlier slab.
        memory, sequence: memory and sequence number of the slab.
    """

    def __init__(self, layout: RowLayout, fast_actions: bool = True, fast_results: bool = True, result_bytes: int = 0):
        self._fast_actions, self._fast_results = fast_actions, fast_results
        self._reserve = RESERVE + result_bytes
        self._size = layout.size
        self._asked, self._reward, self._done = layout.asked, layout.reward, layout.done
        self._put_action = struct.Struct(f"<{layout.action_bytes}sQ").pack_into
        self._put_result = struct.Struct(f"<d{layout.observation_bytes}sQ").pack_into
        self._put_initial = struct.Struct(f"<{layout.action_bytes}sQd{layout.observation_bytes}sQ").pack_into
        action, observation = layout.fixed_leaf(layout.action), layout.fixed_leaf(layout.observation)
        self._action, self._observation = action, observation
        self._action_kind: Any = None  # the integer NumPy scalar of the action space
        if (
            action is not None
            and action.dtype is not None
            and action.shape == ()
            and action.dtype.kind in "iu"
            and action.dtype.isnative
        ):
            self._action_kind = action.dtype.type
            code = " bh i   q"[action.dtype.itemsize]
            code = code if action.dtype.kind == "i" else code.upper()
            pad = layout.action_bytes - action.dtype.itemsize
            self._put_integer = struct.Struct(f"<{code}{pad}xQ").pack_into
        is_vector = observation is not None and len(observation.shape) == 1
        self._dtype = observation.dtype if observation is not None and is_vector else None
        self._vector_bytes = 0 if observation is None else observation.row_size
        self._kind: Any = None  # type of the last accepted reward
        self._only_floats = True
        self.logged = -1
        self.ended, self.initial = False, 0
        self.memory, self.sequence = memoryview(bytearray()), 0
        self._at = -1  # offset of the next row
        self._position, self._count = SLAB_HEADER, 0  # offset of the next log entry, and number of entries
        self._mark = 1  # mark of the next row
        self._floor = self._least = _NEVER

    def follow(self, column: int, before: Array, ready: Array, most: int) -> None:
        """Record changes of a large leaf in the fast path, as deltas.DeltaPacker does. Only the C twin can; this does
        nothing.
        """

    def begin(self, memory: memoryview, sequence: int) -> None:
        """Continue in an empty slab; record_action() returns False until enable_fast_path()."""
        self._position, self._count = SLAB_HEADER, 0
        begin(memory, sequence)
        self.initial -= self.rows
        self.memory, self.sequence = memory, sequence
        self._mark, self.logged = sequence << 32 | 1, -1
        self.ended = False
        self._at = len(memory) - self._size
        self.only_floats(True)
        self.disable_fast_path()

    def move(self, memory: memoryview) -> None:
        """Continue in larger memory, to whose ends the log and the rows were copied; disables the fast path."""
        self._at += len(memory) - len(self.memory)
        self.memory = memory
        self.disable_fast_path()

    @property
    def rows(self) -> int:
        """Number of complete rows."""
        return (self._mark & 0xFFFFFFFF) - 1

    # -- the fast path, disabled and enabled -------------------------------------------------------------------------

    def disable_fast_path(self) -> None:
        """Make record_action() return False until enable_fast_path()."""
        self._least = self._floor = _NEVER

    def enable_fast_path(self, most_rows: int) -> None:
        """Let record_action() accept rows until the slab has most_rows or is full.

        At the end of an episode it pauses until start().
        """
        if self._fast_actions:
            self._least = max(0, len(self.memory) - most_rows * self._size)
            self._set_floor()

    def _set_floor(self) -> None:
        self._floor = _NEVER if self.ended else max(self._position + self._reserve, self._least)

    def is_between_episodes(self) -> bool:
        """Return True if the last row has ended its episode, nothing follows it, and the fast path is enabled."""
        return self.ended and self._least != _NEVER and self.logged < self.rows

    def has_room(self, log_bytes: int = 0) -> bool:
        """Return True if the slab has space for one more row and log_bytes of log."""
        return self._at >= self._position + RESERVE + log_bytes

    def only_floats(self, only: bool) -> None:
        """Set whether rewards are float64; otherwise record_result() returns False."""
        self._only_floats, self._kind = only, None

    # -- rows of one value each ---------------------------------------------------------------------------------------

    @in_use
    def record_action(self, action: Any) -> bool:
        """Record that a step begins; return False, without recording, if the slow path must do it."""
        at = self._at
        if at < self._floor:
            return False
        kind = type(action)
        if kind is self._action_kind or (kind is int and self._action_kind is not None):
            try:
                self._put_integer(self.memory, at, action, self._mark)
            except struct.error:  # an integer outside the dtype
                return False
            return True
        packed = _bytes_of(action, self._action)
        if packed is None:
            return False
        self._put_action(self.memory, at, packed, self._mark)
        return True

    @in_use
    def record_result(self, observation: Any, reward: Any, terminated: Any, truncated: Any) -> bool:
        """Record the result of the step; return False, without recording, if the slow path must do it."""
        if self._at < 0 or (type(reward) is not self._kind and not self._takes(reward)):
            return False  # also before begin()
        # Inlined from _bytes_of for vectors, without .shape: it builds a tuple at each access.
        if not (
            type(observation) is np.ndarray
            and observation.dtype is self._dtype
            and observation.ndim == 1
            and len(packed := observation.tobytes()) == self._vector_bytes
        ):
            other = _bytes_of(observation, self._observation)
            if other is None:
                return False
            packed = other
        if terminated or truncated:
            self.flag(terminated, truncated)
        at, mark = self._at, self._mark
        self._put_result(self.memory, at + self._reward, reward, packed, mark)
        self._at, self._mark = at - self._size, mark + 1
        return True

    def _takes(self, reward: Any) -> bool:
        """Return True if float64 holds the reward exactly."""
        if not self._only_floats or not self._fast_results:
            return False
        kind = type(reward)
        if kind is float or kind is np.float64:
            self._kind = kind
            return True
        return kind is int and -EXACT_INTEGERS <= reward <= EXACT_INTEGERS

    # -- the slow path: rows of any values ----------------------------------------------------------------------------

    def record_packed_action(self, action: bytes) -> None:
        """Record that a step begins. action: its fixed values, laid out as in a row."""
        self._put_action(self.memory, self._at, action, self._mark)

    def record_packed_result(self, observation: bytes, reward: float, terminated: Any, truncated: Any) -> None:
        """Record the result of a step. observation: its fixed values, laid out as in a row."""
        if terminated or truncated:
            self.flag(terminated, truncated)
        at, mark = self._at, self._mark
        self._put_result(self.memory, at + self._reward, reward, observation, mark)
        self._at, self._mark = at - self._size, mark + 1

    def record_initial(self, observation: bytes) -> None:
        """Record the observation before the first step of a run."""
        at, mark = self._at, self._mark
        self._put_initial(self.memory, at, b"", 0, 0.0, observation, mark)
        self._at, self._mark = at - self._size, mark + 1
        self.ended = False

    def start(self, start: tuple[int, int, int, bytes, int, int], observation: Any) -> bool:
        """Record the start of an episode and its first observation; return False if the slow path must do it.

        start: episode id, lane, seed, record of the reset, UTC and monotonic time.
        """
        episode, _, seed, reset_record, utc, monotonic = start
        is_enabled = self._fast_results and self._least != _NEVER
        packed = _bytes_of(observation, self._observation) if is_enabled else None
        if packed is None or not self.has_room(size_of(len(reset_record))):
            return False
        self.initial = self.rows
        self.append(START, reset_record, START_HAS_INITIAL, 0, episode, seed, utc, monotonic)
        self.record_initial(packed)
        self._set_floor()
        return True

    def flag(self, terminated: Any, truncated: Any) -> None:
        """Record that the episode ends with the next row."""
        flags = wire.TERMINATED * bool(terminated) | wire.TRUNCATED * bool(truncated)
        outcome = _TERMINATED if terminated else _TRUNCATED
        self.append(FLAG, b"", flags, 0, outcome, 0, time.time_ns(), time.monotonic_ns())
        self.ended = True
        self._set_floor()

    def append(
        self,
        kind: int,
        payload: bytes = b"",
        flags: int = 0,
        column: int = 0,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
    ) -> None:
        """Append an entry to the log. Raises LogFull if no space would remain for a row."""
        at, rows, count = self._position, self.rows, self._count + 1
        if at + size_of(len(payload)) + ENTRY.size > self._at:
            raise LogFull
        self.logged = rows  # before put(): Ctrl-C may come in between
        following = put(self.memory, at, self.sequence << 32 | count, rows, kind, payload, flags, column, a, b, c, d)
        self._position, self._count = following, count  # in one statement: an interrupt cannot separate them
        self._set_floor()

    # -- undo ---------------------------------------------------------------------------------------------------------

    def drop(self, count: int) -> None:
        """Keep the first `count` log entries; remove the others, and the incomplete row."""
        found = self.entries()
        at = found[count].at if count < len(found) else self._position
        clear(self.memory, at)
        self._position, self._count = at, count
        self.logged = found[count - 1].row if count else -1
        self._set_floor()
        if self._at >= at + ENTRY.size:
            for offset in (self._asked, self._done):
                _MARK.pack_into(self.memory, self._at + offset, 0)

    def pending_action(self) -> bytes | None:
        """Return the fixed values of the pending action, or None."""
        at = self._at
        if at < self._position + ENTRY.size:
            return None
        (mark,) = _MARK.unpack_from(self.memory, at + self._asked)
        return bytes(self.memory[at : at + self._asked]) if mark == self._mark else None

    def last_row(self) -> bytes:
        """Return the fixed values of the observation in the last row; b"" without rows."""
        at = self._at + self._size + self._reward + 8
        return bytes(self.memory[at : self._at + self._size + self._done]) if self.rows else b""

    def last_texts(self) -> dict[int, bytes]:
        """Return the texts of the last observation that the fast path logged, by column; only the C twin has any."""
        return {}

    def entries(self) -> list[LogEntry]:
        return list(entries(self.memory, SLAB_HEADER, self._position, self.sequence))


def _bytes_of(value: Any, leaf: Leaf | None) -> bytes | None:
    """Return the bytes of a value with the exact dtype and shape of its space; None for any other."""
    if leaf is None:
        return None
    kind = type(value)
    if kind is int:
        return integer_bytes(leaf.dtype, value) if leaf.shape == () and leaf.dtype is not None else None
    if kind is np.ndarray:
        fits = value.dtype == leaf.dtype and value.shape == leaf.shape
    else:
        fits = leaf.shape == () and leaf.dtype is not None and kind is leaf.dtype.type and leaf.dtype.isnative
    return value.tobytes() if fits else None


_TERMINATED, _TRUNCATED = int(Outcome.TERMINATED), int(Outcome.TRUNCATED)
