"""Split batches of a vector environment: rows of observations and actions, and the infos of each lane."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector.utils import batch_space, iterate

from gym_trace.data.layout import Layout, Leaf, as_kept, integers_fit, taken_apart
from gym_trace.data.tensors import is_on_device, plain_array
from gym_trace.data.values import Array
from gym_trace.errors import raise_if_of_signal
from gym_trace.format.ring.segment import ColumnRows
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.vector.lanes import Lanes, taken_rows


class BatchPacker:
    """Copies batched values of a space into rows for its leaves.

    Args:
        layout, space: layout and space of one lane.
        lanes: the lanes of the environment, and those that are recorded.
        recorder: packs values outside their space, and receives the warnings.
    """

    def __init__(self, layout: Layout, space: Space[Any], lanes: Lanes, recorder: Recorder):
        self._layout, self._space, self._lanes, self._recorder = layout, space, lanes, recorder
        self._leaves = list(layout.leaves())
        self._usual = [(leaf.dtype, (lanes.recorded, *leaf.shape)) for leaf in self._leaves]

    def step(self, value: Any, buffers: list[Any]) -> list[ColumnRows]:
        """Return the rows of the recorded lanes at a step.

        buffers: output arrays, one per leaf; returned if all rows fit.
        """
        try:
            parts = self._layout.split(value)
            rows = [self._of_step(*given) for given in zip(self._leaves, parts, self._usual, buffers)]
            return buffers if all(map(operator.is_, rows, buffers)) else rows
        except Exception as error:  # another structure, or user objects, which may raise anything
            raise_if_of_signal(error)
            return self.single(self._lanes.rows(self._one_per_lane(value, self._lanes.count)))

    def _of_step(self, leaf: Leaf, part: Any, usual: Any, buffer: Array | None) -> ColumnRows:
        part = self._lanes.rows(part)
        if buffer is not None and type(part) is np.ndarray and (part.dtype, part.shape) == usual:
            buffer[...] = part
            return buffer
        return self._rows(leaf, part, self._lanes.recorded)

    def has_rows(self, value: Any, count: int) -> bool:
        """Return True if each leaf of a batch has count rows."""
        try:
            parts = self._layout.split(value)
            return len(parts) > 0 and all(len(part) == count for part in parts)
        except Exception as error:  # see step()
            raise_if_of_signal(error)
            return False

    def is_batch(self, value: Any) -> bool:
        """Return True if each leaf of a batch is one object; False if it may be a tuple with a value per lane."""
        try:
            return not any(isinstance(part, (dict, tuple)) for part in self._layout.split(value))
        except Exception as error:  # see step()
            raise_if_of_signal(error)
            return False

    def batch(self, value: Any, chosen: Array | None, count: int) -> list[ColumnRows]:
        """Return the chosen rows of a batch of count rows; None: all of them."""
        try:
            parts = self._layout.split(value)
            parts = parts if chosen is None else [taken_rows(part, chosen, count) for part in parts]
            rows = count if chosen is None else len(chosen)
            return [self._rows(leaf, part, rows) for leaf, part in zip(self._leaves, parts)]
        except Exception as error:  # see step()
            raise_if_of_signal(error)
            values = self._one_per_lane(value, count)
            return self.single(values if chosen is None else [values[row] for row in chosen])

    def single(self, values: list[Any]) -> list[ColumnRows]:
        """Return rows of values, one per lane."""
        columns = zip(*[taken_apart(self._layout, value) for value in values])
        return [self._stacked(leaf, list(column)) for leaf, column in zip(self._leaves, columns)]

    def _one_per_lane(self, batch: Any, count: int) -> list[Any]:
        """Return the values in a batch with another structure than the space. Raises any error."""
        values = batch if isinstance(batch, list) else list(iterate(batch_space(self._space, count), batch))
        if len(values) != count:
            raise ValueError(f"{len(values)} values for {count} lanes")
        return values

    def _rows(self, leaf: Leaf, part: Any, count: int) -> ColumnRows:
        if leaf.dtype is not None:
            part = array = self._recorder.plain(leaf.label, part)
            plain = isinstance(array, (list, tuple)) and leaf.dtype.kind in "iub"
            if plain and (leaf.shape or set(map(type, array)) == {int}):  # scalars of NumPy have a width
                array = np.asarray(array)
                is_integer = array.dtype.kind in "iu"
                if is_integer and integers_fit(leaf.dtype, int(array.min(initial=0)), int(array.max(initial=0))):
                    array = array.astype(leaf.dtype)
            if type(array) is np.ndarray and array.shape == (count, *leaf.shape):
                if array.dtype != leaf.dtype and array.dtype.kind == leaf.dtype.kind and array.dtype.isnative:
                    self._complain_of(leaf)
                    return np.array(array, order="C", subok=False)
                if array.dtype == leaf.dtype:
                    return np.array(array, leaf.dtype, order="C", subok=False)
        if len(part) != count:
            raise LookupError
        return self._stacked(leaf, list(part))

    def _stacked(self, leaf: Leaf, values: list[Any]) -> ColumnRows:
        if leaf.dtype is None:
            return [self._recorder.packed(leaf.label, value) for value in values]
        arrays = [as_kept(self._recorder.plain(leaf.label, value), leaf) for value in values]
        if all(map(leaf.fits, arrays)):
            return np.array(arrays, leaf.dtype).reshape(len(arrays), *leaf.shape)
        packed = [self._recorder.packed(leaf.label, array) for array in arrays]
        self._complain_of(leaf)  # after the complaints about values that cannot be stored
        return packed

    def _complain_of(self, leaf: Leaf) -> None:
        complaint = "got values outside the space; recorded exactly as they are"
        self._recorder.complain(leaf.label, complaint)


def infos_by_lane(
    infos: Any,
    count: int,
    keys: Sequence[str] | None = None,
    without: Sequence[str] = (),
    chosen: Sequence[int] | None = None,
) -> list[Any]:
    """Return the info of each lane.

    Args:
        infos: a map, in which values under "key" belong to the lanes for which the mask under "_key" is true; or an
            info for each lane.
        keys: keys to keep; None for all.
        without: keys to leave out.
        chosen: the lanes to return; None for all.
    """
    chosen = range(count) if chosen is None else chosen
    if not isinstance(infos, Mapping):
        infos = [{}] * len(chosen) if infos is None else _rows(infos, count, chosen)
        return [_chosen(info, keys, without) if isinstance(info, Mapping) else info for info in infos]
    lanes: list[dict[Any, Any]] = [{} for _ in chosen]
    for key, value in _chosen(infos, keys, without).items():
        if isinstance(key, str) and key[:1] == "_" and key[1:] in infos and _mask(value, count) is not None:
            continue
        rows = _rows(value, count, chosen)
        mask = _mask(infos.get(f"_{key}"), count)
        for i in range(len(chosen)) if mask is None else mask[list(chosen)].nonzero()[0].tolist():
            lanes[i][key] = rows[i]
    return lanes


def last_of(infos: Any, names: Sequence[str], count: int) -> Any:
    """Return the value under the first of the names in infos: of all lanes, an array with one per lane, or None."""
    if isinstance(infos, Mapping):
        return next((infos[name] for name in names if infos.get(name) is not None), None)
    if not isinstance(infos, (list, tuple)) or len(infos) != count:
        return None
    found = np.full(count, None, object)
    for lane, info in enumerate(infos):
        if isinstance(info, Mapping):
            found[lane] = next((info[name] for name in names if info.get(name) is not None), None)
    return None if all(value is None for value in found) else found


def _chosen(info: Mapping[Any, Any], keys: Sequence[str] | None, without: Sequence[str]) -> Mapping[Any, Any]:
    if keys is None and not without:
        return info
    wanted = info if keys is None else {key: None for key in info if key in keys}
    return {key: info[key] for key in wanted if key not in without}


def _mask(value: Any, count: int) -> Any:
    """Return value as an array if it can be a mask of the lanes, otherwise None."""
    try:
        mask = np.asarray(value) if isinstance(value, list) else plain_array(value)
    except ValueError:  # rows of several lengths
        return None
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (count,) else None


def _rows(value: Any, count: int, chosen: Sequence[int]) -> Sequence[Any]:
    """Return the value of each chosen lane; the whole value if it has no row per lane."""
    if len(chosen) < count and _is_batch(value, count) and is_on_device(value):
        return list(taken_rows(value, np.array(chosen, np.int64), count))
    value = plain_array(value)  # convert tensors before they are indexed lane by lane
    if isinstance(value, Mapping):
        return infos_by_lane(value, count, chosen=chosen)
    if _is_batch(value, count):
        try:
            return [value[lane] for lane in chosen]
        except Exception as error:  # sparse arrays of some formats have no rows
            raise_if_of_signal(error)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value, tuple) and all(_is_batch(item, count) for item in value):  # a Tuple space
            make = getattr(value, "_make", tuple)
            return [make(row) for row in zip(*[_rows(item, count, chosen) for item in value])]
        if len(value) == count:
            return [value[lane] for lane in chosen]
    return [value] * len(chosen)


def _is_batch(value: Any, count: int) -> bool:
    """Return True if value is an array, of any library, with a row for each lane."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, Sequence):
        return len(shape) > 0 and shape[0] == count
    return False
