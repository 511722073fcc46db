"""Large values, such as images, stored as deltas: the changes since the previous row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.data.layout import Leaf
from gym_trace.data.values import Array

# A stored value: positions (u4) and new contents of the words that changed since the previous value; or all its bytes.
Slot = tuple[bytes, bytes] | bytes
Changes = tuple[Array, Array]  # positions and words, as arrays


class Log(Protocol):
    """The part of the recorder's log that the packer uses."""

    def log_whole(self, column: int, value: bytes) -> None:
        """Record all bytes of a value."""

    def log_changes(self, column: int, count: int, changes: bytes) -> bool:
        """Record the positions (u4) of changed words, then the words; return False if the log is full."""


def word_of(row_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the word type for comparing values of row_size bytes: the largest of 8, 4, 2, 1 bytes that divides it."""
    return np.dtype(f"<u{math.gcd(row_size, 8)}")


def changed_words(before: Array, value: Array, most: int) -> bytes | None:
    """Return the positions (u4) of the words that changed, then the new words; None if more than `most` changed.

    Unless it returns None, it updates `before` to equal value.

    Args:
        before: the previous value as a flat array of words.
        value: contiguous, with as many bytes as before.
    """
    flat: Array = np.frombuffer(value, before.dtype)
    (positions,) = np.not_equal(flat, before).nonzero()
    if len(positions) > most:
        return None
    words = flat.take(positions)
    before.put(positions, words)
    return positions.astype(np.uint32).tobytes() + words.tobytes()


class DeltaPacker:
    """Packs the values of one leaf as deltas.

    Args:
        column: index of the leaf.
        other: packs a value of another dtype or shape.
        changed: changed_words() or its compiled twin.

    Attributes:
        before: the last value, as words.
        ready: an array of one bool: True if the next value can be compared with `before`. Then a caller may do the
            packer's work: log the changes and update `before`.
        limit: most changed words of a delta; values with more are stored whole.
    """

    def __init__(
        self,
        leaf: Leaf,
        column: int,
        log: Log,
        other: Callable[[Any], bytes],
        changed: Callable[[Array, Array, int], bytes | None] = changed_words,
    ):
        self._log, self._column, self._other, self._changed = log, column, other, changed
        self._dtype, self._shape = leaf.dtype, leaf.shape
        self._word = word_of(leaf.row_size)
        words = leaf.row_size // self._word.itemsize
        self.limit = words // 4
        self._change_bytes = 4 + self._word.itemsize
        self.before: Array = np.empty(words, self._word)
        self.ready: Array = np.zeros(1, np.bool_)
        self.forget()

    def forget(self) -> None:
        """Store the next value whole, like the first one: readers may lack the previous value."""
        self._is_known = self.ready[0] = False
        self._pause = self._pausing = 0  # values to store uncompared after one with too many changes

    def __call__(self, value: Any) -> bytes:
        """Log the value; return the bytes of the row: none, unless `other` packs it."""
        if type(value) is not np.ndarray or value.dtype != self._dtype or value.shape != self._shape:
            return self._other(value)
        if not value.flags.c_contiguous:
            value = value.copy()
        was_known, self._is_known = self._is_known, False  # until `before` equals the last logged row
        self.ready[0] = False
        if self._pausing:
            self._pausing -= 1
        elif was_known:
            changes = self._changed(self.before, value, self.limit)
            if changes is None:
                self._pause = self._pausing = min(63, 2 * self._pause + 1)
            else:
                self._pause = 0
                if self._log.log_changes(self._column, len(changes) // self._change_bytes, changes):
                    self._is_known = self.ready[0] = True
                    return b""
        whole = value.tobytes()
        self._log.log_whole(self._column, whole)
        self.before[:] = np.frombuffer(whole, self._word)
        self._is_known = True
        self.ready[0] = not self._pause
        return b""

    def last(self) -> bytes:
        """Return all bytes of the last packed value."""
        return self.before.tobytes()


def following(before: Array | None, slot: Slot, word: np.dtype[np.unsignedinteger]) -> Array:
    """Apply a slot to the previous value and return the next one; `before` may be overwritten."""
    return np.frombuffer(slot, word) if isinstance(slot, bytes) else _changed(before, *joined_changes([slot], word))


def _changed(before: Array | None, positions: Array, words: Array) -> Array:
    assert before is not None
    if not before.flags.writeable:
        before = before.copy()
    before.put(positions, words)
    return before


def joined_changes(slots: Sequence[tuple[bytes, bytes]], word: np.dtype[np.unsignedinteger]) -> Changes:
    """Return the positions and words of all slots, concatenated."""
    return (
        np.frombuffer(b"".join([positions for positions, _ in slots]), np.uint32),
        np.frombuffer(b"".join([words for _, words in slots]), word),
    )


class DeltaRows(NamedTuple):
    """Rows of a column of large values, as deltas."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    slots: list[Any]  # Slot
    before: Array | None  # the value before the first row; read-only

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def row_size(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def changed(self) -> int:
        """Approximate stored size of all rows but the first: a word per change, plus two bytes for its position."""
        size = sum(len(slot) if isinstance(slot, bytes) else len(slot[1]) for slot in self.slots[1:])
        return size + 2 * size // word_of(self.row_size).itemsize

    def arrays(self, count: int) -> Iterator[Array]:
        """Yield the values as uint8 arrays of shape (up to count, row size)."""
        word = word_of(self.row_size)
        before = None if self.before is None else self.before.copy()
        for i in range(0, len(self.slots), count):
            slots = self.slots[i : i + count]
            values = np.empty((len(slots), self.row_size), np.uint8)
            for value, slot in zip(values, slots):
                before = following(before, slot, word)
                value[:] = before.view(np.uint8)
            yield values

    def after(self) -> Array | None:
        """Return the value of the last row."""
        whole = [i for i, slot in enumerate(self.slots) if isinstance(slot, bytes)]
        before = self.before
        if whole:
            before = np.frombuffer(self.slots[whole[-1]], word_of(self.row_size))
        changes = self.slots[whole[-1] + 1 if whole else 0 :]
        if not changes or before is None:
            return before
        return _changed(
            before.copy(), *joined_changes(changes, word_of(self.row_size))
        )  # put() applies the last of several changes of a word
