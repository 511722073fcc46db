"""A storage that counts how often its reader waits for an answer, and the functions of gym-trace that read a trace.

Time passes in round trips, not in seconds. A read of bytes that are not there yet waits one round trip. What
`RemoteStorage.soon` would read in another thread is on its way from then on, while the reader goes on.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from scripted_env import Result, ToyEnv, small_blocks

from gym_trace import TraceRecordingWrapper, lint_trace, open_trace, scan_recorded_traces, summarize
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace
from gym_trace.storage.memory import MemoryReader
from gym_trace.storage.protocol import Reader, ReadStorage, Span

CHUNKS = 21
_BLOCK = 16 << 10  # bytes, as those of a RemoteStorage
_ROWS = 40  # in a chunk
_SIZE = 3000  # bytes of an observation; a chunk is larger than one that is fetched whole, without its header first


class RoundTrips(ReadStorage):
    """Files in memory that take a round trip to read. Keeps what it has read.

    Attributes:
        waits: how often the reader had to wait for bytes.
        time: round trips that passed while it waited.
    """

    ahead = 32 << 20

    def __init__(self, files: dict[str, bytes]):
        self.root = "memory:/round-trips"
        self._files = files
        self._arrival: dict[tuple[str, int], int] = {}  # when each block is there
        self._background: int | None = None  # the time in a thread that reads ahead
        self.waits = self.time = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def names(self) -> list[str]:
        return list(self._files)

    def size(self, name: str) -> int:
        if name not in self._files:
            raise FileNotFoundError(name)
        return len(self._files[name])

    def open(self, name: str, holes: int = 0) -> Reader:
        self.size(name)
        return _Reader(self, name, self._files[name])

    def expect(self, spans: Iterable[Span], gaps: bool = True) -> None:
        blocks = {(name, at) for name, offset, length in spans for at in _blocks(offset, length)}
        if blocks:
            self._wait_for(blocks)

    def soon(self, call: Callable[[], object]) -> None:
        self._background = self.time
        try:
            with contextlib.suppress(Exception):  # raised again where the bytes are needed
                call()
        finally:
            self._background = None

    def _wait_for(self, blocks: set[tuple[str, int]]) -> None:
        now = self.time if self._background is None else self._background
        arrival = max(self._arrival.setdefault(block, now + 1) for block in blocks)
        if arrival <= now:
            return
        if self._background is None:
            self.time = arrival
            self.waits += 1
        else:
            self._background = arrival


def _blocks(offset: int, length: int) -> range:
    return range(offset // _BLOCK, -(-(offset + length) // _BLOCK))


class _Reader(MemoryReader):
    def __init__(self, storage: RoundTrips, name: str, content: bytes):
        super().__init__(content)
        self._storage, self._name = storage, name

    def read(self, offset: int, length: int) -> bytes:
        data = super().read(offset, length)
        if data:
            self._storage.expect([Span(self._name, offset, len(data))])
        return data


class _Noise(ToyEnv):
    """Observations that do not compress."""

    observation_space = spaces.Box(0, 255, (_SIZE,), np.uint8)
    action_space = spaces.Discrete(2)

    def __init__(self, steps: int):
        self._steps = steps

    def result(self, action: Any) -> Result:
        return Result(self.np_random.integers(0, 256, _SIZE, np.uint8), float(self.t), self.t == self._steps)


def record_chunks(directory: Path, episodes: int) -> dict[str, bytes]:
    """Record a trace of CHUNKS chunks, with an annotation of text, and return its files."""
    steps = CHUNKS * _ROWS // episodes - 1
    with (
        small_blocks(rows=_ROWS, chunk=1 << 20, frame=1 << 20, values=4096),
        TraceRecordingWrapper(_Noise(steps), directory) as env,
    ):
        for _ in range(episodes):
            env.reset(seed=0)
            for step in range(steps):
                env.step(step % 2)
                env.annotate(note=f"step {step}")
    trace = open_trace(directory)
    assert sum(reader.chunk_count for reader in index_of(trace).readers) == CHUNKS
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# -- what reads a trace -----------------------------------------------------------------------------------------------


def _scan(trace: Trace, out: Path) -> None:
    for episode in trace.scan(["observations", "actions", "rewards"]):
        assert len(episode.observations) == len(episode.rewards) + 1


def _call_back(trace: Trace, out: Path) -> None:
    scan_recorded_traces(trace, lambda observations, actions, rewards: None)


def _windows(trace: Trace, out: Path) -> None:
    next(trace.windows(8, 16))


def _streamed(trace: Trace, out: Path) -> None:
    list(trace.windows(8, 16, cache=None, cache_bytes=1 << 20, replacement=False))


def _normalization(trace: Trace, out: Path) -> None:
    trace[:].normalization()  # a view's normalization is not cached


def _find_steps(trace: Trace, out: Path) -> None:
    trace.find_steps("next_observation[0] == observation[0] or reward < 0")


def _summarize(trace: Trace, out: Path) -> None:
    summarize(trace, columns=True)


def _lint(trace: Trace, out: Path) -> None:
    list(lint_trace(trace))


def _to_arrow(trace: Trace, out: Path) -> None:
    trace.to_arrow().read_all()


def _export(format: str) -> Callable[[Trace, Path], None]:
    def write(trace: Trace, out: Path) -> None:
        from gym_trace.exchange.formats.exporting import export

        export(trace, out / f"{len(trace)}.{format}", format)

    return write


def _verified_rows(trace: Trace, out: Path) -> None:
    from gym_trace.tools.replay.observations import ObservationRows

    rows = ObservationRows(trace, 0)
    for row in range(len(rows)):
        rows.tree()[row]


def _viewed_rows(trace: Trace, out: Path) -> None:
    from gym_trace.playback.leaf_rows import LeafRows
    from gym_trace.playback.opened import ChunkCache

    rows = LeafRows(*index_of(trace).locate(0), ("rewards",), ChunkCache(1 << 20))
    assert sum(count for _, count, _ in rows.parts(0, len(rows))) == len(trace[0])


CONSUMERS: dict[str, Callable[[Trace, Path], None]] = {
    "scan": _scan,
    "call_back": _call_back,
    "windows": _windows,
    "windows, streamed": _streamed,
    "normalization": _normalization,
    "find_steps": _find_steps,
    "summarize": _summarize,
    "lint": _lint,
    "to_arrow": _to_arrow,
    "export jsonl": _export("jsonl"),
    "export npz": _export("npz"),
    "export parquet": _export("parquet"),
    "rows of verify": _verified_rows,
    "rows of the viewer": _viewed_rows,
}


def waits_of(name: str, files: dict[str, bytes], out: Path) -> tuple[int, int]:
    """Return how often a consumer waits after the trace was opened, and how many round trips."""
    storage = RoundTrips(files)
    trace = open_trace(storage)
    waits, time = storage.waits, storage.time
    CONSUMERS[name](trace, out)
    return storage.waits - waits, storage.time - time
