"""The recorded lanes of a vector environment, and their rows in a batch."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from gym_trace.data.tensors import PYTORCH, is_on_device, library_of, plain_array
from gym_trace.data.trees import mapped
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, raise_if_of_signal


class Lanes:
    """All lanes of a vector environment, or some of them.

    Args:
        count: number of lanes of the environment.
        numbers: ascending numbers of the recorded lanes; None: all.
    """

    def __init__(self, count: int, numbers: Array | None = None):
        self.count, self.numbers = count, numbers
        self.recorded = count if numbers is None else len(numbers)
        self._indices: dict[Any, Any] = {}  # index tensor of the recorded lanes on each device

    @classmethod
    def chosen(cls, count: int, lanes: Any) -> Lanes:
        """Parse the option lanes of an environment with count lanes. Raises InvalidOption."""
        if lanes is None:
            return cls(count)
        numbers = _numbers(count, lanes)
        if not len(numbers):
            raise InvalidOption(f"lanes={_shown(lanes)}: no lane of {count}; choose at least one")
        if numbers[0] < 0 or numbers[-1] >= count:
            lane = numbers[0] if numbers[0] < 0 else numbers[-1]
            raise InvalidOption(f"lanes={_shown(lanes)}: no lane {lane}; pass numbers from 0 to {count - 1}")
        return cls(count, None if len(numbers) == count else numbers)

    def of(self, recorded: Iterable[int]) -> list[int]:
        """Return the numbers in the environment of recorded lanes."""
        return list(recorded) if self.numbers is None else self.numbers[list(recorded)].tolist()

    def rows(self, batch: Any) -> Any:
        """Return the recorded lanes' rows of an array or list with a row for each lane. Raises LookupError."""
        return batch if self.numbers is None else taken_rows(batch, self.numbers, self.count, self._indices)

    def host_rows(self, batch: Any) -> Any:
        """Return the recorded lanes' rows, of an array or tensor as an array of NumPy. Raises any error."""
        rows = self.rows(batch)
        return plain_array(rows) if library_of(type(rows)) else rows

    def tree(self, batch: Any) -> Any:
        """Return the recorded lanes' rows of a tree of arrays on the host; None if that is impossible."""
        try:
            return mapped(self._on_host, batch) if isinstance(batch, (dict, tuple)) else self._on_host(batch)
        except Exception as error:  # user objects may raise anything
            raise_if_of_signal(error)
            return None

    def _on_host(self, batch: Any) -> Any:
        kind = type(batch)
        library = "" if kind is np.ndarray else library_of(kind)
        if library == PYTORCH and batch.is_cpu:
            try:
                batch = batch.numpy()
            except (TypeError, RuntimeError):  # the dtype is not NumPy's, or it has gradients
                return self.rows(batch)
        elif library:
            if is_on_device(batch):
                raise LookupError("it is copied together with other arrays")
            batch = plain_array(batch)
        return batch if self.numbers is None else taken_rows(batch, self.numbers, self.count, self._indices)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_indices": {}}


def taken_rows(batch: Any, rows: Array, count: int, indices: dict[Any, Any] | None = None) -> Any:
    """Return rows of an array or list with count rows. Rows on a device are gathered there, then copied.

    Args:
        indices: keeps rows as index tensors on each device, for the next batch.

    Raises LookupError if there are not count rows.
    """
    shape = getattr(batch, "shape", None)
    found = shape[0] if isinstance(shape, tuple) and shape else len(batch)  # the len() of a tensor takes longer
    if found != count:
        raise LookupError(f"{found} rows for {count} lanes")
    if type(batch) is np.ndarray:
        return batch.take(rows, 0)  # in half the time of batch[rows]
    library = library_of(type(batch))
    if library == PYTORCH and batch.is_cpu:  # plain_array() takes longer
        try:
            return batch.numpy().take(rows, 0)
        except (TypeError, RuntimeError):  # the dtype is not NumPy's, or it has gradients
            batch = batch.detach()
    if library == PYTORCH or is_on_device(batch):
        return plain_array(_gathered(batch, rows, library, {} if indices is None else indices))
    array = plain_array(batch) if library or not isinstance(batch, (list, tuple)) else batch
    return array[rows] if isinstance(array, np.ndarray) else [batch[row] for row in rows.tolist()]


def _gathered(batch: Any, rows: Array, library: str, indices: dict[Any, Any]) -> Any:
    if library != PYTORCH:
        return batch[rows]
    index = indices.get(batch.device)
    if index is None:
        index = indices[batch.device] = batch.new_tensor(rows, dtype=sys.modules["torch"].int64)
    return batch.detach().index_select(0, index)


def _numbers(count: int, lanes: Any) -> Array:
    """Return the ascending lane numbers of the option; they may be out of range."""
    if isinstance(lanes, slice):
        return np.sort(np.arange(count)[lanes])
    array = np.asarray(plain_array(lanes))
    if array.ndim == 0 and array.dtype.kind in "iu":
        wanted = operator.index(array[()])
        if not 0 < wanted <= count:
            raise InvalidOption(f"lanes={wanted}: pass a count from 1 to {count}, a slice, a mask or numbers")
        return np.arange(wanted) * count // wanted
    if array.dtype == np.bool_ and array.shape == (count,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidOption(f"lanes={_shown(lanes)}: pass a slice, a mask of {count} lanes, their numbers, or a count")
    return np.unique(array.astype(np.int64))


def _shown(lanes: Any) -> str:
    return f"{lanes!r:.60}"
