"""RLlib's episodes, as its env runners write them, as a trace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.formats.parquet.tables import parquet_files
from gym_trace.formats.rllib.items import (
    Header,
    Items,
    header_of,
    is_episodes,
    pieces_of_episodes,
    space_told,
    unpacked,
)
from gym_trace.model.layout import Branch, Layout, Leaf, PlainSpace
from gym_trace.model.schema import Layouts, WriterSchema
from gym_trace.model.values import Array
from gym_trace.reading.assembly import densified

_KIND = "RLlib episodes"
_UNKNOWN: PlainSpace = {"type": "custom", "class": "", "repr": "not told by RLlib"}
_ANY = Leaf(("values",), None, ())
_NOT_TOLD = "RLlib keeps no seeds, options or times of episodes, nor what environment they are of"
_PIECE_BYTES, _VALUE_BYTES = 4 << 20, 256
_STARTED, _STEPS = Header._fields.index("started"), Header._fields.index("steps")
_NEEDED = {
    *("observations", "actions", "rewards", "infos", "extra_model_outputs"),
    *("is_terminated", "is_truncated", "_observation_space", "_action_space"),
}


class RLlibImporter:
    """RLlib: Parquet of episodes (output_write_episodes=True)."""

    name: ClassVar[str] = "rllib"

    def recognises(self, path: Path) -> bool:
        """Return True if the first Parquet file has a column of episodes."""
        found = parquet_files(path, most=1)
        return bool(found) and is_episodes(found[0])

    def read(self, path: Path) -> Imported:
        """Pieces of one episode are joined. Reads the headers of all episodes first, then one episode after another."""
        files = parquet_files(path)
        if not files:
            raise UnreadableRecording(f"{path}: there are no Parquet files")
        items = Items(files)
        if not len(items):
            raise UnreadableRecording(f"{path}: there are no episodes")
        return _Reader(path, items).imported()


class _Reader:
    """Reads the episodes of some files."""

    def __init__(self, path: Path, items: Items):
        self._items, self._path = items, path
        self._headers = np.empty((len(items), len(Header._fields)), np.int64)
        for number in range(len(items)):
            self._headers[number] = self._header(number)
        self._order, self._counts = pieces_of_episodes(self._headers)
        first = self._state(0)
        spaces = [self._space(first[name]) for name in ("_observation_space", "_action_space")]
        self._schema = new_schema(_KIND, spaces[0], spaces[1], metadata={"path": path.name}, infos=True)
        self._layouts: Layouts = WriterSchema.of(self._schema).layouts

    def imported(self) -> Imported:
        """Return the content of the new trace."""
        steps = int(self._headers[self._order, _STEPS].sum())
        notes = [_NOT_TOLD]
        if again := len(self._headers) - len(self._order):
            notes.append(f"{again:,} rows that are there more than once were read once")
        firsts = self._order[np.cumsum(self._counts) - self._counts]
        if late := int(np.count_nonzero(self._headers[firsts, _STARTED])):
            notes.append(f"of {late:,} episodes the first steps are missing")
        with self._reading(0):
            return imported(_KIND, self._read(), self._schema, notes=notes, steps=steps)

    def _read(self) -> Iterator[NewEpisode]:
        end = 0
        for count in self._counts.tolist():
            run, end = self._order[end : end + count], end + count
            first = self._state(int(run[0]))
            with self._reading(int(run[0])):
                infos = _infos(first)
            reset_info = infos[0] if infos and isinstance(infos[0], dict) else None
            states = chain([first], (self._state(int(number)) for number in run[1:]))
            steps = int(self._headers[run, _STEPS].sum())
            yield NewEpisode(steps, self._parts(states, run), reset_info=reset_info)

    def _parts(self, states: Iterator[dict[str, Any]], run: Array) -> Iterator[NewSteps]:
        """The steps of an episode, of which each piece has its states."""
        for piece, (state, number) in enumerate(zip(states, run.tolist())):
            with self._reading(number):
                yield from self._piece(
                    state, int(self._headers[number, _STEPS]), first=piece == 0, last=piece == len(run) - 1
                )

    def _piece(self, state: dict[str, Any], steps: int, first: bool, last: bool) -> Iterator[NewSteps]:
        observations = _tree(self._layouts.observations, state["observations"])
        actions = _tree(self._layouts.actions, state["actions"])
        rewards = _leaf(_rows(state["rewards"]))
        infos = _infos(state)
        notes = {name: _tree(_ANY, buffer) for name, buffer in _map(state["extra_model_outputs"]).items()}
        if len(rewards) != steps or _length(observations) != steps + 1 or len(infos) != steps + 1:
            raise UnreadableRecording(f"an episode of {steps} steps that has other numbers of rows")
        flags = np.zeros((2, steps), np.bool_)
        if last and steps:
            flags[:, -1] = bool(state["is_terminated"]), bool(state["is_truncated"])
        size = max(1, _PIECE_BYTES // (_size(observations) // (steps + 1) + 1))
        for begin in range(0, max(steps, 1), size):
            end = min(begin + size, steps)
            yield NewSteps(
                _cut(observations, begin + (begin > 0 or not first), end + 1),
                _cut(actions, begin, end),
                rewards[begin:end],
                flags[0, begin:end],
                flags[1, begin:end],
                infos[1 + begin : 1 + end],
                {name: _cut(rows, begin, end) for name, rows in notes.items()},
            )

    # -- items --------------------------------------------------------------------------------------------------------

    def _header(self, number: int) -> Header:
        with self._reading(number):
            return header_of(self._items[number])

    def _state(self, number: int) -> dict[str, Any]:
        with self._reading(number):
            state = unpacked(self._items[number])
            if not isinstance(state, dict) or not state.keys() >= _NEEDED:
                raise UnreadableRecording("no state of a SingleAgentEpisode")
            return state

    def _space(self, told: Any) -> Any:
        with self._reading(0):
            space = space_told(told)
            return _UNKNOWN if space is None else space

    @contextlib.contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        """Says which episode it is that cannot be read."""
        try:
            yield
        except (UnreadableRecording, CorruptTrace) as error:
            where = self._items.path_of(number)
            if str(where) in str(error):
                raise
            raise UnreadableRecording(f"{where}: row {number} of all: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            where = self._items.path_of(number)
            raise UnreadableRecording(f"{where}: row {number}: not an episode: {error!r:.100}") from error


# -- buffers ----------------------------------------------------------------------------------------------------------


def _rows(buffer: Any) -> Any:
    """Return the content of an InfiniteLookbackBuffer without lookback: a list, or arrays, in dicts and tuples."""
    data, lookback = buffer["data"], buffer["lookback"]
    if type(lookback) is not int or lookback < 0:
        raise UnreadableRecording(f"a buffer that looks back {lookback!r:.40} steps")
    return _tail(data, lookback) if buffer["finalized"] else list(data)[lookback:]


def _tail(tree: Any, lookback: int) -> Any:
    if isinstance(tree, dict):
        return {key: _tail(part, lookback) for key, part in tree.items()}
    if isinstance(tree, list):
        return tuple(_tail(part, lookback) for part in tree)
    return tree[lookback:] if isinstance(tree, np.ndarray) else np.asarray(tree)


def _infos(state: dict[str, Any]) -> list[Any]:
    rows = _rows({**state["infos"], "finalized": False})
    return [{} if info is None else info for info in rows]


def _tree(layout: Layout, buffer: Any) -> Any:
    """The rows of a buffer as the space has them."""
    rows = _rows(buffer)
    return _split(layout, rows) if isinstance(rows, list) else _leaves(rows)


def _leaves(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _leaves(part) for key, part in tree.items()}
    return tuple(map(_leaves, tree)) if isinstance(tree, tuple) else _leaf(tree)


def _split(layout: Layout, rows: list[Any]) -> Any:
    """Return one array per leaf, with one value per row."""
    if not isinstance(layout, Branch):
        return _leaf(rows)
    if layout.keys is None:
        if all(isinstance(row, list) and len(row) == len(layout.children) for row in rows):
            return tuple(_split(child, [row[i] for row in rows]) for i, child in enumerate(layout.children))
    elif all(isinstance(row, dict) and row.keys() == set(layout.keys) for row in rows):
        return {key: _split(child, [row[key] for row in rows]) for key, child in zip(layout.keys, layout.children)}
    return rows


def _leaf(rows: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return rows.tolist() if rows.dtype.kind == "U" else rows
    dense = densified(rows)
    return rows if dense is None else dense


def _cut(tree: Any, begin: int, end: int) -> Any:
    if isinstance(tree, dict):
        return {key: _cut(part, begin, end) for key, part in tree.items()}
    return tuple(_cut(part, begin, end) for part in tree) if isinstance(tree, tuple) else tree[begin:end]


def _parts_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _parts_of(part)
    else:
        yield tree


def _length(tree: Any) -> int:
    lengths = {len(part) for part in _parts_of(tree)}
    return lengths.pop() if len(lengths) == 1 else -1


def _size(tree: Any) -> int:
    """Bytes that rows take, about."""
    return sum(part.nbytes if isinstance(part, np.ndarray) else _VALUE_BYTES * len(part) for part in _parts_of(tree))


def _map(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}
