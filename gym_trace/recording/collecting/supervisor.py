"""Supervise the workers of collect(): assign episodes, receive reports, restart dead workers."""

from __future__ import annotations

import heapq
import math
import re
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gym_trace.data.returns import LastReturns, Return
from gym_trace.format.directory import new_writer_id
from gym_trace.recording.collecting.resuming import Shard, finished, has_ended, shard_mark
from gym_trace.recording.collecting.rollout import directory_bytes
from gym_trace.recording.collecting.worker import Report, Setup, Worker, work, worker_for
from gym_trace.recording.processes.fleet import Backend, Cluster, Fleet, Job, Lost, Member, Meter
from gym_trace.recording.processes.run_log import Events
from gym_trace.recording.publishing.spool import publish_ended

_POLL_SECONDS, _REPORT_SECONDS = 0.1, 0.5
_AHEAD_SECONDS = 1.0  # a worker receives about this much work in advance
_MAX_EPISODES_AHEAD = 10_000
_SAVE_SECONDS = 10.0  # workers save everything within this time after Ctrl-C
_START_SECONDS = 60.0  # minimum start timeout: imports are slow on a busy machine
_MAX_FAILURES = 7
_ATTEMPTS_PER_EPISODE = 3


class EpisodeSet:
    """Set of episode numbers of a shard: all below a mark except some holes, and some above it."""

    def __init__(self, numbers: Iterable[int], shard: Shard):
        self._shard, self._mark = shard, shard.number
        self._above = set(numbers)
        self._holes: set[int] = set()
        self._settle()

    def add(self, number: int) -> None:
        if number < self._mark:
            self._holes.discard(number)
        else:
            self._above.add(number)
            self._settle()

    def discard(self, number: int) -> bool:
        """Remove a number; return True if it was in the set."""
        if number not in self:
            return False
        if number < self._mark:
            self._holes.add(number)
        else:
            self._above.discard(number)
        return True

    def __contains__(self, number: int) -> bool:
        return number in self._above or (number < self._mark and number not in self._holes)

    def __len__(self) -> int:
        return len(self._shard.below(self._mark)) - len(self._holes) + len(self._above)

    def below(self, limit: int) -> int:
        """Return the count of numbers below limit."""
        holes = sum(number < limit for number in self._holes)
        return len(self._shard.below(min(self._mark, limit))) - holes + sum(number < limit for number in self._above)

    def _settle(self) -> None:
        while self._mark in self._above:
            self._above.discard(self._mark)
            self._mark += self._shard.of


@dataclass
class WorkerState(Member):
    """State of one worker: also "running", "closing", "publishing", "ended", "given up".

    Attributes:
        uid: of its writer. assigned: episodes it has not finished. given: all episodes of this process.
        at: open episodes at its last report. speed: recent episodes per second.
        base_steps: steps of its earlier processes. trouble: why it was given up.

    Examples:
        >>> done = gym_trace.collect(make_env, directory="traces/more", episodes=100, workers=4)  # doctest: +SKIP
        >>> [worker.episodes for worker in done.workers]  # doctest: +SKIP
    """

    uid: str = ""
    episodes: int = 0
    steps: int = 0
    trouble: str = ""
    assigned: dict[int, None] = field(default_factory=dict)
    given: array[int] = field(default_factory=partial(array, "q"))
    at: tuple[int, ...] = ()
    reported: float = 0.0
    base_steps: int = 0
    speed: float = 0.0


