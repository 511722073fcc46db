"""Which episodes of two traces lie on the disk in the same bytes: these need not be decoded to be compared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gym_trace.model.packing import pack_lenient
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.reading.writer_reader import WriterReader

# Of the fragment table; the times at which something was recorded are none of its values.
_FIELDS = ("episode", "first_step", "steps", "lane", "flags", "outcome", "reward_sum", "seed")
_ROOTS = frozenset(("starts", "observations", "actions", "rewards", "infos", "annotations"))


def same_bytes(a: Trace, b: Trace) -> Iterator[bool] | None:
    """For each episode whether all its values are the same bytes in both traces; every byte is read, none decoded.

    None if the traces are not divided into chunks in the same way, or are damaged: then nothing can be said.

    Raises CorruptTrace.
    """
    pairs = list(zip(a.readers, b.readers))
    whole = all(np.array_equal(trace.chosen, np.arange(len(trace.whole))) for trace in (a, b))
    if not whole or len(a.readers) != len(b.readers) or not all(_are_alike(*pair) for pair in pairs):
        return None
    return (is_same for pair in pairs for is_same in _same_episodes(*pair))


def _are_alike(x: WriterReader, y: WriterReader) -> bool:
    if x.damage or y.damage or not np.array_equal(x.chunk_bounds, y.chunk_bounds):
        return False
    if not np.array_equal(x.parts.fragments, y.parts.fragments) or not np.array_equal(x.parts.first, y.parts.first):
        return False
    if not all(x.fragments[name].tobytes() == y.fragments[name].tobytes() for name in _FIELDS):
        return False
    spaces = [[w.schema.get(name) for name in ("observation_space", "action_space")] for w in (x, y) if w.chunk_count]
    return not spaces or pack_lenient(spaces[0])[0] == pack_lenient(spaces[1])[0]


def _same_episodes(x: WriterReader, y: WriterReader) -> Iterator[bool]:
    parts = x.parts
    last = parts.fragments[parts.first[1:] - 1]  # these ascend: episodes come in the order of their ends
    differs: Array = parts.starts > last  # its start is stored after its end
    by_start = np.argsort(parts.starts, kind="stable")
    starts, done = parts.starts[by_start], 0
    for number in range(x.chunk_count):
        begin, end = x.chunk_bounds[number : number + 2].tolist()
        if not _is_same_chunk(x, y, number):
            rows = parts.of_fragment[begin:end]
            differs[rows[rows >= 0]] = True
            differs[by_start[slice(*np.searchsorted(starts, (begin, end)).tolist())]] = True
        complete = int(np.searchsorted(last, end))
        yield from (~differs[done:complete]).tolist()
        done = complete


def _is_same_chunk(x: WriterReader, y: WriterReader, number: int) -> bool:
    one, other = x.chunk(number, _ROOTS), y.chunk(number, _ROOTS)
    if one.columns != other.columns:  # dtypes, shapes, encodings and checksums
        return False
    return all(one.encoded(path)[1] == other.encoded(path)[1] for path in one.columns)
