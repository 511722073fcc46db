"""Assemble the arrays of an episode from the columns of chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Layout, Leaf, Path, put_together
from gym_trace.data.schema import Layouts
from gym_trace.data.values import ABSENT, Array, copied, densified, dtype_from, objects
from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk

_EXACT_INTEGERS = 1 << 53  # float64 represents integers exactly up to this one


class ChunkSlice(NamedTuple):
    """The rows of one fragment in its chunk. Skips the first step if the observation before it is lost."""

    chunk: Chunk
    chunk_number: int
    observations: slice
    steps: slice
    flags: int


def cut_down(slices: list[ChunkSlice], start: int, stop: int, before: int | None = None) -> list[ChunkSlice]:
    """Return the slices for steps start to stop of an episode, with the observation before them.

    before: number of steps in the fragments before these slices; None: these slices are the first.
    """
    cut: list[ChunkSlice] = []
    step = before or 0  # the next slice begins with this step, and this row of observations
    row = 0 if before is None else step + 1
    for part in slices:
        rows, steps = part.observations.stop - part.observations.start, part.steps.stop - part.steps.start
        observations = slice(*(part.observations.start + min(max(at - row, 0), rows) for at in (start, stop + 1)))
        done = slice(*(part.steps.start + min(max(at - step, 0), steps) for at in (start, stop)))
        if observations.stop > observations.start or done.stop > done.start:
            flags = part.flags if done.stop == part.steps.stop > done.start else 0
            cut.append(part._replace(observations=observations, steps=done, flags=flags))
        row, step = row + rows, step + steps
    return cut


def assemble(name: str, slices: list[ChunkSlice], layouts: Layouts, copy: bool) -> Any:
    """Return the column called name of the episode that these slices make up.

    copy: do not share memory with the chunks.
    """
    if name in ("observations", "actions"):
        layout: Layout = getattr(layouts, name)
        return put_together(layout, [joined_leaf(slices, leaf, copy) for leaf in layout.leaves()])
    done = [(it.chunk, it.steps) for it in slices if it.steps.stop > it.steps.start]
    if name == "rewards":
        return as_rewards(_joined(done, ("rewards",), _VALUES, copy))
    if name in ("terminations", "truncations"):
        return _flags(slices, wire.TERMINATED if name == "terminations" else wire.TRUNCATED)
    if name == "infos":
        if not any(("infos",) in chunk for chunk, _ in done):
            return [] if layouts.infos and not done else None
        return _joined(done, ("infos",), _VALUES, copy).tolist()
    paths = dict.fromkeys(path for chunk, _ in done for path in chunk.columns if path[0] == name)
    return {path[1]: _joined_annotation(done, path, copy) for path in paths if len(path) == 2}


def joined_leaf(slices: list[ChunkSlice], leaf: Leaf, copy: bool) -> Array:
    """Return the rows of one column of observations or actions."""
    observed = leaf.path[0] == "observations"
    rows = [(it.chunk, it.observations if observed else it.steps) for it in slices]
    return _joined([(chunk, at) for chunk, at in rows if at.stop > at.start], leaf.path, leaf, copy)


def assemble_leaf(path: Path, slices: list[ChunkSlice], layouts: Layouts) -> Array:
    """Return the rows of one column, such as ("observations", "image"), of the episode that these slices make up.

    Unlike in assemble(), rows without the structure of their space are Misfit and ABSENT. Infos are an array of
    objects. Rows without a value are None.
    """
    if path[0] in ("observations", "actions"):
        layout = layouts.observations if path[0] == "observations" else layouts.actions
        leaf = next((one for one in layout.leaves() if one.path == path), Leaf(path, None, ()))
        return joined_leaf(slices, leaf, copy=True)
    if path[0] in ("terminations", "truncations"):
        return _flags(slices, wire.TERMINATED if path[0] == "terminations" else wire.TRUNCATED)
    done = [(it.chunk, it.steps) for it in slices if it.steps.stop > it.steps.start]
    if path == ("rewards",):
        return as_rewards(_joined(done, path, _VALUES, copy=True))
    return _joined_annotation(done, path, copy=True)


_Rows = tuple[Chunk, slice]
_VALUES = Leaf(("values",), None, ())  # any object


def _joined(parts: list[_Rows], path: Path, leaf: Leaf, copy: bool) -> Array:
    """Join the rows of one column."""
    if not parts:
        return objects([]) if leaf.dtype is None else np.empty((0, *leaf.shape), leaf.dtype)
    if len(parts) == 1:  # fast path: most episodes have one part
        ((chunk, rows),) = parts
        if path in chunk and not chunk.is_delta_encoded(path) and chunk.array(path).dtype != object:
            array = chunk.array(path)[rows]
            return array.copy() if copy else array
    for chunk, _ in parts:
        if path not in chunk:
            raise CorruptTrace(f"a chunk lacks the column {'/'.join(map(str, path))}")
    if all(chunk.is_delta_encoded(path) for chunk, _ in parts):
        forms = {(column.dtype, column.shape) for column in (chunk.columns[path] for chunk, _ in parts)}
        if len(forms) == 1:  # decode directly into one array
            ((dtype, shape),) = forms
            out, end = np.empty((sum(rows.stop - rows.start for _, rows in parts), *shape), dtype_from(dtype)), 0
            for chunk, rows in parts:
                begin, end = end, end + rows.stop - rows.start
                chunk.decode_rows(path, rows.start, out[begin:end])
            return out
    arrays = [_rows_of(chunk, path, rows) for chunk, rows in parts]
    first = arrays[0]
    if first.dtype != object and all(a.dtype == first.dtype and a.shape[1:] == first.shape[1:] for a in arrays):
        return np.concatenate(arrays)
    items = [copied(item) if copy else item for array in arrays for item in array]
    dense = None if leaf.dtype is None else densified(items)
    return objects(items) if dense is None else dense


def _rows_of(chunk: Chunk, path: Path, rows: slice) -> Array:
    """Return rows of one column. Decodes only these rows of a delta-encoded column."""
    if not chunk.is_delta_encoded(path):
        return chunk.array(path)[rows]
    column = chunk.columns[path]
    out = np.empty((rows.stop - rows.start, *column.shape), dtype_from(column.dtype))
    chunk.decode_rows(path, rows.start, out)
    return out


def _joined_annotation(parts: list[_Rows], path: Path, copy: bool) -> Array:
    """Join an annotation: rows without a value are None."""
    if all(path in chunk for chunk, _ in parts):
        annotation = _joined(parts, path, _VALUES, copy)
        if annotation.dtype != object:
            return annotation
        items = annotation.tolist()
    else:
        items = []
        for chunk, rows in parts:
            items.extend(_rows_of(chunk, path, rows) if path in chunk else [ABSENT] * (rows.stop - rows.start))
    items = [None if item is ABSENT else copied(item) if copy else item for item in items]
    dense = densified(items)
    return objects(items) if dense is None else dense


def as_rewards(rewards: Array) -> Array:
    """Return rewards with their own dtype; objects as float64 if that is exact."""
    if rewards.dtype != object:
        return rewards
    items = rewards.tolist()
    dense = densified(items)
    from_numpy = bool(items) and isinstance(items[0], (np.ndarray, np.generic))
    if not (from_numpy and dense is not None) and all(isinstance(r, _REAL) and _is_exact(r) for r in items):
        return np.array([float(r) for r in items], np.float64)
    return rewards if dense is None else dense


def _is_exact(number: Any) -> bool:
    return not isinstance(number, (int, np.integer)) or abs(int(number)) <= _EXACT_INTEGERS


_REAL = (bool, int, float, np.bool_, np.integer, np.float16, np.float32)


def _flags(slices: list[ChunkSlice], bit: int) -> Array:
    flags = np.zeros(sum(part.steps.stop - part.steps.start for part in slices), bool)
    end = 0
    for part in slices:
        end += part.steps.stop - part.steps.start
        if part.flags & bit and end:
            flags[end - 1] = True
    return flags
