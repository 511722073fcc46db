"""Read the steps of a ring that are not yet in a batch, as chunks of a batch in memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gym_trace.data.packing import pack, unpack
from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.directory import RING, batch_name
from gym_trace.format.ring.memory import LANES, ROWS, read_header, sequence_of
from gym_trace.format.ring.pending import Pending, pending_in
from gym_trace.storage.memory import MemoryStorage
from gym_trace.storage.protocol import ReadStorage

# Functions import the decoders, because most traces have no ring.
if TYPE_CHECKING:
    from gym_trace.format.ring.segment import Segment

_HOLES = 128 << 20  # bytes of empty pages accepted in a sparse copy of a ring
_MOST_SEQUENCE = (1 << 32) - 1  # largest sequence number that fits into a mark
_WRITER = "ring"  # name of the writer of the batch in memory
_PART = batch_name(_WRITER, 0) + PART


class Decoder(Protocol):
    """Decodes slabs of one kind."""

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """Return the numbers of complete rows (or steps) and of complete log entries in a slab."""

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """Return the segments of a slab, and its pending actions.

        most: maximum numbers of rows (or steps) and entries, if the slab may be changing; pending actions are then
            omitted.
        """


class Slab(NamedTuple):
    """Copy of a slab.

    most: numbers of rows (or steps) and log entries that were complete before the copy; None if no process was writing.
    """

    sequence: int
    content: bytes
    most: tuple[int, int] | None


class RingImage(NamedTuple):
    """Copy of a ring: the slabs in use, sorted by sequence number.

    in_batches: last slab that was reused during the copy, which means that its steps are in a batch; 0: none.
    """

    kind: int
    layout: dict[str, Any]
    slabs: list[Slab]
    in_batches: int = 0

    def after(self, sequence: int) -> RingImage:
        """Return the image with only the slabs after this sequence number."""
        return self._replace(slabs=[slab for slab in self.slabs if slab.sequence > sequence])


def read_ring(storage: ReadStorage, writer: str, alive: bool, after: int = 0) -> RingImage | None:
    """Copy the ring of a writer; return None if it does not exist or is from before a reboot.

    Call this before reading the batches, because a slab is reused as soon as its steps are in a batch.

    Args:
        alive: True if the writer may be running.
        after: skip slabs up to this sequence number.

    Raises CorruptTrace, UnsupportedTrace, OSError.
    """
    name = writer + RING
    try:
        with storage.open(name, holes=_HOLES) as file:
            header = read_header(file)
            if header is None:
                return None
            decoder, slabs, in_batches = decoder_of(header.kind, header.layout), {}, 0
            for offset in header.offsets:
                sequence, most = sequence_of(file, offset), None
                if sequence <= after or sequence > _MOST_SEQUENCE:
                    continue
                if alive:
                    # Entries are written before their rows, so count rows first. A row or entry whose mark was read
                    # before a copy is complete in the copy.
                    rows, _ = decoder.complete(sequence, file.read(offset, header.slab_bytes))
                    most = rows, decoder.complete(sequence, file.read(offset, header.slab_bytes))[1]
                content = file.read(offset, header.slab_bytes)
                if not alive or sequence_of(file, offset) == sequence:
                    slabs[sequence] = Slab(sequence, content, most)
                else:
                    in_batches = max(in_batches, sequence)
    except FileNotFoundError:
        return None
    except CorruptTrace as error:
        raise error if error.path else error.located(storage.path(name), 0) from error
    except UnsupportedTrace as error:
        raise UnsupportedTrace(f"{storage.path(name)}: {error}") from error
    return RingImage(header.kind, header.layout, [slabs[sequence] for sequence in sorted(slabs)], in_batches)


def decoder_of(kind: int, layout: dict[str, Any]) -> Decoder:
    """Return the decoder for slabs of this kind. Raises CorruptTrace, UnsupportedTrace."""
    if kind == ROWS:
        from gym_trace.format.ring.rows import RowDecoder

        return RowDecoder(layout)
    if kind == LANES:
        from gym_trace.format.ring.lanes.decoder import LaneDecoder

        return LaneDecoder(layout)
    raise UnsupportedTrace(f"ring of kind {kind}; upgrade gym-trace")


class Recovered(NamedTuple):
    """Steps of a ring that are not in a batch.

    Attributes:
        content: bytes of an unsealed batch with one or more chunks per slab; b"" without steps.
        pending: packed descriptions of the pending actions.
    """

    content: bytes = b""
    pending: bytes = b"\x90"

    @property
    def actions(self) -> list[Pending]:
        return pending_in(unpack(self.pending))

    def open(self, storage: ReadStorage, writer: str) -> BatchReader | None:
        """Open the chunks, which equal those that the writer makes of the same slabs; return None without chunks."""
        if not self.content:
            return None
        return BatchReader(MemoryStorage(storage.path(writer + RING), {_PART: self.content}), _PART)


def recovered(image: RingImage) -> Recovered:
    """Decode the copy of a ring. Raises CorruptTrace."""
    from gym_trace.format.batch_files import BatchFiles
    from gym_trace.format.ring.chunk_builder import ChunkWriter

    decoder = decoder_of(image.kind, image.layout)
    storage = MemoryStorage("")
    writer = BatchFiles(storage, {"writer": _WRITER}, level=1, fsync=False)
    chunks = ChunkWriter(lambda: writer, sys.maxsize)
    pending: list[Pending] = []
    for sequence, content, most in image.slabs:
        segments, actions = decoder.decode(sequence, content, most)
        if segments or actions:  # skip a slab that was just begun
            pending = actions
        for segment in segments:
            chunks.add(segment)
        chunks.write()
    batches = [name for name in storage.names() if name.startswith(_PART.removesuffix(PART))]
    if batches not in ([], [_PART]):
        raise CorruptTrace("too many fragments in a ring")
    described = pack([action.described() for action in pending])
    return Recovered(storage.content(_PART) if batches else b"", described)
