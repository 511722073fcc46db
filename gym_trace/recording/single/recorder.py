"""The recorder of a single environment: episodes and runs of steps, slabs, forks and copies."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import numpy as np

from gym_trace.model.packing import pack
from gym_trace.model.values import Packed
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording.recorder import not_to_be_interrupted
from gym_trace.recording.reset_record import Start
from gym_trace.recording.single.slabs import EXACT_INTEGERS, LEAD_BYTES, Observed, SlabFiller, is_carried, observed_in
from gym_trace.ring.log import END, FLAG, HAS_LEAD, LEAD, START, STOP, size_of

_CHECKS = 16  # times in flush_seconds that the clock is looked at
_MOST_STRIDE = 1 << 14  # rows until it is looked at again
_FLAG_BYTES = 2 * size_of(0)


class OpenRun(NamedTuple):
    """An episode that another recorder began. last: its last observation; None between runs of steps."""

    start: Start
    steps: int
    last: Observed | None


class RowRecorder(SlabFiller):
    """One writer of a trace, fed step by step from one thread.

    While no run of steps is open, or anything else is to be seen to before the next step, .slab declines to be asked.
    """

    def _reset_state(self) -> None:
        super()._reset_state()
        self._run = (0, 0)  # the row of the leading observation, over all slabs, and the index of the step after it
        self._deferred: OpenRun | None = None
        self._orphan: tuple[Any, int] | None = None  # the slab at a fork, and its rows then
        self._early_notes: dict[str, Any] = {}  # annotations of the next step
        self.episode = None
        self.running = False

    def _room(self, log_bytes: int = 0) -> bool:
        return self._deferred is None and super()._room(log_bytes)

    def _release(self) -> None:
        """Has the slab be asked again, until it is time to look at the clock."""
        if self.running and not self.slab.ended and not self._early_notes and not self.failed:
            self.slab.release(self._look_at)
            if not self.limit:  # looked at last: another thread may have something to be seen to
                self.slab.hold()

    # -- episodes and runs of steps -----------------------------------------------------------------------------------

    def skip_episode(self) -> None:
        """Counts an episode that is not recorded."""
        self._episodes += 1

    def begin_at_once(self, start: Start, observation: Any) -> bool:
        """As begin(), of a reset observation that is exactly as its space says; False if it is not done."""
        slab, (episode, _, seed, kept, utc, monotonic) = self.slab, start
        if not (self._answers and self._is_open and self.limit) or self._closed:
            return False
        if self._logs and not (slab.rows < self._most_rows and slab.has_room(LEAD_BYTES)):
            return False
        # Before the slab is told: if Ctrl-C comes after that, the episode is ended by the next reset.
        self._episodes += 1
        self.episode, self._run = start, (self._base + slab.rows, 0)
        self._thread = threading.get_ident()
        if not slab.start(episode, seed, utc, monotonic, kept, observation):
            self.episode = None
            self._episodes -= 1
            return False
        self.running = True
        self._release()
        return True

    def begin(self, start: Start, lead: bytes | None) -> None:
        """Starts an episode. lead: the reset observation, packed; None if the run of steps begins later."""
        self._episodes += 1
        self._stop_running()
        if self._closed or self.failed:
            return
        self._thread = threading.get_ident()
        clocks = start.utc, start.monotonic
        self.log(START, start.kept, HAS_LEAD * (lead is not None), 0, start.episode, start.seed, *clocks)
        if self.failed:
            return
        self.episode, self.slab.ended = start, False
        self._run = (self.next_row(), 0)
        if lead is not None:
            self._open_run(lead)

    def lead(self, first_step: int, observation: Observed) -> None:
        """Starts a run of steps in the middle of the episode with its leading observation."""
        if self._closed or self.failed:
            return
        self.running = False
        self.prepare_lead()
        packed = self.put(observation)
        self.log(LEAD, b"", 0, 0, first_step)
        if self.failed:
            return
        self._run = (self.next_row(), first_step)
        self._open_run(packed)

    def _open_run(self, observation: bytes) -> None:
        self.slab.lead(observation)
        self.running = True
        self._release()

    def prepare_lead(self) -> None:
        """Makes sure that there is room for a leading observation; to be called before it is packed."""
        self._room(LEAD_BYTES)

    def _stop_running(self) -> None:
        self.running = False
        self._early_notes = {}
        self.slab.hold()

    def answer(self, observation: Observed | bytes, reward: Any, terminated: Any, truncated: Any) -> None:
        """Puts down what a step led to: the observation, packed, and a reward of any kind."""
        slab, kind = self.slab, type(reward)
        if (
            (kind is float or kind is np.float64 or (kind is int and -EXACT_INTEGERS <= reward <= EXACT_INTEGERS))
            and (self._is_open and self.running and self._deferred is None and self._reward_type is np.float64)
            and (type(observation) is bytes and slab.has_room(_FLAG_BYTES))
        ):
            slab.answer_packed(observation, reward, terminated, truncated)
        else:
            self._answer(observation, reward, terminated, truncated)

    def _answer(self, observation: Observed | bytes, reward: Any, terminated: Any, truncated: Any) -> None:
        """The same, of what is not as usual."""
        if self.failed or not self.running:
            return
        if self._deferred is not None:  # the process forked within the step
            row = observation.row if isinstance(observation, Observed) else observation
            last = Observed(row, self._observed(self.next_row()))
            self._deferred = self._deferred._replace(steps=self._deferred.steps + 1, last=last)
            return
        number = self._number_of(reward)
        if not self._room(_FLAG_BYTES):
            return
        packed = self.put(observation) if isinstance(observation, Observed) else observation
        if not self.failed:
            self.slab.answer_packed(packed, number, terminated, truncated)
            self._release()

    def stop(self) -> None:
        """Ends the run of steps, but not the episode, after the last row."""
        self._stop_running()
        if self._deferred is not None:  # the process forked within a step that raised
            self._deferred = None
            return
        self._drop_what_has_no_row()
        self.log(STOP)

    def break_off(self) -> bool:
        """Ends the run of steps at a step that raised; returns whether the step is lost: not if its row is complete."""
        self._apart = None
        if self.episode is None or self._deferred is not None:  # closed, or forked, within the step
            self._deferred = None
            return False
        if self.running and self.slab.asked() is None and self.slab.logged < self.slab.rows:
            return False
        self.stop()
        self.skip_step()
        return True

    def skip_step(self) -> None:
        """Counts a step that is not recorded, while no run of steps is open."""
        lead, first_step = self._run
        self._run = (lead, first_step + 1)
        self._early_notes = {}

    def end(self, outcome: Outcome = Outcome.CUT) -> None:
        """Ends the episode after the last row, if it has not ended."""
        self._stop_running()
        slab = self.slab
        if slab.sequence and (slab.logged >= slab.rows or slab.asked() is not None):
            self._drop_what_has_no_row()
        if not slab.ended:
            self.end_without_row(outcome)
        slab.ended = False
        self.episode = self._deferred = None

    def _drop_what_has_no_row(self) -> None:
        """Takes back what was put down for a row that never came, because an exception such as Ctrl-C came first."""
        slab = self.slab
        if not slab.sequence or self.failed:
            return
        if not self._is_open:
            self._turn()
        log = slab.entries()
        left = len(log)
        while left and is_carried(log[left - 1], slab.rows):
            left -= 1
        for entry in log[left:]:
            if entry.kind == FLAG:
                slab.ended = False
            elif entry.kind == START:
                self.episode = None
        slab.drop(left)
        slab.hold()
        self.packers.forget()

    def end_without_row(self, outcome: int) -> None:
        """Ends the episode at a step that is left out. Steps after that belong to the same episode."""
        if self.episode is not None and not self.slab.ended and self._deferred is None:
            self.log(END, b"", 0, 0, outcome, 0, time.time_ns(), time.monotonic_ns())
        self.slab.ended = True
        self._stop_running()

    def end_at_lead(self, outcome: int) -> None:
        """Ends the episode with the leading observation. Steps after that are another run."""
        self.end_without_row(outcome)
        self.running = True

    def annotate(self, values: dict[str, Any]) -> None:
        """Adds values, which are snapshots, to the next row."""
        if self.episode is not None or self._deferred is not None:
            self.slab.hold()  # first: if Ctrl-C comes after, they are not those of a later step
            self._early_notes.update(values)

    # -- room ---------------------------------------------------------------------------------------------------------

    def make_ready(self) -> None:
        """Sees to what is due before a step that is put down once it is known. Raises RecordingError, once."""
        slab, room = self.slab, self.layout.size + LEAD_BYTES + self._answer_bytes  # for a lead and a row
        is_full = slab.rows + 2 > self._most_rows or not slab.has_room(room)
        if self._is_open and slab.rows and (is_full or self._is_due or time.monotonic() >= self._due):
            self._is_due = False
            self._turn()
        self.report()

    def make_room(self, turns: bool = True) -> bool:
        """Sees to what is due before a step; returns whether it can be recorded. Raises RecordingError, once.

        turns: whether the slab may be turned because it is time, and not only because it is full.
        """
        if self.failed:
            self._stop_running()
            self.report()
            return False
        self.limit = 1
        self._complain()
        if self._deferred is not None:
            self._take_over(self._deferred)
        if not self.running:
            return False
        if self.slab.ended:
            self.lead(self.steps_taken(), self.last_observation())
        now = time.monotonic()
        is_soon = now - self._checked < self.flush_seconds / _CHECKS
        self._stride = min(2 * self._stride, _MOST_STRIDE) if is_soon else max(1, self._stride // 2)
        self._checked = now
        if (
            self._room(self._answer_bytes)
            and turns
            and (self._is_due or now >= self._due or self.slab.rows >= self._most_rows)
        ):
            self._is_due = False
            self._turn()
        if self.failed:
            return self.make_room()
        if self._early_notes:
            notes, self._early_notes = self._early_notes, {}
            self.log_value(self.layout.notes_column, _packed_notes(notes))
        self._look_at = min(self._most_rows, self.slab.rows + self._stride)
        self._release()
        return not self.failed

    @property
    def has_steps(self) -> bool:
        return self._episodes > 1 or self._deferred is not None or self.steps_taken() > 0

    def steps_taken(self) -> int:
        """The number of steps of the episode so far, lost ones included."""
        lead, first_step = self._run
        return first_step + max(0, self.next_row() - 1 - lead)  # the leading observation may not be there yet

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def _position(self) -> Any:
        return self.episode, self.next_row()

    def _let_go(self) -> None:
        self.slab.orphan()

    def restart_in_child(self) -> None:
        slab = self.slab if self._deferred is None or self._orphan is None else self._orphan[0]
        orphan = slab, slab.rows
        notes = self._early_notes
        super().restart_in_child()
        self._orphan = orphan
        if self._deferred is not None:
            self._early_notes = notes

    def open_run(self) -> OpenRun | None:
        """What another recorder needs to continue the open episode, or None."""
        if self._deferred is not None:
            return self._after_fork(self._deferred)
        if self.episode is None or self.slab.ended or self.failed or self._closed:
            return None
        if self._thread != threading.get_ident() and self.slab.asked() is not None:  # nobody knows what it leads to
            return None
        return OpenRun(self.episode, self.steps_taken(), self.last_observation() if self.running else None)

    def continue_run(self, run: OpenRun | None) -> None:
        """Continues the episode of another recorder at the next step; writes nothing before."""
        if run is not None:
            self._deferred = run
            self.running = True

    def forget_annotations(self) -> None:
        """Those of a step that is left out."""
        self._early_notes = {}

    def take_over(self) -> None:
        """Continues the episode of another recorder now, if there is one."""
        if self._deferred is not None:
            self.make_room()

    def _after_fork(self, run: OpenRun) -> OpenRun:
        """The open episode now: if the process forked within a step, its row is in the slab that was left."""
        if self._orphan is None or self._orphan[0].rows == self._orphan[1] or run.last is None:
            return run
        return run._replace(steps=run.steps + 1, last=observed_in(self._orphan[0]))

    def _take_over(self, run: OpenRun) -> None:
        run = self._after_fork(run)
        self._deferred = self._orphan = None
        self.running = False
        notes = self._early_notes  # of the step that is to come
        self.begin(run.start._replace(episode=self._episodes), None)
        self._early_notes = notes
        if run.last is not None:
            self.lead(run.steps, run.last)
        else:
            self._run = (self.next_row(), run.steps)


def _packed_notes(notes: dict[str, Any]) -> bytes:
    """Annotations, which are snapshots, as a MessagePack map."""
    head = bytes([0x80 | len(notes)]) if len(notes) < 16 else b"\xdf" + len(notes).to_bytes(4, "big")
    parts = [pack(name) + (value if type(value) is Packed else pack(value)) for name, value in notes.items()]
    return head + b"".join(parts)


not_to_be_interrupted(__file__)
