"""Answers with columns: a JSON head, then arrays in little-endian bytes.

Four bytes hold the length of the head (little-endian). The head is padded to a multiple of 8 bytes, and so is each
array. The head lists them under "arrays": name, dtype, shape, offset (counted from the first array) and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gym_trace.model.values import Array

MIME = "application/x-gym-trace"


def packed(head: Mapping[str, Any], arrays: Iterable[tuple[str, Array | bytes]]) -> bytes:
    """Return the bytes of an answer. Bytes are stored as arrays of uint8."""
    listed, parts, offset = [], [], 0
    for name, values in arrays:
        array = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.ascontiguousarray(values)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        raw = array.tobytes()
        listed.append(
            {"name": name, "dtype": array.dtype.str, "shape": array.shape, "offset": offset, "bytes": len(raw)}
        )
        parts += [raw, bytes(-len(raw) % 8)]
        offset += len(raw) + -len(raw) % 8
    text = json.dumps({**head, "arrays": listed}, allow_nan=False).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, bytes(-(4 + len(text)) % 8), *parts])


def unpacked(data: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the head and the arrays of an answer."""
    length = int.from_bytes(data[:4], "little")
    head: dict[str, Any] = json.loads(data[4 : 4 + length])
    begin = 4 + length + -(4 + length) % 8
    arrays = {
        one["name"]: np.frombuffer(
            data[begin + one["offset"] : begin + one["offset"] + one["bytes"]], one["dtype"]
        ).reshape(one["shape"])
        for one in head["arrays"]
    }
    return head, arrays
