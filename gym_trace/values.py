"""Any value a Gymnasium environment hands out, as MessagePack and back, exactly and without pickle.

docs/FORMAT.md, section 6, lists the extension types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np
import numpy.typing as npt

from gym_trace.errors import CorruptTrace, UnstorableValue

Array = npt.NDArray[Any]

NDARRAY, SCALAR, BIGINT, TUPLE, GRAPH, COMPLEX, OBJECTS, UNSTORED, MISFIT, ABSENT_CODE = range(1, 11)
MAX_NESTING = 16  # of extension types in each other: msgpack takes 45 kB of the C stack, which is short, for each
_DTYPE = re.compile(r"[<>|][biufc]\d{1,3}|[<>|][SU]\d{1,7}|[<>][mM]8(\[[0-9a-zA-Z]{1,12}\])?")


class Misfit(NamedTuple):
    """An observation or action that does not have the structure of its space."""

    value: Any


class Unstored(NamedTuple):
    """Stands for a value that could not be stored: its class and its repr."""

    class_name: str
    text: str


class _Absent:
    """The one value ABSENT: nothing was given for this row."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def is_plain_dtype(text: object) -> bool:
    """Whether text names a dtype that is allowed in a trace; no objects, no structures, no nesting."""
    return isinstance(text, str) and _DTYPE.fullmatch(text) is not None


def dtype_from(text: object) -> np.dtype[Any]:
    """The dtype named in a file. Raises CorruptTrace."""
    if not is_plain_dtype(text):
        raise CorruptTrace(f"not a dtype: {text!r:.60}")
    try:
        return np.dtype(str(text))
    except TypeError as error:
        raise CorruptTrace(f"not a dtype: {text!r}") from error


def plain_array(value: Any) -> Any:
    """The NumPy array in lazy frames, a tensor, or an array of a subclass; any other value as it is."""
    if type(value) is np.ndarray or isinstance(value, np.generic) or not hasattr(value, "__array__"):
        return value
    try:
        array = np.asarray(value)
    except Exception:  # anything: other people's code runs here
        return value
    return value if array.dtype == object and not isinstance(value, np.ndarray) else array


def copied(value: Any) -> Any:
    """An equal value that shares no mutable memory with value; immutable and unknown objects as they are."""
    value = plain_array(value)
    kind = type(value)
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return objects([copied(item) for item in value.ravel()]).reshape(value.shape)
        return np.array(value, order="C", copy=True, subok=False)
    if kind in (list, tuple):
        return kind(copied(item) for item in value)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(copied(item) for item in value))
    return value


def pack(value: Any) -> bytes:
    """value as MessagePack. Raises UnstorableValue for what has no exact form."""
    return _pack(value, _PACK_HOOKS[0])


def _pack_nested(value: Any, depth: int) -> bytes:
    if depth == MAX_NESTING:
        raise UnstorableValue(f"a value of type {_class_name(value)} cannot be stored: tuples more than {depth} deep")
    return _pack(value, _PACK_HOOKS[depth])


def pack_lenient(value: Any) -> tuple[bytes, list[str]]:
    """value as MessagePack, with placeholders for what has no exact form; also the names of the classes replaced."""
    replaced: list[str] = []

    def default(item: Any) -> Any:
        try:
            return to_extension(item, pack_item)
        except UnstorableValue:
            replaced.append(_class_name(item))
            return msgpack.ExtType(UNSTORED, pack([_class_name(item), _shown(item)]))

    depth = -1

    def pack_item(item: Any) -> bytes:
        nonlocal depth
        depth += 1
        try:
            if depth >= MAX_NESTING:
                raise UnstorableValue
            return _pack(item, default)
        finally:
            depth -= 1

    try:
        return pack_item(value), replaced
    except UnstorableValue:  # too deep, or a key that cannot be one
        return pack(msgpack.ExtType(UNSTORED, pack([_class_name(value), _shown(value)]))), [_class_name(value)]


def _pack(value: Any, default: Any) -> bytes:
    try:
        packed: bytes = packer(default).pack(value)
        return packed
    except (ValueError, RecursionError, TypeError, OverflowError) as error:
        if isinstance(error, UnstorableValue):
            raise
        raise UnstorableValue(f"a value of type {_class_name(value)} cannot be stored: {error}") from error


