"""Convert any value of a Gymnasium environment to MessagePack and back, losslessly and without pickle.

docs/FORMAT.md, section 6, lists the extension types.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from gym_trace.data.tensors import RawArray, is_masked, plain_array
from gym_trace.data.values import (
    ABSENT,
    EnumMember,
    Misfit,
    Unstored,
    class_name,
    dtype_from,
    is_plain_dtype,
    objects,
    shown,
    unstored,
)
from gym_trace.errors import CorruptTrace, UnstorableValue, raise_if_of_signal

NDARRAY, SCALAR, BIGINT, TUPLE, GRAPH, COMPLEX, OBJECTS, UNSTORED, MISFIT, ABSENT_CODE, MASKED, RAW, ENUM = range(1, 14)
MAX_NESTING = 16  # levels of extension types: each takes msgpack 45 kB of the C stack
MAX_CONTAINERS = 8 << 20  # containers and map entries in a column's values or a record's metadata


def pack(value: Any) -> bytes:
    """Return value as MessagePack. Raises UnstorableValue if it has no lossless form."""
    return _Packing(lenient=False).packed(value)


def pack_lenient(value: Any) -> tuple[bytes, list[str]]:
    """Return value as MessagePack, and a warning for each part replaced by a placeholder."""
    if type(value) is str and len(value) <= _SHORT:  # common: the mission of each observation
        return _pack_plain(value), []
    packing = _Packing(lenient=True)
    try:
        return packing.packed(value), packing.warnings
    except UnstorableValue:  # too deep, or an invalid key
        return pack(unstored(value)), [*packing.warnings, _warning_for(value)]


def _warning_for(value: Any) -> str:
    return f"a value of type {class_name(value)} cannot be stored; its repr is kept"


class _Packing:
    """Packs one value.

    Args:
        lenient: replace parts without a lossless form by Unstored, instead of raising.
    """

    def __init__(self, lenient: bool):
        self.warnings: list[str] = []
        self._lenient = lenient
        self._depth = -1
        self._may_be_key = False  # True if a packed value was hashable, but unpacks to an unhashable one

    def packed(self, value: Any) -> bytes:
        packed = self._packed(value)
        if self._may_be_key:
            try:
                unpack(packed)
            except CorruptTrace as error:
                raise UnstorableValue(f"a value of type {class_name(value)} cannot be stored: {error}") from error
        return packed

    def _packed(self, value: Any) -> bytes:
        self._depth += 1
        try:
            if self._depth == MAX_NESTING:
                raise UnstorableValue(f"a value of type {class_name(value)} cannot be stored: nested too deep")
            packer = msgpack.Packer(
                default=self._extension, strict_types=True, use_bin_type=True, unicode_errors="surrogatepass"
            )
            if type(value) is dict and not _SCALARS.isdisjoint(map(type, value.values())):
                return _packed_scalars(value, packer.pack)
            packed: bytes = packer.pack(value)
            return packed
        except UnstorableValue:
            raise
        except Exception as error:  # a user-defined mapping may raise anything
            raise_if_of_signal(error)
            text = " ".join(str(error).split())
            raise UnstorableValue(f"a value of type {class_name(value)} cannot be stored: {text}") from error
        finally:
            self._depth -= 1

    def _extension(self, value: Any) -> Any:
        try:
            form = self._form(value)
        except Exception as error:  # as above
            raise_if_of_signal(error)
            if not self._lenient:
                if isinstance(error, UnstorableValue):
                    raise
                raise UnstorableValue(f"a value of type {class_name(value)} cannot be stored: {error!r}") from error
            self.warnings.append(_warning_for(value))
            return msgpack.ExtType(UNSTORED, pack([class_name(value), shown(value)]))
        if type(value).__hash__ is not None and not isinstance(value, (np.generic, tuple)):
            code = form.code if type(form) is msgpack.ExtType else None
            self._may_be_key |= code in _UNHASHABLE or isinstance(form, (list, dict))
        return form

    def _form(self, value: Any) -> Any:
        """Convert a value that msgpack does not know to an extension type, or to a plain value of its base class."""
        if is_masked(value):
            if is_plain_dtype(value.dtype.str) or value.dtype == object:
                mask = None if value._mask is np.ma.nomask else value._mask
                return msgpack.ExtType(MASKED, self._packed([value.data, mask, value._fill_value]))
        elif isinstance(value, np.ndarray):
            if value.dtype.kind in "OT":
                return msgpack.ExtType(OBJECTS, self._packed([list(value.shape), value.ravel().tolist()]))
            if is_plain_dtype(value.dtype.str):
                return msgpack.ExtType(NDARRAY, _pack_plain([value.dtype.str, list(value.shape), value.tobytes()]))
            if value.dtype.kind == "V" and not value.dtype.hasobject:
                return self._form(RawArray.of(value))
        elif isinstance(value, np.generic):
            if is_plain_dtype(value.dtype.str):
                return msgpack.ExtType(SCALAR, _pack_plain([value.dtype.str, value.tobytes()]))
            if value.dtype.kind == "V" and not value.dtype.hasobject:
                return self._form(RawArray.of(value))
        elif isinstance(value, RawArray):
            return msgpack.ExtType(RAW, self._packed([value.dtype, value.data]))
        elif isinstance(value, Misfit):
            return msgpack.ExtType(MISFIT, self._packed(value.value))
        elif isinstance(value, Unstored):
            return msgpack.ExtType(UNSTORED, _pack_plain([value.class_name, value.text]))
        elif isinstance(value, EnumMember):
            return msgpack.ExtType(ENUM, self._packed(list(value)))
        elif value is ABSENT:
            return msgpack.ExtType(ABSENT_CODE, b"")
        elif isinstance(value, tuple):
            if type(value).__name__ == "GraphInstance":
                return msgpack.ExtType(GRAPH, self._packed(list(value)))
            return msgpack.ExtType(TUPLE, self._packed(list(value)))
        elif type(value) is int:
            return msgpack.ExtType(BIGINT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif isinstance(value, complex):
            return msgpack.ExtType(COMPLEX, np.array(value, "<c16").tobytes())
        else:
            for base, plain in _BASES:
                if isinstance(value, base):
                    form = plain(value)
                    is_big = base is int and not -(1 << 63) <= form < 1 << 64
                    return self._form(form) if is_big else form
            if isinstance(value, enum.Enum):
                return msgpack.ExtType(ENUM, self._packed([class_name(value), value.name, value.value]))
            if isinstance(value, Mapping):
                return dict(value)
            array = plain_array(value, self.warnings)
            if array is not value:
                return self._form(array)
        raise UnstorableValue(
            f"a value of type {class_name(value)} cannot be stored; "
            "pass numbers, text, bytes, NumPy arrays, or lists, tuples and dicts of them"
        )


# Convert an instance of a subclass to its plain value, even if it overrides __str__() or similar.
_BASES: tuple[tuple[type, Any], ...] = (
    (int, int.__int__),
    (float, float.__float__),
    (str, str.__str__),
    (bytes, lambda value: b"".join([value])),
    (list, list.copy),
)
_SHORT = 1 << 20  # characters; shorter texts are packed at once
_UNHASHABLE = (NDARRAY, OBJECTS, MASKED, RAW, ENUM)  # the value of an enum may be a list


def _pack_plain(value: list[Any] | str) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def _packed_scalars(values: dict[Any, Any], pack_one: Any) -> bytes:
    """Pack a map with NumPy scalars, such as the infos of many environments, without a callback per scalar."""
    count = len(values)
    parts = [bytes([0x80 | count]) if count < 16 else b"\xdf" + count.to_bytes(4, "big")]
    for key, value in values.items():
        parts.append(pack_one(key))
        head = _HEADS.get(type(value))
        if head is None:
            parts.append(pack_one(value))
        else:
            parts += (head, value)  # join() reads the buffer: tobytes() is several times slower
    return b"".join(parts)


def _head(dtype: np.dtype[Any]) -> bytes:
    """Return the MessagePack of a scalar without its bytes."""
    payload = _pack_plain([dtype.str, bytes(dtype.itemsize)])
    return bytes(msgpack.packb(msgpack.ExtType(SCALAR, payload))[: -dtype.itemsize])


_HEADS = {dtype.type: _head(dtype) for dtype in map(np.dtype, "?bhilqBHILQefdFD")}
_SCALARS = frozenset(_HEADS)


class Containers:
    """Remaining container budget while unpacking: lists, maps and map entries, about 100 bytes of memory each.

    Each takes at least one packed byte, so only input longer than MAX_CONTAINERS needs counting.
    """

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise CorruptTrace(f"more than {MAX_CONTAINERS} lists and maps")

    def list_hook(self, items: list[Any]) -> list[Any]:
        self.take(1)
        return items

    def object_hook(self, items: dict[Any, Any]) -> dict[Any, Any]:
        self.take(1 + len(items))
        return items


def unpack(packed: bytes | memoryview, containers: Containers | None = None) -> Any:
    """Return the value in packed, which is untrusted: no code runs, and memory is bounded. Raises CorruptTrace.

    containers: budget shared with other values.
    """
    if containers is None and len(packed) > MAX_CONTAINERS:
        containers = Containers()
    return _unpack(packed, 0, containers)


def is_readable(packed: bytes) -> bool:
    """Return True if a packed value has no more lists and maps than readers accept."""
    if len(packed) <= MAX_CONTAINERS:  # each takes at least one byte
        return True
    try:
        unpack(packed)
    except CorruptTrace:
        return False
    return True


def _unpack(packed: bytes | memoryview, depth: int, containers: Containers | None) -> Any:
    if depth == len(_UNPACK_HOOKS):
        raise CorruptTrace("a value is nested too deep")
    try:
        if containers is None:  # as for all but very large values
            return msgpack.unpackb(
                packed, ext_hook=_UNPACK_HOOKS[depth], strict_map_key=False, unicode_errors="surrogatepass"
            )
        return msgpack.unpackb(
            packed,
            list_hook=containers.list_hook,
            object_hook=containers.object_hook,
            ext_hook=lambda code, payload: _from_extension(code, payload, depth + 1, containers),
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
    except CorruptTrace:
        raise
    except Exception as error:  # msgpack and our hook raise many types on malicious data
        raise CorruptTrace(f"not a valid value: {error!s:.200}") from error


def _from_extension(code: int, payload: bytes, depth: int, containers: Containers | None = None) -> Any:
    if code == NDARRAY:
        text, shape, raw = _unpack(payload, depth, containers)
        return np.frombuffer(raw, dtype_from(text)).reshape([int(n) for n in shape]).copy()
    if code == SCALAR:
        text, raw = _unpack(payload, depth, containers)
        dtype = dtype_from(text)
        return np.frombuffer(raw, dtype, 1)[0] if dtype.itemsize else dtype.type()  # an empty text has no bytes
    if code == BIGINT:
        return int.from_bytes(payload, "little", signed=True)
    if code == TUPLE:
        return tuple(_unpack(payload, depth, containers))
    if code == GRAPH:
        return graph_of(*_unpack(payload, depth, containers))
    if code == COMPLEX:
        return complex(np.frombuffer(payload, "<c16", 1)[0])
    if code == OBJECTS:
        shape, items = _unpack(payload, depth, containers)
        return objects(items).reshape([int(n) for n in shape])
    if code == UNSTORED:
        class_name, text = _unpack(payload, depth, containers)
        return Unstored(str(class_name), str(text))
    if code == ENUM:
        class_name, name, member = _unpack(payload, depth, containers)
        return EnumMember(str(class_name), None if name is None else str(name), member)
    if code == MISFIT:
        return Misfit(_unpack(payload, depth, containers))
    if code == ABSENT_CODE:
        return ABSENT
    if code == MASKED:
        return masked_array(*_unpack(payload, depth, containers))
    if code == RAW:
        name, data = _unpack(payload, depth, containers)
        if not isinstance(name, str) or not isinstance(data, np.ndarray) or data.dtype != np.uint8 or not data.ndim:
            raise CorruptTrace("malformed array of a dtype that NumPy lacks")
        return RawArray(name, data)
    return msgpack.ExtType(code, payload)


def _unpack_hook(depth: int) -> Any:
    return lambda code, payload: _from_extension(code, payload, depth + 1)


_UNPACK_HOOKS = [_unpack_hook(depth) for depth in range(MAX_NESTING + 2)]


def masked_array(data: Any, mask: Any, fill_value: Any) -> Any:
    if type(data) is not np.ndarray or (mask is not None and (mask.dtype != np.bool_ or mask.shape != data.shape)):
        raise CorruptTrace("malformed masked array")
    array = np.ma.MaskedArray(data, np.ma.nomask if mask is None else mask)
    if fill_value is not None:
        with contextlib.suppress(Exception), np.errstate(all="ignore"):  # NumPy's default does not fit all integers
            array.fill_value = fill_value
    return array


def graph_of(nodes: Any, edges: Any, edge_links: Any) -> Any:
    from gymnasium.spaces import GraphInstance  # local: reading other traces must not import gymnasium

    return GraphInstance(nodes, edges, edge_links)
