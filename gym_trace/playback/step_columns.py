"""Find the steps that satisfy a condition, chunk by chunk."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.selecting.columns import ALWAYS, ConditionColumn, NoSuchKey, factorized, numbers, words
from gym_trace.data.selecting.conditions import numbers_of, rows_where
from gym_trace.data.selecting.language import Node, columns_in, error_at, parse_condition, parse_keys
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_index import EpisodeIndex
from gym_trace.playback.scan import OnDamage, Scan, StepRuns
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.printable import printable

_NAMED = 8  # parts that an error names
_BEFORE, _AFTER = "observation", "next_observation"
_FLAGS = {"terminated": "terminations", "truncated": "truncations"}
_ROOTS = {  # name of a column of steps: name of the stored column
    _BEFORE: "observations",
    _AFTER: "observations",
    "action": "actions",
    "reward": "rewards",
    "info": "infos",
    "annotations": "annotations",
}
STEP_COLUMNS = (*_ROOTS, *_FLAGS, "step", "episode")
_INSTEAD = {
    "observations": f"use {_BEFORE}, before the step, or {_AFTER}, after it",
    **{root: f"use {name}" for name, root in _ROOTS.items() if name not in (_BEFORE, _AFTER, root)},
    "terminations": "use terminated",
    "truncations": "use truncated",
}
STEP_NAMES = frozenset((*STEP_COLUMNS, *_INSTEAD))


def steps_where(content: EpisodeIndex, condition: str, on_damage: OnDamage | None = None) -> Array:
    """Return the steps where a condition holds; see Trace.find_steps.

    on_damage: called with each damaged chunk, which is skipped; None: raises CorruptTrace.
    """
    found = [np.empty((0, 2), np.int64)]
    for block in _scan(content, condition, [parse_condition(condition)], None, on_damage):
        hits = np.flatnonzero(rows_where(condition, _Rows(block)))
        found.append(np.stack([block.episode[block.run_of_step[hits]], block.step[hits]], 1))
    steps = np.concatenate(found)
    return steps[np.lexsort((steps[:, 1], steps[:, 0]))]


def values_of_steps(
    content: EpisodeIndex, terms: str, episodes: Array, on_damage: OnDamage | None = None
) -> Iterator[list[Array]]:
    """Yield the values of terms such as "observation[0], abs(reward)" at the steps of episodes, by blocks of steps.

    Each is float64 of (steps,), NaN where it is unknown. on_damage: as for steps_where().

    Raises InvalidOption, CorruptTrace.
    """
    for block in _scan(content, terms, [node for node, _ in parse_keys(terms)], episodes, on_damage):
        yield numbers_of(terms, _Rows(block))


def _scan(
    content: EpisodeIndex, source: str, trees: list[Node], episodes: Array | None, on_damage: OnDamage | None
) -> Scan:
    """Return a scan of the columns in conditions or terms. Raises InvalidOption."""
    nodes = [node for tree in trees for node in columns_in(tree)]
    names = {str(node.value[0]) for node in nodes}
    _check_names(content, source, nodes)
    roots = frozenset(_ROOTS[name] for name in names & _ROOTS.keys())
    columns = roots | {root for name, root in _FLAGS.items() if name in names}
    return Scan(content, columns, episodes, overlap=_BEFORE in names, on_damage=on_damage)


def _check_names(content: EpisodeIndex, condition: str, nodes: list[Node]) -> None:
    """Raise InvalidOption for a column that no chunk can have."""
    stored = {path for writer in content.readers for path in _paths_of(writer)}
    for node in nodes:
        name, *keys = node.value
        if name not in STEP_COLUMNS:
            near = difflib.get_close_matches(str(name), STEP_COLUMNS, n=1, cutoff=0.6)
            instead = f"did you mean {near[0]!r}?" if near else f"use {', '.join(STEP_COLUMNS)}"
            if ("annotations", name) in stored:
                instead = f"did you mean annotations.{name}?"
            instead = _INSTEAD.get(str(name), instead)
            raise error_at(condition, node.begin, node.end, f"no column {name!r} of steps; {instead}")
        root = _ROOTS.get(str(name))
        if root is None:
            problem = f"{name} is a single value" if keys else ""
        elif not any(path[0] == root for path in stored):
            problem = f"this trace has no {name}"
        elif root == "infos" and not keys:
            problem = 'info is a dict; name a key, such as info.lives or info["a key"]'
        else:
            problem = "" if root == "infos" else _problem_of((root, *keys), stored)
        if problem:
            raise error_at(condition, node.begin, node.end, problem)


def _paths_of(writer: WriterReader) -> Iterator[Path]:
    for batch in writer.read_batches:
        yield from batch.totals
    if writer.schema:
        for layout in (writer.layouts.observations, writer.layouts.actions):
            yield from (leaf.path for leaf in layout.leaves())


def _problem_of(path: Path, stored: set[Path]) -> str:
    if any(path[: len(known)] == known for known in stored):
        return ""
    parts = {known[len(path)] for known in stored if known[: len(path)] == path}
    parts = parts or {known[len(path) - 1] for known in stored if known[: len(path) - 1] == path[:-1]}
    shown = ", ".join(printable(part) for part in sorted(map(str, parts))[:_NAMED])
    return f"name one of its parts: {shown}" if shown else f"no column {'.'.join(map(str, path))}"


class _Rows:
    """The steps of a block as a table for conditions; see gym_trace.data.selecting.columns.Table.

    Columns have the shape (steps, values of a row).
    """

    def __init__(self, block: StepRuns):
        self._block = block

    def __len__(self) -> int:
        return self._block.size

    def column(self, path: tuple[Any, ...]) -> ConditionColumn:
        """Return a column by its path. Raises InvalidOption, CorruptTrace."""
        name, *keys = path
        block, columns = self._block, self._block.columns
        if not len(self):
            return self._unknown()
        if name in ("step", "episode"):
            return numbers((block.step if name == "step" else block.episode[block.run_of_step])[:, None])
        if name in _FLAGS:
            return ConditionColumn("condition", columns[_FLAGS[name],][:, None], ALWAYS)
        if name == "info":
            infos = columns.get(("infos",), ())
            return _of_objects([_within(info, keys) for info in infos]) if len(infos) else self._unknown()
        whole: Path = (_ROOTS[name], *keys)
        stored = next((whole[:end] for end in range(len(whole), 0, -1) if whole[:end] in columns), None)
        if stored is None:
            return self._unknown()
        rows, unknown, unlike = columns[stored], np.empty(0, np.int64), np.empty(0, np.int64)
        if whole[0] == "observations" and rows.dtype == object and self._is_typed(stored):
            rows, unlike = _typed_but_first(rows, block.observation_offsets[:-1])
        if name == _AFTER:
            rows = _rows_at(rows, block.rows_after)
            unknown = block.step_offsets[1:][~block.final_known & (block.lengths > 0)] - 1
        elif name == _BEFORE:
            unknown = np.flatnonzero(np.isin(block.rows_after - 1, unlike)) if len(unlike) else unknown
            rows = _rows_at(rows, block.rows_after - 1)
        shape = rows.shape[1:]
        for key in keys[len(stored) - 1 :]:
            if not isinstance(key, int) or rows.ndim < 2 or not -rows.shape[1] <= key < rows.shape[1]:
                raise NoSuchKey(
                    f"no {key!r} in {'.'.join(map(str, (name, *stored[1:])))}: its rows have the shape {shape}"
                )
            rows = rows[:, key]
        return _without(_column_of(rows), unknown)

    def _is_typed(self, path: Path) -> bool:
        leaf, _ = self._block.reader.about.leaves.get(path, (None, None))
        return leaf is not None and leaf.dtype is not None

    def _unknown(self) -> ConditionColumn:
        return words(np.zeros((len(self), 1), np.int64), [None])


def _typed_but_first(rows: Array, firsts: Array) -> tuple[Array, Array]:
    """Return observations as one array if all but some first ones of runs, from earlier chunks, are arrays of one type.

    Returns (rows, positions of those of another type, which are 0), or the same rows, and no positions.
    """
    last = rows[-1]
    if isinstance(last, np.ndarray) and last.ndim and last.dtype.kind in "biuf":
        fits = [isinstance(row, np.ndarray) and (row.dtype, row.shape) == (last.dtype, last.shape) for row in rows]
        unlike = np.flatnonzero(~np.array(fits))
        if np.isin(unlike, firsts).all():
            zeros = np.zeros_like(last)
            return np.stack([row if fit else zeros for row, fit in zip(rows, fits)]), unlike
    return rows, np.empty(0, np.int64)


def _rows_at(rows: Array, at: Array) -> Array:
    """Return rows at these ascending positions; a view if they are contiguous."""
    first, last = int(at[0]), int(at[-1])
    return rows[first : last + 1] if last - first == len(at) - 1 else rows.take(at, axis=0)


def _without(column: ConditionColumn, rows: Array) -> ConditionColumn:
    """Return a column whose values in some rows are unknown."""
    if not len(rows):
        return column
    known, data = np.broadcast_to(column.known, column.data.shape).copy(), column.data
    known[rows] = False
    if data.dtype.kind == "f":  # a NaN would match isnan()
        data = data.copy()
        data[rows] = 0
    return column._replace(data=data, known=known)


def _column_of(rows: Array) -> ConditionColumn:
    """Return rows as a column, (rows, values of a row)."""
    if rows.dtype == object:
        return _of_objects(rows)
    data = rows.reshape(len(rows), -1)
    if data.dtype.kind == "b":
        return ConditionColumn("condition", data, np.broadcast_to(ALWAYS, data.shape))
    if data.dtype.kind not in "iuf":
        raise InvalidOption(f"values of {rows.dtype} cannot be compared")
    return numbers(data, np.broadcast_to(ALWAYS, data.shape))


def _of_objects(values: Iterable[Any]) -> ConditionColumn:
    column = factorized(values)
    return column._replace(data=column.data[:, None], known=column.known[:, None])


def _within(value: Any, keys: list[Any]) -> Any:
    """Return the value under these keys; None if missing."""
    for key in keys:
        try:
            value = value[key] if isinstance(value, dict) or isinstance(key, int) else None
        except (LookupError, TypeError):
            return None
    return value
