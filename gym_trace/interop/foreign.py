"""Files of strangers, and the widest spaces that their arrays can be of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.errors import UnreadableRecording
from gym_trace.format.manifest import is_bomb
from gym_trace.model.layout import PlainSpace, to_array_map

_MOST_JSON = 64 << 20  # bytes


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. Raises UnreadableRecording."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_JSON + 1)
        said = None if len(raw) > _MOST_JSON or is_bomb(raw) else json.loads(raw)
    except OSError as error:
        raise UnreadableRecording(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise UnreadableRecording(f"{path}: is no JSON object, or too large")
    return said


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file does; no, if there is none that can be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False


def widest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    """The Box of all values of a dtype, of booleans, integers or floats."""
    bounds: tuple[Any, Any] = (-np.inf, np.inf)
    if dtype.kind in "iu":
        bounds = (np.iinfo(dtype).min, np.iinfo(dtype).max)
    elif dtype.kind == "b":
        bounds = (False, True)
    dtype = dtype.newbyteorder("<")
    low, high = (to_array_map(np.array(bound, dtype)) for bound in bounds)
    return {"type": "Box", "dtype": dtype.str, "shape": list(shape), "low": low, "high": high}
