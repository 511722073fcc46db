"""The wrapper that records a single Gymnasium environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.utils import RecordConstructorArgs
from numpy import ndarray

from gym_trace.envs import identity as environment
from gym_trace.errors import InvalidOption
from gym_trace.model.layout import Layout, Leaf, layout_of
from gym_trace.model.tensors import plain_array
from gym_trace.model.values import copied, pack
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.filters import EpisodeFilter, Filters, FrameFilter
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import copied_schema, info_keys, new_schema, opened_directory
from gym_trace.recording.segment import held
from gym_trace.recording.single.block import RowFormat
from gym_trace.recording.single.recorder import RowRecorder
from gym_trace.video.schedules import Schedule

_FINALS = ("final_observation", "final_info")  # of Gymnasium 0.29


# What is known of an episode before the reset that begins it: seed, options (packed), state of the environment's
# generator, UTC and monotonic ns. A plain tuple: episodes of a few steps need many.
_Upcoming = tuple[int | None, bytes | None, Any, int, int]


class TraceRecordingWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Records every step of an environment to a trace, without changing what the environment does.

    Args:
        env: any single Gymnasium environment.
        directory: where the trace goes; made if it is not there. None: a fresh directory under the system's temporary
            one, whose name is logged and found in ``.directory``.
        episode_filter: called with the episode id (0, 1, 2 …) at each reset; episodes for which it says False are
            not recorded and cost nothing.
        frame_filter: called with the index of each step in its episode; steps for which it says False are left out.
            Each run of kept steps comes back as a part of the episode, with the observation before it.
        reward_classes: values of reward; rare classes of reward are kept more often (see filters.RewardClasses).
            Not together with frame_filter.
        record_infos: False, True for all infos, or the keys of those to record.
        split: a word for what the episodes are for, such as "train" or "eval".
        uid: the writer's id in file names; None makes a unique one.
        on_exist: if the directory holds a trace: "error", "append" (a new writer beside the others), or "replace".
        flush_seconds: what a kill -9 can lose, in seconds of steps.
        level: zstd level, -7 to 22. At 1, columns that it makes hardly smaller than -1 does are compressed at -1.
        fsync: whether each flush waits for the disk, so that a power loss loses no more than a kill.
        metadata: anything that MessagePack can hold, stored with the trace.
        on_error: "raise" a RecordingError at the next step when the disk is full, or "warn"; either way once, and the
            environment can be stepped on unrecorded.
        video: which of the recorded episodes are filmed, as MP4 in the directory: None or False for none, "cubic"
            (0, 1, 8, 27 … 729, then every 1,000), or a function of the episode id. The environment needs
            render_mode="rgb_array". Any episode can be filmed later, too, with gym-trace render.

    Attributes:
        directory: pathlib.Path of the trace.

    Raises:
        TraceExists: the directory holds a trace and on_exist is "error".
        InvalidOption: an argument does not make sense.
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
        flush_seconds: float = 1.0,
        level: int = 1,
        fsync: bool = False,
        metadata: Any = None,
        on_error: str = "raise",
        video: Schedule | str | bool | None = None,
    ):
        if isinstance(env, gymnasium.vector.VectorEnv):  # EnvPool's are of both kinds
            raise InvalidOption(f"{type(env).__name__} is a vector environment; use TraceRecordingVectorWrapper")
        # Whoever makes the environment again from its spec records beside this trace, as another writer. Filters are
        # kept as they are: a deep copy of a bound method is one of all that it belongs to.
        RecordConstructorArgs.__init__(
            self,
            _disable_deepcopy=True,
            directory=None if directory is None else str(Path(directory).absolute()),
            episode_filter=episode_filter,
            frame_filter=frame_filter,
            reward_classes=copied(reward_classes),
            record_infos=copied(record_infos),
            split=split,
            on_exist="append",
            flush_seconds=flush_seconds,
            level=level,
            fsync=fsync,
            metadata=copied(metadata),
            on_error=on_error,
            video=video,
        )
        self._video = None if video is None or video is False else LiveVideo(env, video)
        super().__init__(env if self._video is None else self._video)
        self._base_env = env.unwrapped
        self._filters = Filters(episode_filter, frame_filter, reward_classes)
        self._autoreset = environment.autoreset_wrapper(env)
        self._resets_at_once = self._autoreset is not None and "autoreset" not in vars(self._autoreset)
        self._filtered = self._filters.steps or self._resets_at_once  # and there is more to a step than a row
        self._infos = record_infos
        self._info_keys = info_keys(record_infos)
        self._options: dict[str, Any] = {
            "level": level, "fsync": fsync, "flush_seconds": flush_seconds, "on_error": on_error
        }  # fmt: skip
        self._schema: dict[str, Any] = new_schema(
            env,
            env.observation_space,
            env.action_space,
            split=split,
            uid=uid,
            metadata=metadata,
            recorder={
                "record_infos": record_infos if isinstance(record_infos, bool) else list(record_infos),
                **self._filters.described(),
            },
        )
        self.directory = opened_directory(directory, on_exist)
        self._attach(lazy=False)

    def _attach(self, lazy: bool) -> None:
        """A recorder for this wrapper, and the functions that copy values into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        form = RowFormat(observation, action, bool(self._infos), use_frames=not self._filtered)
        self._recorder = recorder = RowRecorder(
            self.directory,
            self._schema,
            form,
            summary=self._filters.summary,
            lazy=lazy,
            **self._options,
        )
        # With one typed column each for observation, action and reward, rows are put together the short way.
        self._simple = _is_typed(observation) and _is_typed(action) and not self._infos and not self._filtered
        first = form.observation_leaves[0] if form.observation_leaves else None
        is_vector = self._simple and first is not None and len(first.shape) == 1 and first not in form.frame_leaves
        self._dtype = first.dtype if first is not None and is_vector else None
        self._vector_bytes = first.row_size if first is not None else 0
        scalar = form.action_leaves[0].dtype if self._simple and form.action_leaves[0].shape == () else None
        self._action_kind = None if scalar is None else scalar.type
        packer: Any = form.packer if self._simple else form.tree_packer
        self._pack_observation: Callable[[Any], Any] = packer(observation, recorder)
        self._pack_action: Callable[[Any], Any] = packer(action, recorder)
        self._step_index = 0
        self._last_slots: tuple[Any, ...] | None = None  # of the observation before the next step, with filtered steps
        self._annotations: dict[str, Any] = {}  # of the next step, likewise
        self._unseen = False  # the observation before the next step, because the one before that raised
        recorder.save_at_exit(self)

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

        If an exception comes out of it, Ctrl-C included, what the environment has done is not known: steps that follow
        are another part of the episode.
        """
        recorder = self._recorder
        rows = recorder.rows
        if rows is not None and (filled := len(rows)) >= recorder.limit:
            rows = None if self._resets_next() else recorder.make_room()
            filled = 0 if rows is None else len(rows)
        simple = self._simple
        if rows is None or (not simple and self._filtered):
            return self._rare_step(action)
        packed_action = action if type(action) is self._action_kind else self._pack_action(action)
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            if type(reward) is not recorder.reward_kind:
                reward = recorder.other_reward(reward)
            row: tuple[Any, ...]
            if simple:
                # What _pack_observation does with a vector that is as the space says, without the call.
                if (
                    type(observation) is ndarray
                    and observation.dtype is self._dtype
                    and observation.ndim == 1
                    and len(packed := observation.tobytes()) == self._vector_bytes
                ):
                    row = (packed, packed_action, reward)
                else:
                    row = (self._pack_observation(observation), packed_action, reward)
            else:
                row = (*self._pack_observation(observation), *packed_action, reward)
                if self._infos:
                    row += (self._pack_info(info),)
            if terminated or truncated:
                recorder.flag(terminated, truncated)
            rows.extend(row)
        except BaseException:
            recorder.rows = None  # before all else: a further Ctrl-C may fall, and no step must follow on these rows
            self._unseen = recorder.break_off(rows, filled)
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
        copies = {name: held(plain_array(value), pack) for name, value in values.items()}
        if self._filtered:  # it is not known yet whether the next step is kept
            self._annotations.update(copies)
        else:
            self._recorder.annotate(copies)

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError if they could not be written."""
        self._recorder.flush()

    def _pack_info(self, info: dict[str, Any]) -> bytes:
        packed = self._recorder.packed_info(info, self._info_keys)
        self._recorder.count_values(len(packed))
        return packed

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _upcoming(self, seed: int | None, options: dict[str, Any] | None) -> _Upcoming | None:
        """Ends the episode, before a reset; what is known of the next one, or None if it is not to be recorded."""
        recorder = self._recorder
        recorder.end()
        recorder.say_if_unrecorded()
        self._last_slots, self._step_index, self._annotations, self._unseen = None, 0, {}, False
        if self._filters.any and not self._filters.keeps_episode(recorder.next_episode):
            recorder.skip_episode()
            return None
        if self._video is not None:
            self._video.expect(self.directory, recorder.writer_id, recorder.next_episode)
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        state = environment.generator_state(self._base_env) if seed is None else None
        return seed, None if options is None else recorder.packed("reset", options), state, utc, monotonic

    def _begin(self, upcoming: _Upcoming, observation: Any, info: dict[str, Any]) -> None:
        """Begins an episode with what a reset has led to."""
        recorder = self._recorder
        recorded_info = self._pack_info(info) if self._infos else None
        seed, options, state, utc, monotonic = upcoming
        start = recorder.start(0, seed, options, state, recorded_info, utc, monotonic)
        recorder.prepare_lead()
        packed = self._pack_observation(observation)
        slots = (packed,) if self._simple else packed
        recorder.begin(start, None if self._filtered else slots)
        if self._filtered:
            self._last_slots = slots

    def _slots_of(self, observation: Any) -> tuple[Any, ...]:
        packed = self._pack_observation(observation)
        return (packed,) if self._simple else packed

    def _resets_next(self) -> bool:
        """Whether the next step is none, but a reset that the environment makes itself."""
        return self._autoreset is not None and not self._resets_at_once and bool(self._autoreset.autoreset)

    # -- steps that are not simply recorded ---------------------------------------------------------------------------

    def _rare_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step that is not recorded, or of which a filter says whether it is, or that is none but a reset."""
        recorder = self._recorder
        if self._resets_next():
            return self._resetting_step(action)
        if recorder.episode is None or recorder.failed:
            if recorder.failed:
                recorder.make_room()  # which says so, once
            result = self.env.step(action)
            if self._resets_at_once and (result[2] or result[3]):
                self._begin_at_once(*result)
            return result
        if self._filtered:
            return self._filtered_step(action)
        return self._step_after_gap(action) if self._unseen else self.env.step(action)

    def _resetting_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        upcoming = self._upcoming(None, None)
        result = observation, _, terminated, truncated, info = self.env.step(action)
        if upcoming is not None:
            self._begin(upcoming, observation, info)
            if terminated or truncated:  # a wrapper around the one that resets, which does not know of it
                self._recorder.end_at_lead(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
        return result

    def _step_after_gap(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step before which nobody saw an observation: it is left out, and what it leads to begins a run."""
        recorder = self._recorder
        recorder.skip_step()
        result = observation, _, terminated, truncated, _ = self.env.step(action)
        recorder.prepare_lead()
        recorder.lead(recorder.steps_taken(), self._slots_of(observation))
        if terminated or truncated:
            recorder.end_at_lead(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
        self._unseen = False
        return result

    def _filtered_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step that a filter may leave out; one is left out, too, if the observation before it is not known."""
        recorder, before = self._recorder, self._last_slots
        action_slots = self._pack_action(action)
        annotations, self._annotations = self._annotations, {}
        index, slots = self._step_index, None
        self._step_index, self._last_slots = index + 1, None
        kept = over = False
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            recorder.go_on()  # a fork may have fallen into the step
            over = bool(terminated or truncated)
            last, last_info = _last_of(observation, info) if over and self._resets_at_once else (observation, info)
            slots = self._pack_observation(last)
            if before is not None and self._filters.keeps_step(index, reward):
                if recorder.rows is None:
                    recorder.prepare_lead()
                    recorder.lead(index, before)
                if annotations:
                    recorder.annotate(annotations)
                row = (*slots, *action_slots, recorder.other_reward(reward))
                if self._infos:
                    row += (self._pack_info(last_info),)
                if over:
                    recorder.flag(terminated, truncated)
                if recorder.rows is not None:
                    recorder.rows.extend(row)
                kept = True
        finally:  # also if the filter raises, or the environment
            if recorder.rows is not None and not kept:
                recorder.stop()
            if over:
                if not kept:
                    recorder.end_unseen(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
                recorder.rows = None  # a further step is another run, if it is kept
            self._last_slots = slots  # at last: where something falls in before, no step follows on this one
        if over and self._resets_at_once:
            self._begin_at_once(*result)
        return result

    def _begin_at_once(self, observation: Any, *rest: Any) -> None:
        """Begins the episode that the environment has begun itself in the step that ended the one before."""
        upcoming = self._upcoming(None, None)
        if upcoming is not None:
            info = {key: value for key, value in rest[-1].items() if key not in _FINALS}
            seed, options, _, utc, monotonic = upcoming
            self._begin((seed, options, None, utc, monotonic), observation, info)
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
        step_index, last_slots, unseen = self._step_index, self._last_slots, self._unseen
        self._attach(lazy=True)
        self._recorder.go_on_with(run)
        if run is not None:
            self._step_index, self._last_slots, self._unseen = step_index, last_slots, unseen


def _last_of(observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The last observation and info of an episode, after which the environment has reset itself in the same step."""
    return info.get(_FINALS[0], observation), info.get(_FINALS[1], info)


def _is_typed(layout: Layout) -> bool:
    return isinstance(layout, Leaf) and layout.dtype is not None