@dataclass
class Collected:
    """Progress of a run.

    Attributes:
        episodes, steps: since the start of the run, including dead workers and earlier parts of a resumed run.
        new_episodes, new_steps: since it was started or resumed.
        speeds: steps per second over the last 10 s, 1 min and 5 min, or since the start if that is less.
        returns: mean, min and max of the last 100 complete episodes; None before the first. Tuples with one value per
            objective if rewards are vectors.
        failed: abandoned episodes, and why. trouble: reason of the last restart.
        stopped: what ended the run: "done", "steps", "seconds", "bytes", "interrupted" or "failed"; "" while it runs.

    Examples:
        >>> done = gym_trace.collect(make_env, directory="traces/many", episodes=100, workers=4)  # doctest: +SKIP
        >>> done.episodes, done.restarts, done.failed  # doctest: +SKIP
    """

    seed: int
    episodes: int = 0
    steps: int = 0
    new_episodes: int = 0
    new_steps: int = 0
    seconds: float = 0.0
    bytes: int = 0
    speeds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    returns: tuple[Return, Return, Return] | None = None
    restarts: int = 0
    workers: list[WorkerState] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    trouble: str = ""
    stopped: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of a run; None means no limit."""

    episodes: int | None = None
    steps: int | None = None
    seconds: float | None = None
    bytes: int | None = None


class Supervisor:
    """Run workers until all episodes are recorded.

    Args:
        setup: task of the workers, without uid. run: name of the run, in the metadata of its writers.
        workers: number of workers; 0: one worker in this process, without the backend.
        done: number of steps of each episode that is already recorded.
        shard: the episodes to record. limits.episodes counts those of all shards.
        local_directory: directory of the trace, or this machine's spool of its URL.
    """

    def __init__(
        self,
        backend: Backend,
        setup: Setup,
        run: str,
        workers: int,
        limits: Limits,
        done: dict[int, int],
        events: Events,
        *,
        stall_timeout: float,
        max_restarts: int,
        cpus: list[int] | None = None,
        niceness: int = 0,
        shard: Shard | None = None,
        local_directory: Path,
    ):
        self._setup, self._run, self._limits, self._events = setup, run, limits, events
        self._shard, self._mark = shard or Shard(), shard_mark(shard)
        self._local_directory, self._is_remote = local_directory, setup.is_remote
        self._is_cluster = isinstance(backend, Cluster)
        self._cpus, self._niceness = cpus, niceness
        self._done, self._resumed = EpisodeSet(done, self._shard), len(done)
        self._to_repeat: list[int] = []  # heap: episodes of lost workers
        self._next = self._shard.number
        self._tries: dict[int, int] = {}  # by suspected episode: lost workers that had no other episode
        self._returns = LastReturns()
        self._ending = False
        self.progress = Collected(setup.seed, workers=[WorkerState() for _ in range(workers or 1)])
        self.progress.episodes, self.progress.steps = len(done), sum(done.values())
        self._is_inline = not workers
        self._inline_worker: Worker | None = None
        self._fleet = Fleet(
            backend,
            dict(enumerate(self.progress.workers)),
            stall_timeout=stall_timeout,
            start_timeout=_START_SECONDS,
            max_restarts=max_restarts,
            max_failures=_MAX_FAILURES,
        )

    def run(self, on_progress: Callable[[Collected], Any] | None) -> Collected:
        """Run to the end. on_progress: called twice a second; a truthy result ends the run."""
        self._meter, self._next_report = Meter(), 0.0
        report_progress = partial(self._report_progress, on_progress)
        try:
            if self._is_inline:
                self._run_inline(report_progress)
            else:
                for number in range(len(self.progress.workers)):
                    self._start(number)
            while self._working():
                self._poll()
                report_progress()
        except KeyboardInterrupt:
            if self._ending or (on_progress is not None and on_progress(self.progress)):
                raise  # the second Ctrl-C does not wait
            self._end("interrupted")
            deadline = time.monotonic() + _SAVE_SECONDS
            while self._working() and time.monotonic() < deadline:
                self._poll()
            raise
        finally:
            self._fleet.close()
        self._measure()
        if on_progress is not None and on_progress(self.progress) and self._is_incomplete():
            self.progress.stopped = "interrupted"
        if not self.progress.stopped or (self._is_incomplete() and self.progress.stopped == "done"):
            self.progress.stopped = "failed"
        return self.progress

    def _run_inline(self, report_progress: Callable[[], None]) -> None:
        """Record in this process. Errors of the environment and the policy are raised as they are."""
        worker = self.progress.workers[0]
        worker.uid, worker.reported = f"{new_writer_id()}{self._mark}-w0", time.monotonic()

        def hear(report: Report) -> None:
            self._hear(0, report)
            report_progress()

        self._inline_worker = worker_for(SimpleNamespace(send=hear), replace(self._setup, uid=worker.uid))
        try:
            self._assign(0)
            self._inline_worker.run()
        finally:
            worker.state = "ended"

    def _report_progress(self, on_progress: Callable[[Collected], Any] | None) -> None:
        """Report progress, and end the run if a limit is met."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            self._measure()
            if on_progress is not None and on_progress(self.progress):
                self._end("interrupted")
        self._end_if_due()

    def _send(self, number: int, episodes: list[int] | None) -> None:
        if self._inline_worker is None:
            self._fleet.send(number, episodes)
        else:
            self._inline_worker.receive(episodes)

    def _working(self) -> bool:
        return any(worker.state not in ("ended", "given up") for worker in self.progress.workers)

    def _poll(self) -> None:
        for key, message in self._fleet.poll(_POLL_SECONDS):
            number = int(key)
            if not isinstance(message, Lost):
                self._hear(number, message)
            elif self.progress.workers[number].state != "ended":
                self._lost(number, message)
        for worker in self.progress.workers:
            if worker.state == "restarting" and self._ending:
                worker.state, worker.due = "ended", math.inf
        for key in self._fleet.due():
            self._start(int(key))

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        worker = self.progress.workers[number]
        worker.uid, worker.reported = f"{new_writer_id()}{self._mark}-w{number}", time.monotonic()
        worker.assigned, worker.given, worker.at, worker.is_watched = {}, array("q"), (), True
        cpu = None if self._cpus is None else self._cpus[number % len(self._cpus)]
        setup = replace(self._setup, uid=worker.uid)
        is_over = partial(has_ended, self._local_directory, worker.uid)
        if self._is_remote:
            is_over = partial(publish_ended, setup.directory, worker.uid)
        self._fleet.start(number, Job(str(number), work, (setup,), self._niceness, cpu, is_over, self._is_remote))
        self._assign(number)

    def _hear(self, number: int, report: Report) -> None:
        worker = self.progress.workers[number]
        before, worker.reported, worker.at = worker.reported, time.monotonic(), report.episodes
        new = worker.base_steps + report.steps - worker.steps
        worker.steps += new
        self.progress.steps += new
        self.progress.new_steps += new
        for episode, _, total in report.finished:
            worker.assigned.pop(episode, None)
            worker.episodes += 1
            worker.failures = 0
            self._done.add(episode)
            self._returns.add(total)
        if report.finished:
            worker.speed = 0.5 * worker.speed + 0.5 * len(report.finished) / max(worker.reported - before, 0.01)
        if report.closed and (self._ending or self._is_remote):
            worker.state, worker.is_watched = "publishing" if self._is_remote else "ended", False
            self._take_back(worker)
        elif not report.closed:
            worker.state = "closing" if self._ending else "running"
            self._assign(number)

    def _lost(self, number: int, lost: Lost) -> None:
        """Take back the episodes that a lost worker has not saved, and schedule its restart."""
        worker = self.progress.workers[number]
        suspects = (worker.at if lost.traceback else ()) or tuple(worker.assigned)
        if self._is_cluster and not has_ended(self._local_directory, worker.uid):
            # A restart would record episodes twice.
            lost = Lost(f"{lost.reason}; its writer {worker.uid} may still run: end its process, and resume the run")
            worker.state, worker.trouble, worker.assigned = "given up", lost.reason, {}
            self._events("given up", worker=number, reason=lost.reason, traceback="")
            return
        written = self._setup.directory if self._is_remote else self._local_directory
        saved = finished(written, self._run, self._setup.seed, re.escape(worker.uid))
        for episode in worker.given:
            if episode not in saved and self._done.discard(episode):  # reported, but not on disk
                worker.assigned[episode] = None
        for episode in saved:
            self._done.add(episode)
            worker.assigned.pop(episode, None)
        if worker.state == "publishing" and self._ending and not worker.assigned:
            worker.state = "ended"
            return
        self._suspect([episode for episode in suspects if episode in worker.assigned], lost.reason)
        self._take_back(worker)
        worker.base_steps = worker.steps
        self.progress.trouble = f"worker {number}: {lost.reason}"
        if self.progress.stopped == "done" and self._remaining():  # not everything is on disk after all
            self._ending, self.progress.stopped = False, ""
        reason_against = self._fleet.retry(number)
        self.progress.restarts = self._fleet.restarts
        if reason_against:
            worker.state, worker.trouble = "given up", lost.reason
        kind = "given up" if reason_against else "restart"
        self._events(kind, worker=number, reason=lost.reason, traceback=lost.traceback)

    def _suspect(self, episodes: list[int], reason: str) -> None:
        """Mark episodes that may have killed a worker: each is then assigned alone, and abandoned if that fails."""
        for episode in episodes:
            self._tries[episode] = self._tries.get(episode, 0) + (len(episodes) == 1)
            if self._tries[episode] >= _ATTEMPTS_PER_EPISODE:
                self.progress.failed[episode] = reason

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _assign(self, number: int) -> None:
        """Assign episodes for about a second, fewer near the end, so that all workers end at about the same time."""
        worker = self.progress.workers[number]
        if self._ending or any(episode in self._tries for episode in worker.assigned):
            return
        remaining = self._remaining()
        share = 1 + remaining // (2 * len(self.progress.workers))
        wanted = min(_MAX_EPISODES_AHEAD, share, max(2, int(worker.speed * _AHEAD_SECONDS))) - len(worker.assigned)
        episodes: list[int] = []
        while len(episodes) < wanted and (episode := self._pop()) is not None:
            if episode in self._tries:  # a suspect is recorded alone
                if episodes or worker.assigned:
                    heapq.heappush(self._to_repeat, episode)
                else:
                    episodes = [episode]
                break
            episodes.append(episode)
        if episodes:
            worker.assigned.update(dict.fromkeys(episodes))
            worker.given.extend(episodes)
            self._send(number, episodes)

    def _pop(self) -> int | None:
        while self._to_repeat:
            episode = heapq.heappop(self._to_repeat)
            if episode not in self._done and episode not in self.progress.failed:
                return episode
        limit = self._limits.episodes
        while limit is None or self._next < limit:
            episode, self._next = self._next, self._next + self._shard.of
            if episode not in self._done:
                return episode
        return None

    def _remaining(self) -> int:
        if self._limits.episodes is None:
            return 1 << 30
        return len(range(self._next, self._limits.episodes, self._shard.of)) + len(self._to_repeat)

    def _take_back(self, worker: WorkerState) -> None:
        for episode in worker.assigned:
            heapq.heappush(self._to_repeat, episode)
        worker.assigned = {}

    def _is_incomplete(self) -> bool:
        limit = self._limits.episodes
        return limit is not None and self._done.below(limit) < len(self._shard.below(limit))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_if_due(self) -> None:
        limits, progress = self._limits, self.progress
        if self._ending:
            return
        are_all_assigned = limits.episodes is not None and self._next >= limits.episodes
        must_repeat = any(episode not in self._done and episode not in progress.failed for episode in self._to_repeat)
        if are_all_assigned and not must_repeat and not any(worker.assigned for worker in progress.workers):
            self._end("done")
        elif limits.steps is not None and progress.steps >= limits.steps:
            self._end("steps")
        elif limits.seconds is not None and self._meter.seconds >= limits.seconds:
            self._end("seconds")
        elif limits.bytes is not None and progress.bytes >= limits.bytes:
            self._end("bytes")

    def _end(self, why: str) -> None:
        """Ask all workers to save and end."""
        if not self._ending:
            self._ending, self.progress.stopped = True, why
            for number in range(len(self.progress.workers)):
                self._send(number, None)

    def _measure(self) -> None:
        progress = self.progress
        progress.seconds = self._meter.seconds
        progress.bytes = directory_bytes(self._local_directory) - self._events.size()
        progress.episodes = len(self._done)
        progress.new_episodes = progress.episodes - self._resumed
        progress.returns = self._returns.summary()
        progress.speeds = self._meter.speeds(progress.new_steps)
