"""Who looks after workers: hands out episodes, hears reports, starts again what has died."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gym_trace.collecting.episode_set import EpisodeRanges, EpisodeSet
from gym_trace.collecting.executor import Executor
from gym_trace.collecting.worker import Report, Setup
from gym_trace.model.returns import LastReturns, Return

_POLL_SECONDS = 0.1
_WINDOWS = (10.0, 60.0, 300.0)  # seconds, over which speed is told
_AHEAD_SECONDS = 1.0  # of work that a worker is given beforehand
_MOST_AHEAD = 10_000  # episodes
_MOST_BACKOFF = 30.0  # seconds
_PATIENCE = 10.0  # seconds that workers have to save what they have at Ctrl-C
_STARTING = 60.0  # seconds that a process has at least to start: what it imports takes its time on a busy machine
_MOST_FAILURES = 7  # of a worker, one after the other, after which it is given up
_TRIES = 3  # of an episode, before it is given up


@dataclass
class WorkerState:
    """What is known of one worker."""

    state: str = "starting"  # running, closing, waiting (to be started again), ended, given up
    uid: str = ""
    episodes: int = 0
    steps: int = 0
    restarts: int = 0
    failures: int = 0  # one after the other, without an episode in between
    trouble: str = ""
    assigned: dict[int, None] = field(default_factory=dict)  # episodes it was given and has not finished
    died_of: tuple[int, ...] = ()  # those that it was at when it failed, where it could say so
    given: EpisodeRanges = field(default_factory=EpisodeRanges)  # all that this process was ever given
    heard: float = 0.0
    due: float = 0.0  # when it is to be started again
    base_steps: int = 0  # of the processes before this one
    speed: float = 0.0  # episodes a second, lately


@dataclass
class Collected:
    """How far a run is.

    Attributes:
        episodes, steps: since the start of the run, also by those who died, and before it was resumed.
        new_episodes, new_steps: since it was started or resumed.
        speeds: steps a second over the last 10 s, 1 min and 5 min, or since the start where that is less.
        returns: mean, least and largest of the last 100 complete episodes; None before the first. Of rewards that are
            several numbers (objectives) tuples, with one for each.
        failed: episodes that were given up, and why.
        stopped: what ended the run: "done", "steps", "seconds", "bytes", "interrupted" or "failed"; "" while it runs.
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
    trouble: str = ""  # why a worker was last started again
    stopped: str = ""


@dataclass(frozen=True)
class Limits:
    """When a run is over; what is None does not end it."""

    episodes: int | None = None
    steps: int | None = None
    seconds: float | None = None
    bytes: int | None = None


