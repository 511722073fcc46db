"""Decoded chunks that random access keeps for the next time."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from gym_trace.format.batch_reader import BatchReader, Chunk
from gym_trace.reading.writer_reader import WriterReader

_Key = tuple[BatchReader, int, str, str]


class ChunkCache:
    """The most recently used chunks, limited by bytes; thread-safe."""

    def __init__(self, limit: int):
        self._limit = limit
        self._chunks: OrderedDict[_Key, tuple[Chunk, int]] = OrderedDict()  # with their bytes
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._chunks)

    def chunk(self, writer: WriterReader, number: int, root: str) -> Chunk:
        """The columns under root of a chunk, decoded. Raises CorruptTrace."""
        key = (*writer.chunk_places[number], writer.key, root)
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
                return self._chunks[key][0]
        chunk = writer.chunk(number, frozenset((root,)))
        chunk.decode()
        with self._lock:
            if key in self._chunks:  # another thread has been quicker
                return self._chunks[key][0]
            self._chunks[key] = chunk, chunk.full_size
            self._bytes += chunk.full_size
            while self._bytes > self._limit and len(self._chunks) > 1:
                self._bytes -= self._chunks.popitem(last=False)[1][1]
        return chunk
