"""Task, memory and pipes that the processes of a policy share. The kernel frees the memory after the last process.

Messages are numbers of 8 bytes, which the kernel writes to a pipe and reads whole: a killed process leaves no lock and
no half message.
"""

from __future__ import annotations

import math
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.heap import Arena
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.training.rollouts import WRITER, Origin, Rollout, Shape
from gym_trace.training.settings import Settings

_ALIGNED = 64
_MESSAGE_BYTES = 8


@dataclass(frozen=True)
class PolicyTask:
    """Task of all processes of a policy. Picklable. See train() for checkpoints.

    Attributes:
        path: directory of the run. spaces: of observations and actions. weights: bytes of the network's weights.
        updates: limit of the run; None: no limit. learn: False: only take rollouts.
        begins: checkpoint of another run or policy that version 1 takes over, see Learner.adopt().
        life: number of earlier starts of the run, so that each start has its own seeds.
        objective: key of the last info of an episode whose value workers report; None: nothing.
    """

    path: str
    spaces: tuple[Any, Any]
    settings: Settings
    shape: Shape
    weights: int
    seed: int
    updates: int | None = None
    begins: dict[str, Any] = field(default_factory=dict)
    learn: bool = True
    checkpoint_seconds: float = 60.0
    keep: int = 3
    milestone_seconds: float | None = None
    save_best: bool = True
    life: int = 0
    objective: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)


class SharedArrays:
    """Equal sets of arrays in shared memory, by index. Picklable only while a process is started."""

    def __init__(self, fields: Mapping[str, tuple[tuple[int, ...], Any]], count: int):
        self._fields: dict[str, tuple[tuple[int, ...], np.dtype[Any], int]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._fields[name] = shape, np.dtype(dtype), size
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        self._size = size
        self._memory = _allocated(max(1, size * count))

    def array(self, index: int, name: str) -> Array:
        shape, dtype, offset = self._fields[name]
        return np.ndarray(shape, dtype, self._memory.buffer, index * self._size + offset)


class RolloutBuffer:
    """Rollouts in shared memory, one per slot."""

    def __init__(self, shape: Shape, count: int):
        self._names = list(shape.fields())
        own = {"writer": ((), WRITER), "origin": ((3,), np.int64), "returns": ((shape.steps, shape.lanes), np.float64)}
        self._arrays = SharedArrays({**shape.fields(), **own}, count)

    def rollout(self, slot: int) -> Rollout:
        """Return the arrays of a slot, in shared memory."""
        return Rollout.of({name: self._arrays.array(slot, name) for name in self._names})

    def returns(self, slot: int) -> Array:
        """Return the array (steps, lanes) with the return of each episode at its last step, and NaN elsewhere."""
        return self._arrays.array(slot, "returns")

    def origin(self, slot: int) -> Origin:
        first_step, version, _ = self._arrays.array(slot, "origin").tolist()
        return Origin(self._arrays.array(slot, "writer").item().decode(), first_step, version)

    def seed(self, slot: int) -> int:
        """Return the seed of the generator of a writer's actions; -1 if a server samples them."""
        return int(self._arrays.array(slot, "origin")[2])

    def set_origin(self, slot: int, origin: Origin, seed: int = -1) -> None:
        self._arrays.array(slot, "writer")[...] = origin.writer.encode()
        self._arrays.array(slot, "origin")[...] = origin.first_step, origin.version, seed


class Weights:
    """The two newest versions of the weights of a network. Picklable only while a process is started."""

    def __init__(self, size: int):
        self.size = size  # bytes
        self._memory = _allocated(_ALIGNED + 2 * size)
        self._versions[:] = -1

    @property
    def _versions(self) -> Array:
        return np.ndarray((3,), np.int64, self._memory.buffer)  # newest version, and version in each half of the memory

    def _half(self, version: int) -> Array:
        return np.ndarray((self.size,), np.uint8, self._memory.buffer, _ALIGNED + version % 2 * self.size)

    @property
    def newest(self) -> int:
        """Latest published version; -1: none."""
        return int(self._versions[0])

    def publish(self, version: int, weights: Array) -> None:
        """Publish a version. weights: bytes, as an array of uint8."""
        versions = self._versions
        versions[1 + version % 2] = -1
        self._half(version)[...] = weights
        versions[1 + version % 2] = version
        versions[0] = version

    def read(self, out: Array, version: int | None = None) -> int:
        """Copy this version, or the latest one, and return its number. Raises LookupError if it is missing."""
        versions = self._versions
        while True:
            wanted = int(versions[0]) if version is None else version
            if versions[1 + wanted % 2] == wanted >= 0:
                out[...] = self._half(wanted)
                if versions[1 + wanted % 2] == wanted:
                    return wanted
            if version is not None:
                raise LookupError(f"the weights of version {version} are not in memory")


def _allocated(size: int) -> Arena:
    """Return memory with allocated pages: if /dev/shm were full, a later write would kill the process."""
    arena = Arena(size)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(arena.fd, 0, size)
    return arena


class Message(NamedTuple):
    """A slot, the life of its worker, and the version of the weights to act with; 8 bytes in a pipe."""

    slot: int
    life: int
    version: int


def put(pipe: Connection, message: Message) -> None:
    """Write a message. Raises OSError if no process reads."""
    number = message.version << 32 | message.life << 16 | message.slot
    os.write(pipe.fileno(), number.to_bytes(_MESSAGE_BYTES, "little"))


def take(pipe: Connection) -> Message:
    """Wait for a message. Raises EOFError if no process writes."""
    data = os.read(pipe.fileno(), _MESSAGE_BYTES)
    if len(data) < _MESSAGE_BYTES:
        raise EOFError
    number = int.from_bytes(data, "little")
    return Message(number & 0xFFFF, number >> 16 & 0xFFFF, number >> 32)


def has_more(pipe: Connection, seconds: float = 0.0) -> bool:
    """Wait up to `seconds` for a message; return True if there is one."""
    return bool(select.select([pipe], [], [], seconds)[0])
