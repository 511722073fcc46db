"""Lower bounds: wrappers that record or keep nothing, and bare decompression."""

from __future__ import annotations

import copy
import lzma
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import workloads
import zstandard
from contestants import Contestant

from gym_trace import open_trace
from gym_trace.format.columns import ZSTD, decode
from gym_trace.playback.episode_index import index_of

RING_BYTES = 64 << 20  # size of the observations, more than a processor's cache
RING_ROWS = 1024  # at most
CANNED_ROWS = 16
MOST_STEPS = 1_000_000  # steps compressed with zstd -19 and xz -9
ROUNDS = 5
LONGER = 10  # times as many steps for the recorder, so that closing it counts little
_READ = frozenset(("observations", "actions", "rewards"))  # as scan_recorded_traces reads them
_FLAGS = ("terminations", "truncations")


# -- recording --------------------------------------------------------------------------------------------------------


class Canned(gymnasium.Env):
    """Repeats a few rows of an environment, so that the cost of wrappers is not lost in its noise."""

    def __init__(self, env: Any, actions: list[Any]):
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.rows = [copy.deepcopy(env.step(action)) for action in actions]
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.rows[0][0], {}

    def step(self, action: Any) -> Any:
        self.at = (self.at + 1) % CANNED_ROWS
        return self.rows[self.at]


class Ring:
    """Preallocated memory for rows of one form, with all pages touched."""

    def __init__(self, observation: Any, *others: Any):
        leaves = [*(observation.values() if isinstance(observation, dict) else [observation]), *others]
        samples = [np.asarray(leaf, object if isinstance(leaf, str) else None) for leaf in leaves]
        self.rows = max(CANNED_ROWS, min(RING_ROWS, RING_BYTES // sum(sample.nbytes for sample in samples)))
        self.arrays = [np.ones((self.rows, *sample.shape), sample.dtype) for sample in samples]
        self.at = 0

    def copy(self, observation: Any, action: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        at = self.at
        *leaves, actions, rewards, terminations, truncations = self.arrays
        if isinstance(observation, dict):
            for array, value in zip(leaves, observation.values()):
                array[at] = value
        else:
            leaves[0][at] = observation
        actions[at] = action
        rewards[at] = reward
        terminations[at] = terminated
        truncations[at] = truncated
        self.at = (at + 1) % self.rows


class RingWrapper(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, ring: Ring):
        super().__init__(env)
        self.copy = ring.copy

    def step(self, action: Any) -> Any:
        result = observation, reward, terminated, truncated, _ = self.env.step(action)
        self.copy(observation, action, reward, terminated, truncated)
        return result


def wrapping(contestant: Contestant, workload: workloads.Workload, directory: str, scale: float) -> dict[str, float]:
    """Return the seconds per step that wrappers add to an environment that repeats a few rows.

    "empty": a wrapper that does nothing; "ring": one that copies into a ring; "canned", of single environments: the
    contestant's, until all is readable.
    """
    env = workload.make()
    env.reset(seed=0)
    actions = workload.actions(env, CANNED_ROWS * max(1, workload.lanes))
    canned = Canned(env, actions)
    observation, *others = canned.rows[0][:4]
    ring = Ring(observation, actions[0], *others)
    env.close()
    many = actions * max(1, int(min(1.0, 10 * scale) * (100 if workload.images or workload.lanes else 1000)))
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, target in {"": canned, "empty": gymnasium.Wrapper(canned), "ring": RingWrapper(canned, ring)}.items():
            times.setdefault(name, []).append(_stepping(target, many) / max(1, workload.lanes))
        if not workload.lanes:
            times.setdefault("canned", []).append(
                _stepping(contestant.wrap(canned, directory), many * LONGER, contestant)
            )
            shutil.rmtree(directory)
    plain, *added = (statistics.median(found) for found in times.values())
    return {name: seconds - plain for name, seconds in zip(list(times)[1:], added)}


def _stepping(env: Any, actions: list[Any], contestant: Contestant | None = None) -> float:
    """Return the seconds per step; of a contestant, with what it does afterwards."""
    if contestant is not None:
        contestant.start(env)
    step, begin = env.step, time.perf_counter()
    for action in actions:
        step(action)
    if contestant is not None:
        contestant.finish(env)
    return (time.perf_counter() - begin) / len(actions)


# -- playback ---------------------------------------------------------------------------------------------------------


class Blobs:
    """The stored columns of observations, actions and rewards, in memory."""

    def __init__(self, directory: str):
        self.columns = []
        for writer in index_of(open_trace(directory)).readers:
            for number in range(writer.chunk_count):
                chunk = writer.chunk(number, _READ)
                self.columns += [chunk.encoded(path) for path in chunk.columns]
        largest = max(column.raw for column, _ in self.columns)
        self._memory = np.ones(max(largest, *(len(blob) for _, blob in self.columns)), np.uint8)

    def decompress(self) -> float:
        """Return the seconds of zstd, decompressing into reused memory."""
        begin = time.perf_counter()
        for column, blob in self.columns:
            room = memoryview(self._memory)
            if not column.encoding & ZSTD:
                room[: len(blob)] = blob
                continue
            reader, filled = zstandard.ZstdDecompressor().stream_reader(blob), 0
            while filled < column.raw and (count := reader.readinto(room[filled : column.raw])):
                filled += count
        return time.perf_counter() - begin

    def decode(self) -> float:
        """Return the seconds of zstd and undoing the filters, with new memory for each column."""
        begin = time.perf_counter()
        for column, blob in self.columns:
            decode(column, blob)
        return time.perf_counter() - begin


# -- size -------------------------------------------------------------------------------------------------------------


def sizes(contestant: Contestant, task: dict[str, Any]) -> dict[str, float]:
    """Return bytes per step of all columns under zstd -19 and xz -9, each column in one piece, of up to MOST_STEPS."""
    trace = open_trace(os.path.join(task["directory"], "recording"))
    taken = int(np.searchsorted(np.cumsum(trace.episodes["steps"]), MOST_STEPS)) + 1
    total = {"zstd -19": 0, "xz -9": 0}
    for name in (*sorted(_READ), *_FLAGS):
        compressors: dict[int, list[Any]] = {}  # by leaf
        for episode in trace.scan(columns=(name,), episodes=slice(taken)):
            for leaf, rows in enumerate(_leaves(getattr(episode, name))):
                if leaf not in compressors:
                    zstd = zstandard.ZstdCompressor(level=19).compressobj()
                    compressors[leaf] = [zstd, lzma.LZMACompressor(preset=9)]
                for kind, compressor in zip(total, compressors[leaf]):
                    total[kind] += len(compressor.compress(rows))
        for pair in compressors.values():
            for kind, compressor in zip(total, pair):
                total[kind] += len(compressor.flush())
    steps = int(trace.episodes["steps"][:taken].sum())
    return {kind: size / steps for kind, size in total.items()}


def _leaves(rows: Any) -> Iterator[bytes]:
    if isinstance(rows, dict):
        for part in rows.values():
            yield from _leaves(part)
    elif isinstance(rows, np.ndarray) and rows.dtype != object:
        yield np.ascontiguousarray(rows).tobytes()
    else:
        yield "\n".join(map(str, rows)).encode() + b"\n"
