"""The wrapper that records a vector environment."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import vector

from gym_trace.envs.autoreset import FINAL_INFO, FINAL_OBSERVATION, demand_all_lanes, vector_mode
from gym_trace.envs.spaces import lane_space
from gym_trace.envs.states import States, offered_states, packed_state
from gym_trace.errors import InvalidOption, UnstorableValue, raise_if_of_signal
from gym_trace.format import wire
from gym_trace.model.layout import layout_of
from gym_trace.model.packing import pack
from gym_trace.model.tensors import is_masked, plain_array
from gym_trace.model.values import Array, objects
from gym_trace.model.vocabulary import ENVIRONMENT, STATES
from gym_trace.recording.filters import EpisodeFilter, FrameFilter
from gym_trace.recording.options import (
    RecordingOptions,
    copied_schema,
    new_schema,
    opened_directory,
    with_documented_options,
)
from gym_trace.recording.vector.batches import BatchPacker, infos_by_lane, last_of
from gym_trace.recording.vector.recorder import LaneRecorder
from gym_trace.ring.chunk_builder import PACKED_ABSENT
from gym_trace.ring.lanes.autoreset import SAME_STEP
from gym_trace.ring.lanes.entries import More, Reset
from gym_trace.ring.lanes.writer import Step
from gym_trace.ring.segment import Rows
from gym_trace.storage.local import LocalStorage

if not hasattr(vector, "AutoresetMode"):
    raise ImportError("TraceRecordingVectorWrapper needs gymnasium 1.1 or newer: pip install -U gymnasium")

if TYPE_CHECKING:
    _Wrapper = vector.VectorWrapper[Any, Any, Any, Any, Any]
else:
    _Wrapper = vector.VectorWrapper  # which is generic since Gymnasium 1.4

_FLOAT = np.dtype("<f8")


@with_documented_options
class TraceRecordingVectorWrapper(_Wrapper):
    """Records every step of every sub-environment to a trace, without changing what the environment does.

    Each sub-environment is a lane. Episodes are stored as if each lane had been recorded alone; what the
    vector environment does to reset a lane is not a step. All autoreset modes are supported; a vector environment
    without a declared mode is treated as NEXT_STEP.

    After an exception in reset() or step() the state of the lanes is unknown: their episodes are kept as "cut", and
    each lane is recorded again from its next episode on.

    A pickled or deep copy has its own writer and continues the episodes. An AsyncVectorEnv cannot be copied.

    Args:
        envs: any Gymnasium vector environment.
        directory … on_error: see RecordingOptions.
        states: keep the states of all lanes every N steps after a reset of all of them, so that env_at() can start
            there: in a SyncVectorEnv of environments that offer it; see TraceRecordingWrapper.

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument does not make sense, or envs is an EnvPool in its asynchronous mode.
    """

    directory: Path

    def __init__(
        self,
        envs: vector.VectorEnv[Any, Any, Any],
        directory: str | os.PathLike[str] | None = None,
        *,
        episode_filter: EpisodeFilter | None = None,
        frame_filter: FrameFilter | None = None,
        reward_classes: Sequence[float] | None = None,
        record_infos: bool | Sequence[str] = False,
        split: str = "train",
        uid: str | None = None,
        on_exist: str = "error",
        flush_seconds: float = 10.0,
        level: int = 1,
        fsync: bool = False,
        metadata: Any = None,
        on_error: str = "raise",
        states: int | None = None,
    ):
        self._options = options = RecordingOptions(
            directory=directory,
            episode_filter=episode_filter,
            frame_filter=frame_filter,
            reward_classes=reward_classes,
            record_infos=record_infos,
            split=split,
            uid=uid,
            on_exist=on_exist,
            flush_seconds=flush_seconds,
            level=level,
            fsync=fsync,
            metadata=metadata,
            on_error=on_error,
        )
        super().__init__(envs)
        demand_all_lanes(envs)
        self._mode = vector_mode(envs)
        self._count = envs.num_envs
        self._seed_step = int(isinstance(envs.unwrapped, (vector.SyncVectorEnv, vector.AsyncVectorEnv)))  # lane by lane
        self._filters = options.filters()
        self._infos, self._info_keys = bool(record_infos), options.info_keys
        self._has_more = self._filters.any or self._infos  # whether steps have more to record than arrays
        self._states_every = states
        self._states = None if states is None else self._offered_states(states)  # of each lane
        self._steps = 0  # since the last reset of all lanes
        self._due = np.zeros(self._count, np.bool_)  # lanes whose state is due
        kept = {} if states is None else {"states": states}
        self._schema = new_schema(
            options,
            envs,
            lane_space(envs, "observation_space"),
            lane_space(envs, "action_space"),
            {**self._filters.described(), **kept, "num_envs": self._count, "autoreset_mode": self._mode},
        )
        with opened_directory(directory, on_exist) as self.directory:
            self._attach(lazy=False)

    def _attach(self, lazy: bool) -> None:
        """Make the recorder, and the packers that copy batches into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        self._recorder = recorder = LaneRecorder(
            LocalStorage(self.directory),
            self._schema,
            self._count,
            self._mode,
            observation,
            action,
            self._filters,
            self._options,
            lazy,
        )
        self._observations = BatchPacker(observation, lane_space(self.env, "observation_space"), self._count, recorder)
        self._actions = BatchPacker(action, lane_space(self.env, "action_space"), self._count, recorder)
        self._notes: dict[str, Rows] = {}  # annotations of the next step
        recorder.save_at_exit(self)

    # -- the environment's methods ------------------------------------------------------------------------------------

    @property
    def autoreset_mode(self) -> vector.AutoresetMode:
        """The autoreset mode of the vector environment."""
        return vector.AutoresetMode(self._mode)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Resets all lanes, or those in options["reset_mask"]. Unfinished episodes are kept as "cut"."""
        recorder = self._recorder
        if not recorder.ready():
            recorder.warn_if_unrecorded()
            return self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        mask = None if options is None else options.get("reset_mask")  # before Gymnasium takes it out of options
        recorder.begin_event()
        try:
            lanes = np.arange(self._count) if mask is None else self._lanes_in(mask)
        except Exception as error:  # anything: other people's objects
            self._cannot_tell("flags in a reset_mask", error)
            return self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        given = {key: value for key, value in (options or {}).items() if key != "reset_mask"}
        packed_options = recorder.packed("reset", given) if given else None
        if mask is None:
            self._notes, self._steps = {}, 0
        ids = None if recorder.filters is None else recorder.filters.reset(lanes)
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        result = observations, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        if seed is None or isinstance(seed, (int, np.integer)):
            seed = [None if seed is None else int(seed) + lane * self._seed_step for lane in range(self._count)]
        try:
            # EnvPool answers a masked reset with rows of the lanes it has reset, Gymnasium with rows of all lanes.
            own = self._observations.has_rows(observations, len(lanes))
            count, rows = (len(lanes), range(len(lanes))) if own else (self._count, lanes.tolist())
            packed_infos = self._packed_infos(infos, rows, count) if self._infos else [None] * count
            starts = [
                recorder.start(lane, seed[lane], packed_options, None, packed_infos[row], utc, monotonic)
                for lane, row in zip(lanes.tolist(), rows)
            ]
            batch = self._observations.batch(observations, None if own else lanes, count)
        except Exception as error:  # as above
            self._cannot_tell("observations and infos of a reset", error)
            return result
        seeds = np.array([start.seed for start in starts], np.int64)
        recorder.add(Reset(lanes, batch, seeds, [start.kept for start in starts], ids, utc, monotonic))
        recorder.report()
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Steps all lanes and records the step."""
        if self._states is not None:
            self._keep_states(self._states)
        recorder, notes = self._recorder, self._notes
        if notes:  # of this step, whatever becomes of it
            self._notes = {}
        if not recorder.slab.ask(actions) and not (recorder.ready() and self._asked(actions)):
            return self.env.step(actions)
        result = observations, rewards, terminations, truncations, _ = self.env.step(actions)
        has_more = self._has_more or notes
        if has_more or not recorder.slab.answer(observations, rewards, terminations, truncations):
            self._answered(result, notes)
        return result

    def _asked(self, actions: Any) -> bool:
        """Record actions that slab.ask() has declined; return False if that is impossible."""
        recorder = self._recorder
        if recorder.slab.ask(actions):
            return True
        recorder.begin_event()
        try:
            packed_actions = self._actions.step(actions, recorder.rooms().actions)
        except Exception as error:  # anything: other people's objects, as below
            self._cannot_tell("actions of a step", error)
            return False
        recorder.ask(packed_actions)
        return True

    def _answered(self, result: tuple[Any, Any, Any, Any, dict[str, Any]], notes: dict[str, Rows]) -> None:
        """Record the results of a step that slab.answer() has declined, or that has more to record."""
        recorder = self._recorder
        recorder.begin_event()
        observations, rewards, terminations, truncations, infos = result
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        try:
            rooms = recorder.rooms()
            packed_rewards: Rows = rooms.rewards
            terminated, truncated = rooms.terminations, rooms.truncations
            terminated[...] = plain_array(terminations)
            truncated[...] = plain_array(truncations)
            if type(rewards) is np.ndarray and rewards.dtype == _FLOAT and rewards.shape == rooms.rewards.shape:
                rooms.rewards[...] = rewards
            else:
                rewards = self._rewards(rewards)
                packed_rewards = self._packed_rewards(rewards)
        except Exception as error:
            self._cannot_tell("rewards, terminations and truncations of a step", error)
            return
        ids = kept = finals = step_infos = reset_infos = None
        if recorder.filters is not None:
            ids, kept = recorder.filters.step(rewards, terminated | truncated)
        ended: list[int] = []
        try:
            if self._mode == SAME_STEP:
                ended = np.flatnonzero(terminated | truncated).tolist()
                finals = self._finals(observations, infos, ended) if ended else None
            if self._infos:  # those of the lanes that are stepped, and of those that are reset
                used = range(self._count) if ids is None or kept is None else np.flatnonzero(kept | (ids >= 0)).tolist()
                step_infos = reset_infos = self._packed_infos(infos, used, self._count)
                last_infos = last_of(infos, FINAL_INFO, self._count) if ended else None
                if last_infos is not None:
                    last = self._packed_infos(last_infos, sorted({*ended} & {*used}), self._count)
                    step_infos = [final or info for final, info in zip(last, reset_infos)]
            packed_observations = self._observations.step(observations, rooms.observations)
        except Exception as error:
            self._cannot_tell("observations and infos of a step", error)
            return
        more = More(finals=finals, infos=step_infos, reset_infos=reset_infos, notes=notes, ids=ids, kept=kept)
        asked = recorder.asked() or []
        recorder.add(Step(utc, monotonic, packed_observations, asked, packed_rewards, terminated, truncated, more))

    def close(self, **kwargs: Any) -> None:
        """Save the trace, then close the environment. Closing twice is fine."""
        if "_recorder" not in self.__dict__:  # it could not be made, and Gymnasium before 1.3 closes what is collected
            return
        try:
            self._recorder.close()
        finally:
            super().close(**kwargs)

    # -- more to record -----------------------------------------------------------------------------------------------

    def annotate(self, **values: Any) -> None:
        """Records further values with the next step, such as ``logprob`` or ``value``, as columns of their own.

        Call it before step(). Each value has one row for each lane. Raises UnstorableValue, InvalidOption.
        """
        for name, value in values.items():
            rows = plain_array(value)
            has_rows = getattr(rows, "shape", True) and hasattr(rows, "__getitem__") and hasattr(rows, "__len__")
            count = len(rows) if has_rows and not isinstance(rows, (str, bytes, Mapping)) else "no"
            if count != self._count:
                raise InvalidOption(f"annotate({name}=...): {count} rows for {self._count} lanes; pass one per lane")
            self._notes[name] = np.array(rows) if _is_numeric(rows) else [_packed_note(name, row) for row in rows]

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError if they could not be written."""
        self._recorder.flush()

    def secure(self) -> None:
        """Returns when the steps so far survive the death of this process: mostly they do already. As flush()."""
        self._recorder.secure()

    def _offered_states(self, every: int) -> list[tuple[Any, States]]:
        """Return each lane's environment and how to get its state. Raises InvalidOption."""
        envs = self.unwrapped
        if not isinstance(envs, vector.SyncVectorEnv):
            raise InvalidOption(f"states={every!r}: the lanes of {type(envs).__name__} give no access to their states; "
                                "use a SyncVectorEnv, or omit it")  # fmt: skip
        if self._filters.steps:
            raise InvalidOption(f"states={every!r}: not together with filters of steps; omit it")
        return [(env, offered_states(env, every)) for env in envs.envs]

    def _keep_states(self, states: list[tuple[Any, States]]) -> None:
        """Record the states before the next step of those lanes where they are due."""
        if self._steps and not self._steps % int(self._states_every or 1):
            self._due[:] = True
        self._steps += 1
        if not self._due.any():
            return
        rows = [PACKED_ABSENT] * self._count
        for lane in np.flatnonzero(self._due).tolist():
            state = packed_state(*states[lane])
            if state is not None:
                rows[lane], self._due[lane] = _packed_note("state", state), False
        self._notes[STATES + ENVIRONMENT] = rows

    # -- batches taken apart ------------------------------------------------------------------------------------------

    def _cannot_tell(self, what: str, error: Exception) -> None:
        """Warn that a step or reset cannot be recorded; it is treated as one that raised."""
        raise_if_of_signal(error)
        self._recorder.complain("lanes", f"the {what}: not one per lane; skipped ({error!r:.200})")

    def _lanes_in(self, mask: Any) -> Array:
        """Return the lanes for which a mask is true."""
        flags = np.asarray(plain_array(mask))
        if flags.size != self._count:
            raise ValueError(f"{flags.size} flags for {self._count} lanes")
        return np.flatnonzero(flags)

    def _finals(self, observations: Any, infos: dict[str, Any], ended: list[int]) -> tuple[Array, list[Rows]]:
        """Return the last observations of lanes that were reset in the same step."""
        lanes = np.array(ended)
        finals = last_of(infos, FINAL_OBSERVATION, self._count)
        if finals is None:
            self._recorder.complain("observations", "no final_obs in infos; first observations stand in for the last")
            finals = observations
        if isinstance(finals, list) or (isinstance(finals, np.ndarray) and finals.dtype == object):
            return lanes, self._observations.single([finals[lane] for lane in ended])
        return lanes, self._observations.batch(finals, lanes, self._count)

    def _rewards(self, values: Any) -> Array:
        """Return rewards as an array with a row for each lane."""
        values = self._recorder.plain("rewards", values)
        try:
            rewards: Array = objects(list(values)) if is_masked(values) else np.asarray(values)
        except ValueError:  # each of another shape
            rewards = objects(list(values))
        if rewards.shape[:1] != (self._count,):
            raise ValueError(f"rewards of shape {rewards.shape}")
        return rewards

    def _packed_rewards(self, rewards: Array) -> Rows:
        """Return a copy of rewards as rows."""
        if rewards.ndim == 1 and rewards.dtype.kind in "biuf" and rewards.dtype.isnative:
            room = self._recorder.reward_room(rewards.dtype)
            room[...] = plain_array(rewards)
            return room
        if _is_numeric(rewards):
            return np.array(rewards)
        return [self._recorder.packed("rewards", reward) for reward in rewards]

    def _packed_infos(self, infos: Any, used: Iterable[int], count: int) -> list[bytes]:
        """Return the infos of count lanes as MessagePack; empty for lanes that are not used."""
        packed, finals = [b""] * count, (*FINAL_OBSERVATION, *FINAL_INFO) if self._mode == SAME_STEP else ()
        try:
            by_lane = infos_by_lane(infos, count, self._info_keys, finals)
        except Exception as error:  # anything: other people's maps, or one that has itself in it
            raise_if_of_signal(error)
            by_lane = [infos] * count
        for lane in used:
            packed[lane] = self._recorder.packed("infos", by_lane[lane])
        return packed

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.unwrapped, vector.AsyncVectorEnv):  # copying its pipes would break those that it has
            raise TypeError("an AsyncVectorEnv, whose lanes are processes, cannot be copied; copy a SyncVectorEnv")
        state = self.__dict__.copy()
        for name in ("_recorder", "_observations", "_actions"):
            del state[name]
        state["_run"] = self._recorder.open_run()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        run = state.pop("_run")
        self.__dict__.update(state)
        self._schema = copied_schema(self._schema)
        self._attach(lazy=True)
        self._recorder.continue_run(run)


def _is_numeric(rows: Any) -> bool:
    """Return True if rows are an array of numbers, which becomes a typed column."""
    return type(rows) is np.ndarray and rows.dtype.kind in "biufc" and rows.dtype.isnative


def _packed_note(name: str, value: Any) -> bytes:
    packed = pack(value)
    if len(packed) > wire.MAX_VALUES // 4:
        raise UnstorableValue(f"annotate({name}=...): {len(packed)} bytes; at most {wire.MAX_VALUES // 4}")
    return packed
