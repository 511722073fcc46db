"""Files of strangers, and the widest spaces that their arrays can be of."""

from __future__ import annotations

import json
import os
from itertools import chain
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
        said = None if len(raw) > _MOST_JSON else json_of(raw)
    except (FileNotFoundError, NotADirectoryError):
        raise UnreadableRecording(f"{path}: is not there, which each data set of this format has") from None
    except OSError as error:
        raise UnreadableRecording(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise UnreadableRecording(f"{path}: is no JSON object, or too large")
    return said


def check_files(path: Path) -> None:
    """Raises UnreadableRecording for what is no regular file in a directory, or at a path: pipes have no end."""
    inner = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in chain([path], inner):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UnreadableRecording(f"{file}: is not a regular file, and not read")


def json_of(text: str | bytes) -> Any:
    """What JSON says, unless that would take many times its memory. Raises ValueError, RecursionError."""
    if is_bomb(text.encode(errors="replace") if isinstance(text, str) else text):
        raise ValueError("more lists and maps than are read")
    return json.loads(text)


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
