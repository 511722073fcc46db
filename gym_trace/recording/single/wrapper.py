"""The wrapper that records a single Gymnasium environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from gym_trace.envs import autoreset
from gym_trace.errors import InvalidOption
from gym_trace.model.packing import pack
from gym_trace.model.tensors import plain_array
from gym_trace.recording.filters import EpisodeFilter, FrameFilter
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import RecordingOptions, new_schema, opened_directory, with_documented_options
from gym_trace.recording.single.episodes import EpisodeRecording
from gym_trace.ring.lanes.autoreset import SAME_STEP
from gym_trace.ring.segment import snapshot
from gym_trace.video.schedules import Schedule


@with_documented_options
class TraceRecordingWrapper(EpisodeRecording, RecordConstructorArgs):
    """Records every step of an environment to a trace, without changing what the environment does.

    Args:
        env: any single Gymnasium environment.
        directory … on_error: see RecordingOptions.
        video: which of the recorded episodes are filmed, as MP4 in the directory: None or False for none, "cubic"
            (0, 1, 8, 27 … 729, then every 1,000), or a function of the episode id. The environment needs
            render_mode="rgb_array". Any episode can be filmed later, too, with gym-trace render.

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace of an earlier run and on_exist is "error".
        InvalidOption: an argument does not make sense.
    """

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
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **options.constructor_args(), video=video)
        self._video = None if video is None or video is False else LiveVideo(env, video)
        super().__init__(env if self._video is None else self._video)
        self._base_env = env.unwrapped
        self._filters = options.filters()
        self._autoreset = autoreset.autoreset_wrapper(env)
        self._resets_at_once = autoreset.wrapper_mode(self._autoreset) == SAME_STEP
        self._filtered = self._filters.steps or self._resets_at_once
        self._infos, self._info_keys = bool(record_infos), options.info_keys
        self._schema = new_schema(options, env, env.observation_space, env.action_space, self._filters.described())
        with opened_directory(directory, on_exist) as self.directory:
            self._attach(lazy=False)

    # -- the environment's methods ------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets the environment. An episode that has not ended is kept with the outcome "cut"."""
        upcoming = self._upcoming(seed, options)
        result = self.env.reset(seed=seed, options=options)
        if upcoming is not None:
            self._begin(upcoming, *result)
        return result

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Steps the environment and records the step.

        If it raises, Ctrl-C included, the state of the environment is unknown: the steps that follow are another part
        of the episode.
        """
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
        """Saves the trace, then closes the environment. Closing twice is fine."""
        try:
            self._recorder.close()
        finally:
            super().close()

    # -- more to record -----------------------------------------------------------------------------------------------

    def annotate(self, **values: Any) -> None:
        """Records further values with the next step, such as ``logprob`` or ``value``, as columns of their own.

        Call it before step(). Numbers and arrays of one dtype and shape become typed columns. Raises UnstorableValue.
        """
        copies = {name: snapshot(plain_array(value), pack) for name, value in values.items()}
        if self._filtered:  # the next step may be left out
            self._annotations.update(copies)
        else:
            self._recorder.annotate(copies)

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError if they could not be written."""
        self._recorder.flush()
