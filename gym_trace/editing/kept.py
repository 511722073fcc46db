"""Which fragments of a writer are kept, and what of a chunk that is kept in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, UnsupportedTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.format.columns import MSGPACK
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.model.packing import pack
from gym_trace.model.values import Array
from gym_trace.reading.writer_reader import WriterReader

Rows = Array | list[bytes]  # of a column: typed, or one MessagePack value a row
Wanted = Callable[[ColumnPath], bool]
_STARTS = ("starts",)
STEP_ROOTS = ("actions", "rewards", "infos", "annotations")


class Kept(NamedTuple):
    """Kept fragments of a writer, in their order.

    Attributes:
        kept: those that stay, with their rows.
        bare: those that stay without, because they say how an episode began or ended of which other runs are kept.
        whole: for each chunk whether it stays as it is. part: whether some of it does.
        ids: of the episodes that are kept.
    """

    kept: Array
    bare: Array
    whole: Array
    part: Array
    ids: Array


def kept_of(reader: WriterReader, rows: Array) -> Kept:
    """rows: which of the writer's episodes are kept, a boolean for each row of its table."""
    fragments, owner, table = reader.fragments, reader.parts.of_fragment, reader.parts.table
    ids = np.unique(table["episode_id"][rows])
    if len(rows) == 0 or rows.all():
        everything = np.ones(len(fragments), np.bool_)
        chunks = np.ones(reader.chunk_count, np.bool_)
        return Kept(everything, ~everything, chunks, ~chunks, ids)
    carries = owner >= 0
    kept = np.zeros(len(fragments), np.bool_)
    kept[carries] = rows[owner[carries]]
    dropped = carries & ~kept
    among = np.isin(fragments["episode"].astype(np.int64), ids)
    kept |= ~carries & among
    bare = dropped & among & (fragments["flags"] & (wire.STARTS | wire.ENDS) > 0)
    stays, goes = _per_chunk(reader, kept | bare), _per_chunk(reader, dropped)
    return Kept(kept, bare, (goes == 0) & (_per_chunk(reader, kept) > 0), (goes > 0) & (stays > 0), ids)


def _per_chunk(reader: WriterReader, fragments: Array) -> Array:
    """Return the count of these fragments in each chunk."""
    return np.diff(np.append(0, np.cumsum(fragments))[reader.chunk_bounds])


def part_of(
    chunk: Chunk, fragments: Array, kept: Array, bare: Array, wanted: Wanted
) -> tuple[Array, dict[ColumnPath, Rows]]:
    """Return the kept fragments of a chunk and its decoded columns. Raises CorruptTrace, UnsupportedTrace."""
    leads = (fragments["flags"] & wire.LEADS > 0).astype(np.int64)
    steps = fragments["steps"].astype(np.int64)
    starts = fragments["flags"] & wire.STARTS > 0
    masks = dict.fromkeys(STEP_ROOTS, np.repeat(kept, steps))
    masks["observations"] = np.repeat(kept, steps + leads)
    masks["starts"] = (kept | bare)[starts]
    columns: dict[ColumnPath, Rows] = {}
    for path in chunk.columns:
        if path == ("fragments",) or not wanted(path):
            continue
        mask = masks.get(str(path[0]))
        if mask is None:
            raise UnsupportedTrace(f"column {path[0]!r} is of a newer gym-trace; upgrade gym-trace to edit this trace")
        if chunk.rows[path] != len(mask):
            problem = f"column {'/'.join(map(str, path))} has the wrong number of rows"
            raise chunk.located(CorruptTrace(problem))
        if mask.any():
            columns[path] = _rows(chunk, path, mask)
    if _STARTS not in columns and masks["starts"].any():  # as a chunk may have none, and be joined to one that has
        columns[_STARTS] = [pack({})] * int(np.count_nonzero(masks["starts"]))
    table = fragments.copy()
    table["flags"][bare] &= np.uint32(wire.STARTS | wire.ENDS)
    table["steps"][bare] = 0
    table["reward_sum"][bare] = 0
    return table[kept | bare], columns


def _rows(chunk: Chunk, path: ColumnPath, mask: Array) -> Rows:
    if chunk.columns[path].dtype != MSGPACK:
        return chunk.array(path)[mask]
    return [value for value, is_kept in zip(chunk.packed(path), mask.tolist()) if is_kept]
