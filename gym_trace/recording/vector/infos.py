"""Infos of vector environments, taken apart into those of single lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gym_trace.errors import raise_if_of_signal
from gym_trace.model.tensors import plain_array


def infos_by_lane(infos: Any, count: int, keys: Sequence[str] | None = None, without: Sequence[str] = ()) -> list[Any]:
    """The info of each lane.

    Args:
        infos: a map, in which values under "key" belong to the lanes for which the mask under "_key" is true; or an
            info for each lane.
        keys: of what is wanted; None for all.
        without: of what is not.
    """
    if not isinstance(infos, Mapping):
        infos = [{}] * count if infos is None else _rows(infos, count)
        return [_chosen(info, keys, without) if isinstance(info, Mapping) else info for info in infos]
    lanes: list[Any] = [{} for _ in range(count)]
    for key, value in _chosen(infos, keys, without).items():
        if isinstance(key, str) and key[:1] == "_" and key[1:] in infos and _mask(value, count) is not None:
            continue
        rows = _rows(value, count)
        mask = _mask(infos.get(f"_{key}"), count)
        for lane in range(count) if mask is None else mask.nonzero()[0].tolist():
            lanes[lane][key] = rows[lane]
    return lanes


def last_of(infos: Any, names: Sequence[str], count: int) -> Any:
    """What infos have under the first of the names that is there: for all lanes, or an array of one a lane, or None."""
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
    """value as an array, if it can be a mask of the lanes."""
    try:
        mask = np.asarray(value) if isinstance(value, list) else plain_array(value)
    except ValueError:  # rows of several lengths
        return None
    return mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ and mask.shape == (count,) else None


def _rows(value: Any, count: int) -> Sequence[Any]:
    """What each lane has of a value; all of it, where it is not one of each lane."""
    value = plain_array(value)  # also of tensors, before they are indexed lane by lane
    if isinstance(value, Mapping):
        return infos_by_lane(value, count)
    if _is_batch(value, count):
        try:
            return [value[lane] for lane in range(count)]
        except Exception as error:  # anything: sparse arrays of some formats have no rows
            raise_if_of_signal(error)
    if isinstance(value, (list, tuple)):
        if value and isinstance(value, tuple) and all(_is_batch(item, count) for item in value):  # of a Tuple space
            make = getattr(value, "_make", tuple)
            return [make(row) for row in zip(*[_rows(item, count) for item in value])]
        if len(value) == count:
            return value
    return [value] * count


def _is_batch(value: Any, count: int) -> bool:
    """Whether value is an array, of whatever library, that has a row for each lane."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, Sequence):
        return len(shape) > 0 and shape[0] == count
    return False
