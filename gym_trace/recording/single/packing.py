"""Pack values of a space for rows: values that fit the space become bytes in the row, others go into the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.data.deltas import DeltaPacker
from gym_trace.data.layout import Layout, Leaf, as_kept, integer_bytes, taken_apart
from gym_trace.data.packing import pack
from gym_trace.data.values import Packed
from gym_trace.format import wire
from gym_trace.format.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.recording.core import changed_words
from gym_trace.recording.recorder import largest_row

Packer = Callable[[Any], bytes]  # returns the bytes of a value in a row; values without a fixed size go into the log


class RowPackers:
    """Packs observations and actions for the rows of a recorder.

    Args:
        rows: receives the entries for the log.
        recorder: packs values outside their space, and receives the warnings.

    Attributes:
        observation, action: the packers.
        deltas: packers of leaves with large values, by column.
    """

    def __init__(self, layout: RowLayout, rows: Any, recorder: Any):
        self._rows, self._recorder, self._layout = rows, recorder, layout
        self.deltas: dict[int, DeltaPacker] = {}
        leaves = layout.observation_leaves
        self.observation = self._tree(layout.observation, leaves, 0)
        self.action = self._tree(layout.action, layout.action_leaves, len(leaves))

    def forget(self) -> None:
        """Pack the next values whole, like the first ones."""
        for packer in self.deltas.values():
            packer.forget()

    def _tree(self, layout: Layout, leaves: list[Leaf], first: int) -> Packer:
        packers = [self._leaf(leaf, number) for number, leaf in enumerate(leaves, first)]
        if len(packers) == 1 and isinstance(layout, Leaf):
            return packers[0]
        return lambda value: b"".join([packer(part) for packer, part in zip(packers, taken_apart(layout, value))])

    def _leaf(self, leaf: Leaf, number: int) -> Packer:
        rows, recorder, dtype, shape, column = self._rows, self._recorder, leaf.dtype, leaf.shape, leaf.label
        if dtype is None:

            def pack_value(value: Any) -> bytes:
                rows.log_value(number, recorder.packed(column, value))
                return b""

            return pack_value

        is_large = leaf in self._layout.delta_leaves
        nothing = b"" if is_large else bytes(leaf.row_size)

        def pack_other(value: Any) -> bytes:
            if type(value) is not int:
                value = recorder.plain(column, value)
            if leaf.fits(value):
                return self.deltas[number](value) if is_large else bytes(value.tobytes())
            if type(value) is int and shape == () and (integer := integer_bytes(dtype, value)) is not None:
                return integer
            if leaf.fits(scalar := as_kept(value, leaf)):
                return bytes(scalar.tobytes())
            copy = recorder.snapshot(column, value)
            got = f"{value.dtype} of shape {value.shape}" if hasattr(value, "dtype") else f"a {type(value).__name__}"
            complaint = f"got {got}, but the space has {dtype} of shape {shape}; recorded exactly"
            recorder.complain(column, complaint)
            rows.log_value(number, copy if type(copy) is Packed else pack(copy))
            return nothing

        if is_large:
            packer = self.deltas[number] = DeltaPacker(leaf, number, rows, pack_other, changed_words)
            return packer
        ndarray = np.ndarray
        if shape == ():
            kind = dtype.type
            if not dtype.isnative:  # scalars are
                return lambda value: np.array(value, dtype).tobytes() if type(value) is kind else pack_other(value)
            return lambda value: value.tobytes() if type(value) is kind else pack_other(value)

        def pack_array(value: Any) -> bytes:
            if type(value) is ndarray and value.dtype is dtype and value.shape == shape:
                return value.tobytes()
            return pack_other(value)

        return pack_array


def chunk_bytes_of(layout: RowLayout) -> int:
    """Return the raw size of a chunk of these rows. Raises UnstorableValue if values are too large to be stored."""
    largest = largest_row(layout.leaves)
    return LARGE_CHUNK if layout.delta_leaves or largest >= wire.LARGE_ROW else SMALL_CHUNK
