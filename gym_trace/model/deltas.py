"""Large values, such as images, of which rows keep only what has changed since the row before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.model.layout import Leaf
from gym_trace.model.values import Array

# What a row keeps: the places (intp) and contents of the words that are not as in the row before, or all bytes.
# As bytes, not as arrays: those are given back to the system more slowly, by a thread that has not seen them before.
Slot = tuple[bytes, bytes] | bytes
Changes = tuple[Array, Array]  # the same as arrays


class Nonconforming(NamedTuple):
    """A value that does not have the dtype and shape that its space says, as rows hold it."""

    value: Any


class Room(Protocol):
    """What is asked of a recorder."""

    def next_row(self) -> int:
        """The index that the row being put together will have, if it comes to that."""

    def count_values(self, count: int) -> None:
        """Counts bytes towards the size of a block."""

    def plain(self, column: str, value: Any) -> Any:
        """The array in a value, if there is one."""

    def snapshot(self, column: str, value: Any) -> Any:
        """What a row holds of a value of any kind."""


def word_of(row_size: int) -> np.dtype[np.unsignedinteger]:
    """In which units frames of so many bytes are compared: 8, 4, 2 or 1 bytes, as divides them."""
    return np.dtype(f"<u{math.gcd(row_size, 8)}")


class DeltaPacker:
    """Takes the frames of one leaf to what rows keep of them.

    A frame counts as the one before only when its row is there: Ctrl-C may fall before it is appended.
    """

    def __init__(self, leaf: Leaf, room: Room):
        self._room = room
        self._dtype, self._shape, self._column = leaf.dtype, leaf.shape, leaf.column
        self._word = word_of(leaf.row_size)
        words = leaf.row_size // self._word.itemsize
        self._limit = words // 4  # changes from which on it is better to keep all
        self._differs = np.empty(words, np.bool_)
        self.forget()

    def forget(self) -> None:
        """Makes the next row keep all bytes."""
        self._before: Array | None = None
        self._latest: tuple[int, Changes | bytes] | None = None  # row, and what has not got into _before yet
        self._pause = self._pausing = 0  # frames that are not compared, after one that had changed all over

    def __call__(self, value: Any) -> Slot | Nonconforming:
        row = self._room.next_row()
        before = self._previous(
            row
        )  # first of all: what is Nonconforming takes the place of a frame that never came, too
        if type(value) is not np.ndarray:
            value = self._room.plain(self._column, value)
        if type(value) is not np.ndarray or value.dtype != self._dtype or value.shape != self._shape:
            return Nonconforming(self._room.snapshot(self._column, value))
        try:
            flat: Array = np.frombuffer(value, self._word)
        except ValueError:  # not contiguous
            flat = np.frombuffer(value.tobytes(), self._word)
        if self._pausing:
            self._pausing -= 1
        elif before is not None:
            (places,) = np.not_equal(flat, before, out=self._differs).nonzero()
            if len(places) <= self._limit:
                self._pause = 0
                words = flat.take(places)
                self._latest = row, (places, words)
                self._room.count_values(12 * len(places))
                return places.tobytes(), words.tobytes()
            self._pause = self._pausing = min(63, 2 * self._pause + 1)
        whole = flat.tobytes()
        self._latest = row, whole
        self._room.count_values(len(whole))
        return whole

    def settle(self) -> None:
        """Forgets a frame that never came: the next row is appended without being packed here."""
        self._previous(self._room.next_row())

    def last(self) -> bytes:
        """All bytes of the frame in the last row that has one."""
        before = self._previous(self._room.next_row())
        assert before is not None
        return before.tobytes()

    def _previous(self, row: int) -> Array | None:
        if self._latest is not None and self._latest[0] < row:
            latest = self._latest[1]
            if isinstance(latest, bytes):
                self._before = np.frombuffer(latest, self._word)
            else:
                self._before = _changed(self._before, *latest)
        self._latest = None
        return self._before


def following(before: Array | None, slot: Slot, word: np.dtype[np.unsignedinteger]) -> Array:
    """The frame after the one before, which may be overwritten."""
    return np.frombuffer(slot, word) if isinstance(slot, bytes) else _changed(before, *joined_changes([slot], word))


def _changed(before: Array | None, places: Array, words: Array) -> Array:
    assert before is not None
    if not before.flags.writeable:
        before = before.copy()
    before.put(places, words)
    return before


def joined_changes(slots: Sequence[tuple[bytes, bytes]], word: np.dtype[np.unsignedinteger]) -> Changes:
    """The places and words of all slots, one after the other."""
    return (
        np.frombuffer(b"".join([places for places, _ in slots]), np.intp),
        np.frombuffer(b"".join([words for _, words in slots]), word),
    )


class DeltaRows(NamedTuple):
    """Rows of a column of frames."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    slots: list[Any]  # Slot
    before: Array | None  # the frame before the first of them; not to be changed

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def row_size(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def changed(self) -> int:
        """How many bytes are kept of the rows after the first one, about: a word, and two bytes for its place."""
        kept = sum(len(slot) if isinstance(slot, bytes) else len(slot[1]) for slot in self.slots[1:])
        return kept + 2 * kept // word_of(self.row_size).itemsize

    def arrays(self, count: int) -> Iterator[Array]:
        """The frames as arrays of bytes of shape (up to count, row size)."""
        word = word_of(self.row_size)
        before = None if self.before is None else self.before.copy()
        for i in range(0, len(self.slots), count):
            slots = self.slots[i : i + count]
            frames = np.empty((len(slots), self.row_size), np.uint8)
            for frame, slot in zip(frames, slots):
                before = following(before, slot, word)
                frame[:] = before.view(np.uint8)
            yield frames

    def after(self) -> Array | None:
        """The frame of the last row."""
        whole = [i for i, slot in enumerate(self.slots) if isinstance(slot, bytes)]
        before = self.before
        if whole:
            before = np.frombuffer(self.slots[whole[-1]], word_of(self.row_size))
        changes = self.slots[whole[-1] + 1 if whole else 0 :]
        if not changes or before is None:
            return before
        return _changed(before.copy(), *joined_changes(changes, word_of(self.row_size)))  # of several the last counts
