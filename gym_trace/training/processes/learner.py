"""Learner process: takes rollouts, learns, logs, publishes weights, and returns the slots."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO

from gym_trace.errors import CorruptTrace, TrainingFailed
from gym_trace.playback.trace import open_trace
from gym_trace.storage.staging import replaced_file
from gym_trace.training.network.learning import Learner
from gym_trace.training.processes.shared import Slots, Token, Weights, has_more, put, take
from gym_trace.training.rollouts import Origin, RecordedRollouts, Shape
from gym_trace.training.run import Run, Update, anew, append
from gym_trace.training.settings import ANY, Settings


@dataclass(frozen=True)
class Learning:
    """Arguments of the learner's process. Picklable to a process that is being started.

    learn: False only takes rollouts.
    updates: limit of the run; None: no limit. begins: checkpoint of another run or policy, which version 1 takes over
    (see Learner.adopt()). keep: number of checkpoints, without milestones.
    frees: pipes that return slots to each worker.
    """

    path: str
    observation_space: Any
    action_space: Any
    settings: Settings
    shape: Shape
    seed: int
    updates: int | None
    begins: dict[str, Any]
    slots: Slots
    weights: Weights
    full: Connection
    frees: list[Connection]
    checkpoint_seconds: float
    keep: int
    milestone_seconds: float | None
    learn: bool = True


def restored(run: Run, log: BinaryIO, learner: Learner) -> tuple[int, float]:
    """Bring a fresh learner to the latest version of the log, from a checkpoint and the trace after it.

    Returns the steps learnt from, and the seconds they took. Raises CorruptTrace if the weights differ.
    """
    updates = list(run.updates())
    if not updates:
        append(log, Update(0, (), 0, learner.digest()))
        return 0, 0.0
    known = [version for version in run.saved() if version < len(updates)]
    if known:
        learner.load(run.checkpoint(known[-1]), known[-1])
    try:
        for _ in learn_again(run, learner, updates[learner.version :]):
            pass
    except CorruptTrace as error:
        raise CorruptTrace(f"{error}; or {anew(run)}") from error
    return updates[-1].steps, float(updates[-1].told.get("seconds", 0.0))


def learn_again(run: Run, learner: Learner, updates: Sequence[Update]) -> Any:
    """Reproduce updates of the log from the trace; yield each. The first is the learner's version.

    Raises CorruptTrace if the weights differ, or a rollout is missing.
    """
    recorded: RecordedRollouts | None = None
    for update in updates:
        if update.version > learner.version:
            if recorded is None:
                recorded = RecordedRollouts(open_trace(run.trace), learner.shape)
            if update.changed:
                learner.adopt(update.changed, run.checkpoints)
            elif len(update.rollouts) != learner.settings.rollouts_per_batch:
                raise CorruptTrace(f"{run.path}: version {update.version} is of {len(update.rollouts)} rollouts", None)
            else:
                try:
                    rollouts = [recorded.read(origin) for origin in update.rollouts]
                except CorruptTrace as error:
                    raise CorruptTrace(f"version {update.version} cannot be learnt again: {error}") from error
                learner.learn(rollouts)
        if learner.digest() != update.digest:
            raise CorruptTrace(f"{run.path}: version {update.version} does not come out again", None)
        yield update


class LearnerProcess:
    """Learn until the limit or a stop order, then save a checkpoint and report the end."""

    def __init__(self, told: Learning, control: Connection):
        self._told, self._settings, self._control = told, told.settings, control
        self._run = Run(told.path)
        self._log = self._run.open_log()
        self._learner = Learner(told.observation_space, told.action_space, told.settings, told.seed, told.updates)
        self._lives = [0] * told.settings.workers
        splits = told.settings.workers * told.settings.splits
        self._waiting: list[deque[int]] = [deque() for _ in range(splits)]  # slots to learn from
        self._arrived: deque[int] = deque()  # the same in order of arrival, for lag "any"
        self._over = False
        self._dropped = 0
        self._least = 0  # rollouts of earlier versions are another policy's
        self._began = self._saved_at = self._milestone_at = time.monotonic()

    def run(self) -> None:
        self.begin()
        while self.turn(1.0):
            pass

    def begin(self) -> None:
        """Restore the state of the run."""
        told, learner = self._told, self._learner
        for staged in self._run.checkpoints.glob(".*.part"):  # left by a killed learner
            staged.unlink()
        self._steps, self._seconds = restored(self._run, self._log, learner)
        if learner.version == 0 and told.begins:
            self._adopt(told.begins)
        told.weights.publish(learner.version, learner.weights())
        for slot in range(self._settings.workers * self._settings.splits * self._settings.slots_per_split):
            self._free(slot)
        self.say("running", (learner.version, self._steps))
        self._idle_since = time.perf_counter()

    @property
    def goes_on(self) -> bool:
        """Return True if another update follows."""
        limit = self._told.updates
        return not self._over and (limit is None or self._steps < limit * self._settings.batch_steps)

    def turn(self, seconds: float = 0.0) -> bool:
        """Make an update if enough rollouts are there, or wait up to `seconds`. Return False after the last one."""
        self._listen(0.0)
        if not self.goes_on:
            self._save()
            self.say("ended", self._learner.version)
            return False
        slots = self._next()
        if slots is None:
            self._listen(seconds)
            return True
        self._update(slots, time.perf_counter() - self._idle_since)
        self._save_when_due()
        self._idle_since = time.perf_counter()
        return True

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def say(self, kind: str, fact: Any) -> None:
        try:
            self._control.send((kind, fact))
        except OSError:  # the driver is gone
            self._over = True

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Take the rollouts and orders that have arrived."""
        ready = wait([self._told.full, self._control], seconds)
        if self._control in ready:
            self._obey()
        if self._told.full in ready:
            self._take_all()

    def _take_all(self) -> None:
        while has_more(self._told.full):
            try:
                slot = take(self._told.full).slot
            except EOFError:  # driver and workers are gone
                self._over = True
                return
            if self._settings.lag == ANY:
                self._arrived.append(slot)
            else:
                self._waiting[slot // self._settings.slots_per_split].append(slot)

    def _next(self) -> list[int] | None:
        """Return the slots of the next update; None if some are missing."""
        each = self._settings.rollouts_per_batch
        self._drop()
        if self._settings.lag != ANY:
            each //= len(self._waiting)
            if any(len(slots) < each for slots in self._waiting):
                return None
            return [slots.popleft() for _ in range(each) for slots in self._waiting]
        if len(self._arrived) < each:
            return None
        return [self._arrived.popleft() for _ in range(each)]

    def _drop(self) -> None:
        """Return slots of rollouts that are too old."""
        oldest = self._least
        if self._settings.lag == ANY:
            oldest = max(oldest, self._learner.version - self._settings.max_lag)
        for slots in (self._arrived, *self._waiting):
            for slot in [slot for slot in slots if self._told.slots.origin(slot).version < oldest]:
                slots.remove(slot)
                self._dropped += 1
                self._free(slot)

    def _free(self, slot: int) -> None:
        worker = slot // (self._settings.slots_per_split * self._settings.splits)
        with contextlib.suppress(OSError):  # the worker is gone and will be restarted
            put(self._told.frees[worker], Token(slot, self._lives[worker], self._learner.version))

    def _obey(self) -> None:
        try:
            kind, fact = self._control.recv()
        except (EOFError, OSError):
            self._over = True
            return
        if kind == "stop":
            self._over = True
        elif kind == "restarted":
            self._restarted(*fact)
        elif kind == "best":
            self._save("best.safetensors", best=fact)
        elif kind == "save":
            self._save()
            self.say("saved", self._learner.version)
        elif kind == "adopt":
            self._adopt(fact)
            self._told.weights.publish(self._learner.version, self._learner.weights())

    def _restarted(self, worker: int, life: int) -> None:
        """Free the slots of a restarted worker, except those it had filled."""
        self._take_all()
        self._lives[worker] = life
        each = self._settings.slots_per_split * self._settings.splits
        held = {slot for slots in self._waiting for slot in slots} | set(self._arrived)
        for slot in range(worker * each, (worker + 1) * each):
            if slot not in held:
                self._free(slot)

    def _adopt(self, changed: dict[str, Any]) -> None:
        """Make a version that takes over another policy's checkpoint and other settings."""
        learner = self._learner
        learner.adopt(changed, self._run.checkpoints)
        self._least = learner.version
        append(self._log, Update(learner.version, (), self._steps, learner.digest(), {}, changed))

    # -- updates ------------------------------------------------------------------------------------------------------

    def _update(self, slots: list[int], waited: float) -> None:
        told, learner = self._told, self._learner
        origins = tuple(told.slots.origin(slot) for slot in slots)
        begin = time.perf_counter()
        lags = [learner.version - origin.version for origin in origins]
        try:
            losses = learner.learn([told.slots.rollout(slot) for slot in slots]) if told.learn else {}
        except TrainingFailed as error:
            raise TrainingFailed(f"{error}: {self._named(origins)}") from error
        self._steps += self._settings.batch_steps
        losses["seconds"] = self._seconds + time.monotonic() - self._began
        if told.learn:
            append(self._log, Update(learner.version, origins, self._steps, learner.digest(), losses))
            told.weights.publish(learner.version, learner.weights())
        for slot in slots:
            self._free(slot)
        facts = {
            "version": learner.version,
            "steps": self._steps,
            "lags": (min(lags), sum(lags) / len(lags), max(lags)),
            "dropped": self._dropped,
            "seconds": {"learning": time.perf_counter() - begin, "waiting": waited},
        }
        self.say("update", {**losses, **facts})

    def _named(self, origins: Sequence[Origin]) -> str:
        """Name the failed update and its episodes."""
        recorded = RecordedRollouts(open_trace(self._run.trace), self._told.shape)
        episodes = sorted({episode for origin in origins for episode in recorded.episodes_of(origin)})
        shown = ", ".join(map(str, episodes[:20])) + (" …" if len(episodes) > 20 else "")
        return f"update to version {self._learner.version + 1}, of episodes {shown} of {self._run.trace}"

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save_when_due(self) -> None:
        told, now = self._told, time.monotonic()
        if now - self._saved_at >= told.checkpoint_seconds:
            self._saved_at = now
            self._save()
        if told.milestone_seconds is not None and now - self._milestone_at >= told.milestone_seconds:
            self._milestone_at = now
            self._save(f"milestone-{self._learner.version:09d}.safetensors")

    def _save(self, name: str | None = None, **facts: Any) -> None:
        """Write a checkpoint. One named by its version replaces older ones beyond `keep`."""
        run = self._run
        path = run.checkpoint(self._learner.version) if name is None else run.checkpoints / name
        with replaced_file(path) as staged:
            self._learner.save(staged, steps=self._steps, **facts)
        for version in run.saved()[: -self._told.keep]:
            run.checkpoint(version).unlink()


def learn(control: Connection, told: Learning) -> None:
    """Body of the learner's process."""
    LearnerProcess(told, control).run()
