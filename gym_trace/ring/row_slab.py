"""Rows and log of a single environment, put into a slab as they happen."""

from __future__ import annotations

import struct
import time
from typing import Any

import numpy as np

from gym_trace.format import wire
from gym_trace.model.layout import Layout, Leaf, integer_bytes
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import Outcome
from gym_trace.ring.log import ENTRY, FLAG, HAS_LEAD, START, Entry, Log, LogFull, entries, size_of
from gym_trace.ring.memory import SLAB_HEADER, begin
from gym_trace.ring.row_layout import RowLayout

_RESERVE = 4 * ENTRY.size  # bytes of the log that a row may take beside what it has room made for: its flag
_NEVER = 1 << 62
_EXACT_INTEGERS = 1 << 53  # as floats
_MARK = struct.Struct("<Q")


class RowSlab:
    """The slab that is being filled with rows.

    ask(), answer() and start() know rows of one typed value of fixed size each for observation and action; all others
    are put down by ask_packed(), answer_packed(), lead() and append(). _core.RowSlab is the same in C, and knows dicts
    and tuples of such values, of large ones that it follows, and of texts, too.

    Args:
        asks, answers: whether ask() and answer() may do anything but decline.
        room: bytes of the log that ask() leaves for the answer.

    Attributes:
        ended: whether answer() has flagged the last row as the end of its episode.
        logged: the number of rows that were there before the last entry of the log.
        memory, sequence: of the slab.
    """

    def __init__(self, layout: RowLayout, asks: bool = True, answers: bool = True, room: int = 0):
        self._asks, self._answers = asks, answers
        self._room = _RESERVE + room
        self._size = layout.size
        self._asked, self._reward, self._done = layout.asked, layout.reward, layout.done
        self._ask = struct.Struct(f"<{layout.action_bytes}sQ").pack_into
        self._answer = struct.Struct(f"<d{layout.observation_bytes}sQ").pack_into
        self._lead = struct.Struct(f"<{layout.action_bytes}sQd{layout.observation_bytes}sQ").pack_into
        action, observation = _only(layout, layout.action), _only(layout, layout.observation)
        self._action, self._observation = action, observation
        self._action_kind: Any = None  # of NumPy scalars that are integers
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
            self._ask_integer = struct.Struct(f"<{code}{pad}xQ").pack_into
        is_vector = observation is not None and len(observation.shape) == 1
        self._dtype = observation.dtype if observation is not None and is_vector else None
        self._vector_bytes = 0 if observation is None else observation.row_size
        self._kind: Any = None  # of the rewards that need no look: the last one's
        self._only_floats = True
        self.logged = -1
        self.ended = False
        self.memory, self.sequence = memoryview(bytearray()), 0
        self._at = -1  # where the next row goes
        self._mark = 1  # of the next row
        self._floor = self._least = _NEVER

    def follow(self, column: int, before: Array, ready: Array, most: int) -> None:
        """Has values of a large leaf be compared with the one before, as its deltas.DeltaPacker does: not here."""

    def begin(self, memory: memoryview, sequence: int) -> None:
        """Goes on in an empty slab, and has ask() decline until release()."""
        self._log = Log(memory, SLAB_HEADER, len(memory), sequence)
        begin(memory, sequence)
        self.memory, self.sequence = memory, sequence
        self._mark, self.logged = sequence << 32 | 1, -1
        self.ended = False
        self._at = len(memory) - self._size
        self.only_floats(True)
        self.hold()

    @property
    def rows(self) -> int:
        """Complete ones."""
        return (self._mark & 0xFFFFFFFF) - 1

    # -- when ask() is to say no --------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Has ask() decline until release()."""
        self._least = self._floor = _NEVER

    def release(self, most_rows: int) -> None:
        """Has ask() accept rows until there are so many, or no room for more."""
        if self._asks:
            self._least = max(0, len(self.memory) - most_rows * self._size)
            self._floor = max(self._log.position + self._room, self._least)

    def has_room(self, log_bytes: int = 0) -> bool:
        """Whether there is room for one more row, and that much in the log."""
        return self._at >= self._log.position + _RESERVE + log_bytes

    def only_floats(self, only: bool) -> None:
        """Whether the rewards of rows are float64, as answer() puts them down; otherwise it declines."""
        self._only_floats, self._kind = only, None

    # -- rows of one value each ---------------------------------------------------------------------------------------

    def ask(self, action: Any) -> bool:
        """Puts down that the environment is about to be stepped; False if it is not done and has to be otherwise."""
        at = self._at
        if at < self._floor:
            return False
        kind = type(action)
        if kind is self._action_kind or (kind is int and self._action_kind is not None):
            try:
                self._ask_integer(self.memory, at, action, self._mark)
            except struct.error:  # an integer that the space does not have
                return False
            return True
        packed = _bytes_of(action, self._action)
        if packed is None:
            return False
        self._ask(self.memory, at, packed, self._mark)
        return True

    def answer(self, observation: Any, reward: Any, terminated: Any, truncated: Any) -> bool:
        """Puts down what the step led to; False if it is not done and has to be otherwise."""
        if type(reward) is not self._kind and not self._takes(reward):
            return False
        # Inlined from _bytes_of: a vector, without .shape, which builds a tuple at each access.
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
        self._answer(self.memory, at + self._reward, reward, packed, mark)
        self._at, self._mark = at - self._size, mark + 1
        return True

    def _takes(self, reward: Any) -> bool:
        """Whether a reward can be put down as float64."""
        if not self._only_floats or not self._answers:
            return False
        kind = type(reward)
        if kind is float or kind is np.float64:
            self._kind = kind
            return True
        return kind is int and -_EXACT_INTEGERS <= reward <= _EXACT_INTEGERS

    # -- rows of any values -------------------------------------------------------------------------------------------

    def ask_packed(self, action: bytes) -> None:
        """The same, with the fixed values of the action as they lie in a row."""
        self._ask(self.memory, self._at, action, self._mark)

    def answer_packed(self, observation: bytes, reward: float, terminated: Any, truncated: Any) -> None:
        """The same, with the fixed values of the observation as they lie in a row."""
        if terminated or truncated:
            self.flag(terminated, truncated)
        at, mark = self._at, self._mark
        self._answer(self.memory, at + self._reward, reward, observation, mark)
        self._at, self._mark = at - self._size, mark + 1

    def lead(self, observation: bytes) -> None:
        """Puts down an observation that leads a run of steps."""
        at, mark = self._at, self._mark
        self._lead(self.memory, at, b"", 0, 0.0, observation, mark)
        self._at, self._mark = at - self._size, mark + 1
        self.ended = False

    def start(self, episode: int, seed: int, utc: int, monotonic: int, kept: bytes, observation: Any) -> bool:
        """Puts down that an episode starts, and its first observation; False if that is to be done otherwise."""
        packed = _bytes_of(observation, self._observation) if self._answers else None
        if packed is None or not self.has_room(size_of(len(kept))):
            return False
        self.append(START, kept, HAS_LEAD, 0, episode, seed, utc, monotonic)
        self.lead(packed)
        return True

    def flag(self, terminated: Any, truncated: Any) -> None:
        """Puts down that the episode ends with the next row."""
        said = wire.TERMINATED * bool(terminated) | wire.TRUNCATED * bool(truncated)
        outcome = _TERMINATED if terminated else _TRUNCATED
        self.append(FLAG, b"", said, 0, outcome, 0, time.time_ns(), time.monotonic_ns())
        self.ended = True
        self.hold()

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
        """Appends an entry to the log. Raises LogFull where that would leave no room for a row."""
        log = self._log
        if log.position + size_of(len(payload)) + ENTRY.size > self._at:
            raise LogFull
        self.logged = self.rows  # first: Ctrl-C may come after
        log.append(kind, self.rows, payload, flags, column, a, b, c, d)
        self._floor = max(log.position + self._room, self._least)

    # -- taking back --------------------------------------------------------------------------------------------------

    def drop(self, count: int) -> None:
        """Takes back all but so many entries of the log, and what there is of a row that is not complete."""
        found = self.entries()
        at = found[count].at if count < len(found) else self._log.position
        self._log.cut(at, count)
        self.logged = found[count - 1].row if count else -1
        self._floor = max(at + self._room, self._least)
        if self._at >= at + ENTRY.size:
            for offset in (self._asked, self._done):
                _MARK.pack_into(self.memory, self._at + offset, 0)

    def asked(self) -> bytes | None:
        """The fixed values of the action that was asked and not answered, if there is one."""
        at = self._at
        if at < self._log.position + ENTRY.size:
            return None
        (mark,) = _MARK.unpack_from(self.memory, at + self._asked)
        return bytes(self.memory[at : at + self._asked]) if mark == self._mark else None

    def last_row(self) -> bytes:
        """The fixed values of the observation in the last row; nothing if there is none."""
        at = self._at + self._size + self._reward + 8
        return bytes(self.memory[at : self._at + self._size + self._done]) if self.rows else b""

    def last_texts(self) -> dict[int, bytes]:
        """What answer() or start() has put into the log of the observation in the last row, by column: nothing here."""
        return {}

    def entries(self) -> list[Entry]:
        """All entries of the log."""
        return list(entries(self.memory, SLAB_HEADER, self._log.position, self.sequence))

    def orphan(self) -> None:
        """Goes on in private memory: what a step that is under way adds concerns nobody but who looks here."""
        if self.sequence:  # it was begun
            self.memory = memoryview(bytearray(self.memory))
            self._log.memory = self.memory


def _only(layout: RowLayout, tree: Layout) -> Leaf | None:
    """The only leaf of an observation or action, if it is of fixed size in the row."""
    fixed = isinstance(tree, Leaf) and tree.dtype is not None and tree not in layout.delta_leaves
    return tree if fixed and isinstance(tree, Leaf) else None


def _bytes_of(value: Any, leaf: Leaf | None) -> bytes | None:
    """The bytes of a value that is exactly as its space says; None of any other."""
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
