"""One recorded episode, as users see it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Protocol, overload

import numpy as np

from gym_trace.data.agents import AgentEpisode, JointColumns, Name, appeared
from gym_trace.data.other_names import OF_EPISODE, KnowsOtherNames
from gym_trace.data.returns import numbers_of
from gym_trace.data.showing.frames import steps_frame
from gym_trace.data.showing.html import image, page, player, sparkline
from gym_trace.data.showing.pictures import picture_of, pictures_in
from gym_trace.data.showing.text import count, moment, number, seed_of
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, TraceError
from gym_trace.printable import printable


class Source(Protocol):
    """Reads the arrays of one episode."""

    def column(self, name: str, steps: range | None) -> Any:
        """Return a column, or only its rows for these steps."""

    def start(self) -> dict[str, Any]:
        """Return the reset record."""

    def pending(self) -> Any:
        """Return the action of the step that was running at the end, or None."""


class Episode(KnowsOtherNames):
    """One recorded episode of N steps, or one contiguous part of it where steps were filtered out.

    Arrays are decoded on first access, and you may modify them. A slice, such as ``episode[100:164]``, has its steps
    and the observation before them, and reads little else.

    An episode is a snapshot. A running episode keeps the steps that it had when it was read; call Trace.refresh() and
    index the trace again for later ones. A pickled episode reads its arrays from the same directory
    when unpickled; an episode from a scan carries its arrays along. ``==`` is identity: compare arrays, or traces by
    diff_traces().

    Attributes:
        index: position in the trace.
        episode_id: 0, 1, 2 … in the order in which its writer began episodes. With `writer` it is unique in a trace.
        writer: id of the writer.
        lane: index of the sub-environment, 0 for a single environment.
        first_step: index in the episode of the first step here; 0 unless steps were filtered out or lost.
        outcome: "terminated", "truncated", "cut", "closed", "lost" or "running". A part has the outcome of its episode.
        seed: the seed passed to reset, or None.
        split: such as "train" or "eval".
        has_final_observation: True if the last row of observations follows the last step. False if an import, or a
            vector environment, did not have it: the row is a placeholder, NaN, 0 or "".
        start_time, end_time: UTC, ns; None if unknown. start_monotonic, end_monotonic: monotonic clock, ns.

    Examples:
        >>> episode = gym_trace.open_trace("traces/cartpole")[0]
        >>> len(episode), episode.seed is not None, episode.outcome, episode.total_reward
        (12, True, 'terminated', 12.0)
        >>> episode.observations.shape, episode.actions.shape  # the reset observation comes first
        ((13, 4), (12,))
        >>> episode[-2:].terminations
        array([False,  True])
    """

    _OTHER_NAMES = OF_EPISODE
    __slots__ = ("_cache", "_prefix", "_record", "_source", "_steps", "split", "writer")

    def __init__(
        self, record: Any, writer: str, split: str, source: Source, steps: range | None = None, prefix: int = 0
    ):
        self._record = record
        self._source = source
        self._steps = steps  # steps of this part; None for all
        self._prefix = prefix  # steps of the whole episode that repeat another one
        self._cache: dict[str, Any] = {}
        self.writer = writer
        self.split = split

    def __reduce__(self) -> Any:
        return Episode, (self._record, self.writer, self.split, self._source, self._steps, self._prefix)

    def __len__(self) -> int:
        return int(self._record["steps"]) if self._steps is None else len(self._steps)

    @overload
    def __getitem__(self, steps: slice) -> Episode: ...

    @overload
    def __getitem__(self, steps: str | int) -> AgentEpisode: ...

    def __getitem__(self, steps: slice | str | int) -> Episode | AgentEpisode:
        """Return consecutive steps as an episode, or the steps of one of many agents, by its name.

        Raises:
            TypeError: for any other index.
            KeyError: there is no such agent.
            TraceError: the episode is of a single agent.
        """
        if isinstance(steps, str) or (type(steps) is int and self._has_agents()):
            return AgentEpisode(self, self._joint, steps)
        if not isinstance(steps, slice) or steps.step not in (None, 1):
            raise TypeError(f"episode[{steps!r}]: pass a slice without a stride, such as episode[0:64]")
        chosen = (range(int(self._record["steps"])) if self._steps is None else self._steps)[steps]
        chosen = chosen if len(chosen) else range(chosen.start, chosen.start)
        return Episode(self._record, self.writer, self.split, self._source, chosen, self._prefix)

    def __repr__(self) -> str:
        return "<" + "\n  ".join([self._title, *self._lines()]) + ">"

    def _repr_html_(self) -> str:
        """Return HTML for notebooks: the repr, the rewards and the last observed image, if readable; and the viewer."""
        return page(self._title, self._lines(), *self._still, player(self))

    @property
    def _still(self) -> list[str]:
        """HTML of the rewards and of the last observed image, which needs no scripts; as far as they are readable."""
        parts = []
        with suppress(TraceError):
            parts.append(sparkline(numbers_of(self.rewards), "rewards"))
            last = self[max(0, len(self) - 1) :].observations
            row = -1 if self.has_final_observation else 0
            parts += [image(picture_of(array[row])) for array in pictures_in(last)]
        return parts

    @property
    def _title(self) -> str:
        part = f" from step {self.first_step}" if self.first_step else ""
        total = float(self._record["return"])
        known = f", return {number(total)}" if self._steps is None and total == total else ""
        what = f"{count(len(self), 'step')}{known}, {self.outcome}"
        return printable(f"Episode {self.episode_id} of {self.writer}{part}: {what}")

    def _lines(self) -> list[str]:
        """Return the lines of the repr after the title; reads no steps."""
        ended = not np.isnat(self._record["end_time"])
        took = f", took {number(self._record['duration'] / 1e9)} s" if ended else ""
        return [
            printable(f"index {self.index}, lane {self.lane}, seed {seed_of(self._record)}, split {self.split}"),
            f"started {moment(self._record['start_time'])} UTC{took}",
        ]

    def to_pandas(self) -> Any:
        """Return the steps as a pandas.DataFrame (needs pandas).

        One row per step: the observation before it, action, reward, terminated, truncated, and annotations.NAME. An
        array of up to 64 numbers has one column per number, "observation[2]"; larger ones fill a column of arrays.
        Parts of dicts and tuples have columns of their own, "observation.position[0]". The final observation has no
        row: use ``episode.observations[-1]``.

        Raises MissingExtra, CorruptTrace.

        Examples:
            >>> frame = gym_trace.open_trace("traces/cartpole")[0].to_pandas()
            >>> list(frame.columns)[-4:], len(frame)
            (['action', 'reward', 'terminated', 'truncated'], 12)
        """
        trees = {
            "observation": self.observations,
            "action": self.actions,
            "reward": self.rewards,
            "terminated": self.terminations,
            "truncated": self.truncations,
            **{f"annotations.{name}": values for name, values in self.annotations.items()},
        }
        return steps_frame(trees, len(self))

    @property
    def index(self) -> int:
        return int(self._record["index"])

    @property
    def episode_id(self) -> int:
        return int(self._record["episode_id"])

    @property
    def lane(self) -> int:
        return int(self._record["lane"])

    @property
    def first_step(self) -> int:
        return int(self._record["first_step"]) + (0 if self._steps is None else self._steps.start)

    @property
    def prefix(self) -> int:
        """Number of steps at the beginning that repeat another episode: episode[episode.prefix:] are the new ones.

        It is 0 unless branch() recorded the episode.
        """
        return min(len(self), max(0, self._prefix - self.first_step))

    @property
    def outcome(self) -> str:
        return str(self._record["outcome"])

    @property
    def has_final_observation(self) -> bool:
        is_end = self._steps is None or self._steps.stop == int(self._record["steps"])
        return not is_end or bool(self._record["has_final_observation"])

    @property
    def total_reward(self) -> float | Array:
        """The return: the sum of the rewards here; NaN if it is unknown or rewards are not numbers.

        Rewards of several numbers (objectives) give an array, one sum per objective; this reads the rewards.
        """
        known = float(self._record["return"]) if self._steps is None else math.nan
        if known == known or not len(self):
            return known if self._steps is None else 0.0
        try:
            rewards = self.rewards
        except TraceError:  # damaged, or too large for memory
            return math.nan
        if rewards.dtype.kind not in "biuf" or (rewards.ndim < 2 and self._steps is None):
            return math.nan
        return rewards.sum(axis=0) if rewards.ndim > 1 else float(np.sum(rewards))

    @property
    def seed(self) -> int | None:
        seed = int(self._record["seed"])
        if seed == -2:
            large = self._start.get("seed")
            return large if isinstance(large, int) else None
        return None if seed < 0 else seed

    @property
    def _start(self) -> dict[str, Any]:
        """The reset record."""
        if "start" not in self._cache:
            self._cache["start"] = self._source.start()
        start: dict[str, Any] = self._cache["start"]
        return start

    @property
    def options(self) -> dict[str, Any] | None:
        """The options passed to reset."""
        return self._start.get("options")

    @property
    def rng_state(self) -> dict[str, Any] | None:
        """State of the environment's random generator before an unseeded reset, as a state of a NumPy bit generator."""
        return self._start.get("rng_state")

    @property
    def reset_info(self) -> dict[str, Any] | None:
        """The info that reset returned, if infos were recorded."""
        from gym_trace.data.packing import unpack

        packed = self._start.get("reset_info")
        if packed is not None and not isinstance(packed, bytes):
            raise CorruptTrace("malformed reset record")
        return None if packed is None else unpack(packed)

    @property
    def pending_action(self) -> Any:
        """The action after the last recorded step, which was running when the writer was killed.

        It has the structure of the action space. None if no action was running or it is unknown, if the episode is
        still running, or if this slice ends earlier.
        """
        is_end = self._steps is None or self._steps.stop == int(self._record["steps"])
        return self._source.pending() if is_end else None

    @property
    def start_time(self) -> int | None:
        return _time(self._record["start_time"])

    @property
    def end_time(self) -> int | None:
        return _time(self._record["end_time"])

    @property
    def start_monotonic(self) -> int | None:
        start = self.start_time
        return None if start is None else start - int(self._record["clock_offset"])

    @property
    def end_monotonic(self) -> int | None:
        start = self.start_monotonic
        return None if start is None or self.end_time is None else start + int(self._record["duration"])

    def _column(self, name: str) -> Any:
        if name not in self._cache:
            try:
                self._cache[name] = self._source.column(name, self._steps)
            except MemoryError as error:
                raise TraceError(
                    f"{name}: {len(self)} steps do not fit in memory; read a part, such as episode[0:1000]"
                ) from error
        return self._cache[name]

    @property
    def observations(self) -> Any:
        """N + 1 rows, the reset observation first: an array (N + 1, *shape), or dicts and tuples of them.

        The last row is a placeholder if has_final_observation is False.
        """
        return self._column("observations")

    @property
    def actions(self) -> Any:
        """N rows: an array (N, *shape), or dicts and tuples of them."""
        return self._column("actions")

    @property
    def rewards(self) -> Array:
        """(N,), float64 unless the environment returned NumPy rewards of another dtype.

        Rewards of mixed types, such as 0 and np.float32(0.5), become float64 if it represents every value exactly;
        their types are lost. Otherwise they are objects of the recorded types. Plain booleans and integers of up to
        53 bits also become float64.
        """
        return np.asarray(self._column("rewards"))

    @property
    def terminations(self) -> Array:
        """(N,) bool, as the environment returned them."""
        return np.asarray(self._column("terminations"))

    @property
    def truncations(self) -> Array:
        """(N,) bool, as the environment returned them."""
        return np.asarray(self._column("truncations"))

    @property
    def infos(self) -> list[dict[str, Any]]:
        """N dicts. Raises TraceError if infos were not recorded."""
        infos = self._column("infos")
        if infos is None:
            raise TraceError("infos: not recorded; record with record_infos=True (gym-trace record --infos)")
        return list(infos)

    @property
    def annotations(self) -> dict[str, Array]:
        """(N, …) arrays by name; None in a row without a value; empty for an episode without steps."""
        return dict(self._column("annotations"))

    def _has_agents(self) -> bool:
        with suppress(TraceError):
            return bool(self._joint.names)
        return False

    # -- many agents --------------------------------------------------------------------------------------------------

    @property
    def _joint(self) -> JointColumns:
        if "joint" not in self._cache:
            self._cache["joint"] = JointColumns(self.observations)
        columns: JointColumns = self._cache["joint"]
        return columns

    @property
    def agents(self) -> list[Name]:
        """The agents, in order of appearance; ``episode[name]`` has the steps of one.

        Raises TraceError if the episode is of a single agent.
        """
        return [self._joint.names[number] for number in appeared(self._joint)]

    @property
    def turns(self) -> Array:
        """(N,) int64: the agent that acted in each turn, an index of `agents`; -1 when none was left.

        Raises TraceError if all agents act at once, or the episode is of a single agent.
        """
        turn = self._joint.turn
        if turn is None:
            raise TraceError("turns: recorded from a parallel environment, where all agents act in each step")
        index_of = {number: index for index, number in enumerate(appeared(self._joint))}
        return np.array([index_of.get(number, -1) for number in turn[: len(self)].tolist()], np.int64)

    @property
    def states(self) -> dict[str, Array]:
        """(N,) arrays of objects by name: states before the steps; None in a row without one.

        "generator": state that the environment's random generator was set to (see TraceRecordingWrapper.reseed()), in
        the form of NumPy's bit generators. "environment": state of the environment, recorded with states=; "final":
        likewise, but after the step, if that ended the episode.
        """
        return dict(self._column("states"))


def infos_of(episode: Episode) -> list[dict[str, Any]] | None:
    """Return the infos of an episode; None if they were not recorded."""
    try:
        return episode.infos
    except TraceError as error:
        if isinstance(error, CorruptTrace):
            raise
        return None


def _time(value: Any) -> int | None:
    return None if np.isnat(value) else int(value.astype(np.int64))
