"""Compare an environment with its recording."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.layout import Layout, Leaf, as_kept
from gym_trace.data.packing import pack_lenient
from gym_trace.data.tensors import plain_array
from gym_trace.data.values import Array, unstored
from gym_trace.errors import InvalidOption
from gym_trace.printable import key_text, shown

_STATISTICS = frozenset("rlt")  # episode statistics: return, length, time
_PLAIN_NUMBERS = (bool, int, float, np.float64)


class Difference(NamedTuple):
    """The first difference of a replay from the recording.

    Attributes:
        step: index of the step, or None at the reset.
        column: e.g. "observations/position", "rewards" or "infos/lives"; "error" if the environment raised one.
        at: index of the first different element in the value, () for a scalar.
        recorded, seen: the two elements, or the two values unless both are arrays of one dtype and shape.
        largest: largest difference between elements of the two values; None unless both are arrays of numbers.

    Examples:
        >>> twice = {"rewards": lambda episode: 2 * episode.rewards}
        >>> _ = gym_trace.edit.map("traces/cartpole", twice, "traces/rewards-doubled")
        >>> pair = next(gym_trace.diff_traces("traces/cartpole", "traces/rewards-doubled"))
        >>> pair.difference.column, pair.difference.step
        ('rewards', 0)
    """

    step: int | None
    column: str
    at: tuple[int, ...]
    recorded: Any
    seen: Any
    largest: float | None

    def __str__(self) -> str:
        return self.as_text()

    def as_text(self, first: str = "recorded", second: str = "seen") -> str:
        """Return the position and the two values as text. first, second: names of the values.

        Examples:
            >>> twice = {"rewards": lambda episode: 2 * episode.rewards}
            >>> _ = gym_trace.edit.map("traces/cartpole", twice, "traces/rewards-twice")
            >>> pair = next(gym_trace.diff_traces("traces/cartpole", "traces/rewards-twice"))
            >>> print(pair.difference.as_text("A has", "B has"))
            at step 0, rewards: A has 1.0, B has 2.0
        """
        where = "at the reset" if self.step is None else f"at step {self.step}"
        if self.column == "error":
            return f"{where}: {self.seen}"
        more = "" if not self.at or self.largest is None else f", largest difference {self.largest:.3g}"
        values = f"{first} {_shown(self.recorded)}, {second} {_shown(self.seen)}"
        return f"{where}, {element(self.column, self.at)}: {values}{more}"


def element(column: str, at: tuple[int, ...]) -> str:
    """Return the name of an element of a column: observations[2]."""
    return f"{column}[{', '.join(map(str, at))}]" if at else column


class Comparison:
    """Settings of a comparison.

    Args:
        atol, rtol: numbers are close if abs(recorded - seen) <= atol + rtol * abs(recorded). Both 0: bit for bit,
            including dtypes and shapes.
        tolerances: atol of single columns, by name: "rewards", "observations" or "observations/position".
        ignore: columns that are not compared, of COLUMNS.

    Raises:
        InvalidOption
    """

    COLUMNS = ("observations", "rewards", "terminations", "truncations", "infos")

    def __init__(
        self,
        atol: float = 0.0,
        rtol: float = 0.0,
        ignore: Collection[str] = (),
        tolerances: Mapping[str, float] | None = None,
    ):
        if not (atol >= 0 and rtol >= 0):
            raise InvalidOption(f"atol={atol!r}, rtol={rtol!r}: pass numbers, 0 or more")
        for name, tolerance in (tolerances or {}).items():
            if name.partition("/")[0] not in self.COLUMNS:
                raise InvalidOption(f"tolerance of {name!r}: no such column; choose from {', '.join(self.COLUMNS)}")
            if not tolerance >= 0:
                raise InvalidOption(f"tolerance of {name!r}: {tolerance!r}; pass a number, 0 or more")
        if unknown := set(ignore) - set(self.COLUMNS):
            raise InvalidOption(f"ignore: unknown column {sorted(unknown)[0]!r}; choose from {', '.join(self.COLUMNS)}")
        self.atol, self.rtol, self.tolerances = atol, rtol, dict(tolerances or {})
        self.columns = frozenset(self.COLUMNS) - set(ignore)


class EpisodeComparison:
    """Compares the results of resets and steps with a recorded episode.

    Args:
        observations: the observations of the episode, or a structure that returns single rows; None: those of episode.
        all_infos: True if all infos were recorded, so that an unrecorded one is a difference.
        batched: True for a lane of a vector environment that is compared with a single environment.
        replayed: True for results of a replay, which takes another time; see without_clock().
        seen: layout of the observations of another environment: only leaves and keys that both have are compared.

    Attributes:
        largest: largest difference of numbers that count as close.
        exact: True while everything is equal bit for bit.
    """

    def __init__(
        self,
        comparison: Comparison,
        episode: Episode,
        layouts: Any,
        observations: Any = None,
        all_infos: bool = False,
        batched: bool = False,
        replayed: bool = False,
        seen: Layout | None = None,
    ):
        self.largest, self.exact = 0.0, True
        self._skipped: set[str] = set()
        self._atol, self._rtol, self._tolerances = comparison.atol, comparison.rtol, comparison.tolerances
        self._layout: Layout = layouts.observations
        self._seen, self._shares = seen or self._layout, seen is not None
        self._shared = shared_leaves(self._layout, self._seen)
        self._columns = columns = comparison.columns - (
            {"observations"} if self._shares and not self._shared else set()
        )
        self._leaves: list[Array] | None = None  # recorded observations; None: their structure is not the space's
        if "observations" in columns:
            self._observations = episode.observations if observations is None else observations
            with contextlib.suppress(LookupError):
                self._leaves = self._layout.split(self._observations)
        self._rewards = episode.rewards if "rewards" in columns else np.empty(0)
        flags = [name for name in ("terminations", "truncations") if name in columns]
        self._flags: dict[str, Array] = {name: getattr(episode, name) for name in flags}
        self._all_infos, self._batched, self._replayed = all_infos, batched, replayed
        self._unknown_row = -1 if episode.has_final_observation else len(episode)  # index in the observations
        self._reset_info = episode.reset_info if "infos" in columns else None
        self._infos = None if self._reset_info is None else infos_of(episode)

    def reset(self, observation: Any, info: dict[str, Any]) -> Difference | None:
        """Compare the result of a reset; return the first difference."""
        difference = self._observation(None, 0, observation)
        if difference is None and self._reset_info is not None:
            difference = self._info(None, self._reset_info, info)
        return difference

    def step(
        self, step: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> Difference | None:
        """Compare the result of a step; return the first difference."""
        difference = self._observation(step, step + 1, observation)
        if difference is None:
            for pair in self.reward_pair(step, reward):
                difference = self.value(step, *pair)
        for name, seen in (("terminations", terminated), ("truncations", truncated)):
            if difference is None and name in self._flags and bool(self._flags[name][step]) != bool(seen):
                difference = Difference(step, name, (), bool(self._flags[name][step]), bool(seen), None)
        if difference is None and self._infos is not None:
            difference = self._info(step, self._infos[step], info)
        return difference

    def skip(self, column: str) -> None:
        """Stop to compare a column. column: as in a Difference."""
        self._skipped.add(column)
        self._flags.pop(column, None)

    def _observation(self, step: int | None, row: int, observation: Any) -> Difference | None:
        for name, recorded, seen in self.observation_pairs(row, observation):
            difference = self.value(step, name, recorded, seen)
            if difference is not None:
                return difference
        return None

    def observation_pairs(self, row: int, observation: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the name of each compared leaf, its recorded value in a row of observations, and the one seen now."""
        if "observations" not in self._columns or row == self._unknown_row:
            return
        if self._leaves is None:
            yield "observations", self._observations[row], observation
            return
        try:
            seen = self._seen.split(observation)
        except LookupError:
            yield "observations", [rows[row] for rows in self._leaves], observation
            return
        for leaf, number, seen_number in self._shared:
            yield leaf.label, self._leaves[number][row], as_kept(seen[seen_number], leaf)

    def reward_pair(self, step: int, reward: Any) -> Iterator[tuple[str, Any, Any]]:
        """Yield the column's name, the recorded reward of a step, and the one seen now, if rewards are compared."""
        if "rewards" in self._columns:
            yield "rewards", self._rewards[step], _as_recorded(reward, self._rewards.dtype)

    def _info(self, step: int | None, recorded: dict[str, Any], info: dict[str, Any]) -> Difference | None:
        if not (isinstance(recorded, dict) and isinstance(info, dict)):  # the file is untrusted
            return self.value(step, "infos", recorded, info)
        if self._replayed:
            recorded, info = without_clock(recorded), without_clock(info)
        for key in info if self._all_infos else ():
            if key not in recorded:
                return Difference(step, f"infos/{key_text(key)}", (), None, info[key], None)
        for key in recorded:
            if key not in info:
                if self._shares:
                    continue
                return Difference(step, f"infos/{key_text(key)}", (), recorded[key], None, None)
            seen = _as_batched(recorded[key], info[key]) if self._batched else info[key]
            difference = self.value(step, f"infos/{key_text(key)}", recorded[key], seen)
            if difference is not None:
                return difference
        return None

    def _atol_of(self, column: str) -> float:
        """Return the absolute tolerance of a column, or of its nearest parent that has one."""
        while column not in self._tolerances and column:
            column = column.rpartition("/")[0]
        return self._tolerances.get(column, self._atol)

    def value(self, step: int | None, column: str, recorded: Any, seen: Any) -> Difference | None:
        """Compare two values; return the difference."""
        if column in self._skipped:
            return None
        seen = plain_array(seen)
        if not all(type(value) is np.ndarray or isinstance(value, np.generic) for value in (recorded, seen)):
            return None if are_equal(recorded, seen) else Difference(step, column, (), recorded, seen, None)
        has_same_type = recorded.dtype == seen.dtype and recorded.shape == seen.shape
        if has_same_type and recorded.tobytes() == seen.tobytes():
            return None
        are_numbers = recorded.dtype.kind in "biuf" and seen.dtype.kind in "biuf"
        if recorded.shape != seen.shape or not are_numbers:
            return Difference(step, column, (), recorded, seen, None)
        a, b = np.asarray(recorded), np.asarray(seen)
        atol = self._atol_of(column)
        with np.errstate(all="ignore"):
            distance = np.abs(a.astype(np.float64) - b.astype(np.float64))
            near = distance <= atol + self._rtol * np.abs(a.astype(np.float64))
            close = (near & np.isfinite(a) & np.isfinite(b)) | (a == b)
        close |= (a != a) & (b != b)
        largest = float(distance[np.isfinite(distance)].max(initial=0.0))
        if (atol or self._rtol) and close.all():
            self.largest, self.exact = max(self.largest, largest), False
            return None
        differs = ~close if atol or self._rtol or not has_same_type else _bits_differ(a, b)
        at = next((tuple(index) for index in np.argwhere(differs).tolist()), ())
        if a.shape and not at:  # only the dtypes differ
            return Difference(step, column, (), recorded, seen, largest)
        return Difference(step, column, at, a[at][()], b[at][()], largest)


