"""Values in RLlib's episodes: MessagePack with arrays as the package msgpack-numpy has them, which also unpickles.

Nothing is unpickled here, and nothing is written that msgpack-numpy would unpickle.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.model.containers import Containers
from gym_trace.model.values import is_plain_dtype, shown

_KINDS = "biufcSUmM"  # of arrays without objects
_DEEPEST = 100
_PLAIN = frozenset((type(None), bool, float, bytes))


def packed(value: Any) -> bytes:
    """A plain value as MessagePack. Raises TypeError for another one."""
    done: bytes = msgpack.packb(value, default=_encoded, strict_types=True)
    return done


def _encoded(value: Any) -> Any:
    if type(value) is np.ndarray and value.dtype.kind in _KINDS:
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b""
        return {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": list(value.shape), b"data": data}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"a value of type {type(value).__name__}")


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether RLlib reads such a value as it is: no tuples, nor keys that are not text."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if kind is str:
        return bool(value.isascii()) or _is_unicode(value)
    if kind is int:
        return bool(-(1 << 63) <= value < 1 << 64)
    if depth > _DEEPEST:
        return False
    if kind is list:
        return all(is_plain(item, depth + 1) for item in value)
    if kind is dict:
        return all(type(key) is str and is_plain(key) and is_plain(item, depth + 1) for key, item in value.items())
    if kind is np.ndarray:
        return value.dtype.kind in _KINDS
    return isinstance(value, np.generic) and value.dtype.kind in "biufc"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_plain(value: Any, depth: int = 0) -> Any:
    """What RLlib can read in the place of a value: tuples become lists, keys text, what is unknown its repr."""
    if is_plain(value, depth):
        return value
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [as_plain(item, depth + 1) for item in value]
    if depth < _DEEPEST and isinstance(value, dict):
        return {_as_text(key): as_plain(item, depth + 1) for key, item in value.items()}
    return _as_text(value)


def _as_text(value: Any) -> str:
    return (value if isinstance(value, str) else shown(value)).encode(errors="replace").decode()


def unpacked(data: bytes) -> Any:
    """The value in MessagePack that may come from anybody. Raises UnreadableRecording."""
    try:
        known = Containers()
        return msgpack.unpackb(
            data,
            list_hook=known.list_hook,
            object_hook=lambda found: _decoded(known.object_hook(found)),
            strict_map_key=True,
        )
    except UnreadableRecording:
        raise
    except CorruptTrace as error:
        raise UnreadableRecording(f"no episode that is read: {error.problem}") from error
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise UnreadableRecording(f"no MessagePack of an episode: {error!r:.100}") from error


def _decoded(found: dict[Any, Any]) -> Any:
    if b"nd" in found:
        return _array(found)
    if b"complex" in found:
        return complex(str(found[b"data"]))
    return found


def _array(found: dict[Any, Any]) -> Any:
    if found.get(b"kind") == b"O":
        raise UnreadableRecording(
            "an array of Python objects, which is pickled; unpickling runs whatever is in a file, so it is not done"
        )
    text, data = found[b"type"], found[b"data"]
    if not is_plain_dtype(text) or not isinstance(data, bytes):
        raise UnreadableRecording(f"an array of dtype {text!r:.60}")
    dtype = np.dtype(text)
    if found[b"nd"] is not True:
        return np.frombuffer(data, dtype)[0]
    shape = tuple(found[b"shape"])
    if not all(type(size) is int and size >= 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise UnreadableRecording(f"an array of shape {shape!r:.60} that has {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)
