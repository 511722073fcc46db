"""Spaces as RLlib writes them into episodes (ray.rllib.utils.serialization.gym_space_to_dict)."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from gym_trace.errors import UnreadableRecording
from gym_trace.model.values import Array

_MOST_BYTES = 64 << 20  # of one array
_DEEPEST = 32


def space_told(told: Any) -> Space[Any] | None:
    """The space that RLlib has told; None where it told none, or one that is not known here.

    Raises UnreadableRecording if what it told is malformed.
    """
    try:
        return _space(told, 0)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, zlib.error) as error:
        raise UnreadableRecording(f"what is said of a space is malformed: {error!r:.100}") from error


def _space(told: Any, depth: int) -> Space[Any] | None:
    if told is None:
        return None
    if depth > _DEEPEST:
        raise ValueError("nested too deep")
    kind = told["space"]
    if kind == "dict":
        members: dict[str, Any] = {key: _space(member, depth + 1) for key, member in told["spaces"].items()}
        return None if None in members.values() else spaces.Dict(members)
    if kind == "tuple":
        parts: list[Any] = [_space(part, depth + 1) for part in told["spaces"]]
        return None if None in parts else spaces.Tuple(parts)
    made = _MADE.get(kind)
    return None if made is None else made(told)


def _told_box(told: dict[str, Any]) -> Space[Any]:
    dtype = np.dtype(told["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"a Box of {dtype}")
    low, high = (np.broadcast_to(_array_told(told[name]), told["shape"]) for name in ("low", "high"))
    return spaces.Box(low.astype(dtype), high.astype(dtype), tuple(told["shape"]), dtype.type)


_MADE: dict[str, Any] = {
    "box": _told_box,
    "discrete": lambda told: spaces.Discrete(told["n"], start=told.get("start", 0)),
    "multi-binary": lambda told: spaces.MultiBinary(told["n"]),
    "multi-discrete": lambda told: spaces.MultiDiscrete(_array_told(told["nvec"]), dtype=np.dtype(told["dtype"]).type),
    "text": lambda told: spaces.Text(told["max_length"], min_length=told["min_length"], charset=told["charset"]),
}


def _array_told(text: str) -> Array:
    packed = base64.b64decode(text, validate=True)
    unpacker = zlib.decompressobj()
    raw = unpacker.decompress(packed, _MOST_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError("an array that is too large")
    return np.lib.format.read_array(io.BytesIO(raw))  # which reads no objects
