"""Progress of a run, and the loop that supervises its processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_trace.data.returns import LastReturns, Return
from gym_trace.recording.collecting.rollout import directory_bytes
from gym_trace.recording.processes.fleet import Meter
from gym_trace.training.processes.policy_processes import InlineProcesses, PolicyProcesses
from gym_trace.training.run import MEAN

_POLL_SECONDS, _REPORT_SECONDS = 0.1, 0.5
_MIN_EPISODES = 10  # before a policy is compared with others


@dataclass
class Trained:
    """Progress of a run.

    Attributes:
        version: number of updates. steps: learned from; new_steps: since it was started or resumed.
        speeds: steps per second over the last 10 s, 1 min and 5 min, or since the start if that is less.
        returns, lengths: mean, min and max of the last 100 episodes; None before the first.
        lags: min, mean and max age of the rollouts of the last update, in versions. dropped: rollouts too old.
        shares: of the time of workers ("waiting", "acting", "stepping") and of the learner ("learning", "gathering").
        losses: of the last update. workers: the state of each. trouble: reason of the last restart.
        others: progress of the other policies of a population.
        stopped: what ended the run: "done", "return", "seconds", "interrupted"; "" while it runs.

    Examples:
        >>> trained = gym_trace.train(make_env, "runs/one", steps=50_000)  # doctest: +SKIP
        >>> trained.version, trained.returns  # doctest: +SKIP
    """

    directory: Path
    seed: int
    version: int = 0
    steps: int = 0
    new_steps: int = 0
    episodes: int = 0
    seconds: float = 0.0
    speeds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    returns: tuple[Return, Return, Return] | None = None
    lengths: tuple[Return, Return, Return] | None = None
    lags: tuple[float, float, float] = (0.0, 0.0, 0.0)
    dropped: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    restarts: int = 0
    trouble: str = ""
    others: list[Trained] = field(default_factory=list)
    stopped: str = ""

    @property
    def bytes_on_disk(self) -> int:
        """Size of the traces and checkpoints of all policies."""
        places = (policy.directory / part for policy in (self, *self.others) for part in ("trace", "checkpoints"))
        return sum(map(directory_bytes, places))


class Driver:
    """Track the processes of a policy until its run has ended."""

    def __init__(
        self,
        processes: PolicyProcesses | InlineProcesses,
        progress: Trained,
        seconds: float | None,
        until_return: float | None,
    ):
        self.processes, self.progress = processes, progress
        self._seconds, self.until_return = seconds, until_return
        self._mean: float | None = None  # mean return in the log: last 100 episodes that were learned from
        self.clear_returns()
        self._meter = Meter()
        self._spent: Counter[str] = Counter()  # seconds
        self._first: int | None = None  # steps at the start
        self.saved: int | None = None  # version of the last requested checkpoint, once written

    def hear(self, seconds: float) -> None:
        """Process reports, waiting up to `seconds`; stop the processes when a limit is met. Raises TrainingFailed."""
        for who, _, kind, fact in self.processes.poll(seconds):
            if who == "worker" and kind == "collected":
                self._collected(fact)
            elif kind == "update":
                self._updated(fact)
            elif who == "learner" and kind == "running":
                self.progress.version, self.progress.steps = fact
                if self._first is None:
                    self._first = fact[1]
                    self._meter.restart()
            elif who == "learner" and kind == "ended":
                self.processes.end_workers()
            elif who == "learner" and kind == "saved":
                self.saved = fact
        self.progress.workers = [worker.state for worker in self.processes.workers]
        self.progress.restarts, self.progress.trouble = self.processes.restarts, self.processes.trouble
        self._stop_when_due()

    def _collected(self, report: Any) -> None:
        for total, length, objective in report.episodes:
            self.progress.episodes += 1
            self._recent += 1
            self._returns.add(total)
            self._lengths.add(float(length))
            if objective is not None:
                self._objectives.add(objective)
        self._spent.update(report.seconds)
        self.progress.returns, self.progress.lengths = self._returns.summary(), self._lengths.summary()

    def clear_returns(self) -> None:
        """Clear the returns so far: another policy played these episodes."""
        self._returns, self._lengths, self._objectives, self._recent = LastReturns(), LastReturns(), LastReturns(), 0

    def objective(self, name: str) -> float | None:
        """Return the mean of the last episodes; None for fewer than 10. name: see Exchange."""
        found = {"return": self._returns, "length": self._lengths}.get(name, self._objectives).summary()
        return found[0] if found and self._recent >= _MIN_EPISODES and isinstance(found[0], float) else None

    def _updated(self, facts: dict[str, Any]) -> None:
        progress = self.progress
        progress.version, progress.steps = facts.pop("version"), facts.pop("steps")
        progress.lags, progress.dropped = facts.pop("lags"), facts.pop("dropped")
        self._spent.update(facts.pop("seconds"))
        self._mean = facts.pop(MEAN)
        progress.losses = facts

    def _stop_when_due(self) -> None:
        mean = self._mean
        if self.processes.stopping or self._first is None:
            return
        if self.until_return is not None and mean is not None and mean >= self.until_return:
            self.stop("return")
        elif self._seconds is not None and self._meter.seconds >= self._seconds:
            self.stop("seconds")

    def stop(self, why: str) -> None:
        """Ask the processes to save and end."""
        if not self.processes.stopping:
            self.progress.stopped = why
            self.processes.stop()

    def measure(self) -> None:
        """Update times and speeds of the progress."""
        progress = self.progress
        progress.seconds = self._meter.seconds
        progress.new_steps = progress.steps - (self._first or 0)
        progress.speeds = self._meter.speeds(progress.new_steps)
        for names in (("waiting", "acting", "stepping"), ("gathering", "learning")):
            total = sum(self._spent[name] for name in names)
            progress.shares |= {name: self._spent[name] / total for name in names if total}


def drive(
    drivers: Sequence[Driver], on_progress: Callable[[Trained], Any] | None, between: Callable[[], None] | None = None
) -> Trained:
    """Run policies side by side until all have ended; return the progress of the first. Raises TrainingFailed.

    between: called in each turn, for exchanges between policies.
    """
    first, interrupted = drivers[0], False
    next_report = time.monotonic()
    try:
        if _are_prepared(drivers, on_progress):
            for driver in drivers:
                driver.processes.start()
        else:
            _stop_all(drivers)
        while sum(not driver.processes.is_over for driver in drivers):
            try:
                for driver in drivers:
                    driver.hear(_POLL_SECONDS / len(drivers))
                if between is not None:
                    between()
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + _REPORT_SECONDS
                    for driver in drivers:
                        driver.measure()
                    if on_progress is not None and on_progress(first.progress):
                        _stop_all(drivers)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                _stop_all(drivers)
    finally:
        for driver in drivers:
            driver.processes.close()
    for driver in drivers:
        driver.measure()
        driver.progress.stopped = driver.progress.stopped or "done"
    return first.progress


def _are_prepared(drivers: Sequence[Driver], on_progress: Callable[[Trained], Any] | None) -> bool:
    """Wait until processes can start; return False if the run is stopped before."""
    try:
        preparing = drivers[0].processes.prepare()
        while preparing is not None and preparing.is_alive():
            preparing.join(_REPORT_SECONDS)
            if on_progress is not None and on_progress(drivers[0].progress):
                return False
    except KeyboardInterrupt:
        return False
    return True


def _stop_all(drivers: Sequence[Driver]) -> None:
    for driver in drivers:
        driver.stop("interrupted")
