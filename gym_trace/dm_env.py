"""Record dm_env environments, such as dm_control's. Needs dm_env: pip install 'gym-trace[dm-env]'."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_trace.envs.dm_env import DmEnvView, ends_of
from gym_trace.errors import MissingExtra
from gym_trace.recording.options import (
    RecordingKeywords,
    RecordingOptions,
    new_schema,
    opened_directory,
    takes_recording_options,
)
from gym_trace.recording.single.steps import StepRecorder

try:
    import dm_env
except ImportError as error:
    raise MissingExtra(f"gym_trace.dm_env needs dm_env ({error}): pip install 'gym-trace[dm-env]'") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["RecordedEnvironment", "record"]


class RecordedEnvironment(dm_env.Environment):
    """A dm_env.Environment whose steps are recorded; record() makes one.

    Attributes:
        directory: pathlib.Path of the trace.

    Examples:
        >>> with gym_trace.dm_env.record(env, "traces/dm") as env:  # doctest: +SKIP
        ...     timestep = env.reset()
    """

    directory: Path

    def __init__(self, env: dm_env.Environment, options: RecordingOptions):
        self._env, self._view, filters = env, DmEnvView(env), options.filters()
        self._timestep: dm_env.TimeStep | None = None
        spaces = self._view.observation_space, self._view.action_space
        schema = new_schema(options, self._view, *spaces, filters.described())
        with opened_directory(options.directory, options.on_exist) as self.directory:
            self._steps = StepRecorder(self.directory, schema, options, filters.by_step)

    def reset(self) -> dm_env.TimeStep:
        """Begin an episode. An episode that has not ended is kept with the outcome "cut"."""
        return self._begin(self._env.reset)

    def step(self, action: Any) -> dm_env.TimeStep:
        """Step the environment. After the last time step of an episode, begin the next one, as dm_env does."""
        if self._timestep is None or self._timestep.last():
            return self._begin(lambda: self._env.step(action))
        steps = self._steps
        if not (steps.slabs.slab.record_action(action) or steps.record_action(action)):
            steps.expect(action)
        try:
            self._timestep = timestep = self._env.step(action)
            terminated, truncated = ends_of(timestep)
            steps.annotate({"discount": timestep.discount})
            steps.record_result(timestep.observation, timestep.reward, terminated, truncated, {})
        except BaseException:
            steps.break_off()
            raise
        return timestep

    def _begin(self, begin: Callable[[], dm_env.TimeStep]) -> dm_env.TimeStep:
        upcoming = self._steps.upcoming(None, None, self._view)
        self._timestep = timestep = begin()
        if upcoming is not None:
            self._steps.begin(upcoming, timestep.observation, {})
        return timestep

    def annotate(self, **values: Any) -> None:
        """Record further values with the next step, by name. Raises UnstorableValue."""
        self._steps.annotate(values)

    def flush(self) -> None:
        """Write all steps so far, so that other processes can read them. Raises RecordingError if that fails."""
        self._steps.recorder.flush()

    def close(self) -> None:
        """Save the trace, then close the environment. Closing twice is fine."""
        try:
            self._steps.recorder.close()
        finally:
            self._env.close()

    def observation_spec(self) -> Any:
        """The spec of the environment."""
        return self._env.observation_spec()

    def action_spec(self) -> Any:
        """The spec of the environment."""
        return self._env.action_spec()

    def reward_spec(self) -> Any:
        """The spec of the environment."""
        return self._env.reward_spec()

    def discount_spec(self) -> Any:
        """The spec of the environment."""
        return self._env.discount_spec()

    def __getattr__(self, name: str) -> Any:  # physics, task …
        if name.startswith("__") or "_env" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._env, name)


@takes_recording_options
def record(
    env: dm_env.Environment, directory: str | os.PathLike[str] | None = None, **options: Unpack[RecordingKeywords]
) -> RecordedEnvironment:
    """Return an environment that behaves like env and records every step.

    Observations and actions keep dtype, shape and bits; a reward may be an array. The discount of each step is the
    annotation ``discount``. A last time step with discount 0 becomes terminated, any other truncated. Nested specs
    become Dict and Tuple spaces. The generator state of dm_control's environments is recorded, so that episodes can be
    verified: ``gym-trace verify DIR --make my_tasks:make``.

    Args:
        directory … keep_if: see RecordingOptions.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an option or a spec is invalid.
        MissingExtra: on import of gym_trace.dm_env, if dm_env is not installed.

    Examples:
        >>> env = gym_trace.dm_env.record(env, "traces/dm")  # doctest: +SKIP
        >>> timestep = env.step(env.reset().observation)  # doctest: +SKIP
    """
    return RecordedEnvironment(env, RecordingOptions(directory=directory, **options))
