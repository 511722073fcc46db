"""Write the rings of dead writers into batches: rings are lost at a reboot, and are not copied to other machines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from gym_trace.data.packing import unpack
from gym_trace.errors import CorruptTrace, RecordingError, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.directory import WriterFiles, find_writers
from gym_trace.format.manifest import reopened
from gym_trace.format.rewrite import LEVEL, SourceChunk, rewrite
from gym_trace.format.ring.recovered import read_ring
from gym_trace.playback.ring_tail import RingTail, tail_of
from gym_trace.playback.trace import TraceLike, writable_storage_of
from gym_trace.storage.protocol import Appender, Storage

_LOCK_SECONDS = 2.0  # readers hold the lock for a moment, to find out whether the writer is alive
_REPAIR = "'gym-trace edit repair' keeps its readable steps, until this machine restarts"


def take_in_rings(directory: TraceLike) -> tuple[list[str], list[str]]:
    """Write the rings of dead writers into batches, and remove the rings.

    The writer's last batch is continued and sealed, under the writer's lock; its open episodes stay "lost". If it is
    killed, the trace reads as before or as after the call, and the next call continues. Live writers, and rings from
    before a reboot, are skipped. WRITER.ring.part, left by a kill while a ring grew, is removed.

    Returns:
        The ids of the writers whose rings were written, and the problems of the others.

    Raises:
        TraceNotFound
        RecordingError: the batches could not be written.

    Examples:
        >>> gym_trace.recording.take_in_rings("traces/cartpole")  # no writer died
        ([], [])
    """
    storage = writable_storage_of(directory)
    done: list[str] = []
    problems: list[str] = []
    for files in find_writers(storage):
        if not (files.has_ring or files.has_new_ring) or files.manifest is None or files.is_alive():
            continue
        try:
            if _take_in(storage, files):
                done.append(files.writer)
        except (CorruptTrace, UnsupportedTrace) as error:
            problems.append(f"the ring of {files.writer} stays as it is: {error}; {_REPAIR}")
        except OSError as error:
            raise RecordingError(f"{storage.root}: the ring of {files.writer} cannot be written: {error}") from error
    return done, problems


def _take_in(storage: Storage, files: WriterFiles) -> bool:
    manifest = _locked(storage, files)
    if manifest is None:
        return False
    with contextlib.closing(manifest):
        files = files.listed_again()  # another process may have written the ring since
        if files.has_new_ring:  # it is a copy of the ring, or empty
            storage.remove(files.new_ring)
        if not files.has_ring or (image := read_ring(storage, files.writer, alive=False)) is None:
            return False
        last: dict[int, BatchReader] = {}  # batches from the newest one back to one with slab numbers
        for number, name in sorted(files.batches.items(), reverse=True):
            if _is_empty(files, name):
                storage.remove(name)
                del files.batches[number]
                continue
            last[number] = BatchReader(storage, name)
            if last[number].slabs.complete:
                break
        tail = tail_of(files, image, last)
        if tail.batch is not None or tail.actions or tail.number in last:
            _write(storage, files, tail, last, manifest)
        storage.remove(files.ring)
        storage.sync()
        return True


def _locked(storage: Storage, files: WriterFiles) -> Appender | None:
    assert files.manifest is not None
    until = time.monotonic() + _LOCK_SECONDS
    while (manifest := reopened(storage, files.manifest)) is None and time.monotonic() < until:
        time.sleep(0.01)
    return manifest


def _is_empty(files: WriterFiles, name: str) -> bool:
    """Return True if the writer died before it wrote a chunk or schema into a new batch."""
    if not name.endswith(PART):
        return False
    with files.storage.open(name) as file:
        if file.size <= wire.HEADER_SIZE:
            return True
    batch = BatchReader(files.storage, name)
    return not (batch.damage or len(batch.chunks) or batch.schema)


def _write(
    storage: Storage, files: WriterFiles, tail: RingTail, last: dict[int, BatchReader], manifest: Appender
) -> None:
    """Append the data of the ring to the last batch, and seal it. Raises CorruptTrace, OSError."""
    begun = last.get(tail.number)
    if begun is not None:
        if not begun.name.endswith(PART) or begun.ended or tail.number != max(files.batches):
            raise CorruptTrace("it continues a batch that is not the last one", begun.path)
        begun = _cut(storage, begun, tail.counts[tail.number])
    schema = begun.schema if begun is not None else _schema(files)
    if schema is None:
        raise CorruptTrace("the schema is lost, so the columns cannot be interpreted", files.where)
    description = {key: value for key, value in schema.items() if key not in ("batch", "type")}
    writer = BatchFiles(storage, {**description, "writer": files.writer}, LEVEL, fsync=False, manifest=manifest)
    try:
        writer.resume(tail.number, begun)
        _add(writer, tail)
        writer.seal()
    finally:
        writer.detach()


def _cut(storage: Storage, batch: BatchReader, chunks: int) -> BatchReader:
    """Return the batch without a torn end, and without chunks of a slab that the ring has completely."""
    if batch.damage:
        raise batch.damage[0].error()
    end = int(batch.chunks["offset"][chunks]) if chunks < len(batch.chunks) else batch.size - batch.torn
    if end < batch.size:
        file = storage.reopen(batch.name)
        assert file is not None  # because no lock is requested
        with contextlib.closing(file):
            file.truncate(end)
            file.sync()
    return BatchReader(storage, batch.name)


def _schema(files: WriterFiles) -> dict[str, Any] | None:
    for name in reversed(files.batches.values()):
        if (schema := BatchReader(files.storage, name).schema) is not None:
            return schema
    listed = files.schema()
    return None if listed is None else listed[0]


def _add(writer: BatchFiles, tail: RingTail) -> None:
    """Append the chunks of a ring. Readers ignore them until the last one is written, so no step is read twice."""
    if not tail.slabs:
        return
    pending, final = unpack(tail.ring.pending), (tail.slabs[-1][0], False)
    chunks = list(_chunks_of(tail, final, pending))
    rewrite(chunks, writer, is_one_batch=True)
    if not chunks and pending:
        writer.write(np.zeros(0, wire.FRAGMENT), {}, final, pending)


def _chunks_of(tail: RingTail, final: tuple[int, bool], pending: Any) -> Iterator[SourceChunk]:
    """Yield the chunks of a ring. final: slab of the last one."""
    batch, begin = tail.batch, 0
    for number, count in enumerate(batch.chunks["fragments"].tolist() if batch is not None else ()):
        assert batch is not None
        is_last = number == len(batch.chunks) - 1
        slab = final if is_last else (tail.slabs[0][0], True)
        table, read = batch.fragments[begin : begin + count], partial(batch.read_chunk, number)
        yield SourceChunk(table, read, slab=slab, pending=pending if is_last else ())
        begin += count
