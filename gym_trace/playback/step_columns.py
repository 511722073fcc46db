"""Steps that satisfy a condition, found chunk by chunk."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.selecting.columns import ALWAYS, Column, NoSuchKey, factorized, numbers, words
from gym_trace.data.selecting.conditions import rows_where
from gym_trace.data.selecting.language import columns_in, parse_condition, pointed
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.playback.content import Content
from gym_trace.playback.episode_scan import OnDamage, damage_at
from gym_trace.playback.writer_reader import Block, WriterReader
from gym_trace.printable import printable

_NAMED = 8  # parts that an error names
_BEFORE, _AFTER = "observation", "next_observation"
_FLAGS = {"terminated": wire.TERMINATED, "truncated": wire.TRUNCATED}
_ROOTS = {  # by the names of columns of steps, those of stored columns
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


def steps_where(content: Content, condition: str, on_damage: OnDamage | None = None) -> Array:
    """Return the steps where a condition holds; see Trace.find_steps.

    on_damage: called with each damaged chunk, which is skipped; None: raises CorruptTrace.
    """
    names = {str(node.value[0]) for node in columns_in(parse_condition(condition))}
    _check_names(content, condition)
    roots = frozenset(_ROOTS[name] for name in names & _ROOTS.keys())
    found = [np.empty((0, 2), np.int64)]
    wanted = np.arange(len(content)) if content.chosen is None else content.chosen
    place = np.full(int(content.bounds[-1]), -1)
    place[wanted] = np.arange(len(wanted))
    for number, writer in enumerate(content.writers):
        episodes = place[int(content.bounds[number]) : int(content.bounds[number + 1])]
        if not (episodes >= 0).any():
            continue
        if writer.damage and on_damage is None:
            raise writer.damage[0].error()
        last: _Last = {}
        for block in writer.blocks(episodes >= 0):
            try:
                chunk = writer.chunk(block.number, roots)
                table = _Rows(writer, block, chunk, episodes, last)
                hits = rows_where(condition, table) & table.is_wanted
                if _BEFORE in names:
                    last = table.last_observations()
            except CorruptTrace as error:
                if on_damage is None:
                    raise
                on_damage(damage_at(writer, block.number, error.problem))
                last = {}
                continue
            found.append(np.stack([table.episode[hits], table.step[hits]], 1))
    steps = np.concatenate(found)
    return steps[np.lexsort((steps[:, 1], steps[:, 0]))]


def _check_names(content: Content, condition: str) -> None:
    """Raise InvalidOption for a column that no chunk can have."""
    stored = {path for writer in content.readers for path in _paths_of(writer)}
    for node in columns_in(parse_condition(condition)):
        name, *keys = node.value
        if name not in STEP_COLUMNS:
            near = difflib.get_close_matches(str(name), STEP_COLUMNS, n=1, cutoff=0.6)
            instead = f"did you mean {near[0]!r}?" if near else f"use {', '.join(STEP_COLUMNS)}"
            instead = _INSTEAD.get(str(name), instead)
            raise pointed(condition, node.begin, node.end, f"no column {name!r} of steps; {instead}")
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
            raise pointed(condition, node.begin, node.end, problem)


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


_Last = dict[int, dict[Path, Array]]  # by the row of an episode, its last observation so far: a row of each column


class _Rows:
    """The steps of a chunk as a table for conditions; see gym_trace.data.selecting.columns.Table.

    Columns have the shape (steps, values of a row).

    Attributes:
        episode: place of the episode of each row, -1 if it is not wanted.
        step: step of each row in its whole episode.
        is_wanted: rows that are part of a wanted episode.
    """

    def __init__(self, writer: WriterReader, block: Block, chunk: Chunk, episodes: Array, last: _Last):
        """last: observations before the first step of episodes that continue here."""
        self._chunk, self._block, self._table, self._known = chunk, block, block.table, last
        self._leads = (block.table["flags"] & wire.LEADS > 0).astype(np.int64)
        self._seen, ends = block.offsets
        begins, counts = ends[:-1], block.table["steps"].astype(np.int64)
        self._of_fragment = np.repeat(np.arange(len(counts)), counts)
        self._ends = ends[1:]  # end row of each fragment
        position = np.arange(len(self._of_fragment)) - begins[self._of_fragment]
        self._after = (self._seen[:-1] + self._leads)[self._of_fragment] + position  # row of the observation after it
        self._continues = np.flatnonzero((position == 0) & (self._leads == 0)[self._of_fragment])
        self.step = block.table["first_step"].astype(np.int64)[self._of_fragment] + position
        self.episode = np.where(block.rows < 0, -1, episodes[block.rows])[self._of_fragment]
        # A part whose first observation is lost begins with the next step.
        lacks = np.zeros(len(counts), bool)
        parts = writer.parts
        trimmed = parts.first_of(parts.trimmed.nonzero()[0])
        lacks[trimmed[(trimmed >= block.begin) & (trimmed < block.begin + len(counts))] - block.begin] = True
        self.is_wanted = (self.episode >= 0) & ~(lacks[self._of_fragment] & (position == 0))

    def __len__(self) -> int:
        return len(self._of_fragment)

    def column(self, path: tuple[Any, ...]) -> Column:
        """Return a column by its path. Raises InvalidOption, CorruptTrace."""
        name, *keys = path
        if name in ("step", "episode"):
            return numbers((self.step if name == "step" else self.episode)[:, None])
        if name in _FLAGS:
            flagged = (self._table["flags"] & _FLAGS[name] > 0) & (self._table["steps"] > 0)
            data = np.zeros((len(self), 1), bool)
            data[self._ends[flagged] - 1] = True
            return Column("condition", data, ALWAYS)
        if not len(self):
            return self._unknown()
        if name == "info":
            infos = self._chunk.array(("infos",)) if ("infos",) in self._chunk else ()
            return _of_any_kind([_within(info, keys) for info in infos]) if len(infos) else self._unknown()
        whole: Path = (_ROOTS[name], *keys)
        stored = next((whole[:end] for end in range(len(whole), 0, -1) if whole[:end] in self._chunk), None)
        if stored is None:
            return self._unknown()
        rows = self._chunk.array(stored)
        unknown = np.empty(0, np.int64)
        if name == _AFTER:
            rows = rows[self._after]
            placeholders = (self._table["flags"] & wire.PLACEHOLDER > 0) & (self._table["steps"] > 0)
            unknown = self._ends[placeholders] - 1
        elif name == _BEFORE:
            rows, unknown = self._before(stored, rows)
        for key in keys[len(stored) - 1 :]:
            if not isinstance(key, int) or rows.ndim < 2 or not -rows.shape[1] <= key < rows.shape[1]:
                shape = self._chunk.array(stored).shape[1:]
                raise NoSuchKey(
                    f"no {key!r} in {'.'.join(map(str, (name, *stored[1:])))}: its rows have the shape {shape}"
                )
            rows = rows[:, key]
        return _without(_column_of(rows), unknown)

    def _before(self, path: Path, rows: Array) -> tuple[Array, Array]:
        """Return the observations before each step, and the steps before which it is unknown."""
        found = rows[np.maximum(self._after - 1, 0)]
        unknown = []
        for row in self._continues.tolist():
            known = self._known.get(int(self._block.rows[self._of_fragment[row]]), {}).get(path)
            if known is None or (known.dtype, known.shape[1:]) != (rows.dtype, rows.shape[1:]):
                unknown.append(row)
            else:
                found[row] = known[0]
        return found, np.array(unknown, np.int64)

    def last_observations(self) -> _Last:
        """Return the last observation of each episode that continues behind this chunk."""
        rows, has_ended = self._block.rows, self._table["flags"] & wire.ENDS > 0
        ended = set(rows[has_ended].tolist())
        last = {row: known for row, known in self._known.items() if row not in ended}
        paths = [path for path in self._chunk.columns if path[0] == "observations"]
        for fragment in np.flatnonzero(~has_ended & (rows >= 0) & (np.diff(self._seen) > 0)).tolist():
            end = int(self._seen[fragment + 1])
            last[int(rows[fragment])] = {path: self._chunk.array(path)[end - 1 : end].copy() for path in paths}
        return last

    def _unknown(self) -> Column:
        return words(np.zeros((len(self), 1), np.int64), [None])


def _without(column: Column, rows: Array) -> Column:
    """Return a column whose values in some rows are unknown."""
    if not len(rows):
        return column
    known, data = np.broadcast_to(column.known, column.data.shape).copy(), column.data
    known[rows] = False
    if data.dtype.kind == "f":  # so that isnan() does not find them
        data = data.copy()
        data[rows] = 0
    return column._replace(data=data, known=known)


def _column_of(rows: Array) -> Column:
    """Return rows as a column, (rows, values of a row)."""
    if rows.dtype == object:
        return _of_any_kind(rows)
    data = rows.reshape(len(rows), -1)
    if data.dtype.kind == "b":
        return Column("condition", data, np.broadcast_to(ALWAYS, data.shape))
    if data.dtype.kind not in "iuf":
        raise InvalidOption(f"values of {rows.dtype} cannot be compared")
    return numbers(data, np.broadcast_to(ALWAYS, data.shape))


def _of_any_kind(values: Iterable[Any]) -> Column:
    column = factorized(values)
    return column._replace(data=column.data[:, None], known=column.known[:, None])


def _within(value: Any, keys: list[Any]) -> Any:
    """Return what is under these keys; None if there is nothing."""
    for key in keys:
        try:
            value = value[key] if isinstance(value, dict) or isinstance(key, int) else None
        except (LookupError, TypeError):
            return None
    return value
