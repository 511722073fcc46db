"""The wrapper that records a single Gymnasium environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import gymnasium
from gymnasium.utils import RecordConstructorArgs, seeding

from gym_trace.data.vocabulary import ENVIRONMENT, FINAL, GENERATOR, STATES, Outcome
from gym_trace.envs import autoreset
from gym_trace.envs.seeding import restore_generator
from gym_trace.envs.states import States, offered_states, packed_state
from gym_trace.errors import InvalidOption
from gym_trace.format.ring.lanes.autoreset import SAME_STEP
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import (
    RecordingKeywords,
    RecordingOptions,
    demand_gymnasium,
    new_schema,
    opened_directory,
    takes_recording_options,
)
from gym_trace.recording.single.episodes import ENDED, OPEN, PAUSED
from gym_trace.recording.single.steps import Result, StepRecorder, Upcoming, outcome_of
from gym_trace.recording.video_schedules import Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes_recording_options
class TraceRecordingWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Records every step of an environment to a trace, without changing what the environment does.

    Args:
        env: any single Gymnasium environment.
        directory … keep_if: see RecordingOptions.
        states: record the state of the environment every N steps, from the first one on, and after the step that ends
            an episode (not one that is cut), so that env_at() can start there: for Gymnasium's MuJoCo environments,
            ALE, and others that offer it (see gym_trace.recording.States).
        video: the episodes to film, as MP4 in the directory: None or False for none, "cubic"
            (0, 1, 8, 27 … 729, then every 1,000), or a function of the episode id. The environment needs
            render_mode="rgb_array". Any recorded episode can also be filmed later, with gym-trace render.

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument is invalid.

    Examples:
        >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/wrapped") as env:
        ...     _ = env.reset(seed=0)
        ...     _ = env.step(0)
        >>> gym_trace.open_trace("traces/wrapped")[0].outcome
        'closed'
    """

    directory: Path

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        directory: str | os.PathLike[str] | None = None,
        *,
        states: int | None = None,
        video: Schedule | str | bool | None = None,
        **options: Unpack[RecordingKeywords],
    ):
        if isinstance(env, gymnasium.vector.VectorEnv):  # EnvPool's are also of type gymnasium.Env
            raise InvalidOption(f"{type(env).__name__}: is a vector environment; use TraceRecordingVectorWrapper")
        demand_gymnasium(env, gymnasium.Env, "an environment")
        self._options = recording = RecordingOptions(directory=directory, **options)
        # Not deep-copied: a deep copy of a filter that is a bound method would copy the object that it belongs to.
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, **recording.constructor_args(), states=states, video=video
        )
        self._video = None if video is None or video is False else LiveVideo(env, video)
        super().__init__(env if self._video is None else self._video)
        self._base_env = env.unwrapped
        self._autoreset = autoreset.autoreset_wrapper(env)  # or None
        self._resets_at_once = autoreset.wrapper_mode(self._autoreset) == SAME_STEP  # as in Gymnasium 0.29
        filters = recording.filters()
        is_filtered = filters.by_step or self._resets_at_once
        self._states_every, self._state_is_due = states, False
        self._states = None if states is None else self._offered_states(states, is_filtered)
        described = filters.described() | ({} if states is None else {"states": states})
        schema = new_schema(recording, env, env.observation_space, env.action_space, described)
        with opened_directory(directory, recording.on_exist) as self.directory:
            self._steps = StepRecorder(self.directory, schema, recording, is_filtered)
        self._recorder, self._slabs = self._steps.recorder, self._steps.slabs

    # -- the environment's methods ------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment. An unfinished episode is kept with the outcome "cut".

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/reset") as env:
            ...     _ = env.reset(seed=7)
            >>> gym_trace.open_trace("traces/reset")[0].seed
            7
        """
        steps = self._steps
        if seed is None and options is None and self._video is None:
            usual = steps.usual_reset(self.env, self._base_env)
            if usual is not None:
                return usual
        upcoming = self._upcoming(seed, options, self._base_env)
        result = observation, info = self.env.reset(seed=seed, options=options)
        if upcoming is not None:
            steps.begin(upcoming, observation, info)
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step the environment and record the step.

        If it raises, including Ctrl-C, the state of the environment is unknown: the following steps are another part
        of the episode.

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/step") as env:
            ...     _ = env.reset(seed=0)
            ...     observation, reward, terminated, truncated, info = env.step(1)
            >>> gym_trace.open_trace("traces/step")[0].actions
            array([1])
        """
        states = self._states
        if states is not None:
            self._keep_state(states)
        slab = self._slabs.slab
        if not slab.record_action(action):
            if autoreset.resets_next(self._autoreset):
                return self._resetting_step(action)
            if not self._steps.record_action(action):
                return self._special_step(action)
            slab = self._slabs.slab
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            if (
                states is not None and (terminated or truncated) and self._record_state(FINAL, states)
            ) or not slab.record_result(observation, reward, terminated, truncated):
                self._steps.record_result(observation, reward, terminated, truncated, info)
        except BaseException:
            self._steps.break_off()
            raise
        return result

    def close(self) -> None:
        """Save the trace, then close the environment. Closing twice is fine.

        Examples:
            >>> env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/close")
            >>> _ = env.reset(seed=0)
            >>> env.close()
            >>> gym_trace.open_trace("traces/close")[0].outcome
            'closed'
        """
        try:
            self._recorder.close()
        finally:
            super().close()

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step, such as ``logprob`` or ``value``, as columns of their own.

        Call it before step(). Numbers and arrays of one dtype and shape become typed columns. Raises UnstorableValue.

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/annotate") as env:
            ...     _ = env.reset(seed=0)
            ...     env.annotate(value=1.5)  # of the next step
            ...     _ = env.step(1)
            >>> gym_trace.open_trace("traces/annotate")[0].annotations
            {'value': array([1.5])}
        """
        self._steps.annotate(values)

    def reseed(self, seed: int) -> None:
        """Seed the environment's random generator before the next step; a replay does the same at that step.

        Raises EnvironmentUnavailable if the environment has no such generator.

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/reseed") as env:
            ...     _ = env.reset(seed=0)
            ...     env.reseed(5)
            ...     _ = env.step(1)
            >>> gym_trace.open_trace("traces/reseed")[0].states["generator"].shape
            (1,)
        """
        self.set_generator(seeding.np_random(seed)[0].bit_generator.state)

    def set_generator(self, state: Mapping[str, Any]) -> None:
        """Like reseed(), with a state of a bit generator of NumPy.

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/set_generator") as env:
            ...     _ = env.reset(seed=0)
            ...     env.set_generator(np.random.PCG64(3).state)
            ...     _ = env.step(1)
            >>> gym_trace.open_trace("traces/set_generator")[0].states["generator"].shape
            (1,)
        """
        restore_generator(self._base_env, state)
        self.annotate(**{STATES + GENERATOR: dict(state)})

    def _end_episode(self, outcome: Outcome) -> None:
        """End the open episode, if the environment has not ended it."""
        if self._steps.episodes.state in (OPEN, PAUSED):
            self._steps.end(outcome)

    def _number_episode(self, episode_id: int) -> None:
        """Give the next episode this id, which is larger than those before."""
        self._recorder.next_episode = episode_id

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails.

        Examples:
            >>> with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces/flush") as env:
            ...     _ = env.reset(seed=0)
            ...     env.flush()
            ...     shown = str(gym_trace.open_trace(env.directory)[0].outcome)
            >>> shown
            'running'
        """
        self._recorder.flush()

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _upcoming(self, seed: int | None, options: dict[str, Any] | None, env: Any = None) -> Upcoming | None:
        """End the episode before a reset. Return the start of the next one, or None if it is not recorded."""
        upcoming = self._steps.upcoming(seed, options, env)
        if upcoming is not None and self._video is not None:
            self._video.expect(self.directory, self._recorder.writer_id, self._recorder.next_episode)
        return upcoming

    def _special_step(self, action: Any) -> Result:
        """Do a step that is not recorded, is subject to a filter, is also a reset, or comes after a gap."""
        steps = self._steps
        steps.expect(action)
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
        except BaseException:
            steps.break_off()
            raise
        resets = self._resets_at_once and (terminated or truncated)
        if resets:
            observation, info = autoreset.last_of_episode(observation, info)
        steps.record_result(observation, reward, terminated, truncated, info)
        if resets:
            self._begin_in_step(result)
        return result

    def _resetting_step(self, action: Any) -> Result:
        """Do a step that the autoreset wrapper turns into a reset."""
        upcoming = self._upcoming(None, None, self._base_env)
        result = observation, _, terminated, truncated, info = self.env.step(action)
        if upcoming is not None:
            self._steps.begin(upcoming, observation, info)
            if terminated or truncated:  # set by a wrapper outside of the autoreset wrapper, such as a time limit
                self._steps.episodes.end_without_row(outcome_of(terminated))
        return result

    def _begin_in_step(self, result: Result) -> None:
        """Begin the episode that autoreset began in the step that ended the previous one."""
        upcoming = self._upcoming(None, None)
        if upcoming is not None:
            self._steps.begin(upcoming, result[0], autoreset.info_of_reset(result[4]))
            if self._video is not None:
                self._video.begin()

    # -- states -------------------------------------------------------------------------------------------------------

    def _offered_states(self, every: int, is_filtered: bool) -> States:
        if is_filtered or self._autoreset is not None:
            raise InvalidOption(f"states={every!r}: not together with filters or autoreset; omit it")
        return offered_states(self.env, every)

    def _keep_state(self, states: States) -> None:
        """Record the state before the next step, if it is due."""
        steps = self._steps.episodes.steps_taken()
        if self._steps.episodes.state not in (OPEN, ENDED):
            self._state_is_due = False
        elif self._state_is_due or not steps % int(self._states_every or 1):
            self._state_is_due = not self._record_state(ENVIRONMENT, states)

    def _record_state(self, name: str, states: States) -> bool:
        """Record the state with the next step, or the one that is being executed; return False without one."""
        state = packed_state(self.env, states)
        if state is not None:
            self.annotate(**{STATES + name: state})
        return state is not None

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_recorder", "_slabs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._recorder, self._slabs = self._steps.recorder, self._steps.slabs
