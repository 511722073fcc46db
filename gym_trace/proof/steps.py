"""Recorded steps as inputs of an update: references into a trace instead of copies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption, ReplayDiverged
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.proof.state import Packed, as_value

OWN = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations", "dones")


class Steps(Mapping[str, Any]):
    """Arrays of recorded steps, by column. The log keeps which steps they are, and a digest, but no copy.

    Args:
        where: numbers of steps since the recording began, counted in each lane: range(256, 384), or an array of
            integers; a pair of arrays, steps and lanes, chooses single steps of lanes.
        arrays: by column, as the function that learns takes them: observations, next_observations, actions, rewards,
            terminations, truncations, dones (either of these two) and annotations, each by its name. They are NumPy
            arrays or tensors of any dtype that holds the values. Of a vector environment their shape is (steps, lanes,
            ...), of a single one and of single steps of lanes (steps, ...).
    """

    def __init__(self, where: range | Array | tuple[Array, Array], /, **arrays: Any):
        self.where = where
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def reference(self) -> tuple[Any, Any]:
        """Return what the log keeps: where as plain data or arrays, and how the columns are stored."""
        where = self.where
        if isinstance(where, range):
            if where.step != 1:
                raise InvalidOption(f"{where}: pass a range without a stride, or an array")
            plain: Any = [where.start, where.stop]
        elif isinstance(where, tuple):
            plain = {"rows": np.asarray(where[0], np.int64), "lanes": np.asarray(where[1], np.int64)}
        else:
            plain = {"rows": np.asarray(where, np.int64)}
        columns = []
        for name, array in self._arrays.items():
            packed = Packed(array, name)
            if len(packed.arrays) != 1:
                raise InvalidOption(f"{name}: pass an array or a tensor")
            kind, _, dtype, shape = packed.tree
            columns.append([name, kind, dtype, shape, _digest(packed.arrays[0])])
        return plain, columns


class RecordedSteps:
    """Columns of a trace by numbers of steps.

    Args:
        writer: of the steps; None: the only one.
    """

    def __init__(self, trace: Trace, writer: str | None):
        self._trace = trace
        names = [writer] if writer is not None else trace.writers
        if len(names) != 1:
            raise InvalidOption(f"{trace.directory}: has {len(names)} writers; pass the recorder to UpdateLog")
        table = trace.episodes
        number = trace.writers.index(names[0]) if names[0] in trace.writers else -1
        mine = np.flatnonzero(table["writer"] == number).tolist()
        self._lanes: list[list[int]] = []
        for index in mine:
            lane = int(table["lane"][index])
            self._lanes += [[] for _ in range(lane + 1 - len(self._lanes))]
            if table["steps"][index]:
                self._lanes[lane].append(int(index))
        self._columns: dict[tuple[str, int], Array] = {}

    def of(self, plain: Any, columns: Any) -> Steps:
        """Return steps as they were passed. Raises ReplayDiverged if the trace has other values."""
        found: dict[str, Any] = {}
        for name, kind, dtype, shape, digest in columns:
            values = self._values(name, plain)
            wanted = np.dtype(dtype) if kind == "numpy" else _numpy_dtype(dtype)
            data = np.ascontiguousarray(values.reshape(shape).astype(wanted)).reshape(-1).view(np.uint8)
            if _digest(data) != digest:
                raise ReplayDiverged(f"{name} of steps {_shown(plain)} are not those of {self._trace.directory}")
            found[name] = as_value(kind, data, dtype, shape)
        return Steps(self._where(plain), **found)

    def _where(self, plain: Any) -> Any:
        if isinstance(plain, dict):
            return (plain["rows"], plain["lanes"]) if "lanes" in plain else plain["rows"]
        return range(*plain)

    def _values(self, name: str, plain: Any) -> Array:
        try:
            if isinstance(plain, dict) and "lanes" in plain:
                pairs = zip(plain["rows"].tolist(), plain["lanes"].tolist())
                return np.stack([self._column(name, lane)[row] for row, lane in pairs])
            rows = plain["rows"] if isinstance(plain, dict) else np.arange(*plain)
            lanes = [self._column(name, lane)[rows] for lane in range(len(self._lanes))]
            return np.stack(lanes, 1)
        except InvalidOption:
            raise
        except (IndexError, ValueError) as error:
            raise ReplayDiverged(f"{self._trace.directory}: lacks {name} of steps {_shown(plain)}") from error

    def _column(self, name: str, lane: int) -> Array:
        """Return a column of all steps of a lane."""
        if (name, lane) not in self._columns:
            pieces = [_column_of(self._trace[index], name) for index in self._lanes[lane]]
            self._columns[name, lane] = np.concatenate(pieces)
        return self._columns[name, lane]


def _column_of(episode: Any, name: str) -> Array:
    if name == "observations":
        return np.asarray(episode.observations[:-1])
    if name == "next_observations":
        return np.asarray(episode.observations[1:])
    if name == "dones":
        return np.asarray(episode.terminations | episode.truncations)
    if name in OWN:
        return np.asarray(getattr(episode, name))
    column = episode.annotations.get(name)
    if column is None:
        raise InvalidOption(f"{name}: no column of the trace; it has {', '.join((*OWN, *episode.annotations))}")
    return np.asarray(column)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError as error:
        raise InvalidOption(f"steps: a tensor of {name} cannot be a reference; pass it as an argument") from error


def _digest(data: Array) -> str:
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


def _shown(plain: Any) -> str:
    return f"{plain['rows'][:4].tolist()} …" if isinstance(plain, dict) else f"{plain[0]} to {plain[1]}"
