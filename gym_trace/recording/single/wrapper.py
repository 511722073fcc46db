"""The wrapper that records a single Gymnasium environment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.utils import RecordConstructorArgs, seeding

from gym_trace.envs import autoreset
from gym_trace.envs.seeding import restore_generator
from gym_trace.envs.states import States, packed_state, states_of
from gym_trace.errors import InvalidOption
from gym_trace.model.layout import layout_of
from gym_trace.model.packing import pack
from gym_trace.model.tensors import plain_array
from gym_trace.model.vocabulary import ENVIRONMENT, GENERATOR, STATES, Outcome
from gym_trace.recording.filters import EpisodeFilter, FrameFilter
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import (
    RecordingOptions,
    copied_schema,
    new_schema,
    opened_directory,
    with_documented_options,
)
from gym_trace.recording.reset_record import packed_generator
from gym_trace.recording.single.recorder import Observed, RowRecorder
from gym_trace.ring.lanes.autoreset import SAME_STEP
from gym_trace.ring.row_layout import RowLayout
from gym_trace.ring.segment import snapshot
from gym_trace.storage.local import LocalStorage
from gym_trace.video.schedules import Schedule

# The start of an episode before its reset: seed, packed options, state of the environment's random generator, UTC and
# monotonic time in ns. A plain tuple, which is cheaper than a class: there is one for each episode.
_Upcoming = tuple[int | None, bytes | None, Any, int, int]
_Result = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]  # of a step


@with_documented_options
class TraceRecordingWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Records every step of an environment to a trace, without changing what the environment does.

    Args:
        env: any single Gymnasium environment.
        directory … on_error: see RecordingOptions.
        video: the episodes to film, as MP4 in the directory: None or False for none, "cubic"
            (0, 1, 8, 27 … 729, then every 1,000), or a function of the episode id. The environment needs
            render_mode="rgb_array". Any recorded episode can also be filmed later, with gym-trace render.
        states: keep the state of the environment every N steps, so that env_at() can start there. For MuJoCo
            environments of Gymnasium, and those with get_state() and set_state() (see envs.states.States).

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument is invalid.
    """

    directory: Path

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
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
        video: Schedule | str | bool | None = None,
        states: int | None = None,
    ):
        if isinstance(env, gymnasium.vector.VectorEnv):  # EnvPool's are also of type gymnasium.Env
            raise InvalidOption(f"{type(env).__name__}: is a vector environment; use TraceRecordingVectorWrapper")
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
        # Not deep-copied: a deep copy of a filter that is a bound method would copy the object that it belongs to.
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, **options.constructor_args(), video=video, states=states
        )
        self._video = None if video is None or video is False else LiveVideo(env, video)
        super().__init__(env if self._video is None else self._video)
        self._base_env = env.unwrapped
        self._filters = options.filters()
        self._autoreset = autoreset.autoreset_wrapper(env)  # or None
        self._resets_at_once = autoreset.wrapper_mode(self._autoreset) == SAME_STEP  # as in Gymnasium 0.29
        # True if every step is a special one: a filter is asked, or the step may also be a reset.
        self._filtered = self._filters.steps or self._resets_at_once
        self._infos, self._info_keys = bool(record_infos), options.info_keys
        self._states_every, self._states = states, None if states is None else self._offered_states(states)
        described = self._filters.described() | ({} if states is None else {"states": states})
        self._schema = new_schema(options, env, env.observation_space, env.action_space, described)
        with opened_directory(directory, on_exist) as self.directory:
            self._attach(lazy=False)

    def _attach(self, lazy: bool) -> None:
        """Create the recorder, and the functions that copy values into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        self._recorder = recorder = RowRecorder(
            LocalStorage(self.directory),
            self._schema,
            RowLayout(observation, action, use_deltas=not self._filtered),
            self._infos,
            self._filtered,
            self._options,
            self._filters.summary,
            lazy,
        )
        self._pack_observation, self._pack_action = recorder.packers.observation, recorder.packers.action
        self._step_index = 0
        self._last: Observed | None = None  # with filtered steps: the observation before the next step
        self._annotations: dict[str, Any] = {}  # with filtered steps: of the next step
        self._unseen = False  # True if the observation before the next step is unknown, because a step raised
        recorder.save_at_exit(self)

    # -- the environment's methods ------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment. An unfinished episode is kept with the outcome "cut"."""
        upcoming = self._upcoming(seed, options)
        result = self.env.reset(seed=seed, options=options)
        if upcoming is not None:
            self._begin(upcoming, *result)
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record the step.

        If it raises, including Ctrl-C, the state of the environment is unknown: the following steps are another part
        of the episode.
        """
        if self._states is not None:
            self._keep_state(self._states)
        slab = self._recorder.slab
        if not slab.ask(action):
            if not self._asked(action):
                return self._special_step(action)
            slab = self._recorder.slab
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            if not slab.answer(observation, reward, terminated, truncated):
                self._answered(observation, reward, terminated, truncated, info)
        except BaseException:
            self._unseen = self._recorder.break_off()
            raise
        return result

    def close(self) -> None:
        """Save the trace, then close the environment. Closing twice is fine."""
        try:
            self._recorder.close()
        finally:
            super().close()

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step, such as ``logprob`` or ``value``, as columns of their own.

        Call it before step(). Numbers and arrays of one dtype and shape become typed columns. Raises UnstorableValue.
        """
        copies = {name: snapshot(plain_array(value), pack) for name, value in values.items()}
        if self._filtered:  # the next step may be skipped
            self._annotations.update(copies)
        else:
            self._recorder.annotate(copies)

    def reseed(self, seed: int) -> None:
        """Seed the environment's random generator before the next step; a replay does the same at that step.

        Raises EnvironmentUnavailable if the environment has no such generator.
        """
        self.set_generator(seeding.np_random(seed)[0].bit_generator.state)

    def set_generator(self, state: Mapping[str, Any]) -> None:
        """Like reseed(), with a state as NumPy's bit generators give it."""
        restore_generator(self._base_env, state)
        self.annotate(**{STATES + GENERATOR: dict(state)})

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails."""
        self._recorder.flush()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _upcoming(self, seed: int | None, options: dict[str, Any] | None) -> _Upcoming | None:
        """End the episode before a reset. Return the start of the next one, or None if it is not recorded."""
        recorder = self._recorder
        recorder.end()
        recorder.warn_if_unrecorded()
        self._last, self._step_index, self._annotations, self._unseen = None, 0, {}, False
        if self._filters.any and not self._filters.keeps_episode(recorder.next_episode):
            recorder.skip_episode()
            return None
        if self._video is not None:
            self._video.expect(self.directory, recorder.writer_id, recorder.next_episode)
        recorder.prepare()
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        state = packed_generator(self._base_env) if seed is None else None
        return seed, None if options is None else recorder.packed("reset", options), state, utc, monotonic

    def _begin(self, upcoming: _Upcoming, observation: Any, info: dict[str, Any]) -> None:
        """Begin an episode with the observation and info of its reset."""
        recorder = self._recorder
        recorded_info = self._packed_info(info) if self._infos else None
        seed, options, state, utc, monotonic = upcoming
        start = recorder.start(0, seed, options, state, recorded_info, utc, monotonic)
        if self._filtered:
            self._last = self._apart(observation)
            recorder.begin(start, None)
        elif not recorder.begin_at_once(start, observation):
            recorder.prepare_lead()
            recorder.begin(start, self._pack_observation(observation))
            recorder.report()

    def _apart(self, observation: Any) -> Observed:
        return self._recorder.packed_apart(self._pack_observation, observation)

    def _offered_states(self, every: int) -> States:
        if every < 1:
            raise InvalidOption(f"states={every!r}: pass a number of steps, 1 or more")
        if self._filtered or self._autoreset is not None:
            raise InvalidOption(f"states={every!r}: not together with filters or autoreset; omit it")
        states = states_of(self._base_env)
        if states is None:
            name = type(self._base_env).__name__
            raise InvalidOption(f"states={every!r}: {name} offers no state; omit it, or give {name} get_state() and "
                                "set_state()")  # fmt: skip
        return states

    def _keep_state(self, states: States) -> None:
        """Record the state before the next step, if it is due."""
        steps = self._recorder.steps_taken()
        if steps and self._recorder.running and not steps % int(self._states_every or 1):
            self.annotate(**{STATES + ENVIRONMENT: packed_state(self._base_env, states)})

    def _packed_info(self, info: dict[str, Any]) -> bytes:
        return self._recorder.packed_info(info, self._info_keys)

    # -- steps off the fast path --------------------------------------------------------------------------------------

    def _asked(self, action: Any) -> bool:
        """Record an action that slab.ask() has declined; return False if the step is a special one."""
        recorder = self._recorder
        if self._filtered or autoreset.resets_next(self._autoreset) or not recorder.make_room():
            return False
        return recorder.slab.ask(action) or recorder.ask(self._pack_action(action))

    def _answered(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: dict[str, Any]) -> None:
        """Record a result that slab.answer() has declined."""
        packed = self._pack_observation(observation)
        if self._infos:
            self._recorder.log_value(self._recorder.layout.info_column, self._packed_info(info))
        self._recorder.answer(packed, reward, terminated, truncated)

    def _special_step(self, action: Any) -> _Result:
        """Do a step that is not recorded, is subject to a filter, is in fact a reset, or comes after a gap."""
        recorder = self._recorder
        if autoreset.resets_next(self._autoreset):
            return self._resetting_step(action)
        recorder.take_over()
        if recorder.episode is None or recorder.failed:
            if recorder.failed:
                recorder.make_room()  # reports the failure, once
            result = self.env.step(action)
            if self._resets_at_once and (result[2] or result[3]):
                self._begin_in_step(result)
            return result
        if self._filtered:
            return self._filtered_step(action)
        return self._step_after_gap(action) if self._unseen else self.env.step(action)

    def _resetting_step(self, action: Any) -> _Result:
        """Do a step that the autoreset wrapper turns into a reset."""
        upcoming = self._upcoming(None, None)
        result = observation, _, terminated, truncated, info = self.env.step(action)
        if upcoming is not None:
            self._begin(upcoming, observation, info)
            if terminated or truncated:  # set by a wrapper outside of the autoreset wrapper, such as a time limit
                self._recorder.end_at_lead(_outcome(terminated))
        return result

    def _step_after_gap(self, action: Any) -> _Result:
        """Do a step whose first observation is unknown. It is skipped; its last observation begins a run of steps."""
        recorder = self._recorder
        recorder.skip_step()
        result = observation, _, terminated, truncated, _ = self.env.step(action)
        recorder.lead(recorder.steps_taken(), self._apart(observation))
        if terminated or truncated:
            recorder.end_at_lead(_outcome(terminated))
        self._unseen = False
        return result

    def _filtered_step(self, action: Any) -> _Result:
        """Do a step that a filter may skip. It is also skipped if the observation before it is unknown."""
        recorder, before = self._recorder, self._last
        recorder.make_ready()
        packed_action = recorder.packed_apart(self._pack_action, action)
        annotations, self._annotations = self._annotations, {}
        index, after = self._step_index, None
        self._step_index, self._last = index + 1, None
        kept = over = False
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            recorder.take_over()  # the process may have forked within the step
            over = bool(terminated or truncated)
            last, last_info = observation, info
            if over and self._resets_at_once:
                last, last_info = autoreset.last_of_episode(observation, info)
            after = self._apart(last)
            if before is not None and self._filters.keeps_step(index, reward):
                if not recorder.running:
                    recorder.lead(index, before)
                if annotations:
                    recorder.annotate(annotations)
                if recorder.make_room(turns=False) and recorder.ask(recorder.put(packed_action)):
                    if self._infos:
                        recorder.log_value(recorder.layout.info_column, self._packed_info(last_info))
                    recorder.answer(after, reward, terminated, truncated)
                kept = True
        finally:  # also if the filter or the environment raises
            if recorder.running and not kept:
                recorder.stop()
            if not kept:
                recorder.forget_annotations()
            if over:
                if not kept:
                    recorder.end_without_row(_outcome(terminated))
                recorder.running = False  # a step after the end begins a new run
            self._last = after  # last: if an interrupt falls in before, the next step must not continue this one
        if over and self._resets_at_once:
            self._begin_in_step(result)
        return result

    def _begin_in_step(self, result: _Result) -> None:
        """Begin the episode that autoreset has begun in the same step that ended the one before."""
        upcoming = self._upcoming(None, None)
        if upcoming is not None:
            seed, options, _, utc, monotonic = upcoming
            self._begin((seed, options, None, utc, monotonic), result[0], autoreset.info_of_reset(result[4]))
            if self._video is not None:
                self._video.begin()

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_recorder", "_pack_observation", "_pack_action"):
            del state[name]
        state["_run"] = self._recorder.open_run()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        run = state.pop("_run")
        self.__dict__.update(state)
        self._schema = copied_schema(self._schema)
        step_index, last, unseen = self._step_index, self._last, self._unseen
        self._attach(lazy=True)
        self._recorder.continue_run(run)
        if run is not None:
            self._step_index, self._last, self._unseen = step_index, last, unseen


def _outcome(terminated: Any) -> Outcome:
    return Outcome.TERMINATED if terminated else Outcome.TRUNCATED
