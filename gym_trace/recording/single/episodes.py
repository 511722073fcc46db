"""Episodes of a single environment, and its special steps: filtered, autoreset, after a gap."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from gym_trace.envs import autoreset
from gym_trace.envs.seeding import generator_state
from gym_trace.model.layout import Leaf, layout_of
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.filters import Filters
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import RecordingOptions, copied_schema
from gym_trace.recording.single.block import RowFormat
from gym_trace.recording.single.recorder import RowRecorder
from gym_trace.storage.local import LocalStorage

# What is known of an episode before its reset: seed, packed options, state of the environment's random generator, UTC
# and monotonic time in ns. A plain tuple, which is cheaper than a class: there is one for each episode.
_Upcoming = tuple[int | None, bytes | None, Any, int, int]


class EpisodeRecording(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The part of TraceRecordingWrapper that is not on its hot path: recorder, episodes, special steps, copies."""

    directory: Path
    _options: RecordingOptions
    _schema: dict[str, Any]
    _filters: Filters
    _infos: bool  # whether infos are recorded
    _info_keys: tuple[str, ...] | None  # the keys to record; None: all
    _video: LiveVideo | None
    _base_env: gymnasium.Env[Any, Any]
    _autoreset: Any  # the autoreset wrapper around the environment, or None
    _resets_at_once: bool  # it resets in the step that ends an episode, as that of Gymnasium 0.29 does
    _filtered: bool  # whether every step is a special one: a filter is asked, or the step may also be a reset

    def _attach(self, lazy: bool) -> None:
        """Makes the recorder, and the functions that copy values into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        form = RowFormat(observation, action, self._infos, use_deltas=not self._filtered)
        self._recorder = recorder = RowRecorder(
            LocalStorage(self.directory), self._schema, form, self._options, self._filters.summary, lazy
        )
        # A row of one typed observation, one typed action and the reward is built without a generic loop over leaves.
        is_typed = all(isinstance(layout, Leaf) and layout.dtype is not None for layout in (observation, action))
        self._simple = is_typed and not self._infos and not self._filtered
        first = form.observation_leaves[0] if form.observation_leaves else None
        is_vector = self._simple and first is not None and len(first.shape) == 1 and first not in form.delta_leaves
        self._dtype = first.dtype if first is not None and is_vector else None
        self._vector_bytes = first.row_size if first is not None else 0
        scalar = form.action_leaves[0].dtype if self._simple and form.action_leaves[0].shape == () else None
        self._action_kind = None if scalar is None else scalar.type
        packer: Any = form.packer if self._simple else form.tree_packer
        self._pack_observation: Callable[[Any], Any] = packer(observation, recorder)
        self._pack_action: Callable[[Any], Any] = packer(action, recorder)
        self._step_index = 0
        self._last_slots: tuple[Any, ...] | None = None  # with filtered steps: of the observation before the next step
        self._annotations: dict[str, Any] = {}  # with filtered steps: of the next step
        self._unseen = False  # whether the observation before the next step is unknown, because a step raised
        recorder.save_at_exit(self)

    def _pack_info(self, info: dict[str, Any]) -> bytes:
        packed = self._recorder.packed_info(info, self._info_keys)
        self._recorder.count_values(len(packed))
        return packed

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _upcoming(self, seed: int | None, options: dict[str, Any] | None) -> _Upcoming | None:
        """Ends the episode before a reset. Returns what is known of the next one, or None if it is not recorded."""
        recorder = self._recorder
        recorder.end()
        recorder.warn_if_unrecorded()
        self._last_slots, self._step_index, self._annotations, self._unseen = None, 0, {}, False
        if self._filters.any and not self._filters.keeps_episode(recorder.next_episode):
            recorder.skip_episode()
            return None
        if self._video is not None:
            self._video.expect(self.directory, recorder.writer_id, recorder.next_episode)
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        state = generator_state(self._base_env) if seed is None else None
        return seed, None if options is None else recorder.packed("reset", options), state, utc, monotonic

    def _begin(self, upcoming: _Upcoming, observation: Any, info: dict[str, Any]) -> None:
        """Begins an episode with the observation and info of its reset."""
        recorder = self._recorder
        recorded_info = self._pack_info(info) if self._infos else None
        seed, options, state, utc, monotonic = upcoming
        start = recorder.start(0, seed, options, state, recorded_info, utc, monotonic)
        recorder.prepare_lead()
        slots = self._slots_of(observation)
        recorder.begin(start, None if self._filtered else slots)
        if self._filtered:
            self._last_slots = slots

    def _slots_of(self, observation: Any) -> tuple[Any, ...]:
        packed = self._pack_observation(observation)
        return (packed,) if self._simple else packed

    def _resets_next(self) -> bool:
        """Whether the autoreset wrapper will take the next call of step() for a reset."""
        return autoreset.resets_next(self._autoreset)

    # -- special steps ------------------------------------------------------------------------------------------------

    def _special_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step that is not recorded, is subject to a filter, is in fact a reset, or comes after a gap."""
        recorder = self._recorder
        if self._resets_next():
            return self._resetting_step(action)
        if recorder.episode is None or recorder.failed:
            if recorder.failed:
                recorder.make_room()  # reports the failure, once
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
            if terminated or truncated:  # set by a wrapper outside of the autoreset wrapper, such as a time limit
                self._recorder.end_at_lead(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
        return result

    def _step_after_gap(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step whose first observation is unknown. It is left out; its last observation begins a new run of steps."""
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
        """A step that a filter may leave out. It is also left out if the observation before it is unknown."""
        recorder, before = self._recorder, self._last_slots
        action_slots = self._pack_action(action)
        annotations, self._annotations = self._annotations, {}
        index, slots = self._step_index, None
        self._step_index, self._last_slots = index + 1, None
        kept = over = False
        try:
            result = observation, reward, terminated, truncated, info = self.env.step(action)
            recorder.take_over()  # the process may have forked within the step
            over = bool(terminated or truncated)
            last, last_info = observation, info
            if over and self._resets_at_once:
                last, last_info = autoreset.last_of_episode(observation, info)
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
        finally:  # also if the filter or the environment raises
            if recorder.rows is not None and not kept:
                recorder.stop()
            if over:
                if not kept:
                    recorder.end_without_row(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
                recorder.rows = None  # a step after the end begins a new run
            self._last_slots = slots  # last: if an interrupt falls in before, the next step must not continue this one
        if over and self._resets_at_once:
            self._begin_at_once(*result)
        return result

    def _begin_at_once(self, observation: Any, *rest: Any) -> None:
        """Begins the episode that autoreset has begun in the same step that ended the one before."""
        upcoming = self._upcoming(None, None)
        if upcoming is not None:
            info = autoreset.info_of_reset(rest[-1])
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
        self._recorder.continue_run(run)
        if run is not None:
            self._step_index, self._last_slots, self._unseen = step_index, last_slots, unseen
