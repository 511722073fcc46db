"""Values in RLlib's episodes: MessagePack with arrays as the package msgpack-numpy has them, which also unpickles.

Nothing is unpickled here.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.model.containers import Containers
from gym_trace.model.values import is_plain_dtype


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
