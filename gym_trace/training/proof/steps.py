"""Recorded steps as inputs of an update: references into a trace instead of copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gym_trace.data.tensors import plain_array
from gym_trace.data.values import Array, dtype_from
from gym_trace.errors import InvalidOption, ReplayDiverged
from gym_trace.playback.trace import Trace
from gym_trace.training.proof.state import Devices, device_of, digest_of, placed
from gym_trace.training.proof.trace_checks import lanes_of

OWN = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations", "dones")
_CACHE_BYTES = 256 << 20  # limit of the cache of decoded columns
_STRIDE = 1 << 40  # offset between the step numbers of two lanes


class Steps(Mapping[str, Any]):
    """Arrays of recorded steps, by column. The log stores their numbers and a digest, but no copy.

    Args:
        where: numbers of steps since the start of the recording, counted per lane: range(256, 384), or an array of
            integers; a pair of arrays, steps and lanes, selects single steps of lanes.
        arrays: by column, as your function that learns expects them: observations, next_observations, actions, rewards,
            terminations, truncations, dones (either of these two) and annotations, each by its name. They are NumPy
            arrays or tensors of any dtype that holds the values. Of a vector environment their shape is (steps, lanes,
            ...), of a single one and of single steps of lanes (steps, ...).

    Examples:
        >>> steps = gym_trace.proof.Steps(range(0, 128), rewards=rewards)  # doctest: +SKIP
        >>> loss = log.update(steps=steps)  # doctest: +SKIP
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
        """Return the content for the log: where, as plain data or arrays, and a description of each column."""
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
            logged_device = device_of(array) if isinstance(array, torch.Tensor) else False
            columns.append([name, logged_device, values.dtype.str, list(values.shape), digest])
        return plain, columns


class RecordedSteps:
    """Columns of a trace by numbers of steps.

    Args:
        writer: writer of the steps; None: the only one. devices: see placed().
    """

    def __init__(self, trace: Trace, writer: str | None, devices: Devices = None):
        self._trace, self._devices = trace, devices
        names = trace.writers if writer is None else [writer]
        if len(names) != 1:
            raise ReplayDiverged(f"{trace.directory}: has {len(names)} writers, and the log names none")
        self._writer = names[0]
        lanes = {lane: found for (name, lane), found in lanes_of(trace).items() if name == names[0]}
        self._lane_count = max(lanes, default=-1) + 1
        self._episodes = np.array([index for lane in sorted(lanes) for index in lanes[lane][0]], int)
        # First step of each episode; the steps of a lane are numbered from lane * _STRIDE on.
        self._begins = np.array([lane * _STRIDE + begin for lane in sorted(lanes) for begin in lanes[lane][1]], int)
        ends = [int(begins[-1]) + int(trace.episodes["steps"][rows[-1]]) for rows, begins in lanes.values()]
        self._max_steps = max(ends, default=0)  # in any lane
        self._columns: dict[tuple[str, int], Array] = {}  # by name and episode
        self._bytes = 0

    def of(self, plain: Any, columns: Any, uses: dict[tuple[str, int], list[Array]] | None = None) -> Steps:
        """Return steps as they were passed.

        uses: receives the numbers of the steps, by writer and lane.

        Raises ReplayDiverged if the trace has other values.
        """
        found: dict[str, Any] = {}
        wanted = self._wanted(plain, [str(name) for name, *_ in columns])
        for name, logged_device, dtype, shape, digest in columns:
            values = _in_form(self._values(name, plain, wanted), dtype_from(dtype), tuple(shape), wanted)
            if values is None or digest_of(values) != digest:
                raise ReplayDiverged(f"{name} of steps {_shown(plain)} are not those of {self._trace.directory}")
            found[name] = placed(torch.from_numpy(values), logged_device, self._devices) if logged_device else values
        if columns and uses is not None:
            for lane in np.unique(wanted // _STRIDE).tolist():
                uses.setdefault((self._writer, lane), []).append(wanted[wanted // _STRIDE == lane] % _STRIDE)
        return Steps(_where(plain), **found)

    def _wanted(self, plain: Any, names: list[str]) -> Array:
        """Return the steps, (steps, lanes), or (steps,) of chosen lanes, as numbers in the order of _begins."""
        if isinstance(plain, dict):
            rows, lanes = np.asarray(plain["rows"]), np.asarray(plain.get("lanes", 0))
        else:
            begin, end = plain
            rows, lanes = np.arange(begin, min(end, begin + self._max_steps + 1)), np.asarray(0)
        for numbers, limit in ((rows, self._max_steps), (lanes, self._lane_count)):
            if numbers.dtype.kind not in "iu" or ((numbers < 0) | (numbers >= limit)).any():
                raise ReplayDiverged(f"{self._trace.directory}: lacks {', '.join(names)} of steps {_shown(plain)}")
        if isinstance(plain, dict) and "lanes" in plain:
            return np.asarray(rows + lanes * _STRIDE)
        return np.asarray(rows[:, None] + np.arange(self._lane_count) * _STRIDE)

    def _values(self, name: str, plain: Any, wanted: Array) -> Array:
        """Return the rows of a column: (*wanted.shape, ...)."""
        numbers = np.searchsorted(self._begins, wanted, "right") - 1
        found: Array | None = None
        try:
            for number in np.unique(numbers).tolist():
                is_in_episode = numbers == number
                values = self._column(name, int(self._episodes[number]))[wanted[is_in_episode] - self._begins[number]]
                if found is None:
                    found = np.empty((*wanted.shape, *values.shape[1:]), values.dtype)
                found[is_in_episode] = values
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
        raise ReplayDiverged(f"{name}: no column of the trace; it has {', '.join((*OWN, *episode.annotations))}")
    return np.asarray(column)


def _in_form(values: Array, dtype: np.dtype[Any], shape: tuple[int, ...], wanted: Array) -> Array | None:
    """Return recorded values in the dtype and shape of an argument; None if that changes or reorders them."""
    steps = wanted.shape
    fits = shape[:1] in ((steps[0],), (wanted.size,)) and (
        shape[0] == wanted.size or len(steps) == 1 or shape[1:2] == steps[1:2]
    )
    if dtype.kind not in "biufc" or not fits:
        return None
    cast = np.ascontiguousarray(values.reshape(shape).astype(dtype, copy=False))
    is_rounded = np.can_cast(values.dtype, dtype, "same_kind") and dtype.kind in "fc"
    return cast if is_rounded or np.array_equal(cast.astype(values.dtype).ravel(), values.ravel()) else None


def _where(plain: Any) -> Any:
    if isinstance(plain, dict):
        return (plain["rows"], plain["lanes"]) if "lanes" in plain else plain["rows"]
    return range(*plain)


def _shown(plain: Any) -> str:
    return f"{plain['rows'][:4].tolist()} …" if isinstance(plain, dict) else f"{plain[0]} to {plain[1]}"
