"""Rings of rows, packed by hand from docs/FORMAT.md, section 8, as after a killed recording."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack
import numpy as np

from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.ring.chunk_builder import ChunkWriter
from gym_trace.format.ring.memory import ROWS
from gym_trace.format.ring.recovered import decoder_of
from gym_trace.storage.local import LocalStorage

MAGIC = b"\x89GTRNG\r\n"
START, INITIAL, FLAG, STOP, END, VALUE, CHANGES, WHOLE, REWARD_TYPE, CONTINUE = range(1, 11)
TERMINATED, TRUNCATED = 4, 8
SLAB_BYTES = 4096
ROW_BYTES = 48  # action, asked, reward, observation, padding, done
LAYOUT: dict[str, Any] = {
    "row": ROW_BYTES,
    "asked": 8,
    "reward": 16,
    "done": 40,
    "observations": 1,
    "columns": [[["observations"], "<f4", [3], 24], [["actions"], "<i8", [], 0]],
}
SCHEMA = {
    "writer": "w",
    "created": 1,
    "split": "train",
    "observation_space": {"type": "Box", "dtype": "<f4", "shape": [3]},
    "action_space": {"type": "Discrete", "dtype": "<i8"},
    "recorder": {"record_infos": False},
}


def boot_id() -> bytes:
    return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))


def ring(contents: Iterable[bytes], layout: dict[str, Any] | bytes = LAYOUT, **fields: Any) -> bytes:
    """Return a ring file. fields: values that override those of the header."""
    slabs = list(contents)
    packed = layout if isinstance(layout, bytes) else msgpack.packb(layout)
    first = -(-(128 + len(packed)) // 4096) * 4096
    known = {"magic": MAGIC, "major": 1, "minor": 0, "features": 0, "file_id": b"\7" * 16, "boot": boot_id(), "kind": 1}
    known |= {"slabs": len(slabs), "slab_bytes": len(slabs[0]) if slabs else SLAB_BYTES, "first": first}
    known |= {"length": len(packed), "crc": crc32(packed), **fields}
    header = struct.pack("<8sHHI16s16sIIQQII44x", *known.values())
    header += struct.pack("<I", crc32(header))
    return (header + packed).ljust(first, b"\0") + b"".join(slabs)


class Slab:
    """A slab with rows of three floats, an integer and a reward."""

    def __init__(self, sequence: int, size: int = SLAB_BYTES):
        self.sequence, self.rows, self.entries = sequence, 0, 0
        self.memory = bytearray(size)
        struct.pack_into("<Q", self.memory, 0, sequence)
        self.position = 64

    def mark(self, number: int) -> int:
        return self.sequence << 32 | number

    def log(self, kind: int, payload: bytes = b"", flags: int = 0, column: int = 0, **numbers: int) -> None:
        self.entries += 1
        values = [numbers.get(name, 0) for name in "abcd"]
        entry = struct.pack("<IIHHI4qQ", self.rows, len(payload), kind, flags, column, *values, self.mark(self.entries))
        entry += payload + bytes(-len(payload) % 8)
        self.memory[self.position : self.position + len(entry)] = entry
        self.position += len(entry)

    def room(self) -> int:
        """Return the bytes between the log and the rows."""
        return len(self.memory) - ROW_BYTES * self.rows - self.position

    def ask(self, action: int) -> None:
        struct.pack_into("<qQ", self.memory, self._at(), action, self.mark(self.rows + 1))

    def answer(self, reward: float, observation: Any) -> None:
        struct.pack_into("<d3f4xQ", self.memory, self._at() + 16, reward, *observation, self.mark(self.rows + 1))
        self.rows += 1

    def record_initial(self, observation: Any) -> None:
        self.answer(0.0, observation)

    def _at(self) -> int:
        return len(self.memory) - ROW_BYTES * (self.rows + 1)


class Run:
    """Episodes of given lengths in slabs, some of which are written as chunks.

    The observation after step t of episode e is [e, t, 0.5], the action of step t is t % 5, its reward t + 0.25.
    """

    def __init__(self, size: int = SLAB_BYTES, first: int = 1):
        self.size = size
        self.slabs = [Slab(first, size)]
        self.episode = self.step = -1
        self.running = False

    @property
    def slab(self) -> Slab:
        return self.slabs[-1]

    def make_room(self, bytes_needed: int = 400) -> None:
        if self.slab.room() < bytes_needed:
            self.turn()

    def turn(self) -> None:
        """Continue in the next slab."""
        self.slabs.append(Slab(self.slab.sequence + 1, self.size))
        if self.episode >= 0:
            self.slab.log(CONTINUE, flags=1 if self.running else 2, a=self.episode, b=self.step, c=1000, d=10)

    def reset(self, seed: int = -1) -> None:
        self.make_room()
        self.episode, self.step, self.running = self.episode + 1, 0, True
        kept = msgpack.packb({"options": {"e": self.episode}})
        self.slab.log(START, kept, flags=1, a=self.episode, b=seed, c=1000, d=10)
        self.slab.record_initial([self.episode, 0, 0.5])

    def take_step(self, last: bool = False) -> None:
        self.make_room()
        self.slab.ask(self.step % 5)
        if last:
            self.slab.log(FLAG, flags=TERMINATED, a=1, c=5000, d=4010)
            self.running = False
        self.slab.answer(self.step + 0.25, [self.episode, self.step + 1, 0.5])
        self.step += 1

    def play(self, *lengths: int, open_end: bool = False) -> Run:
        """Add episodes of these lengths. open_end: leave the last one open."""
        for i, length in enumerate(lengths):
            self.reset()
            for step in range(length):
                self.take_step(last=step == length - 1 and not (open_end and i == len(lengths) - 1))
        return self

    def ring(self, count: int = 3, **fields: Any) -> bytes:
        """Return the current ring with this number of slabs."""
        memory = [bytes(self.size)] * count
        for slab in self.slabs:
            memory[slab.sequence % count] = bytes(slab.memory)
        return ring(memory, **fields)


class Writer:
    """A writer of slabs, alive until it is closed."""

    def __init__(self, directory: Path, name: str = "w"):
        self.directory, self.name = directory, name
        directory.mkdir(exist_ok=True)
        self.files = BatchFiles(LocalStorage(directory), {**SCHEMA, "writer": name}, level=1, fsync=False)
        self.chunks = ChunkWriter(lambda: self.files, 1 << 20)

    def put(self, data: bytes) -> None:
        fresh = self.directory / f"{self.name}.fresh"
        fresh.write_bytes(data)
        fresh.rename(self.directory / f"{self.name}.ring")

    def write(self, slab: Slab) -> None:
        """Write a slab as a chunk."""
        segments, pending = decoder_of(ROWS, LAYOUT).decode(slab.sequence, bytes(slab.memory))
        self.chunks.write_slab(slab.sequence, segments, [action.described() for action in pending])

    def die(self) -> None:
        self.files.detach()


def killed(directory: Path, run: Run, written: int = 0, name: str = "w", **fields: Any) -> Run:
    """Make the directory of a run that was killed after writing this number of slabs."""
    writer = Writer(directory, name)
    for slab in run.slabs[:written]:
        writer.write(slab)
    writer.put(run.ring(**fields))
    writer.die()
    return run


def check_episode(episode: Any) -> None:
    """Compare an episode of a run with the expected one."""
    steps, first, number = len(episode), episode.first_step, episode.episode_id
    expected = np.array([[number, first + t, 0.5] for t in range(steps + 1)], "<f4")
    assert episode.observations.tolist() == expected.tolist()
    assert episode.actions.tolist() == [(first + t) % 5 for t in range(steps)]
    assert episode.rewards.tolist() == [first + t + 0.25 for t in range(steps)]
    assert episode.terminations.tolist()[:-1] == [False] * (steps - 1)
    if not first:
        assert episode.options == {"e": number}
