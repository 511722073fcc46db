"""Episodes of a single environment, and its special steps: filtered, autoreset, after a gap."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, SupportsFloat

import gymnasium

from gym_trace.envs import autoreset
from gym_trace.model.layout import layout_of
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.filters import Filters
from gym_trace.recording.live_video import LiveVideo
from gym_trace.recording.options import RecordingOptions, copied_schema
from gym_trace.recording.reset_record import packed_generator
from gym_trace.recording.single.recorder import RowRecorder
from gym_trace.recording.single.slabs import Observed
from gym_trace.ring.row_layout import RowLayout
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
        layout = RowLayout(observation, action, use_deltas=not self._filtered)
        self._recorder = recorder = RowRecorder(
            LocalStorage(self.directory),
            self._schema,
            layout,
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
        self._unseen = False  # whether the observation before the next step is unknown, because a step raised
        recorder.save_at_exit(self)

    def _packed_info(self, info: dict[str, Any]) -> bytes:
        return self._recorder.packed_info(info, self._info_keys)

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _upcoming(self, seed: int | None, options: dict[str, Any] | None) -> _Upcoming | None:
        """Ends the episode before a reset. Returns what is known of the next one, or None if it is not recorded."""
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
        """Begins an episode with the observation and info of its reset."""
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

    def _resets_next(self) -> bool:
        """Whether the autoreset wrapper will take the next call of step() for a reset."""
        return autoreset.resets_next(self._autoreset)

    # -- special steps ------------------------------------------------------------------------------------------------

    def _asked(self, action: Any) -> bool:
        """Puts down an action that could not be put down at once; False if the step is a special one."""
        recorder = self._recorder
        if self._filtered or self._resets_next() or not recorder.make_room():
            return False
        return recorder.slab.ask(action) or recorder.ask(self._pack_action(action))

    def _answered(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: dict[str, Any]) -> None:
        """Puts down what could not be put down at once of a step that was asked."""
        packed = self._pack_observation(observation)
        if self._infos:
            self._recorder.log_info(self._packed_info(info))
        self._recorder.answer(packed, reward, terminated, truncated)

    def _special_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step that is not recorded, is subject to a filter, is in fact a reset, or comes after a gap."""
        recorder = self._recorder
        if self._resets_next():
            return self._resetting_step(action)
        recorder.take_over()
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
        recorder.lead(recorder.steps_taken(), self._apart(observation))
        if terminated or truncated:
            recorder.end_at_lead(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
        self._unseen = False
        return result

    def _filtered_step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """A step that a filter may leave out. It is also left out if the observation before it is unknown."""
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
                        recorder.log_info(self._packed_info(last_info))
                    recorder.answer(after, reward, terminated, truncated)
                kept = True
        finally:  # also if the filter or the environment raises
            if recorder.running and not kept:
                recorder.stop()
            if not kept:
                recorder.forget_annotations()
            if over:
                if not kept:
                    recorder.end_without_row(Outcome.TERMINATED if terminated else Outcome.TRUNCATED)
                recorder.running = False  # a step after the end begins a new run
            self._last = after  # last: if an interrupt falls in before, the next step must not continue this one
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
        step_index, last, unseen = self._step_index, self._last, self._unseen
        self._attach(lazy=True)
        self._recorder.continue_run(run)
        if run is not None:
            self._step_index, self._last, self._unseen = step_index, last, unseen