class Supervisor:
    """Runs workers until all is done.

    Args:
        new_uid: makes the id of a worker's writer.
        on_disk: tells which episodes, of how many steps, a writer has saved whole; asked when its process is gone.
        event: called with a kind and facts, of whatever happens.
    """

    def __init__(
        self,
        executor: Executor,
        setup: Setup,
        workers: int,
        limits: Limits,
        done: dict[int, int],
        *,
        new_uid: Callable[[int], str],
        on_disk: Callable[[str], dict[int, int]],
        bytes_on_disk: Callable[[], int],
        event: Callable[..., None],
        stall_timeout: float,
        max_restarts: int,
        cpus: list[int] | None = None,
    ):
        self._executor, self._setup, self._limits = executor, setup, limits
        self._new_uid, self._on_disk, self._bytes_on_disk, self._event = new_uid, on_disk, bytes_on_disk, event
        self._stall_timeout, self._max_restarts, self._cpus = stall_timeout, max_restarts, cpus
        self._done, self._before = EpisodeSet(done), len(done)
        self._again: list[int] = []  # a heap of episodes that somebody had and lost
        self._next = 0
        self._tries: dict[int, int] = {}  # how often workers died of an episode and no other; also 0
        self._returns = LastReturns()
        self._history: deque[tuple[float, int]] = deque()
        self._ending = False
        self.progress = Collected(setup.seed, workers=[WorkerState() for _ in range(workers)])
        self.progress.episodes, self.progress.steps = len(done), sum(done.values())

    def run(self, on_progress: Callable[[Collected], Any] | None, every: float = 0.5) -> Collected:
        """Until it is over. on_progress: called every so many seconds; a truthy result ends the run."""
        begin = self._begin = time.monotonic()
        next_report = begin
        workers = self.progress.workers
        try:
            for number in range(len(workers)):
                self._start(number)
            while self._working():
                self._turn()
                now = time.monotonic()
                if now >= next_report:
                    next_report = now + every
                    self._measure(now)
                    if on_progress is not None and on_progress(self.progress):
                        self._end("interrupted")
                self._end_where_due(now)
        except KeyboardInterrupt:
            if self._ending or (on_progress is not None and on_progress(self.progress)):
                raise  # the second one, which ends everything at once
            self._end("interrupted")
            deadline = time.monotonic() + _PATIENCE
            while self._working() and time.monotonic() < deadline:
                self._turn()
            raise
        finally:
            for number in range(len(workers)):
                self._executor.stop(number)
        self._measure(time.monotonic())
        if on_progress is not None and on_progress(self.progress) and self._missing():
            self.progress.stopped = "interrupted"
        if not self.progress.stopped or (self._missing() and self.progress.stopped == "done"):
            self.progress.stopped = "failed"
        return self.progress

    def _working(self) -> bool:
        return any(worker.state not in ("ended", "given up") for worker in self.progress.workers)

    def _turn(self) -> None:
        for number, report in self._executor.poll(_POLL_SECONDS):
            self._hear(number, report)
        self._look_after(time.monotonic())

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> None:
        worker = self.progress.workers[number]
        worker.uid, worker.state, worker.heard = self._new_uid(number), "starting", time.monotonic()
        worker.assigned, worker.given, worker.died_of = {}, EpisodeRanges(), ()
        cpu = None if self._cpus is None else self._cpus[number % len(self._cpus)]
        self._executor.start(number, replace(self._setup, uid=worker.uid, cpu=cpu))
        self._give(number)

    def _hear(self, number: int, report: Report | None) -> None:
        worker = self.progress.workers[number]
        before, worker.heard = worker.heard, time.monotonic()
        if report is None:
            if worker.state != "ended":
                self._lost(number, worker.trouble or "its process ended")
            return
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
            worker.speed = 0.5 * worker.speed + 0.5 * len(report.finished) / max(worker.heard - before, 0.01)
        if report.state == "closed" and self._ending:
            worker.state = "ended"
            self._take_back(worker)
        elif report.state in ("closed", "failed"):  # it is gone in a moment
            worker.trouble, worker.died_of = report.trouble or "it has ended by itself", report.episodes
        else:
            worker.state = "closing" if self._ending else "running"
            self._give(number)

    def _look_after(self, now: float) -> None:
        for number, worker in enumerate(self.progress.workers):
            if worker.state == "waiting" and self._ending:
                worker.state = "ended"
            elif worker.state == "waiting" and now >= worker.due:
                self._start(number)
            elif worker.state in ("starting", "running", "closing"):
                patience = max(self._stall_timeout, _STARTING * (worker.state == "starting"))
                if now - worker.heard > patience:
                    self._lost(number, f"no sign of life for {patience:g} s")

    def _lost(self, number: int, trouble: str) -> None:
        """A worker that is gone, or has to go: what it has not saved is for others, and it is started again."""
        worker = self.progress.workers[number]
        self._executor.stop(number)
        suspects = worker.died_of or tuple(worker.assigned)
        saved = self._on_disk(worker.uid)
        for episode in worker.given:
            if episode not in saved and self._done.discard(episode):  # said, but lost on the way to the disk
                worker.assigned[episode] = None
        for episode in saved:
            self._done.add(episode)
            worker.assigned.pop(episode, None)
        reason = trouble.strip().splitlines()[-1] if trouble.strip() else "unknown"
        self._suspect([episode for episode in suspects if episode in worker.assigned], reason)
        self._take_back(worker)
        worker.base_steps, worker.trouble = worker.steps, ""
        self.progress.trouble = f"worker {number}: {reason}"
        if self.progress.stopped == "done" and self._left():  # not everything is on disk after all
            self._ending, self.progress.stopped = False, ""
        worker.failures += 1
        if self.progress.restarts >= self._max_restarts or worker.failures > _MOST_FAILURES:
            worker.state, worker.trouble = "given up", reason
            self._event("given up", worker=number, reason=reason, traceback=trouble)
            return
        self.progress.restarts += 1
        worker.restarts += 1
        backoff = min(_MOST_BACKOFF, 0.1 * 2.0**worker.failures)
        worker.state, worker.due = "waiting", time.monotonic() + backoff
        self._event("restart", worker=number, reason=reason, traceback=trouble, seconds=backoff)

    def _suspect(self, episodes: list[int], reason: str) -> None:
        """One of these may be what a worker died of: each is recorded alone from now on, and given up in the end."""
        for episode in episodes:
            self._tries[episode] = self._tries.get(episode, 0) + (len(episodes) == 1)
            if self._tries[episode] >= _TRIES:
                self.progress.failed[episode] = reason

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _give(self, number: int) -> None:
        """Episodes for about a second, fewer when few are left, so that no worker ends long after the others."""
        worker = self.progress.workers[number]
        if self._ending or any(episode in self._tries for episode in worker.assigned):
            return
        left = self._left()
        share = 1 + left // (2 * len(self.progress.workers))
        wanted = min(_MOST_AHEAD, share, max(2, int(worker.speed * _AHEAD_SECONDS))) - len(worker.assigned)
        episodes: list[int] = []
        while len(episodes) < wanted and (episode := self._pop()) is not None:
            if episode in self._tries:  # somebody died of it, or of another one beside it: it is recorded alone
                if episodes or worker.assigned:
                    heapq.heappush(self._again, episode)
                else:
                    episodes = [episode]
                break
            episodes.append(episode)
        if episodes:
            worker.assigned.update(dict.fromkeys(episodes))
            worker.given.extend(episodes)
            self._executor.tell(number, episodes)

    def _pop(self) -> int | None:
        while self._again:
            episode = heapq.heappop(self._again)
            if episode not in self._done and episode not in self.progress.failed:
                return episode
        limit = self._limits.episodes
        while limit is None or self._next < limit:
            self._next += 1
            if self._next - 1 not in self._done:
                return self._next - 1
        return None

    def _left(self) -> int:
        if self._limits.episodes is None:
            return 1 << 30
        return max(0, self._limits.episodes - self._next) + len(self._again)

    def _take_back(self, worker: WorkerState) -> None:
        for episode in worker.assigned:
            heapq.heappush(self._again, episode)
        worker.assigned = {}

    def _missing(self) -> bool:
        limit = self._limits.episodes
        return limit is not None and self._done.below(limit) < limit

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_where_due(self, now: float) -> None:
        limits, progress = self._limits, self.progress
        if self._ending:
            return
        everything = limits.episodes is not None and self._next >= limits.episodes
        again = any(e not in self._done and e not in progress.failed for e in self._again)
        if everything and not again and not any(worker.assigned for worker in progress.workers):
            self._end("done")
        elif limits.steps is not None and progress.steps >= limits.steps:
            self._end("steps")
        elif limits.seconds is not None and now - self._begin >= limits.seconds:
            self._end("seconds")
        elif limits.bytes is not None and progress.bytes >= limits.bytes:
            self._end("bytes")

    def _end(self, why: str) -> None:
        """Has all workers save and end."""
        if not self._ending:
            self._ending, self.progress.stopped = True, why
            for number in range(len(self.progress.workers)):
                self._executor.tell(number, None)

    def _measure(self, now: float) -> None:
        progress = self.progress
        progress.seconds, progress.bytes = now - self._begin, self._bytes_on_disk()
        progress.episodes = len(self._done)
        progress.new_episodes = progress.episodes - self._before
        progress.returns = self._returns.summary()
        self._history.append((now, progress.new_steps))
        while len(self._history) > 1 and now - self._history[1][0] >= _WINDOWS[-1]:
            self._history.popleft()
        ten, minute, five = (self._speed(now, window) for window in _WINDOWS)
        progress.speeds = ten, minute, five

    def _speed(self, now: float, window: float) -> float:
        earlier = next((sample for sample in self._history if now - sample[0] <= window), self._history[-1])
        before = self._begin if len(self._history) < 2 else earlier[0]
        steps = self.progress.new_steps - (0 if before == self._begin else earlier[1])
        return steps / (now - before) if now > before else 0.0
