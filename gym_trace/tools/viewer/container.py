"""Answers with columns: a JSON head, then arrays in little-endian bytes.

The first four bytes are the length of the head (little-endian). The head and each array are padded to a multiple of 8
bytes. Under "arrays", the head has for each array name, dtype, shape, offset (from the first array) and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gym_trace.data.values import Array

MIME = "application/x-gym-trace"


def packed(head: Mapping[str, Any], arrays: Iterable[tuple[str, Array | bytes]]) -> bytes:
    """Return the bytes of an answer. Bytes are stored as arrays of uint8."""
    entries, parts = [], []
    for name, values in arrays:
        array = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.ascontiguousarray(values)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        raw = array.tobytes()
        entries.append((name, array.dtype.str, array.shape, len(raw)))
        parts += [raw, padding(len(raw))]
    return b"".join([opening(head, entries), *parts])


def opening(head: Mapping[str, Any], entries: Iterable[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return the bytes before the arrays. entries: name, dtype, shape and number of bytes of each."""
    listed, offset = [], 0
    for name, dtype, shape, size in entries:
        listed.append({"name": name, "dtype": dtype, "shape": shape, "offset": offset, "bytes": size})
        offset += size + len(padding(size))
    text = json.dumps({**head, "arrays": listed}, allow_nan=False).encode()
    return len(text).to_bytes(4, "little") + text + padding(4 + len(text))


def padding(size: int) -> bytes:
    """Return the zeros that pad this number of bytes."""
    return bytes(-size % 8)


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the head and the arrays of an answer."""
    length = int.from_bytes(data[:4], "little")
    head: dict[str, Any] = json.loads(data[4 : 4 + length])
    begin = 4 + length + -(4 + length) % 8
    arrays: dict[str, Array] = {}
    for entry in head["arrays"]:
        start = begin + entry["offset"]
        array = np.frombuffer(data[start : start + entry["bytes"]], entry["dtype"])
        arrays[entry["name"]] = array.reshape(entry["shape"])
    return head, arrays
