"""Values that were written as JSON (docs/STEPS.md), had back bit for bit. The text may be anybody's."""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.model.packing import graph_of, masked_array
from gym_trace.model.tensors import RawArray
from gym_trace.model.values import ABSENT, Array, EnumMember, Misfit, Unstored, dtype_from, objects

_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_MOST_DIMENSIONS = 32
_MOST_ALIKE = 1000


def untagged(plain: Any) -> Any:
    """The value that tagged() was given. Raises UnreadableRecording."""
    try:
        return _value(plain)
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError, CorruptTrace) as error:
        raise UnreadableRecording(f"a value is malformed ({error!r:.100})") from error


def array_from(plain: Any, dtype: Any, shape: Any) -> Array:
    """The array of a dtype and shape, given as rows_of() has written it. Raises ValueError, TypeError, CorruptTrace."""
    kind = dtype_from(dtype)
    sizes = tuple(shape)
    if len(sizes) > _MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError("invalid shape")
    if isinstance(plain, str) and plain not in _SPECIAL and not plain.startswith("NaN:"):
        return np.frombuffer(bytearray(base64.b64decode(plain, validate=True)), kind).reshape(sizes)
    array = np.array(plain, object)
    if array.size != math.prod(sizes):
        raise ValueError("an array of another shape than is said")
    flat, texts = array.ravel(), {}
    for place, number in enumerate(flat.tolist()):
        if isinstance(number, str):
            texts[place] = number
            flat[place] = 0
        elif type(number) not in (bool, int, float):
            raise TypeError("an array with other values than numbers")
    numbers = np.array(flat.tolist(), kind)
    for place, text in texts.items():
        numbers[place] = _not_finite(text, kind)
    return numbers.reshape(sizes)


def _not_finite(text: str, kind: np.dtype[Any]) -> Any:
    if text in _SPECIAL:
        return kind.type(_SPECIAL[text])
    if not text.startswith("NaN:") or kind.kind != "f":
        raise ValueError("an array with other values than numbers")
    raw = bytes.fromhex(text[4:])
    return np.frombuffer(raw, kind.newbyteorder(">")).astype(kind)[0] if len(raw) == kind.itemsize else _refuse()


def _refuse() -> Any:
    raise ValueError("a number of another size than its dtype")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return list(map(_value, plain))
    if not isinstance(plain, dict):
        return plain
    if len(plain) == 1:
        [(tag, content)] = plain.items()
        if tag.startswith("$"):
            return _FORMS[tag](content)
    return dict(zip(plain, map(_value, plain.values())))


def map_of(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map. Raises ValueError for very many keys of one hash, which were made for a map to take for ever."""
    known = list(pairs)
    if len(known) > _MOST_ALIKE and max(Counter(hash(key) for key, _ in known).values()) > _MOST_ALIKE:
        raise ValueError("a map of too many keys that are alike")
    return dict(known)


def _scalar(content: Any) -> Any:
    dtype, number = content
    return array_from(number, dtype, ())[()]


def _array(content: Any) -> Any:
    dtype, shape, numbers = content
    return array_from(numbers, dtype, shape)


def _objects(content: Any) -> Any:
    shape, values = content
    return objects(list(map(_value, values))).reshape(shape)


def _float(text: Any) -> float:
    return float(_not_finite(text, np.dtype(np.float64)))


def _raw(content: Any) -> RawArray:
    name, data = content
    array = _value(data)
    if not (isinstance(name, str) and isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim):
        raise TypeError("the bytes of an array")
    return RawArray(name, array)


def _bytes(text: Any) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(pair: Any) -> complex:
    real, imaginary = map(_value, pair)
    return complex(real, imaginary)


def _unstored(pair: Any) -> Unstored:
    name, text = pair
    return Unstored(str(name), str(text))


def _enum(three: Any) -> EnumMember:
    class_name, name, value = three
    return EnumMember(str(class_name), None if name is None else str(name), _value(value))


def _extension(pair: Any) -> Any:
    code, data = pair
    return msgpack.ExtType(code, _bytes(data))


_FORMS: dict[str, Callable[[Any], Any]] = {
    "$scalar": _scalar,
    "$array": _array,
    "$objects": _objects,
    "$masked": lambda content: masked_array(*map(_value, content)),
    "$raw": _raw,
    "$tuple": lambda content: tuple(map(_value, content)),
    "$graph": lambda content: graph_of(*map(_value, content)),
    "$map": lambda content: map_of((_value(key), _value(item)) for key, item in content),
    "$bytes": _bytes,
    "$int": lambda text: int(text, 16),
    "$float": _float,
    "$complex": _complex,
    "$value": lambda content: Misfit(_value(content)),
    "$unstored": _unstored,
    "$enum": _enum,
    "$absent": lambda _: ABSENT,
    "$extension": _extension,
    "$unknown": lambda text: Unstored("", str(text)),
}
