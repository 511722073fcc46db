"""Large values, such as images, stored as deltas: what has changed since the row before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gym_trace.model.layout import Leaf
from gym_trace.model.values import Array

# What a row keeps: the places (intp) and contents of the words that differ from the row before, or all bytes. Not as
# arrays, because another thread frees bytes faster.
Slot = tuple[bytes, bytes] | bytes
Changes = tuple[Array, Array]  # the same as arrays


class Nonconforming(NamedTuple):
    """A snapshot of a value that does not have the dtype and shape of its space."""

    value: Any


class RowContext(Protocol):
    """What a packer needs to know of the recorder whose rows it packs."""

    def next_row(self) -> int:
        """The index of the next row to be appended."""

    def count_values(self, count: int) -> None:
        """Counts bytes towards the size of a block."""

    def plain(self, column: str, value: Any) -> Any:
        """The value as a NumPy array, if it is an array of another library."""

    def snapshot(self, column: str, value: Any) -> Any:
        """An immutable or own copy of a value."""


def word_of(row_size: int) -> np.dtype[np.unsignedinteger]:
    """The word in which values of row_size bytes are compared: 8, 4, 2 or 1 bytes, whichever divides them."""
    return np.dtype(f"<u{math.gcd(row_size, 8)}")


class DeltaPacker:
    """Packs the values of one leaf as deltas.

    A packed value becomes the base of the next delta only once its row is appended: Ctrl-C may come in between.
    """

    def __init__(self, leaf: Leaf, context: RowContext):
        self._context = context
        self._dtype, self._shape, self._column = leaf.dtype, leaf.shape, leaf.column
        self._word = word_of(leaf.row_size)
        words = leaf.row_size // self._word.itemsize
        self._limit = words // 4  # of more changed words all bytes are kept
        self._differs = np.empty(words, np.bool_)
        self.forget()

    def forget(self) -> None:
        """Makes the next row keep all bytes, as the first one does."""
        self._before: Array | None = None
        self._latest: tuple[int, Changes | bytes] | None = None  # row, and what is to be applied to _before
        self._pause = self._pausing = 0  # values not to be compared, after one with too many changes

    def __call__(self, value: Any) -> Slot | Nonconforming:
        row = self._context.next_row()
        before = self._previous(row)  # first: also drops a value whose row was never appended
        if type(value) is not np.ndarray:
            value = self._context.plain(self._column, value)
        if type(value) is not np.ndarray or value.dtype != self._dtype or value.shape != self._shape:
            return Nonconforming(self._context.snapshot(self._column, value))
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
                self._context.count_values(12 * len(places))
                return places.tobytes(), words.tobytes()
            self._pause = self._pausing = min(63, 2 * self._pause + 1)
        whole = flat.tobytes()
        self._latest = row, whole
        self._context.count_values(len(whole))
        return whole

    def settle(self) -> None:
        """Drops a value whose row was never appended, before a row that is not packed here."""
        self._previous(self._context.next_row())

    def last(self) -> bytes:
        """All bytes of the value in the last row that has one."""
        before = self._previous(self._context.next_row())
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
    """The value that a slot makes of the one before, which may be overwritten."""
    return np.frombuffer(slot, word) if isinstance(slot, bytes) else _changed(before, *joined_changes([slot], word))


def _changed(before: Array | None, places: Array, words: Array) -> Array:
    assert before is not None
    if not before.flags.writeable:
        before = before.copy()
    before.put(places, words)
    return before


def joined_changes(slots: Sequence[tuple[bytes, bytes]], word: np.dtype[np.unsignedinteger]) -> Changes:
    """The places and words of all slots, concatenated."""
    return (
        np.frombuffer(b"".join([places for places, _ in slots]), np.intp),
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
        """Approximate stored size of the rows after the first: a word for each change, and two bytes for its place."""
        kept = sum(len(slot) if isinstance(slot, bytes) else len(slot[1]) for slot in self.slots[1:])
        return kept + 2 * kept // word_of(self.row_size).itemsize

    def arrays(self, count: int) -> Iterator[Array]:
        """The values as uint8 arrays of shape (up to count, row size)."""
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
        """The value of the last row."""
        whole = [i for i, slot in enumerate(self.slots) if isinstance(slot, bytes)]
        before = self.before
        if whole:
            before = np.frombuffer(self.slots[whole[-1]], word_of(self.row_size))
        changes = self.slots[whole[-1] + 1 if whole else 0 :]
        if not changes or before is None:
            return before
        return _changed(before.copy(), *joined_changes(changes, word_of(self.row_size)))  # of several the last counts
