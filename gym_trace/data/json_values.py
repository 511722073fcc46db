"""Any value of a trace as JSON, and back, bit for bit (docs/reference/steps.md).

A row of a column with a declared dtype and shape is written as numbers alone. Any other value becomes a map with one
key, a tag that begins with "$". JSON to read may be untrusted.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgpack
import numpy as np

from gym_trace.data.packing import graph_of, masked_array
from gym_trace.data.tensors import RawArray, is_masked
from gym_trace.data.values import ABSENT, Array, EnumMember, Misfit, Unstored, dtype_from, objects, shown
from gym_trace.errors import CorruptTrace, UnreadableRecording

MOST_NUMBERS = 4096  # an array with more numbers is written in base64
# Dtypes written as JSON numbers, as np.dtype.str without its byte order.
NUMBERS = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"])
_ENCODED = json.JSONEncoder(allow_nan=False).encode
_INT64, _UINT64 = -(1 << 63), 1 << 64


def json_text(value: Any) -> str:
    """Encode a JSON value as text: strict, ASCII, on one line, and without a control character."""
    return _ENCODED(value).replace("\x7f", "\\u007f")  # the control character that JSON does not escape


class Form(NamedTuple):
    """The declared form of the rows of a column."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def is_base64(self) -> bool:
        """True if arrays are written as base64: they are large, or JSON lacks their numbers."""
        return self.dtype.str[1:] not in NUMBERS or math.prod(self.shape) > MOST_NUMBERS

    def declared(self) -> dict[str, Any]:
        return {"dtype": self.dtype.str, "shape": list(self.shape)} | ({"base64": True} if self.is_base64 else {})


def rows_of(rows: Array, form: Form | None) -> list[Any]:
    """Return each row as a JSON value. form: the declared form; None: undeclared."""
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
        return list(rows.tolist())
    plain = rows.astype(object)
    for index in zip(*np.nonzero(~np.isfinite(rows))):
        plain[index] = _not_finite(rows[index])
    return list(plain.tolist())


def _not_finite(number: Any) -> str:
    """Return NaN, Infinity or -Infinity; for a NaN with other bits than np.nan, also its bits: NaN:7ff0000000000001."""
    if np.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    if number.tobytes() == number.dtype.type(np.nan).tobytes():
        return "NaN"
    return f"NaN:{np.asarray(number)[None].astype(number.dtype.newbyteorder('>')).tobytes().hex()}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def tagged(value: Any) -> Any:
    """Return the JSON form of any value that a trace can hold."""
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
    """Return True if a map with these keys is a plain JSON map, which readers cannot mistake for a tagged value."""
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


# -- from JSON --------------------------------------------------------------------------------------------------------

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_DIMENSIONS = 32
_MOST_COLLISIONS = 1000  # keys of a map with one hash


def untagged(plain: Any) -> Any:
    """Return the value from the result of tagged(). Raises UnreadableRecording."""
    try:
        return _value(plain)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, CorruptTrace) as error:
        raise UnreadableRecording(f"malformed value ({error!r:.100})") from error


def array_from(plain: Any, dtype: Any, shape: Any) -> Array:
    """Return an array of a dtype and shape from its JSON (see rows_of). Raises ValueError, TypeError, CorruptTrace."""
    kind = dtype_from(dtype)
    sizes = tuple(shape)
    if len(sizes) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("invalid shape")
    if isinstance(plain, str) and plain not in _SPECIAL and not plain.startswith("NaN:"):
        return np.frombuffer(bytearray(base64.b64decode(plain, validate=True)), kind).reshape(sizes)
    array = np.array(plain, object)
    if array.size != math.prod(sizes):
        raise ValueError("array of a shape other than declared")
    flat, texts = array.ravel(), {}
    for index, number in enumerate(flat.tolist()):
        if isinstance(number, str):
            texts[index] = number
            flat[index] = 0
        elif type(number) not in (bool, int, float):
            raise TypeError("array with values other than numbers")
    numbers = np.array(flat.tolist(), kind)
    for index, text in texts.items():
        numbers[index] = _special(text, kind)
    return numbers.reshape(sizes)


def _special(text: str, kind: np.dtype[Any]) -> Any:
    if text in _SPECIAL:
        return kind.type(_SPECIAL[text])
    raw = bytes.fromhex(text[4:]) if text.startswith("NaN:") and kind.kind == "f" else b""
    if len(raw) != kind.itemsize:
        raise ValueError("invalid number for its dtype")
    return np.frombuffer(raw, kind.newbyteorder(">")).astype(kind)[0]


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return list(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        [(tag, content)] = plain.items()
        if tag.startswith("$"):
            return _OF_PARTS[tag](*content) if tag in _OF_PARTS else _OF_ONE[tag](content)
    return dict(zip(plain, map(_value, plain.values())))


def map_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a map. Raises ValueError for too many colliding keys, which take quadratic time."""
    known = list(pairs)
    if len(known) > _MOST_COLLISIONS and max(Counter(hash(key) for key, _ in known).values()) > _MOST_COLLISIONS:
        raise ValueError("map with too many colliding keys")
    return dict(known)


def _raw(name: Any, data: Any) -> RawArray:
    array = _value(data)
    if not (isinstance(name, str) and isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim):
        raise TypeError("invalid bytes of an array")
    return RawArray(name, array)


_OF_PARTS: dict[str, Callable[..., Any]] = {
    "$scalar": lambda dtype, number: array_from(number, dtype, ())[()],
    "$array": lambda dtype, shape, numbers: array_from(numbers, dtype, shape),
    "$objects": lambda shape, values: objects(list(map(_value, values))).reshape(shape),
    "$masked": lambda *parts: masked_array(*map(_value, parts)),
    "$raw": _raw,
    "$graph": lambda *parts: graph_of(*map(_value, parts)),
    "$complex": lambda real, imaginary: complex(_value(real), _value(imaginary)),
    "$unstored": lambda name, text: Unstored(str(name), str(text)),
    "$enum": lambda kind, name, value: EnumMember(str(kind), None if name is None else str(name), _value(value)),
    "$extension": lambda code, data: msgpack.ExtType(code, base64.b64decode(data, validate=True)),
}
_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(_value, items)),
    "$map": lambda pairs: map_of((_value(key), _value(item)) for key, item in pairs),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$int": lambda text: int(text, 16),
    "$float": lambda text: float(_special(text, np.dtype(np.float64))),
    "$value": lambda value: Misfit(_value(value)),
    "$absent": lambda _: ABSENT,
    "$unknown": lambda text: Unstored("", str(text)),
}
