"""The wrapper that records a vector environment."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import vector

from gym_trace.data.values import Array
from gym_trace.data.vocabulary import ENVIRONMENT, FINAL, STATES
from gym_trace.envs.autoreset import demand_all_lanes, vector_mode
from gym_trace.envs.spaces import lane_space
from gym_trace.envs.states import States, offered_states, packed_state
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.format.ring.chunk_builder import PACKED_ABSENT
from gym_trace.format.ring.lanes.autoreset import SAME_STEP
from gym_trace.recording.filters import Filters
from gym_trace.recording.options import (
    RecordingKeywords,
    RecordingOptions,
    demand_gymnasium,
    new_schema,
    opened_directory,
    takes_recording_options,
)
from gym_trace.recording.reset_record import packed_generators
from gym_trace.recording.vector.lanes import Lanes
from gym_trace.recording.vector.steps import LaneSteps, packed_annotation

if not hasattr(vector, "AutoresetMode"):
    raise MissingExtra("TraceRecordingVectorWrapper needs gymnasium 1.1 or newer: pip install -U gymnasium")

if TYPE_CHECKING:
    from typing_extensions import Unpack

    _Wrapper = vector.VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = vector.VectorWrapper  # generic since Gymnasium 1.4

_FLOAT = np.dtype("<f8")


@takes_recording_options
class TraceRecordingVectorWrapper(_Wrapper):
    """Records every step of every sub-environment to a trace, without changing what the environment does.

    Each sub-environment is a lane. Episodes are stored as if each lane had been recorded alone; what the
    vector environment does to reset a lane is not a step. All autoreset modes are supported; a vector environment
    without a declared mode is treated as NEXT_STEP.

    After an exception in reset() or step() the state of the lanes is unknown: their episodes are kept as "cut", and
    each lane is recorded again from its next episode on.

    A copy (fork, pickle, deepcopy) is a new writer, which records each lane from its next episode on. An AsyncVectorEnv
    cannot be copied.

    Args:
        envs: any Gymnasium vector environment.
        directory … keep_if: see RecordingOptions.
        lanes: record only these lanes: a slice, a mask, their numbers, or a count, spread evenly over all. They keep
            their numbers. Tensors on a device are gathered there, so that only these rows are copied.
        states: record the states of all lanes every N steps after a reset of all lanes, so that env_at() can start
            there: in a SyncVectorEnv of environments that offer it; see TraceRecordingWrapper. With the autoreset mode
            SAME_STEP the state after the last step of an episode is unknown: the lane has been reset by then.

    Attributes:
        directory: pathlib.Path of the trace.
        lanes: numbers of the recorded lanes, ascending.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument is invalid, or envs is an EnvPool in its asynchronous mode.

    Examples:
        >>> envs = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
        >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector")
        >>> progress = gym_trace.record_episodes(envs, episodes=8, seed=0)
        >>> envs.close()
        >>> sorted(set(gym_trace.open_trace("traces/vector").episodes["lane"].tolist()))
        [0, 1, 2, 3]
    """

    directory: Path

    def __init__(
        self,
        envs: vector.VectorEnv[Any, Any, Any],
        directory: str | os.PathLike[str] | None = None,
        *,
        lanes: int | slice | Sequence[int] | Sequence[bool] | Array | None = None,
        device_lag: int = 0,
        states: int | None = None,
        **options: Unpack[RecordingKeywords],
    ):
        if isinstance(envs, gymnasium.Env) and not isinstance(envs, vector.VectorEnv):
            raise InvalidOption(f"{type(envs).__name__}: is a single environment; use TraceRecordingWrapper")
        demand_gymnasium(envs, vector.VectorEnv, "a vector environment")
        self._options = recording = RecordingOptions(directory=directory, **options)
        super().__init__(envs)
        demand_all_lanes(envs)
        self._mode = vector_mode(envs)
        self._count = envs.num_envs
        self._lanes = Lanes.chosen(self._count, lanes)
        self.lanes: list[int] = self._lanes.of(range(self._lanes.recorded))
        self._pick: Callable[[Any], Any] | None = None if self._lanes.numbers is None else self._lanes.tree
        self._lag = operator.index(device_lag)
        if self._lag < 0:
            raise InvalidOption(f"device_lag={device_lag!r}: pass a number of steps, 0 or more")
        if self._lag:
            self._pick = _nothing  # no step may overtake those that are on their way
        self._seed_step = int(isinstance(envs.unwrapped, (vector.SyncVectorEnv, vector.AsyncVectorEnv)))  # lane by lane
        spaces = lane_space(envs, "observation_space"), lane_space(envs, "action_space")
        filters = recording.filters()
        if self._lag and filters.is_active:
            raise InvalidOption("device_lag: not together with filters, which need the rewards at once; omit it")
        self._states_every, self._states = states, None if states is None else self._offered_states(states, filters)
        self._since_reset = 0  # steps since the last reset of all lanes
        self._due = np.zeros(self._lanes.recorded, np.bool_)  # recorded lanes whose state is due
        stored = {} if states is None else {"states": states}
        some = {} if self._lanes.numbers is None else {"lanes": self._lanes.numbers.tolist()}
        described = filters.described() | stored | some | {"num_envs": self._count, "autoreset_mode": self._mode}
        schema = new_schema(recording, envs, *spaces, described)
        with opened_directory(directory, recording.on_exist) as self.directory:
            self._steps = LaneSteps(self.directory, schema, recording, spaces, self._lanes, self._mode, lag=self._lag)
        self._attach()

    def _attach(self) -> None:
        self._recorder, self._slabs = self._steps.recorder, self._steps.slabs
        self._recorder.save_at_exit(self)

    # -- the environment's methods ------------------------------------------------------------------------------------

    @property
    def autoreset_mode(self) -> vector.AutoresetMode:
        """The autoreset mode of the vector environment."""
        return vector.AutoresetMode(self._mode)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all lanes, or the lanes in options["reset_mask"]. Unfinished episodes are kept as "cut".

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-reset")
            >>> _ = envs.reset(seed=[1, 2])
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-reset").episodes["seed"].tolist()
            [1, 2]
        """
        upcoming = self._steps.upcoming(options)  # before Gymnasium takes the mask out of the options
        if upcoming is None:
            return self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        seeds: Any = seed
        if seed is None or isinstance(seed, (int, np.integer)):
            seeds = [None if seed is None else int(seed) + lane * self._seed_step for lane in range(self._count)]
        given = dict(
            enumerate(seeds if isinstance(seeds, (list, tuple)) else ())
        )  # others are the environment's matter
        unseeded = [lane for lane in self._lanes.of(upcoming.lanes.tolist()) if given.get(lane, 0) is None]
        generators = packed_generators(self.env, unseeded, upcoming.is_whole)
        result = observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        if upcoming.is_whole:
            self._since_reset = 0
        self._steps.begin(upcoming, observations, infos, seeds, generators)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all lanes and record the step.

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-step")
            >>> _ = envs.reset(seed=0)
            >>> _ = envs.step(np.array([0, 1]))
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-step")[1].actions
            array([1])
        """
        if self._states is not None:
            self._keep_states(self._states)
        slabs, steps, pick, annotations = self._slabs, self._steps, self._pick, self._steps.annotations
        if annotations:  # they belong to this step, also if it raises
            steps.annotations = {}
        if not slabs.slab.record_action(actions if pick is None else pick(actions)) and not steps.record_action(
            actions
        ):
            return self.env.step(actions)
        result = observations, rewards, terminations, truncations, _ = self.env.step(actions)
        if pick is not None:
            observations, rewards, terminations, truncations = map(pick, result[:4])
        if self._states is not None and self._mode != SAME_STEP and (ended := terminations | truncations).any():
            annotations = {**annotations, STATES + FINAL: self._rows_of_states(self._states, ended)}
        if (
            annotations
            or steps.has_more
            or not slabs.slab.record_result(observations, rewards, terminations, truncations)
        ):
            steps.record_result(result, annotations)
        return result

    def close(self, **kwargs: Any) -> None:
        """Save the trace, then close the environment. Closing twice is fine.

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-close")
            >>> _ = envs.reset(seed=0)
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-close").episodes["outcome"].tolist()
            ['closed', 'closed']
        """
        if "_recorder" not in self.__dict__:  # __init__ failed; Gymnasium before 1.3 calls close() in __del__
            return
        try:
            self._recorder.close()
        finally:
            super().close(**kwargs)

    def __enter__(self) -> TraceRecordingVectorWrapper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- more to record -----------------------------------------------------------------------------------------------

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step, such as ``logprob`` or ``value``, as columns of their own.

        Call it before step(). Each value has one row for each lane. Raises UnstorableValue, InvalidOption.

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-annotate")
            >>> _ = envs.reset(seed=0)
            >>> envs.annotate(value=np.array([0.5, 1.5]))  # one row per lane
            >>> _ = envs.step(np.array([0, 1]))
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-annotate")[1].annotations
            {'value': array([1.5])}
        """
        self._steps.annotate(values)

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails.

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-flush")
            >>> _ = envs.reset(seed=0)
            >>> envs.flush()
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-flush").episodes["outcome"].tolist()
            ['closed', 'closed']
        """
        self._recorder.flush()

    def secure(self) -> None:
        """Make all steps so far survive a kill, also without memory-mapped files. Raises like flush().

        Examples:
            >>> envs = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
            >>> envs = gym_trace.TraceRecordingVectorWrapper(envs, "traces/vector-secure")
            >>> _ = envs.reset(seed=0)
            >>> _ = envs.step(np.array([0, 1]))
            >>> envs.secure()  # these steps survive a kill, on every system
            >>> envs.close()
            >>> gym_trace.open_trace("traces/vector-secure").episodes["steps"].tolist()
            [1, 1]
        """
        (self._recorder.flush if self._lag else self._recorder.secure)()

    # -- states -------------------------------------------------------------------------------------------------------

    def _offered_states(self, every: int, filters: Filters) -> list[tuple[Any, States]]:
        """Return each lane's environment and the States to get its state. Raises InvalidOption."""
        envs = self.unwrapped
        if not isinstance(envs, vector.SyncVectorEnv):
            raise InvalidOption(f"states={every!r}: the lanes of {type(envs).__name__} give no access to their states; "
                                "use a SyncVectorEnv, or omit it")  # fmt: skip
        if filters.by_step:
            raise InvalidOption(f"states={every!r}: not together with filters of steps; omit it")
        return [(envs.envs[lane], offered_states(envs.envs[lane], every)) for lane in self.lanes]

    def _keep_states(self, states: list[tuple[Any, States]]) -> None:
        """Record the states before the next step of the lanes where they are due."""
        if not self._since_reset % int(self._states_every or 1):
            self._due[:] = True
        self._since_reset += 1
        if not self._due.any():
            return
        rows = self._rows_of_states(states, self._due)
        self._due &= [row is PACKED_ABSENT for row in rows]
        self._steps.annotations[STATES + ENVIRONMENT] = rows

    def _rows_of_states(self, states: list[tuple[Any, States]], lanes: Array) -> list[bytes]:
        """Return the states of these recorded lanes, a mask, as rows; absent where get_state() has returned None."""
        rows = [PACKED_ABSENT] * self._lanes.recorded
        for lane in np.flatnonzero(lanes).tolist():
            state = packed_state(*states[lane])
            if state is not None:
                rows[lane] = packed_annotation("state", state)
        return rows

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.unwrapped, vector.AsyncVectorEnv):  # a copy would break its pipes
            raise TypeError("an AsyncVectorEnv, whose lanes are processes, cannot be copied; copy a SyncVectorEnv")
        return {name: value for name, value in self.__dict__.items() if name not in ("_recorder", "_slabs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()


def _nothing(_: Any) -> None:
    """Return None, which no slab accepts as a batch."""
