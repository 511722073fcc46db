"""From the columns of chunks to the arrays of an episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.model.layout import Leaf, Path, put_together
from gym_trace.model.schema import Layouts
from gym_trace.model.values import ABSENT, Array, copied, dtype_from, objects

_EXACT_INTEGERS = 1 << 53


class Piece(NamedTuple):
    """One fragment of an episode: where its rows lie in a chunk."""

    chunk: Chunk
    chunk_number: int
    observations: slice
    steps: slice
    flags: int


def cut_down(pieces: list[Piece], start: int, stop: int, trimmed: bool, before: int | None = None) -> list[Piece]:
    """Return the pieces of some steps of an episode, with the observation before them; the result needs no trimming.

    before: number of steps in the fragments before these pieces; None: these pieces come first.
    """
    cut: list[Piece] = []
    step = (before or 0) - trimmed  # which step, and which observation, the next piece begins with
    row = 0 if before is None else step + 1
    for piece in pieces:
        rows, steps = piece.observations.stop - piece.observations.start, piece.steps.stop - piece.steps.start
        observations = slice(*(piece.observations.start + min(max(at - row, 0), rows) for at in (start, stop + 1)))
        done = slice(*(piece.steps.start + min(max(at - step, 0), steps) for at in (start, stop)))
        if observations.stop > observations.start or done.stop > done.start:
            flags = piece.flags if done.stop == piece.steps.stop > done.start else 0
            cut.append(piece._replace(observations=observations, steps=done, flags=flags))
        row, step = row + rows, step + steps
    return cut


def assemble(name: str, pieces: list[Piece], layouts: Layouts, trimmed: bool, copy: bool) -> Any:
    """The column called name of the episode that pieces make up. copy: the chunks are shared, so copy out of them.

    trimmed: the observation before the first step is lost; that step is left out, what it led to comes first.
    """
    skip = int(trimmed)
    if name == "observations":
        leaves = [_joined(pieces, leaf.path, _observation_rows, leaf, copy) for leaf in layouts.observations.leaves()]
        return put_together(layouts.observations, leaves)
    if name == "actions":
        leaves = [_joined(pieces, leaf.path, _step_rows, leaf, copy)[skip:] for leaf in layouts.actions.leaves()]
        return put_together(layouts.actions, leaves)
    if name == "rewards":
        return as_rewards(_joined(pieces, ("rewards",), _step_rows, _VALUES, copy)[skip:])
    if name in ("terminations", "truncations"):
        bit = wire.TERMINATED if name == "terminations" else wire.TRUNCATED
        return _flag_column(pieces, bit)[skip:]
    # Pieces without steps have no step rows, even if their chunks do.
    stepped = [piece for piece in pieces if piece.steps.stop > piece.steps.start]
    if name == "infos":
        if not any(("infos",) in piece.chunk for piece in stepped):
            return [] if layouts.infos and not stepped else None
        return _joined(pieces, ("infos",), _step_rows, _VALUES, copy)[skip:].tolist()
    paths = dict.fromkeys(
        path for piece in stepped for path in piece.chunk.columns if path[0] == "annotations" and len(path) == 2
    )
    notes = {path[1]: _joined_notes(stepped, path, copy)[skip:] for path in paths}
    return {name: values for name, values in notes.items() if len(values)}  # not of one step that is trimmed


_VALUES = Leaf(("values",), None, ())  # of any kind


def _observation_rows(piece: Piece) -> slice:
    return piece.observations


def _step_rows(piece: Piece) -> slice:
    return piece.steps


def _joined(pieces: list[Piece], path: Path, rows_of: Callable[[Piece], slice], leaf: Leaf, copy: bool) -> Array:
    """The rows of one column, of all pieces."""
    parts = [(piece.chunk, rows) for piece in pieces if (rows := rows_of(piece)).stop > rows.start]
    if not parts:
        return objects([]) if leaf.dtype is None else np.empty((0, *leaf.shape), leaf.dtype)
    for chunk, _ in parts:
        if path not in chunk:
            raise CorruptTrace(f"a chunk lacks the column {'/'.join(map(str, path))}")
    if all(chunk.is_walked(path) for chunk, _ in parts):
        walked = _walked(parts, path)
        if walked is not None:
            return walked
    arrays = [chunk.array(path)[rows] for chunk, rows in parts]
    first = arrays[0]
    if first.dtype != object and all(a.dtype == first.dtype and a.shape[1:] == first.shape[1:] for a in arrays):
        if len(arrays) == 1:
            return first.copy() if copy else first
        return np.concatenate(arrays)
    items = [copied(item) if copy else item for array in arrays for item in _items(array)]
    if leaf.dtype is not None:
        dense = densified(items)
        if dense is not None:
            return dense
    return objects(items)


def _walked(parts: list[tuple[Chunk, slice]], path: Path) -> Array | None:
    """Decode the rows of a column directly into one array; return None if they differ in dtype or shape."""
    kinds = {(column.dtype, column.shape) for column in (chunk.columns[path] for chunk, _ in parts)}
    if len(kinds) > 1:
        return None
    ((dtype, shape),) = kinds
    out = np.empty((sum(rows.stop - rows.start for _, rows in parts), *shape), dtype_from(dtype))
    end = 0
    for chunk, rows in parts:
        begin, end = end, end + rows.stop - rows.start
        chunk.decode_rows(path, rows.start, out[begin:end])
    return out


def _items(array: Array) -> list[Any]:
    """The rows as values: arrays, or scalars that keep their dtype."""
    return list(array)


def _joined_notes(pieces: list[Piece], path: Path, copy: bool) -> Array:
    """An annotation: rows of chunks that lack it are None, as are those that were not given."""
    if all(path in piece.chunk for piece in pieces if piece.steps.stop > piece.steps.start):
        notes = _joined(pieces, path, _step_rows, _VALUES, copy)
        items = notes.tolist() if notes.dtype == object else None
    else:
        items = []
        for piece in pieces:
            rows = piece.steps
            known = path in piece.chunk
            items += _items(piece.chunk.array(path)[rows]) if known else [ABSENT] * (rows.stop - rows.start)
    if items is None:
        return notes
    items = [None if item is ABSENT else copied(item) if copy else item for item in items]
    dense = densified(items)
    return objects(items) if dense is None else dense


def densified(items: list[Any]) -> Array | None:
    """items as one array if all are values of one dtype and shape, None otherwise."""
    kinds = set(map(type, items))
    if not kinds:
        return None
    if kinds <= {float, np.float64}:  # the same to the writer, so which of them comes depends on where chunks end
        return np.array(items, np.float64)
    if all(kind is np.ndarray or issubclass(kind, np.generic) for kind in kinds):
        dtype, shape = items[0].dtype, items[0].shape
        if dtype.kind not in "biufc" or not all(item.dtype == dtype and item.shape == shape for item in items):
            return None
        array = np.empty((len(items), *shape), dtype)
        for i, item in enumerate(items):
            array[i] = item
        return array
    if kinds == {bool}:
        return np.array(items, bool)
    if kinds == {int} and all(-(1 << 63) <= item < 1 << 63 for item in items):
        return np.array(items, np.int64)
    return None


def as_rewards(rewards: Array) -> Array:
    """Rewards of one NumPy dtype have it; others are float64, where that holds each of them exactly."""
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


def _flag_column(pieces: list[Piece], bit: int) -> Array:
    flags = np.zeros(sum(piece.steps.stop - piece.steps.start for piece in pieces), bool)
    end = 0
    for piece in pieces:
        end += piece.steps.stop - piece.steps.start
        if piece.flags & bit and end:
            flags[end - 1] = True
    return flags