class FirstDifferences:
    """Compares results to the end of an episode. Its methods are those of EpisodeComparison.

    Attributes:
        found: the first difference of each column, and of each leaf and key, in the order of steps.
        terminated, truncated: flags of the last step.
    """

    def __init__(self, comparison: EpisodeComparison):
        self._comparison = comparison
        self.found: list[Difference] = []
        self.terminated = self.truncated = False

    def reset(self, *result: Any) -> None:
        self._add(lambda: self._comparison.reset(*result))

    def step(
        self, step: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> None:
        self.terminated, self.truncated = bool(terminated), bool(truncated)
        self._add(lambda: self._comparison.step(step, observation, reward, terminated, truncated, info))

    def _add(self, compare: Callable[[], Difference | None]) -> None:
        while (difference := compare()) is not None:
            self.found.append(difference)
            self._comparison.skip(difference.column)


def shared_leaves(recorded: Layout, seen: Layout) -> list[tuple[Leaf, int, int]]:
    """Return the leaves that two layouts share: of one path, dtype and shape, with their numbers in both.

    An array alone is also the only leaf of its dtype and shape in a Dict, as AddRenderObservation puts it there.
    """
    pairs = [(one, i, j, other) for i, one in enumerate(recorded.leaves()) for j, other in enumerate(seen.leaves())]
    alike = [pair for pair in pairs if (pair[0].dtype, pair[0].shape) == (pair[3].dtype, pair[3].shape)]
    same_path = [pair for pair in alike if pair[0].path == pair[3].path]
    found = same_path or (alike if isinstance(recorded, Leaf) and len(alike) == 1 else [])
    return [(one, i, j) for one, i, j, _ in found]


def are_equal(recorded: Any, seen: Any) -> bool:
    """Return True if two values that are not both arrays are equal as stored."""
    packed = pack_lenient(recorded)[0]
    return packed in (pack_lenient(seen)[0], pack_lenient(_enums_as_text(seen))[0])


def _enums_as_text(value: Any) -> Any:
    """Return a value as older traces store it: members of enums as their repr."""
    if isinstance(value, dict):
        return {key: _enums_as_text(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_enums_as_text, value))
    return unstored(value) if isinstance(value, Enum) and not isinstance(value, (int, float, str)) else value


class Fingerprint:
    """Hashes the results of resets and steps instead of comparing them. infos: True to include infos."""

    def __init__(self, infos: bool) -> None:
        self._hash = hashlib.blake2b()
        self._infos = infos

    def reset(self, observation: Any, info: dict[str, Any]) -> None:
        self._hash.update(pack_lenient([observation, without_clock(info) if self._infos else None])[0])

    def step(
        self, step: int, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> None:
        result = [observation, reward, bool(terminated), bool(truncated), without_clock(info) if self._infos else None]
        self._hash.update(pack_lenient(result)[0])

    def digest(self) -> bytes:
        return self._hash.digest()


def without_clock(info: dict[str, Any]) -> dict[str, Any]:
    """Return an info without the seconds ("t") of gymnasium.wrappers.RecordEpisodeStatistics."""
    clocks = [key for key, value in info.items() if isinstance(value, Mapping) and value.keys() == _STATISTICS]
    return {**info, **{key: {"r": info[key]["r"], "l": info[key]["l"]} for key in clocks}} if clocks else info


def _as_recorded(reward: Any, dtype: np.dtype[Any]) -> Any:
    """Return a reward as the recorder stores it. dtype: dtype of the recorded rewards.

    Recorders store plain numbers, and rewards of several types, as float64. Imported rewards may be integers; a plain
    integer then becomes one of that dtype.
    """
    if type(reward) is int and dtype.kind in "iu" and np.iinfo(dtype).min <= reward <= np.iinfo(dtype).max:
        return dtype.type(reward)
    if type(reward) in _PLAIN_NUMBERS or (dtype == np.float64 and isinstance(reward, np.number)):
        with contextlib.suppress(OverflowError):  # an integer beyond all floats
            return np.float64(reward)
    return reward


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return str(value) if isinstance(value, np.generic) else shown(value)


def _as_batched(recorded: Any, seen: Any) -> Any:
    """Return an info as in a vector environment: plain numbers become NumPy numbers of the same value."""
    if isinstance(recorded, Mapping) and isinstance(seen, Mapping):
        return {key: _as_batched(recorded.get(key), value) for key, value in seen.items()}
    if not isinstance(recorded, np.generic) or not isinstance(seen, (bool, int, float, np.generic)):
        return seen
    try:
        batched = recorded.dtype.type(seen)
    except (TypeError, ValueError, OverflowError):
        return seen
    return batched if batched == seen or (batched != batched and seen != seen) else seen


def _bits_differ(a: Array, b: Array) -> Array:
    """Return a mask of elements whose bytes differ; NaNs and zeros may be equal with different bytes."""
    first, second = (np.frombuffer(x.tobytes(), np.uint8).reshape(-1, x.dtype.itemsize) for x in (a, b))
    return np.asarray((first != second).any(axis=1)).reshape(a.shape)
