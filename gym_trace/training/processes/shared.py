"""Memory that the processes of a run share, which the kernel frees when the last of them is gone; and who says what.

Messages of data go through pipes as numbers of 8 bytes, which the kernel writes and reads whole: a process that is
killed leaves no lock behind, and no half message.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.values import Array
from gym_trace.training.rollouts import WRITER, Origin, Rollout, Shape

_ALIGNED = 64
_TOKEN = 8  # bytes


class Rooms:
    """So many sets of the same arrays. Picklable to processes that are being started."""

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], Any]], count: int):
        self._fields: dict[str, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._fields[name] = shape, np.dtype(dtype), size
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        self._size = size
        self._memory = _allocated(max(1, size * count))

    def array(self, room: int, name: str) -> Array:
        shape, dtype, offset = self._fields[name]
        return np.ndarray(shape, dtype, self._memory.buffer, room * self._size + offset)


class Slots:
    """Room for rollouts."""

    def __init__(self, shape: Shape, count: int):
        self._names = list(shape.fields())
        self._rooms = Rooms({**shape.fields(), "writer": ((), WRITER), "place": ((2,), np.int64)}, count)

    def rollout(self, slot: int) -> Rollout:
        """Its arrays, in the shared memory."""
        return Rollout.of({name: self._rooms.array(slot, name) for name in self._names})

    def origin(self, slot: int) -> Origin:
        first_step, version = self._rooms.array(slot, "place").tolist()
        return Origin(self._rooms.array(slot, "writer").item().decode(), first_step, version)

    def set_origin(self, slot: int, origin: Origin) -> None:
        self._rooms.array(slot, "writer")[...] = origin.writer.encode()
        self._rooms.array(slot, "place")[...] = origin.first_step, origin.version


class Weights:
    """The two newest versions of the weights of a network. Picklable to processes that are being started."""

    def __init__(self, size: int):
        self.size = size  # bytes
        self._memory = _allocated(_ALIGNED + 2 * size)
        self._versions[:] = -1

    @property
    def _versions(self) -> Array:
        return np.ndarray((3,), np.int64, self._memory.buffer)  # the newest, and that of each room

    def _room(self, version: int) -> Array:
        return np.ndarray((self.size,), np.uint8, self._memory.buffer, _ALIGNED + version % 2 * self.size)

    @property
    def newest(self) -> int:
        """The version that was published last; -1: none."""
        return int(self._versions[0])

    def publish(self, version: int, weights: Array) -> None:
        """weights: bytes, as an array of uint8."""
        versions = self._versions
        versions[1 + version % 2] = -1
        self._room(version)[...] = weights
        versions[1 + version % 2] = version
        versions[0] = version

    def read(self, room: Array, version: int | None = None) -> int:
        """Copies them, of this version or the newest; returns which. Raises LookupError if that is not there."""
        versions = self._versions
        while True:
            wanted = int(versions[0]) if version is None else version
            if versions[1 + wanted % 2] == wanted >= 0:
                room[...] = self._room(wanted)
                if versions[1 + wanted % 2] == wanted:
                    return wanted
            if version is not None:
                raise LookupError(f"the weights of version {version} are gone, or were never there")


def _allocated(size: int) -> Arena:
    """Memory whose pages are there: a write into one that a full /dev/shm had to give later would kill the process."""
    arena = Arena(size)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(arena.fd, 0, size)
    return arena


class Token(NamedTuple):
    """A slot, to which life of the worker that has it the message belongs, and which weights it is to act with."""

    slot: int
    life: int
    version: int


def put(pipe: Connection, token: Token) -> None:
    """Raises OSError if nobody reads any more."""
    number = token.version << 32 | token.life << 16 | token.slot
    os.write(pipe.fileno(), number.to_bytes(_TOKEN, "little"))


def take(pipe: Connection) -> Token:
    """Waits. Raises EOFError if nobody writes any more."""
    data = os.read(pipe.fileno(), _TOKEN)
    if len(data) < _TOKEN:
        raise EOFError
    number = int.from_bytes(data, "little")
    return Token(number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32)


def has_more(pipe: Connection, seconds: float = 0.0) -> bool:
    """Whether there is something to take, waiting for it at most so long."""
    return bool(select.select([pipe], [], [], seconds)[0])
