"""Steps that satisfy a condition, found chunk by chunk."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.format import wire
from gym_trace.format.batch_reader import Chunk
from gym_trace.model.layout import Path
from gym_trace.model.values import Array
from gym_trace.printable import printable
from gym_trace.reading.content import Content
from gym_trace.reading.episode_scan import OnDamage, damage_at
from gym_trace.reading.writer_reader import Block, WriterReader
from gym_trace.selecting.columns import ALWAYS, Column, NoSuchKey, factorized, numbers, words
from gym_trace.selecting.conditions import rows_where
from gym_trace.selecting.language import columns_in, parse_condition, pointed

_NAMED = 8  # parts that an error names
_SINGULAR = {"observation": "observations", "action": "actions", "reward": "rewards"}
_FLAGS = {"terminated": wire.TERMINATED, "truncated": wire.TRUNCATED}
_STORED = ("observations", "actions", "rewards", "annotations", "infos")
STEP_COLUMNS = (*_STORED, *_FLAGS, "step", "episode")
STEP_NAMES = frozenset((*STEP_COLUMNS, *_SINGULAR))


def steps_where(content: Content, condition: str, on_damage: OnDamage | None = None) -> Array:
    """Return the steps where a condition holds; see Trace.find_steps.

    on_damage: called with each damaged chunk, which is skipped; None: raises CorruptTrace.
    """
    named = [node.value for node in columns_in(parse_condition(condition))]
    roots = frozenset(_SINGULAR.get(str(path[0]), str(path[0])) for path in named)
    _check_names(content, condition)
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
        for block in writer.blocks(episodes >= 0):
            try:
                chunk = writer.chunk(block.number, roots & frozenset(_STORED))
                table = _Rows(writer, block, chunk, episodes, roots)
                hits = rows_where(condition, table) & table.is_wanted
            except CorruptTrace as error:
                if on_damage is None:
                    raise
                on_damage(damage_at(writer, block.number, error.problem))
                continue
            found.append(np.stack([table.episode[hits], table.step[hits]], 1))
    steps = np.concatenate(found)
    return steps[np.lexsort((steps[:, 1], steps[:, 0]))]


def _check_names(content: Content, condition: str) -> None:
    """Raise InvalidOption for a column that no chunk can have."""
    stored = {path for writer in content.readers for path in _paths_of(writer)}
    for node in columns_in(parse_condition(condition)):
        name, *keys = node.value
        name = _SINGULAR.get(str(name), str(name))
        if name not in STEP_COLUMNS:
            near = difflib.get_close_matches(name, STEP_COLUMNS, n=1, cutoff=0.6)
            instead = f"did you mean {near[0]!r}?" if near else f"use {', '.join(STEP_COLUMNS)}"
            raise pointed(condition, node.begin, node.end, f"no column {name!r} of steps; {instead}")
        if name not in _STORED:
            problem = f"{name} is a single value" if keys else ""
        elif not any(path[0] == name for path in stored):
            problem = f"this trace has no {name}"
        elif name == "infos" and not keys:
            problem = 'infos is a dict; name a key, such as infos.lives or infos["a key"]'
        else:
            problem = "" if name == "infos" else _problem_of((name, *keys), stored)
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


class _Rows:
    """The rows of a chunk as a table for conditions; see gym_trace.selecting.columns.Table.

    If observations are named, there is one row for each observation, also that before the first step, whose step is
    one less and has no action; otherwise one for each step. Columns have the shape (rows, values of a row).

    Attributes:
        episode: place of the episode of each row, -1 if it is not wanted.
        step: step of each row in its whole episode.
        is_wanted: rows that are part of a wanted episode.
    """

    def __init__(self, writer: WriterReader, block: Block, chunk: Chunk, episodes: Array, roots: frozenset[str]):
        self._writer, self._chunk, self._table = writer, chunk, block.table
        self._has_observations = "observations" in roots
        leads = (block.table["flags"] & wire.LEADS > 0).astype(np.int64)
        observations, steps = block.offsets
        begins, counts = steps[:-1], block.table["steps"].astype(np.int64)
        if self._has_observations:
            begins, counts = observations[:-1], counts + leads
        self._of_fragment = np.repeat(np.arange(len(counts)), counts)
        self._ends = begins + counts  # of the rows of each fragment
        self._position = np.arange(len(self._of_fragment)) - begins[self._of_fragment]
        if self._has_observations:
            self._position -= leads[self._of_fragment]
        self._is_step = self._position >= 0
        self.step = block.table["first_step"].astype(np.int64)[self._of_fragment] + self._position
        self.episode = np.where(block.rows < 0, -1, episodes[block.rows])[self._of_fragment]
        # A part whose first observation is lost begins with the next step.
        lacks = np.zeros(len(counts), bool)
        parts = writer.parts
        trimmed = parts.first_of(parts.trimmed.nonzero()[0])
        lacks[trimmed[(trimmed >= block.begin) & (trimmed < block.begin + len(counts))] - block.begin] = True
        self.is_wanted = (self.episode >= 0) & ~(lacks[self._of_fragment] & (self._position == 0))

    def __len__(self) -> int:
        return len(self._of_fragment)

    def column(self, path: tuple[Any, ...]) -> Column:
        """Return a column by its path. Raises InvalidOption, CorruptTrace."""
        name, *keys = path
        name = _SINGULAR.get(str(name), str(name))
        if name in ("step", "episode"):
            return numbers((self.step if name == "step" else self.episode)[:, None])
        if name in _FLAGS:
            flagged = (self._table["flags"] & _FLAGS[name] > 0) & (self._table["steps"] > 0)
            data = np.zeros((len(self), 1), bool)
            data[self._ends[flagged] - 1] = True
            return Column("condition", data, self._is_step[:, None])
        if name == "infos":
            infos = self._chunk.array(("infos",)) if ("infos",) in self._chunk else ()
            return self._spread(_of_any_kind([_within(info, keys) for info in infos]), len(infos))
        path = (name, *keys)
        stored = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._chunk), None)
        if stored is None:
            return self._unknown()
        rows = self._chunk.array(stored)
        for key in keys[len(stored) - 1 :]:
            if not isinstance(key, int) or rows.ndim < 2 or not -rows.shape[1] <= key < rows.shape[1]:
                shape = self._chunk.array(stored).shape[1:]
                raise NoSuchKey(f"no {key!r} in {'.'.join(map(str, stored))}: its rows have the shape {shape}")
            rows = rows[:, key]
        return self._observed(rows) if name == "observations" else self._spread(_column_of(rows), len(rows))

    def _unknown(self) -> Column:
        return words(np.zeros((len(self), 1), np.int64), [None])

    def _observed(self, rows: Array) -> Column:
        column = _column_of(rows)
        placeholders = self._ends[self._table["flags"] & wire.PLACEHOLDER > 0] - 1
        if not len(placeholders):
            return column
        known = np.broadcast_to(column.known, column.data.shape).copy()
        known[placeholders] = False
        data = column.data
        if data.dtype.kind == "f":  # so that isnan() does not find them
            data = data.copy()
            data[placeholders] = 0
        return column._replace(data=data, known=known)

    def _spread(self, column: Column, steps: int) -> Column:
        """Return a column of steps with rows for the observations before them, which are unknown."""
        if not steps:
            return self._unknown()
        if not self._has_observations:
            return column
        data = np.zeros((len(self), *column.data.shape[1:]), column.data.dtype)
        known = np.zeros(data.shape, bool)
        data[self._is_step], known[self._is_step] = column.data, np.broadcast_to(column.known, column.data.shape)
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
