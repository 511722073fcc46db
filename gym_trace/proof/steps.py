"""Recorded steps as inputs of an update: references into a trace instead of copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gym_trace.errors import InvalidOption, ReplayDiverged
from gym_trace.model.tensors import plain_array
from gym_trace.model.values import Array, dtype_from
from gym_trace.playback.trace import Trace
from gym_trace.proof.recorded import lanes_of
from gym_trace.proof.state import digest_of, place_of, placed

OWN = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations", "dones")
_CACHE_BYTES = 256 << 20  # of decoded columns
_FAR = 1 << 40  # steps


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
            values = plain_array(array.detach() if isinstance(array, torch.Tensor) else array)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "biufc":
                raise InvalidOption(f"{name}: pass an array or a tensor of numbers, of a dtype that NumPy has")
            digest = digest_of(np.ascontiguousarray(values))
            place = place_of(array) if isinstance(array, torch.Tensor) else False
            columns.append([name, place, values.dtype.str, list(values.shape), digest])
        return plain, columns


class RecordedSteps:
    """Columns of a trace by numbers of steps.

    Args:
        writer: of the steps; None: the only one. device: of tensors, see placed().
    """

    def __init__(self, trace: Trace, writer: str | None, device: str | None = None):
        self._trace, self._device = trace, device
        names = trace.writers if writer is None else [writer]
        if len(names) != 1:
            raise InvalidOption(f"{trace.directory}: has {len(names)} writers; pass the recorder to UpdateLog")
        lanes = {lane: found for (name, lane), found in lanes_of(trace).items() if name == names[0]}
        self._lane_count = max(lanes, default=-1) + 1
        self._episodes = np.array([index for lane in sorted(lanes) for index in lanes[lane][0]], int)
        # Where an episode begins, in steps of all lanes one after the other, a long way from each to the next.
        self._begins = np.array([lane * _FAR + begin for lane in sorted(lanes) for begin in lanes[lane][1]], int)
        self._columns: dict[tuple[str, int], Array] = {}  # by episode
        self._bytes = 0

    def of(self, plain: Any, columns: Any) -> Steps:
        """Return steps as they were passed. Raises ReplayDiverged if the trace has other values."""
        found: dict[str, Any] = {}
        for name, place, dtype, shape, digest in columns:
            values = self._values(name, plain).reshape(shape)
            values = np.ascontiguousarray(values.astype(dtype_from(dtype), copy=False))
            if digest_of(values) != digest:
                raise ReplayDiverged(f"{name} of steps {_shown(plain)} are not those of {self._trace.directory}")
            found[name] = placed(torch.from_numpy(values), place, self._device) if place else values
        return Steps(_where(plain), **found)

    def _values(self, name: str, plain: Any) -> Array:
        """Return the rows of a column: (steps, lanes, ...), or (steps, ...) of chosen lanes."""
        rows = plain["rows"] if isinstance(plain, dict) else np.arange(*plain)
        is_chosen = isinstance(plain, dict) and "lanes" in plain
        wanted = rows + plain["lanes"] * _FAR if is_chosen else rows[:, None] + np.arange(self._lane_count) * _FAR
        numbers = np.searchsorted(self._begins, wanted, "right") - 1
        found: Array | None = None
        try:
            for number in np.unique(numbers).tolist():
                here = numbers == number
                values = self._column(name, int(self._episodes[number]))[wanted[here] - self._begins[number]]
                if found is None:
                    found = np.empty((*wanted.shape, *values.shape[1:]), values.dtype)
                found[here] = values
        except IndexError:
            found = None
        if found is None:
            raise ReplayDiverged(f"{self._trace.directory}: lacks {name} of steps {_shown(plain)}")
        return found

    def _column(self, name: str, index: int) -> Array:
        if (name, index) not in self._columns:
            if self._bytes > _CACHE_BYTES:
                self._columns, self._bytes = {}, 0
            self._columns[name, index] = column = _column_of(self._trace[index], name)
            self._bytes += column.nbytes
        return self._columns[name, index]


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


def _where(plain: Any) -> Any:
    if isinstance(plain, dict):
        return (plain["rows"], plain["lanes"]) if "lanes" in plain else plain["rows"]
    return range(*plain)


def _shown(plain: Any) -> str:
    return f"{plain['rows'][:4].tolist()} …" if isinstance(plain, dict) else f"{plain[0]} to {plain[1]}"
