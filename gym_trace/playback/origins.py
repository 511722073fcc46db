"""Writers whose episodes are in the files of another writer (docs/FORMAT.md, Origins)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gym_trace.data.origins import ID_BITS, Origin, origins_of
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Damage
from gym_trace.format.directory import is_writer_id
from gym_trace.format.fragments import Fragments
from gym_trace.playback.writer_reader import Share, SharedChunks, WriterReader

_ROWS_PER_ORIGIN = 32  # rows of the budget of a trace that an origin takes


def readers_by_origin(stored: WriterReader) -> list[WriterReader]:
    """Return the readers of the episodes in the files of a writer: the given one, or one for each origin."""
    try:
        origins = origins_of(stored.about_or_empty.raw, stored.writer)
        stored.budget.take(_ROWS_PER_ORIGIN * (len(origins) - origins.count(None)))
    except CorruptTrace as error:
        stored.take_damage(error)
        return [stored]
    return _readers_of(stored, origins) if origins else [stored]


def _readers_of(stored: WriterReader, origins: Sequence[Origin | None]) -> list[WriterReader]:
    numbers, problem = origin_numbers(stored.fragments), origin_problem(stored.fragments, origins)
    if not is_ascending(numbers):
        numbers = numbers[:0]
    where = stored.batches[0].path if stored.batches else stored.files.where
    damage = [Damage(where, 0, 0, problem)] if problem else []
    every = np.arange(len(origins) + 1)
    bounds = numbers.searchsorted(every)
    row_numbers = stored.parts["episode_id"] >> ID_BITS if len(numbers) else np.empty(0, np.int64)
    row_bounds = row_numbers.searchsorted(every)
    chunks = stored.chunk_bounds.searchsorted(bounds, side="right") - 1
    rows_before = _rows_before(stored, bounds, chunks)
    present = np.array([origin is not None for origin in origins])
    weights = np.append(0, np.cumsum((1 + np.diff(bounds)) * present))
    sizes = np.diff(stored.size * weights // max(1, int(weights[-1])))  # bytes, shared by number of fragments
    shared = SharedChunks()
    readers = []
    for number, origin in enumerate(origins):
        if origin is not None:
            row, chunk, before = int(row_bounds[number]), int(chunks[number]), tuple(rows_before[number].tolist())
            share = Share(stored, number, row, chunk, before, int(sizes[number]), damage, shared)
            fragments, rows = slice(*bounds[number : number + 2].tolist()), slice(row, int(row_bounds[number + 1]))
            readers.append(stored.of_origin(share, _named(origin, number, stored), fragments, rows))
    return readers


def _rows_before(stored: WriterReader, bounds: Array, chunks: Array) -> Array:
    """Return how many observations, steps and reset records come before these fragments in their chunks."""
    steps, flags = stored.fragments.steps.astype(np.int64), stored.fragments.flags
    counts = np.stack([steps + (flags & wire.HAS_INITIAL > 0), steps, flags & wire.STARTS > 0], axis=1)
    totals = np.concatenate([np.zeros((1, 3), np.int64), np.cumsum(counts, axis=0, dtype=np.int64)])
    found: Array = totals[bounds] - totals[stored.chunk_bounds[chunks]]
    return found


def _named(origin: Origin, number: int, stored: WriterReader) -> Origin:
    """Replace an invalid writer id: it comes from an untrusted file, and becomes part of file names."""
    if is_writer_id(origin.writer):
        return origin
    return origin._replace(writer=f"{stored.writer[:100]}.{number}")


def origin_numbers(fragments: Array | Fragments) -> Array:
    """Return the number of the origin of each fragment."""
    numbers: Array = (fragments["episode"] >> np.uint64(ID_BITS)).astype(np.int64)
    return numbers


def is_ascending(numbers: Array) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def origin_problem(fragments: Array | Fragments, origins: Sequence[Origin | None], least: int = 0) -> str:
    """Return the problem of fragments of these origins; empty if valid. least: the lowest origin that they may have."""
    numbers = origin_numbers(fragments)
    if not is_ascending(numbers) or int(numbers[:1].min(initial=least)) < least:
        return "the fragments of its origins are not in order"
    carries = (fragments["steps"] > 0) | (fragments["flags"] & wire.HAS_INITIAL > 0)
    found = np.unique(numbers[carries]).tolist()
    if not all(number < len(origins) and origins[number] is not None for number in found):
        return "fragments of origins that its schema does not name"
    return ""
