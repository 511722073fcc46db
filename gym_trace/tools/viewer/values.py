"""Recorded values as JSON for a person to read: NaN as text, large arrays by dtype and shape."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np

from gym_trace.data.values import EnumMember, Misfit, Unstored
from gym_trace.printable import integer, key_text, shown

MOST_NUMBERS = 64  # limit of a listed array
_MOST_ITEMS = 256  # limit of a list or map
_DEEPEST = 16  # levels of nested values
_MOST_CHARACTERS = 4096  # limit of a text
_SAFE = 1 << 53  # numbers of JavaScript are exact below


def to_json(value: Any, depth: int = 0) -> Any:
    """Return a recorded value as JSON: numbers short but exact, other values abbreviated if they are long."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < _SAFE else integer(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return value if len(value) <= _MOST_CHARACTERS else value[:_MOST_CHARACTERS] + "…"
    if isinstance(value, np.generic):
        return _of_array(np.asarray(value))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _of_array(value) if value.size <= MOST_NUMBERS else array_text(value.dtype, value.shape)
    if isinstance(value, Misfit):
        return to_json(value.value, depth)
    if isinstance(value, (EnumMember, Unstored)):
        return shown(value, 1000)
    if depth < _DEEPEST:
        if isinstance(value, dict):
            items = islice(value.items(), _MOST_ITEMS)
            listed = {key_text(key)[:_MOST_CHARACTERS]: to_json(item, depth + 1) for key, item in items}
            return listed | ({"…": f"{len(value)} entries"} if len(value) > _MOST_ITEMS else {})
        if isinstance(value, (list, tuple, np.ndarray)):
            listed_items = [to_json(item, depth + 1) for item in islice(value, _MOST_ITEMS)]
            return listed_items + (["…"] if len(value) > _MOST_ITEMS else [])
    return shown(value, 1000)


def array_text(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Return the text that stands for an array that is too large to be listed."""
    return f"{dtype} array {shape}"


def _of_array(array: Any) -> Any:
    if array.ndim:
        return [_of_array(row) for row in array]
    if array.dtype.kind == "f" and array.dtype.itemsize < 8:
        return _number(float(str(array[()])))  # the shortest text of a float32 is not that of its double
    value = array.item()
    return to_json(value) if isinstance(value, (bool, int, float, str)) else shown(value, 1000)


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
