"""Any value of a trace as JSON has it, and so that it can be had back, bit for bit (docs/STEPS.md).

A row of a column whose dtype and shape were declared is numbers alone. All other values say themselves what they are,
in a map with one key that begins with "$".
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from gym_trace.model.tensors import RawArray, is_masked
from gym_trace.model.values import ABSENT, Array, EnumMember, Misfit, Unstored, shown

MOST_NUMBERS = 4096  # of an array that are written one by one; a larger one is in base64
NUMBERS = frozenset(
    ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
)  # as np.dtype.str has them
_ENCODED = json.JSONEncoder(allow_nan=False).encode
_INT64, _UINT64 = -(1 << 63), 1 << 64


def json_text(value: Any) -> str:
    """Encode a JSON value as text: strict, ASCII, on one line, and without a control character."""
    return _ENCODED(value).replace("\x7f", "\\u007f")  # the one that JSON leaves as it is


class Form(NamedTuple):
    """The declared form of the rows of a column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def is_base64(self) -> bool:
        """Return True if an array is written as base64: a large one, or one of other values than numbers."""
        return self.dtype.str[1:] not in NUMBERS or math.prod(self.shape) > MOST_NUMBERS

    def declared(self) -> dict[str, Any]:
        """As JSON."""
        return {"dtype": self.dtype.str, "shape": list(self.shape)} | ({"base64": True} if self.is_base64 else {})


def rows_of(rows: Array, form: Form | None) -> list[Any]:
    """Each row as JSON can have it. form: what was declared; None: nothing."""
    if form is None:
        return list(map(tagged, rows))
    if rows.dtype == form.dtype and rows.shape[1:] == form.shape:
        return _numbers(rows, form)
    return [_row_of(row, form) for row in rows]


def _row_of(row: Any, form: Form) -> Any:
    is_array = type(row) is np.ndarray or isinstance(row, np.generic)
    if is_array and row.dtype == form.dtype and row.shape == form.shape:
        return _numbers(np.asarray(row)[None], form)[0]
    return {"$value": tagged(row)}


def _numbers(rows: Array, form: Form) -> list[Any]:
    if form.is_base64:
        return [_base64(row.tobytes()) for row in rows]
    if form.dtype.kind != "f" or np.isfinite(rows).all():
        return rows.tolist()  # type: ignore[no-any-return]
    plain = rows.astype(object)
    for place in zip(*np.nonzero(~np.isfinite(rows))):
        plain[place] = _not_finite(rows[place])
    return plain.tolist()  # type: ignore[no-any-return]


def _not_finite(number: Any) -> str:
    """NaN, Infinity, -Infinity; of any other NaN than NumPy's usual one also its bits, as NaN:7ff0000000000001."""
    if np.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    if number.tobytes() == number.dtype.type(np.nan).tobytes():
        return "NaN"
    return f"NaN:{np.asarray(number)[None].astype(number.dtype.newbyteorder('>')).tobytes().hex()}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tagged(value: Any) -> Any:
    """Any value that a trace can hold, as JSON can have it."""
    try:
        return _tagged(value)
    except RecursionError:
        return {"$unknown": "a value that is nested too deep"}


def _tagged(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind in _TAGS:
        return _TAGS[kind](value)
    if isinstance(value, np.generic):
        return {"$scalar": [value.dtype.str, _row_of(value, Form(value.dtype, ()))]}
    if is_masked(value):
        mask = None if value.mask is np.ma.nomask else _tagged(value.mask)
        return {"$masked": [_tagged(value.data), mask, _tagged(value._fill_value)]}
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return {"$objects": [list(value.shape), list(map(_tagged, value.ravel().tolist()))]}
        return {"$array": [value.dtype.str, list(value.shape), _row_of(value, Form(value.dtype, value.shape))]}
    if kind.__name__ == "GraphInstance":
        return {"$graph": list(map(_tagged, value))}
    return {"$unknown": shown(value)}


def _integer(value: int) -> Any:
    return value if _INT64 <= value < _UINT64 else {"$int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": _not_finite(np.float64(value))}


def is_plain_map(keys: Iterable[Any]) -> bool:
    """Return True if a map of these keys is a plain JSON map that no reader takes for a tagged value."""
    return all(type(key) is str and not key.startswith("$") for key in keys)


def _map(value: dict[Any, Any]) -> Any:
    if is_plain_map(value):
        return dict(zip(value, map(_tagged, value.values())))
    return {"$map": [[_tagged(key), _tagged(item)] for key, item in value.items()]}


_TAGS: dict[type, Callable[[Any], Any]] = {
    int: _integer,
    float: _float,
    list: lambda value: list(map(_tagged, value)),
    dict: _map,
    tuple: lambda value: {"$tuple": list(map(_tagged, value))},
    bytes: lambda value: {"$bytes": _base64(value)},
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    Misfit: lambda value: {"$value": _tagged(value.value)},
    Unstored: lambda value: {"$unstored": [value.class_name, value.text]},
    EnumMember: lambda value: {"$enum": [value.class_name, value.name, _tagged(value.value)]},
    RawArray: lambda value: {"$raw": [value.dtype, _tagged(value.data)]},
    type(ABSENT): lambda _: {"$absent": True},
    msgpack.ExtType: lambda value: {"$extension": [value.code, _base64(value.data)]},
}
