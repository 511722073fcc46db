"""Steps of one environment as they happen: filters, infos, annotations, and steps that are not recorded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gym_trace.data.layout import layout_of
from gym_trace.data.packing import pack
from gym_trace.data.tensors import plain_array
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import raise_if_of_signal
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.segment import snapshot
from gym_trace.format.wire import NO_SEED
from gym_trace.recording.core import pcg64_state
from gym_trace.recording.options import RecordingOptions, copied_schema, storage_in
from gym_trace.recording.recorder import Recorder, using_recorder
from gym_trace.recording.reset_record import NOTHING, PCG64, packed_generator
from gym_trace.recording.single.episodes import ENDED, IDLE, OPEN, TAKEN_OVER, EpisodeRecorder
from gym_trace.recording.single.slabs import Observed
from gym_trace.storage.interrupts import held_back

# The start of an episode before its reset: seed, packed options, state of the environment's random generator, UTC and
# monotonic time in ns. A plain tuple, which is cheaper than a class: there is one for each episode.
Upcoming = tuple[int | None, bytes | None, Any, int, int]
Result = tuple[Any, Any, Any, Any, Any]  # result of a step in Gymnasium

_USUAL, _SKIPPED, _FILTERED, _AFTER_GAP = range(4)  # kinds of steps


class StepRecorder:
    """Records the steps of one environment, each in two halves: the action before it is executed, then its result.

    The caller first tries slab.record_action(), the fast path, then record_action(). If both return False, the step is
    special, and the caller calls expect(). After the step it calls record_result(), unless slab.record_result() has
    recorded the result; or break_off(), if the step raised. A copy is another writer, which begins with its next
    reset.

    Args:
        lane: lane of the episodes.
        is_filtered: True if every step is special: a filter decides about it, or it may also be a reset.
        lazy: True to create no files before the first reset.
    """

    def __init__(
        self,
        directory: Path,
        schema: dict[str, Any],
        options: RecordingOptions,
        is_filtered: bool,
        lane: int = 0,
        lazy: bool = False,
    ):
        self._directory, self._schema, self._options, self._lane = directory, schema, options, lane
        self._is_filtered = is_filtered
        self.filters = options.filters()
        self._infos, self._info_keys = bool(options.record_infos), options.info_keys
        self._is_plain = not (self._infos or is_filtered or self.filters.is_active)  # resets are then recorded faster
        self._attach(lazy)

    def _attach(self, lazy: bool) -> None:
        """Create the recorder, and the functions that copy values into its rows."""
        observation = layout_of(self._schema["observation_space"], ("observations",))
        action = layout_of(self._schema["action_space"], ("actions",))
        layout = RowLayout(observation, action, not self._is_filtered, self._lane)
        storage = storage_in(self._directory, self._options)
        self.recorder = Recorder(storage, self._schema, self._options, self.filters.summary)
        self.episodes = EpisodeRecorder(self.recorder, layout, self._infos, self._is_filtered)
        self.slabs = self.episodes.slabs
        self.recorder.attach(self.slabs, self.episodes, lazy)
        self._pack_observation, self._pack_action = self.slabs.packers.observation, self.slabs.packers.action
        self._kind = _USUAL  # kind of the current step
        self._reset_episode()
        self.recorder.save_at_exit(self)

    def _reset_episode(self) -> None:
        """Reset the state of the previous episode."""
        self._step_index = 0
        self._last: Observed | None = None  # filtered mode: the observation before the next step
        self._before: Observed | None = None  # filtered mode: the observation before the current step
        self._packed_action: Observed | None = None  # filtered mode: the action of the current step
        self._annotations: dict[str, Any] = {}  # filtered mode: the annotations of the next step
        self._unseen = False  # True if the observation before the next step is unknown, because a step raised

    # -- episodes -----------------------------------------------------------------------------------------------------

    def usual_reset(self, env: Any, base_env: Any) -> tuple[Any, Any] | None:
        """Reset an environment after a step that has ended its episode, and begin the next one.

        Return None, before the reset, if upcoming() and begin() must be called instead; they do the same in more calls.
        Since the last reset, the environment has emptied the caches of the processor, so each line counts.
        """
        if not (self._is_plain and self.slabs.slab.is_between_episodes()):
            return None
        try:
            state = pcg64_state(base_env.np_random.bit_generator, PCG64)
        except Exception as error:  # user code may raise anything
            raise_if_of_signal(error)
            return None
        if state is None:
            return None
        recorder, episodes = self.recorder, self.episodes
        utc, monotonic = time.time_ns(), time.monotonic_ns()
        episodes.forget()
        result: tuple[Any, Any] = env.reset(seed=None, options=None)
        recorder.is_in_use = True
        try:
            start = recorder.next_episode, self._lane, NO_SEED, state, utc, monotonic
            if episodes.try_begin_fast(start, result[0]):
                return result
        finally:
            recorder.is_in_use = False
        self.begin((None, None, state, utc, monotonic), *result)
        return result

    def upcoming(self, seed: int | None, options: dict[str, Any] | None, base_env: Any = None) -> Upcoming | None:
        """End the episode before a reset. Return the start of the next one, or None if it is not recorded.

        base_env: unwrapped environment; the state of its generator is recorded if there is no seed.
        """
        if self._is_plain and self.slabs.slab.is_between_episodes():
            self.episodes.forget()
        elif not self._end_before_reset():
            return None
        state = packed_generator(base_env) if seed is None and base_env is not None else None
        packed = None if options is None else self.recorder.packed("reset", options)
        return seed, packed, state, time.time_ns(), time.monotonic_ns()

    @using_recorder
    def _end_before_reset(self) -> bool:
        """End the episode before a reset; return True if the next one is recorded."""
        recorder, filters = self.recorder, self.filters
        recorder.begin_again()
        self.episodes.end()
        recorder.warn_if_unrecorded()
        self._kind = _USUAL
        self._reset_episode()
        if filters.is_active and not filters.keeps_episode(recorder.next_episode):
            self.episodes.skip_episode()
            return False
        recorder.prepare()
        return True

    def begin(self, upcoming: Upcoming, observation: Any, info: Any) -> None:
        """Begin an episode with the observation and info of its reset."""
        recorder = self.recorder
        recorder.is_in_use = True  # the decorator using_recorder() would take longer
        try:
            seed, options, state, utc, monotonic = upcoming
            if seed is None and options is None and not self._infos:
                start = recorder.next_episode, self._lane, NO_SEED, state or NOTHING, utc, monotonic
            else:
                recorded_info = self._packed_info(info) if self._infos else None
                start = recorder.start(self._lane, seed, options, state, recorded_info, utc, monotonic)
            if self._is_filtered:
                self._last = self._apart(observation)
                self.episodes.begin(start, None)
            elif not self.episodes.try_begin_fast(start, observation):
                self.slabs.make_space_for_initial()
                self.episodes.begin(start, self._pack_observation(observation))
                recorder.report()
        finally:
            recorder.is_in_use = False

    @using_recorder
    def end(self, outcome: Outcome) -> None:
        """End the open episode."""
        self.episodes.end(outcome)

    # -- steps --------------------------------------------------------------------------------------------------------

    def annotate(self, values: dict[str, Any]) -> None:
        """Record further values with the next step, or with the one that is being executed. Raises UnstorableValue."""
        copies = {name: snapshot(plain_array(value), pack) for name, value in values.items()}
        if self._is_filtered:  # the step may be skipped
            self._annotations.update(copies)
        else:
            self.episodes.annotate(copies)

    @using_recorder
    def record_action(self, action: Any) -> bool:
        """Record an action after slab.record_action() returned False; return False if the step is special."""
        episodes = self.episodes
        self._kind = _USUAL
        if self._is_filtered or not episodes.make_room():
            return False
        return self.slabs.slab.record_action(action) or episodes.record_action(self._pack_action(action))

    @using_recorder
    def expect(self, action: Any) -> None:
        """Prepare for the result of a step that is not recorded, is subject to a filter, or comes after a gap."""
        episodes = self.episodes
        self._kind = _SKIPPED
        if episodes.state is TAKEN_OVER:
            self.recorder.warn_of_copy()
        elif self.recorder.failed:
            episodes.make_room()  # reports the failure, once
        elif episodes.state is IDLE:
            return
        elif self._is_filtered:
            episodes.make_ready()
            self._packed_action = self.slabs.packed_apart(self._pack_action, action)
            self._before, self._last, self._kind = self._last, None, _FILTERED
            self._step_index += 1
        elif self._unseen:
            episodes.skip_step()
            self._kind = _AFTER_GAP

    @using_recorder
    def record_result(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Record the result of a special step, or one for which slab.record_result() returned False."""
        kind, self._kind = self._kind, _USUAL
        if kind == _USUAL:
            packed = self._pack_observation(observation)
            self.episodes.log_annotations()
            if self._infos:
                self.slabs.log_value(self.slabs.layout.info_column, self._packed_info(info))
            self.episodes.record_result(packed, reward, terminated, truncated)
        elif kind == _FILTERED and self.episodes.episode is not None:  # else the process forked within the step
            self._record_filtered(observation, reward, terminated, truncated, info)
        elif kind == _AFTER_GAP:
            self._record_after_gap(observation, terminated, truncated)

    @using_recorder
    def break_off(self) -> None:
        """Record that the step has raised: the state of the environment is unknown."""
        kind, self._kind = self._kind, _USUAL
        with held_back():  # a second Ctrl-C would leave it unknown that the steps go on after a gap
            if kind == _USUAL:
                self._unseen = self.episodes.break_off()
            elif kind == _FILTERED:
                self._skip_filtered()

    @using_recorder
    def lose(self) -> None:
        """Record that a step was taken, but perhaps not recorded: later steps are another part of the episode."""
        kind, self._kind = self._kind, _USUAL
        if self._is_filtered:
            self._step_index += kind == _USUAL
            self._last = None
            self._skip_filtered()
        elif kind == _USUAL:
            self._unseen = self.episodes.break_off(is_executed=True) or self._unseen

    def _record_filtered(self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
        """Record a step, unless a filter skips it, or the observation before it is unknown."""
        episodes, slabs = self.episodes, self.slabs
        before, action, index = self._before, self._packed_action, self._step_index - 1
        annotations, self._annotations = self._annotations, {}
        after, is_kept = None, False
        try:
            after = self._apart(observation)
            if before is not None and action is not None and self.filters.keeps_step(index, reward):
                if episodes.state is not OPEN:
                    episodes.begin_run(index, before)
                if annotations:
                    episodes.annotate(annotations)
                if episodes.make_room(switches=False) and episodes.record_action(slabs.put(action)):
                    if self._infos:
                        slabs.log_value(slabs.layout.info_column, self._packed_info(info))
                    episodes.record_result(after, reward, terminated, truncated)
                is_kept = True
        finally:  # also if the filter raises
            if not is_kept:
                self._skip_filtered()
                if terminated or truncated:
                    episodes.end_without_row(outcome_of(terminated))
            self._last = after  # last: after an interrupt before this line, the next step must not continue this one

    def _skip_filtered(self) -> None:
        """Skip a step: later steps are another run."""
        self._annotations = {}
        episodes = self.episodes
        if episodes.state is OPEN or (episodes.state is ENDED and self.slabs.is_incomplete):  # ended by that very step
            episodes.stop()
        episodes.forget_annotations()

    def _record_after_gap(self, observation: Any, terminated: Any, truncated: Any) -> None:
        """Skip a step whose first observation is unknown. Its last observation begins a run of steps."""
        episodes = self.episodes
        episodes.begin_run(episodes.steps_taken(), self._apart(observation))
        if terminated or truncated:
            episodes.end_without_row(outcome_of(terminated))
        self._unseen = False

    def _apart(self, observation: Any) -> Observed:
        return self.slabs.packed_apart(self._pack_observation, observation)

    def _packed_info(self, info: Any) -> bytes:
        return self.recorder.packed_info(info, self._info_keys)

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("recorder", "episodes", "slabs", "_pack_observation", "_pack_action"):
            del state[name]
        state["is_open"] = self.episodes.is_open
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_open = state.pop("is_open")
        self.__dict__.update(state)
        self._schema = copied_schema(self._schema)
        self._attach(lazy=True)
        if is_open:
            self.episodes.take_over()


def outcome_of(terminated: Any) -> Outcome:
    """Return the outcome of an episode whose last step was terminated or truncated."""
    return Outcome.TERMINATED if terminated else Outcome.TRUNCATED
