"""Integers as protobuf writes them: seven bits a byte, the lowest first, the last byte below 128."""

from __future__ import annotations

import numpy as np

from gym_trace.model.values import Array

MOST_BYTES = 10  # of an integer of 64 bits


class MalformedExample(ValueError):
    """Bytes that are no tf.train.Example, or not the one that was promised."""


def varint(number: int) -> bytes:
    """One integer that is not negative."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*parts, number))


def varints(numbers: Array) -> bytes:
    """Integers of any dtype, those below 0 as if they were 64 bits without a sign."""
    values = numbers.ravel().astype(np.int64, copy=False).view(np.uint64)
    if not len(values) or int(values.max()) < 0x80:
        return values.astype(np.uint8).tobytes()
    groups = values[:, None] >> np.arange(0, 7 * MOST_BYTES, 7, dtype=np.uint64)
    used = np.maximum((groups != 0).sum(axis=1, keepdims=True), 1)
    places = np.arange(MOST_BYTES)
    octets = (groups & np.uint64(0x7F)).astype(np.uint8)
    octets[places < used - 1] |= 0x80
    packed: Array = octets[places < used]
    return packed.tobytes()


def numbers_in(data: bytes) -> Array:
    """The integers, (N,) int64, of bytes that end with the last of them. Raises MalformedExample."""
    octets = np.frombuffer(data, np.uint8)
    is_last = octets < 0x80
    if is_last.all():
        return octets.astype(np.int64)
    ends = np.flatnonzero(is_last) + 1
    if not len(ends) or ends[-1] != len(octets):
        raise MalformedExample("an integer that is cut off")
    begins = np.append(0, ends[:-1])
    lengths = ends - begins
    if int(lengths.max()) > MOST_BYTES:
        raise MalformedExample("an integer of more than 64 bits")
    places = np.arange(len(octets)) - np.repeat(begins, lengths)
    parts = (octets & 0x7F).astype(np.uint64) << (places * 7).astype(np.uint64)
    return np.add.reduceat(parts, begins).view(np.int64)
