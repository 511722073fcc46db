"""What is in a ring and not yet in a batch, read as chunks that are like those of a batch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.directory import RING, batch_name
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.packing import pack, unpack
from gym_trace.ring.chunk_builder import ChunkWriter
from gym_trace.ring.lanes.decoder import LaneDecoder
from gym_trace.ring.memory import LANES, ROWS, read_header, sequence_of
from gym_trace.ring.pending import Pending, pending_in
from gym_trace.ring.rows import RowDecoder
from gym_trace.ring.segment import Segment
from gym_trace.storage.memory import MemoryStorage
from gym_trace.storage.protocol import ReadStorage

_HOLES = 128 << 20  # bytes of a ring that was copied without its empty pages
_LAST = (1 << 32) - 1  # sequence number that fits a mark
_WRITER = "ring"  # in memory
_PART = batch_name(_WRITER, 0) + PART


class Decoder(Protocol):
    """Decodes slabs of one kind."""

    def complete(self, sequence: int, slab: bytes | memoryview) -> tuple[int, int]:
        """How many rows, or steps, of a slab are complete, and how many entries of its log."""

    def decode(
        self, sequence: int, slab: bytes | memoryview, most: tuple[int, int] | None = None
    ) -> tuple[list[Segment], list[Pending]]:
        """What a slab holds, and the actions that were asked and not answered.

        most: of how many rows, or steps, and entries, where there may be more by now, and of what is being asked.
        """


class Slab(NamedTuple):
    """What was in a slab when it was copied.

    most: how many rows, or steps, and entries of the log were complete; None: all that are, nobody was changing it.
    """

    sequence: int
    content: bytes
    most: tuple[int, int] | None


class RingImage(NamedTuple):
    """What was in a ring when it was read: the slabs that were begun, in the order of their sequence numbers.

    in_batches: the sequence number of a slab that is in a batch, because it was begun again while it was copied; or 0.
    """

    kind: int
    layout: dict[str, Any]
    slabs: list[Slab]
    in_batches: int = 0

    def after(self, sequence: int) -> RingImage:
        """Only the slabs that came after this one."""
        return self._replace(slabs=[slab for slab in self.slabs if slab.sequence > sequence])


def read_ring(storage: ReadStorage, writer: str, alive: bool, after: int = 0) -> RingImage | None:
    """What the ring of a writer holds; None if there is none, or it is of another start of the system.

    To be called before the batches are read: a slab is begun again as soon as it is in a batch.

    Args:
        alive: whether it may be changing.
        after: slabs up to this sequence number are left out.

    Raises CorruptTrace, UnsupportedTrace, OSError.
    """
    name = writer + RING
    try:
        with storage.open(name, holes=_HOLES) as file:
            header = read_header(file)
            if header is None:
                return None
            decoder, slabs, in_batches = decoder_of(header.kind, header.layout), {}, 0
            for place in header.places:
                sequence, most = sequence_of(file, place), None
                if sequence <= after or sequence > _LAST:
                    continue
                if alive:
                    # An entry is there before its row. Each is whole in a copy that begins after its mark was seen.
                    rows, _ = decoder.complete(sequence, file.read(place, header.slab_bytes))
                    most = rows, decoder.complete(sequence, file.read(place, header.slab_bytes))[1]
                content = file.read(place, header.slab_bytes)
                if not alive or sequence_of(file, place) == sequence:
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
    """Of slabs of this kind. Raises CorruptTrace, UnsupportedTrace."""
    if kind == ROWS:
        return RowDecoder(layout)
    if kind == LANES:
        return LaneDecoder(layout)
    raise UnsupportedTrace(f"a ring of kind {kind}; upgrade gym-trace")


class Recovered(NamedTuple):
    """What is in a ring and in no batch.

    Attributes:
        content: a batch that is not sealed, of a chunk or more for each slab; empty if there are none.
        pending: the actions that were never answered, as metadata has them, packed.
    """

    content: bytes = b""
    pending: bytes = b"\x90"

    @property
    def actions(self) -> list[Pending]:
        return pending_in(unpack(self.pending))

    def open(self, storage: ReadStorage, writer: str) -> BatchReader | None:
        """The chunks, which are as the writer makes them of the same slabs; None if there are none."""
        if not self.content:
            return None
        return BatchReader(MemoryStorage(storage.path(writer + RING), {_PART: self.content}), _PART)


def recovered(image: RingImage) -> Recovered:
    """What there is in a ring. Raises CorruptTrace."""
    decoder = decoder_of(image.kind, image.layout)
    storage = MemoryStorage("")
    writer = TraceWriter(storage, {"writer": _WRITER}, level=1, fsync=False)
    chunks = ChunkWriter(lambda: writer, sys.maxsize)
    pending: list[Pending] = []
    for sequence, content, most in image.slabs:
        segments, asked = decoder.decode(sequence, content, most)
        if segments or asked:  # or it is a slab that was only just begun
            pending = asked
        for segment in segments:
            chunks.add(segment)
        chunks.write()
    batches = [name for name in storage.names() if name.startswith(_PART.removesuffix(PART))]
    if batches not in ([], [_PART]):
        raise CorruptTrace("a ring has more fragments than there can be")
    described = pack([action.described() for action in pending])
    return Recovered(storage.content(_PART) if batches else b"", described)
