"""Steps in the ring of a writer that are not yet in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.directory import WriterFiles
from gym_trace.format.ring.pending import Pending
from gym_trace.format.ring.recovered import Recovered, RingImage, recovered

_SlabKey = tuple[int, tuple[int, int] | None]


class RingTail(NamedTuple):
    """Steps in a ring that are not yet in a batch, in the form of chunks.

    Attributes:
        batch: these chunks; None if there are no steps.
        number: number of the batch that they will be in.
        counts: number of chunks to read of each batch: chunks of a slab that is still in the ring are not read.
        slabs: state of each slab, to detect new data.
    """

    ring: Recovered = Recovered()
    batch: BatchReader | None = None
    number: int = 0
    counts: Mapping[int, int] = {}
    slabs: tuple[_SlabKey, ...] = ()

    @property
    def actions(self) -> list[Pending]:
        """Actions without a result."""
        return self.ring.actions


def tail_of(
    files: WriterFiles, image: RingImage | None, batches: Mapping[int, BatchReader], known: RingTail | None = None
) -> RingTail:
    """Read the steps of a ring that are not in batches. Raises CorruptTrace, UnsupportedTrace.

    Args:
        image: the ring, copied before the batches were read; None without one.
        known: the previous result, which is reused if the ring has not changed.
    """
    counts = {number: len(batch.chunks) for number, batch in batches.items()}
    number = _next_number(files, batches)
    if image is None:
        return RingTail(number=number, counts=counts)
    image = image.after(complete_in(batches))
    there = {slab.sequence for slab in image.slabs}
    for which in sorted(batches, reverse=True):
        slabs = batches[which].slabs
        if slabs.unfinished in there:
            counts[which] = max(0, counts[which] - slabs.chunks)
            number = which
    slabs_now = tuple((slab.sequence, slab.most) for slab in image.slabs)
    is_live = any(slab.most is not None for slab in image.slabs)
    if known is not None and is_live and known.slabs == slabs_now:
        return known._replace(number=number, counts=counts)
    ring = recovered(image) if image.slabs else Recovered()
    return RingTail(ring, ring.open(files.storage, files.writer), number, counts, slabs_now)


def complete_in(batches: Mapping[int, BatchReader]) -> int:
    """Return the number of the last slab that is completely in batches."""
    return max((batch.slabs.complete for batch in batches.values()), default=0)


def is_behind(image: RingImage | None, batches: Mapping[int, BatchReader]) -> bool:
    """Return True if slabs are neither in these batches nor in the ring, so that there may be newer batches."""
    if image is None:
        return False
    before = image.slabs[0].sequence - 1 if image.slabs else 0
    return max(before, image.in_batches) > complete_in(batches)


def _next_number(files: WriterFiles, batches: Mapping[int, BatchReader]) -> int:
    """Return the number of the batch of the next chunk."""
    if not files.batches:
        return 0
    last = max(files.batches)
    ended = batches[last].ended if last in batches else not files.batches[last].endswith(PART)
    return last + ended
