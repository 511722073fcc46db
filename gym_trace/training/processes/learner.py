"""Learner process: take rollouts, learn, log, publish weights, and return the slots."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from gym_trace.errors import CorruptTrace, TrainingFailed
from gym_trace.playback.trace import open_trace
from gym_trace.storage.staging import remove_left, replaced_file
from gym_trace.training.network.learning import Learner
from gym_trace.training.processes.shared import Message, PolicyTask, RolloutBuffer, Weights, has_more, put, take
from gym_trace.training.proof.chain import START, UPDATE
from gym_trace.training.proof.state import kernels, made_with
from gym_trace.training.rollouts import MeanReturn, Origin, RecordedRollouts
from gym_trace.training.run import DROPPED, MEAN, OF_ANOTHER, TOO_OLD, WORKER, Run, Update, restart_advice, steps_now
from gym_trace.training.settings import ANY
from gym_trace.training.versions import BEST, load_newest, relearn


class LearnerProcess:
    """Learn until the limit or a stop order, then save a checkpoint and report the end."""

    def __init__(
        self,
        control: Connection,
        task: PolicyTask,
        buffer: RolloutBuffer,
        weights: Weights,
        full: Connection,
        frees: Sequence[Connection],
    ):
        """full: pipe of filled slots. frees: pipes that return slots to each worker."""
        settings = task.settings
        self._task, self._settings, self._control = task, settings, control
        self._buffer, self._weights, self._full, self._frees = buffer, weights, full, frees
        self._run = Run(task.path)
        self._log = self._run.open_log()
        total = settings.updates_of(self._run.about.get("steps"))  # without extensions, which are in the log
        self._learner = Learner(*task.spaces, settings, task.seed, total)
        self._lives = [0] * settings.workers
        self._slots_per_worker = settings.slots_per_split * settings.splits
        splits = settings.workers * settings.splits
        self._waiting: list[deque[int]] = [deque() for _ in range(splits)]  # slots to learn from
        self._arrived: deque[int] = deque()  # slots in order of arrival, for lag "any"
        self._over = False
        self._dropped = 0
        self._min_version = 0  # rollouts of earlier versions come from another policy
        self._mean, self._best = MeanReturn(), -math.inf
        self._logged_writers: set[str] = set()  # writers whose seed is in the log
        self._started_at = self._saved_at = self._milestone_at = time.monotonic()

    def run(self) -> None:
        self.begin()
        while self.turn(1.0):
            pass

    def begin(self) -> None:
        """Bring the learner to the latest version of the log. Raises CorruptTrace if weights differ."""
        run, learner = self._run, self._learner
        remove_left(run.checkpoints)
        log = run.log
        updates, self._logged_writers = log.updates, set(log.seeds)
        self._log.append(START, {"time": time.time(), "save_best": self._task.save_best, **made_with(), **kernels()})
        if not updates:
            updates = [Update(0, (), 0, learner.digest())]
            self._log.append(UPDATE, updates[0].plain())
        load_newest(learner, {version: run.checkpoint(version) for version in run.saved() if version < len(updates)})
        try:
            for _ in relearn(run, learner, updates[learner.version :]):
                pass
        except CorruptTrace as error:
            raise CorruptTrace(f"{error}; or {restart_advice(run)}") from error
        self._steps, self._seconds = updates[-1].steps, float(updates[-1].results.get("seconds", 0.0))
        self._restore_best(updates)
        if learner.version == 0 and self._task.begins:
            self._adopt(self._task.begins)
        if (limit := self._task.updates) is not None and limit != self._settings.updates_of(steps_now(run)):
            self._adopt({"steps": limit * self._settings.batch_steps})
        self._publish()
        for slot in range(self._slots_per_worker * self._settings.workers):
            self._free(slot)
        self.report("running", (learner.version, self._steps))
        self._idle_since = time.perf_counter()

    def _restore_best(self, updates: Sequence[Update]) -> None:
        """Continue the mean return of the last episodes; save the best version if a kill prevented that."""
        takeover = max(update.version for update in updates if update.version == 0 or "checkpoint" in update.changed)
        own = [update.rollouts for update in updates[takeover:]]
        if any(own):
            self._mean.restore(own, RecordedRollouts(open_trace(self._run.trace), self._task.shape))
        means = {update.version: update.results[MEAN] for update in updates if MEAN in update.results}
        if means:
            version, self._best = max(means.items(), key=lambda item: item[1])  # the first of equal ones
            if self._task.save_best and version == updates[-1].version:
                self._save(BEST, best=self._best)

    def _publish(self) -> None:
        self._weights.publish(self._learner.version, self._learner.weights())

    @property
    def continues(self) -> bool:
        """Return True if another update follows."""
        limit = self._task.updates
        return not self._over and (limit is None or self._steps < limit * self._settings.batch_steps)

    def turn(self, seconds: float = 0.0) -> bool:
        """Make an update if there are enough rollouts, or wait up to `seconds`. Return False after the last update."""
        self._listen(0.0)
        if not self.continues:
            self._save()
            self.report("ended", self._learner.version)
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
        self._log.close()

    def report(self, kind: str, fact: Any) -> None:
        try:
            self._control.send((kind, fact))
        except OSError:  # the driver is gone
            self._over = True

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
        """Take the rollouts and orders that have arrived."""
        ready = wait([self._full, self._control], seconds)
        if self._control in ready:
            self._handle_order()
        if self._full in ready:
            self._take_all()

    def _take_all(self) -> None:
        while has_more(self._full):
            try:
                slot = take(self._full).slot
            except EOFError:  # driver and workers are gone
                self._over = True
                return
            self._log_writer(slot)
            if self._settings.lag == ANY:
                self._arrived.append(slot)
            else:
                self._waiting[slot // self._settings.slots_per_split].append(slot)

    def _log_writer(self, slot: int) -> None:
        """Log the seed of a worker's generator before its first rollout."""
        writer, seed = self._buffer.origin(slot).writer, self._buffer.seed(slot)
        if writer not in self._logged_writers and seed >= 0:
            self._logged_writers.add(writer)
            self._log.append(WORKER, [writer, seed])

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
        oldest = self._min_version
        if self._settings.lag == ANY:
            oldest = max(oldest, self._learner.version - self._settings.max_lag)
        dropped = []
        for slots in (self._arrived, *self._waiting):
            for slot in [slot for slot in slots if self._buffer.origin(slot).version < oldest]:
                slots.remove(slot)
                origin = self._buffer.origin(slot)
                is_other = origin.version < self._min_version
                reason = OF_ANOTHER if is_other else TOO_OLD.format(self._settings.max_lag)
                dropped.append([*origin, reason])
                self._dropped += 1
                self._free(slot)
        if dropped:
            self._log.append(DROPPED, dropped)

    def _free(self, slot: int) -> None:
        worker = slot // self._slots_per_worker
        with contextlib.suppress(OSError):  # the worker is gone and will be restarted
            put(self._frees[worker], Message(slot, self._lives[worker], self._learner.version))

    def _handle_order(self) -> None:
        try:
            kind, fact = self._control.recv()
        except (EOFError, OSError):
            self._over = True
            return
        if kind == "stop":
            self._over = True
        elif kind == "restarted":
            self._restarted(*fact)
        elif kind == "save":
            self._save()
            self.report("saved", self._learner.version)
        elif kind == "adopt":
            self._adopt(fact)
            self._publish()

    def _restarted(self, worker: int, life: int) -> None:
        """Free the slots of a restarted worker, except those it had filled."""
        self._take_all()
        self._lives[worker] = life
        held = {slot for slots in self._waiting for slot in slots} | set(self._arrived)
        for slot in range(worker * self._slots_per_worker, (worker + 1) * self._slots_per_worker):
            if slot not in held:
                self._free(slot)

    def _adopt(self, changed: dict[str, Any]) -> None:
        """Make a version that takes over another policy's checkpoint and other settings."""
        learner = self._learner
        learner.adopt(changed, self._run.checkpoints)
        self._min_version = learner.version
        if "checkpoint" in changed:
            self._mean = MeanReturn()  # another policy played the episodes before
        self._log.append(UPDATE, Update(learner.version, (), self._steps, learner.digest(), {}, changed).plain())

    # -- updates ------------------------------------------------------------------------------------------------------

    def _update(self, slots: list[int], waited: float) -> None:
        learner = self._learner
        origins = tuple(self._buffer.origin(slot) for slot in slots)
        begin = time.perf_counter()
        lags = [learner.version - origin.version for origin in origins]
        try:
            losses = learner.learn([self._buffer.rollout(slot) for slot in slots]) if self._task.learn else {}
        except TrainingFailed as error:
            raise TrainingFailed(f"{error}: {self._failed_update(slots, origins)}") from error
        self._steps += self._settings.batch_steps
        losses["seconds"] = self._seconds + time.monotonic() - self._started_at
        mean = self._mean.add([self._buffer.returns(slot) for slot in slots])
        if self._task.learn:
            results = losses if mean is None else {**losses, MEAN: mean}
            self._log.append(UPDATE, Update(learner.version, origins, self._steps, learner.digest(), results).plain())
            if mean is not None and mean > self._best:
                self._best = mean
                if self._task.save_best:
                    self._save(BEST, best=mean)
            self._publish()
        for slot in slots:
            self._free(slot)
        facts = {
            "version": learner.version,
            "steps": self._steps,
            "lags": (min(lags), sum(lags) / len(lags), max(lags)),
            "dropped": self._dropped,
            MEAN: mean,
            "seconds": {"learning": time.perf_counter() - begin, "gathering": waited},
        }
        self.report("update", {**losses, **facts})

    def _failed_update(self, slots: Sequence[int], origins: Sequence[Origin]) -> str:
        """Return text for the failed update: the step that caused it, or the episodes."""
        recorded = RecordedRollouts(trace := open_trace(self._run.trace), self._task.shape)
        for slot, origin in zip(slots, origins):
            if (found := self._buffer.rollout(slot).not_finite()) is not None:
                episode, step = recorded.step_of(origin, *found[1:])
                seed = trace.episodes["seed"][episode]
                return f"step {step} of episode {episode} (seed {seed}) of {self._run.trace}; nothing learned from it"
        episodes = sorted({episode for origin in origins for episode in recorded.episodes_of(origin)})
        shown = ", ".join(map(str, episodes[:20])) + (" …" if len(episodes) > 20 else "")
        return f"update to version {self._learner.version + 1}, of episodes {shown} of {self._run.trace}"

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def _save_when_due(self) -> None:
        task, now = self._task, time.monotonic()
        if now - self._saved_at >= task.checkpoint_seconds:
            self._saved_at = now
            self._save()
        if task.milestone_seconds is not None and now - self._milestone_at >= task.milestone_seconds:
            self._milestone_at = now
            self._save(f"milestone-{self._learner.version:09d}.safetensors")

    def _save(self, name: str | None = None, **facts: Any) -> None:
        """Write a checkpoint. One named by its version replaces older ones beyond `keep`."""
        run = self._run
        path = run.checkpoint(self._learner.version) if name is None else run.checkpoints / name
        with replaced_file(path) as staged:
            self._learner.save(staged, steps=self._steps, **facts)
        for version in run.saved()[: -self._task.keep]:
            run.checkpoint(version).unlink()


def learn(*arguments: Any) -> None:
    """Body of the learner's process. Takes the arguments of LearnerProcess."""
    LearnerProcess(*arguments).run()
