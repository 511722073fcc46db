"""Episodes of a single environment, as runs of steps in slabs."""

from __future__ import annotations

import time
from threading import get_ident
from typing import Any

import numpy as np

from gym_trace.data.packing import pack
from gym_trace.data.values import Packed
from gym_trace.data.vocabulary import Outcome
from gym_trace.format.ring import log
from gym_trace.format.ring.log import CONTINUE, END, FLAG, INITIAL, START, START_HAS_INITIAL, STOP
from gym_trace.format.ring.row_layout import RowLayout
from gym_trace.format.ring.row_slab import EXACT_INTEGERS
from gym_trace.recording.recorder import Phase, Recorder, State
from gym_trace.recording.reset_record import Start
from gym_trace.recording.single.slabs import FLAG_BYTES, Observed, RowSlabs

IDLE, OPEN, PAUSED, ENDED, TAKEN_OVER = (  # attributes of an Enum are slow before Python 3.12
    State.IDLE,
    State.OPEN,
    State.PAUSED,
    State.ENDED,
    State.TAKEN_OVER,
)


class EpisodeRecorder:
    """Records the episodes of one environment, fed step by step from one thread.

    Args:
        infos: True if steps have infos.
        is_filtered: True if the fast path never records a step.

    Attributes:
        slabs: the slabs of the episodes.
        episode: the start of the open episode, or None.
    """

    def __init__(self, recorder: Recorder, layout: RowLayout, infos: bool, is_filtered: bool):
        self._recorder = recorder
        self.slabs = RowSlabs(recorder, layout, infos, is_filtered, self._continuation)

    def reset(self) -> None:
        """Set the state of a new writer."""
        self.episode: Start | None = None
        self._state = IDLE
        self._first_step = 0  # index of the step after the initial observation
        self._annotations: dict[str, Any] = {}  # annotations of the next step

    @property
    def state(self) -> State:
        """IDLE, OPEN, PAUSED, ENDED or TAKEN_OVER."""
        return ENDED if self._state is OPEN and self.slabs.slab.ended else self._state

    @property
    def is_open(self) -> bool:
        return self._state is not IDLE

    @property
    def has_steps(self) -> bool:
        return self._recorder.next_episode > 1 or self.steps_taken() > 0

    def take_over(self) -> None:
        self._state = TAKEN_OVER

    def steps_taken(self) -> int:
        """Return the number of steps of the episode so far, including lost ones."""
        slab = self.slabs.slab
        return self._first_step + max(0, slab.rows - 1 - slab.initial)  # its row may not be written yet

    def _continuation(self) -> tuple[Any, ...] | None:
        """Return the entry that continues the episode in the next slab: arguments of RowSlab.append()."""
        self._state = state = self.state  # the previous slab has the flag of the end
        if self.episode is None:
            return None
        flags = log.RUNNING * (state is OPEN) | log.ENDED * (state is ENDED)
        episode, _, _, _, utc, monotonic = self.episode
        return CONTINUE, b"", flags, 0, episode, self.steps_taken(), utc, monotonic

    # -- starts and ends ----------------------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Count an episode that is not recorded."""
        self._recorder.next_episode += 1

    def try_begin_fast(self, start: Start, observation: Any) -> bool:
        """Begin an episode whose reset observation fits its space exactly; return False if begin() must be called."""
        recorder, slabs = self._recorder, self.slabs
        if slabs.logs_observations and not slabs.has_space_for_initial():
            return False
        # Before slab.start(): if Ctrl-C comes after that, the next reset ends the episode.
        recorder.next_episode += 1
        self.episode, self._first_step = start, 0
        recorder.thread = get_ident()
        if not slabs.slab.start(start, observation):
            self.episode = None
            recorder.next_episode -= 1
            return False
        self._state = OPEN
        return True

    def begin(self, start: Start, initial: bytes | None) -> None:
        """Begin an episode. initial: the reset observation, packed; None if the run of steps begins later."""
        recorder = self._recorder
        recorder.next_episode += 1
        self._pause()
        if recorder.is_closed or recorder.failed:
            return
        recorder.thread = get_ident()
        episode, _, seed, reset_record, utc, monotonic = start
        flags = START_HAS_INITIAL * (initial is not None)
        self.slabs.log(START, reset_record, flags, 0, episode, seed, utc, monotonic)
        if recorder.failed:
            return
        self.episode, self._state = start, PAUSED
        self._set_run(0)
        if initial is not None:
            self._open(initial)

    def begin_run(self, first_step: int, observation: Observed) -> None:
        """Begin a run of steps in the middle of the episode with the observation before its first step."""
        if self._recorder.is_closed:
            return
        slabs, state = self.slabs, self.state
        slabs.slab.disable_fast_path()
        self._state = PAUSED if state is OPEN else state
        slabs.make_space_for_initial()
        packed = slabs.put(observation)
        slabs.log(INITIAL, b"", 0, 0, first_step)
        if not slabs.is_begun:
            return
        self._set_run(first_step)
        self._open(packed)

    def _set_run(self, first_step: int) -> None:
        """Set the index of the step after an initial observation that is written next."""
        slab = self.slabs.slab
        slab.initial, self._first_step = slab.rows, first_step

    def _open(self, observation: bytes) -> None:
        self.slabs.slab.record_initial(observation)
        self._state = OPEN
        self._release()

    def _release(self) -> None:
        """Let the slab accept steps, unless something else must be recorded before the next one."""
        if self.state is OPEN and not self._annotations and not self._recorder.failed:
            self.slabs.enable_fast_path()

    def _pause(self) -> None:
        """Stop the run of steps, in memory only."""
        slab = self.slabs.slab
        if self._state is OPEN:
            self._state = ENDED if slab.ended else PAUSED
        self._annotations = {}
        slab.disable_fast_path()

    def stop(self) -> None:
        """End the run of steps, but not the episode, after the last row."""
        self._pause()
        self._drop_incomplete_row()
        self.slabs.log(STOP)

    def end(self, outcome: Outcome = Outcome.CUT) -> None:
        """End the episode after the last row, if it has not ended."""
        self._pause()
        if self.slabs.is_incomplete:
            self._drop_incomplete_row()
        if self._state is not ENDED and not self._recorder.failed:  # steps that ended it may be missing
            self.end_without_row(outcome)
        self.forget()

    def forget(self) -> None:
        """Forget an episode that its last row has ended; otherwise call end()."""
        self.episode, self._state = None, IDLE

    def end_without_row(self, outcome: int) -> None:
        """End the episode at a step that is skipped, or at its initial observation. Later steps are another part."""
        if self.episode is not None and self.state is not ENDED:
            self.slabs.log(END, b"", 0, 0, outcome, 0, time.time_ns(), time.monotonic_ns())
        self._pause()
        self._state = ENDED

    def _drop_incomplete_row(self) -> None:
        """Remove the entries of a row that an exception, such as Ctrl-C, has interrupted."""
        kinds = self.slabs.drop_incomplete_row()
        if FLAG in kinds:
            self.slabs.slab.ended = False
            self._state = PAUSED
        if START in kinds:
            self.episode = None

    # -- steps --------------------------------------------------------------------------------------------------------

    def make_ready(self) -> None:
        """Switch the slab if due, before a step that is recorded after its result. Raises RecordingError, once."""
        if self.slabs.is_due:
            self.slabs.switch_slab()
        self._recorder.report()

    def make_room(self, switches: bool = True) -> bool:
        """Do what is due before a step; return True if the step can be recorded. Raises RecordingError, once.

        switches: True if the slab may be switched because of the time, not only because it is full. False within a
            step: a failure to write is reported at the next one.
        """
        recorder, slabs = self._recorder, self.slabs
        if recorder.failed and (switches or not slabs.is_begun):
            self._pause()
            if switches:
                recorder.report()
            return False
        if recorder.needs_attention:
            recorder.attend()
        state = self.state
        if state is ENDED:
            self.begin_run(self.steps_taken(), slabs.last_observation())
        elif state is not OPEN:
            return False
        now = recorder.clock.look(slabs.slab.rows)
        if (
            slabs.make_room(slabs.result_bytes)
            and switches
            and (now >= recorder.clock.due or slabs.slab.rows >= slabs.most_rows)
        ):
            slabs.switch_slab()
        if recorder.failed and (switches or not slabs.is_begun):
            return self.make_room(switches)
        self.log_annotations()
        self._release()
        return True

    def record_action(self, action: bytes) -> bool:
        """Record a packed action before the environment is stepped with it; return False if that fails."""
        if not self.slabs.make_room(self.slabs.result_bytes):
            return False
        self.slabs.slab.record_packed_action(action)
        return True

    def record_result(self, observation: Observed | bytes, reward: Any, terminated: Any, truncated: Any) -> None:
        """Record the result of a step: the packed observation, and a reward of any type.

        Writing may have failed in the thread during the step. The result still goes into the slab if that is begun.
        """
        slabs, kind = self.slabs, type(reward)
        slab = slabs.slab
        if (
            (kind is float or kind is np.float64 or (kind is int and -EXACT_INTEGERS <= reward <= EXACT_INTEGERS))
            and (slabs.is_begun and self._state is OPEN and slabs.takes_floats)
            and (type(observation) is bytes and slab.has_room(FLAG_BYTES))
        ):
            slab.record_packed_result(observation, reward, terminated, truncated)
            return
        if self._recorder.phase is Phase.CLOSED or self._state is not OPEN:
            return
        number = slabs.number_of(reward)
        if not slabs.make_room(FLAG_BYTES):
            return
        packed = slabs.put(observation) if isinstance(observation, Observed) else observation
        if slabs.is_begun:
            slab.record_packed_result(packed, number, terminated, truncated)
            self._release()

    def break_off(self, is_executed: bool = False) -> bool:
        """End the run of steps at a step that raised; return True if its row is incomplete, so that it is lost.

        is_executed: True if the environment has taken the step, even if none of it is recorded.
        """
        slabs = self.slabs
        slabs.forget_value()
        if self.episode is None:  # closed, or forked, within the step
            return False
        if not is_executed and self.state is not PAUSED and not slabs.is_incomplete:
            return False
        self.stop()
        self.skip_step()
        return True

    def skip_step(self) -> None:
        """Count a step that is not recorded, while no run of steps is open."""
        self._first_step += 1
        self._annotations = {}

    # -- annotations --------------------------------------------------------------------------------------------------

    def annotate(self, values: dict[str, Any]) -> None:
        """Add snapshots of values to the next row."""
        if self.episode is not None:
            self.slabs.slab.disable_fast_path()  # first: after a Ctrl-C, no later step must get them
            self._annotations.update(values)

    def log_annotations(self) -> None:
        """Append the annotations of the next row to the log, if there are any."""
        if self._annotations:
            annotations, self._annotations = self._annotations, {}
            self.slabs.log_value(self.slabs.layout.annotations_column, _packed(annotations))

    def forget_annotations(self) -> None:
        """Drop the annotations of a step that is skipped."""
        self._annotations = {}


def _packed(annotations: dict[str, Any]) -> bytes:
    """Pack annotations, which are snapshots, as a map."""
    count = len(annotations)
    head = bytes([0x80 | count]) if count < 16 else b"\xdf" + count.to_bytes(4, "big")
    parts = [pack(name) + (value if type(value) is Packed else pack(value)) for name, value in annotations.items()]
    return head + b"".join(parts)