def packer(default: Any) -> Any:
    """A MessagePack packer that hands what is not plain to default."""
    return msgpack.Packer(default=default, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass")


def to_extension(value: Any, pack_item: Any = pack) -> Any:
    """What msgpack does not know, as one of our extension types or as a plain value of its base class."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject and value.dtype == np.dtype(object):
            return msgpack.ExtType(OBJECTS, pack_item([list(value.shape), value.ravel().tolist()]))
        if is_plain_dtype(value.dtype.str):
            return msgpack.ExtType(NDARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))
    elif isinstance(value, np.generic):
        if is_plain_dtype(value.dtype.str):
            return msgpack.ExtType(SCALAR, pack([value.dtype.str, value.tobytes()]))
    elif isinstance(value, Misfit):
        return msgpack.ExtType(MISFIT, pack_item(value.value))
    elif isinstance(value, Unstored):
        return msgpack.ExtType(UNSTORED, pack([value.class_name, value.text]))
    elif value is ABSENT:
        return msgpack.ExtType(ABSENT_CODE, b"")
    elif isinstance(value, tuple):
        if type(value).__name__ == "GraphInstance":
            return msgpack.ExtType(GRAPH, pack_item(list(value)))
        return msgpack.ExtType(TUPLE, pack_item(list(value)))
    elif type(value) is int:
        return msgpack.ExtType(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    elif isinstance(value, complex):
        return msgpack.ExtType(COMPLEX, np.array(value, "<c16").tobytes())
    else:
        bases: tuple[Any, ...] = (int, float, str, bytes, list)
        for base in bases:
            if isinstance(value, base):
                plain = base(value)
                beyond = base is int and not -(1 << 63) <= plain < 1 << 64
                return to_extension(plain) if beyond else plain
        if isinstance(value, Mapping):
            return dict(value)
        array = plain_array(value)
        if array is not value:
            return to_extension(array, pack_item)
    raise UnstorableValue(
        f"a value of type {_class_name(value)} cannot be stored; "
        "give numbers, text, bytes, NumPy arrays, or lists, tuples and dicts of them"
    )


def _pack_hook(depth: int) -> Any:
    return lambda value: to_extension(value, lambda item: _pack_nested(item, depth + 1))


_PACK_HOOKS = [_pack_hook(depth) for depth in range(MAX_NESTING)]


def _shown(value: Any) -> str:
    try:
        return repr(value)[:1000]
    except Exception as error:  # anything: other people's code runs here
        return f"repr raised {type(error).__name__}"


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def unpack(packed: bytes | memoryview) -> Any:
    """The value in packed. Nothing of it is trusted: raises CorruptTrace, runs nothing, takes bounded memory."""
    return _unpack(packed, 0)


def _unpack(packed: bytes | memoryview, depth: int) -> Any:
    limit = len(packed)
    if depth == len(_UNPACK_HOOKS):
        raise CorruptTrace("a value is nested too deep")
    try:
        return msgpack.unpackb(
            packed,
            ext_hook=_UNPACK_HOOKS[depth],
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_str_len=limit,
            max_bin_len=limit,
            max_ext_len=limit,
            max_array_len=limit,
            max_map_len=limit,
        )
    except CorruptTrace:
        raise
    except Exception as error:  # msgpack raises many kinds, and what our hook does with hostile data raises more
        raise CorruptTrace(f"not a valid value: {error}") from error


def _from_extension(code: int, payload: bytes, depth: int) -> Any:
    if code == NDARRAY:
        text, shape, raw = _unpack(payload, depth)
        return np.frombuffer(raw, dtype_from(text)).reshape([int(n) for n in shape]).copy()
    if code == SCALAR:
        text, raw = _unpack(payload, depth)
        dtype = dtype_from(text)
        return np.frombuffer(raw, dtype, 1)[0] if dtype.itemsize else dtype.type()  # an empty text has no bytes
    if code == BIGINT:
        return int.from_bytes(payload, "little", signed=True)
    if code == TUPLE:
        return tuple(_unpack(payload, depth))
    if code == GRAPH:
        return _graph(*_unpack(payload, depth))
    if code == COMPLEX:
        return complex(np.frombuffer(payload, "<c16", 1)[0])
    if code == OBJECTS:
        shape, items = _unpack(payload, depth)
        return objects(items).reshape([int(n) for n in shape])
    if code == UNSTORED:
        class_name, text = _unpack(payload, depth)
        return Unstored(str(class_name), str(text))
    if code == MISFIT:
        return Misfit(_unpack(payload, depth))
    if code == ABSENT_CODE:
        return ABSENT
    return msgpack.ExtType(code, payload)


def _unpack_hook(depth: int) -> Any:
    return lambda code, payload: _from_extension(code, payload, depth + 1)


_UNPACK_HOOKS = [_unpack_hook(depth) for depth in range(MAX_NESTING + 2)]


def _graph(nodes: Any, edges: Any, edge_links: Any) -> Any:
    from gymnasium.spaces import GraphInstance  # here, so that reading other traces does not load gymnasium

    return GraphInstance(nodes, edges, edge_links)


def objects(items: list[Any]) -> Array:
    """A one-dimensional array of dtype object that holds items as they are."""
    array = np.empty(len(items), object)
    array[:] = items if not any(hasattr(item, "__len__") for item in items) else _one_by_one(items)
    return array


def _one_by_one(items: list[Any]) -> Array:
    array = np.empty(len(items), object)
    for i, item in enumerate(items):
        array[i] = item
    return array


def row_of(batch: Any, index: int) -> Any:
    """One value of a batch of arrays, or dicts and tuples of them; its arrays are the caller's own."""
    if isinstance(batch, dict):
        return {key: row_of(value, index) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(value, index) for value in batch)
    row = batch[index]
    return row.copy() if isinstance(row, np.ndarray) else row
