"""gym_trace.train: a policy that is trained by several processes, and a trace of all that it has learnt from."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import gymnasium

from gym_trace.collecting.executor import check_portable, end_if_unguarded
from gym_trace.collecting.rollout import new_root_seed
from gym_trace.collecting.run_log import Events, machine
from gym_trace.envs.seeding import EPISODES
from gym_trace.errors import InvalidOption, TrainingFailed
from gym_trace.model.returns import LastReturns, Return
from gym_trace.recording.provenance import provenance_of
from gym_trace.training.actor import Actor, clipped
from gym_trace.training.cell import Cell
from gym_trace.training.learner import Learning
from gym_trace.training.learning import Learner, made_with
from gym_trace.training.learnt.versions import version_of
from gym_trace.training.run import Run
from gym_trace.training.settings import settings_from

_BEGIN = "begin.safetensors"
_POLL_SECONDS = 0.1
_FEW = 10  # episodes, before a policy is compared with others
_WINDOWS = (10.0, 60.0, 300.0)  # seconds, over which speed is told


@dataclass
class Trained:
    """How far a run is.

    Attributes:
        version: how many updates there are. steps: learnt from; new_steps: since it was started or resumed.
        speeds: steps a second over the last 10 s, 1 min and 5 min, or since the start where that is less.
        returns, lengths: mean, least and largest of the last 100 episodes; None before the first.
        lags: least, mean and largest age of what the last update learnt from, in versions. dropped: rollouts too old.
        shares: of the time of workers ("waiting", "acting", "stepping") and of the learner ("learning", "gathering").
        losses: of the last update. workers: the state of each. trouble: why a process was started again last.
        stopped: what ended it: "done", "return", "seconds", "interrupted"; "" while it runs.
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
    stopped: str = ""


def train(
    make_env: Callable[[], gymnasium.Env[Any, Any]],
    directory: str | os.PathLike[str],
    *,
    steps: int | None = None,
    seconds: float | None = None,
    until_return: float | None = None,
    seed: int | None = None,
    resume: bool = False,
    begin_with: str | None = None,
    learn: bool = True,
    trust: bool = False,
    checkpoint_seconds: float = 60.0,
    keep: int = 3,
    milestone_seconds: float | None = None,
    save_best: bool = True,
    stall_timeout: float = 120.0,
    max_restarts: int = 100,
    cpus: Sequence[int] | None = None,
    niceness: int = 0,
    on_progress: Callable[[Trained], Any] | None = None,
    describe: dict[str, Any] | None = None,
    command: str = "gym_trace.train",
    argv: bool = False,
    git_diff: bool = False,
    **settings: Any,
) -> Trained:
    """Trains a policy with PPO, and records everything that it learns from.

    The directory has the trace, a log of which steps each update was made of, and checkpoints: verify_run() makes the
    same weights of them again. Processes are started afresh, so a script that calls this needs
    ``if __name__ == "__main__":`` around it.

    Args:
        make_env: makes an environment in a worker; a function of a module, or anything that cloudpickle can carry.
        directory: a new one, or that of the run to resume.
        steps: to learn from. seconds: end after so many. until_return: end when the mean return of the last 100
            episodes is as large. One of them is needed.
        seed: 0 or more; None takes one from the system's entropy. With lag 0 and 1 it decides the weights.
        resume: go on with a run that was interrupted, with its settings and limits, but for seconds, and
            until_return if it is given.
        begin_with: take over weights and optimizer of a version of another run: DIR, DIR@VERSION or DIR@best.
        learn: False measures how fast is collected: the first weights act, and nothing comes of it but the trace.
        trust: whether a module may be imported that a run, to be resumed or to begin with, names as its model.
        checkpoint_seconds, keep: how often there is a checkpoint, and how many stay; milestone_seconds: those that stay
            for good. save_best: whether there is one of the largest mean return of the last 100 episodes.
        stall_timeout: seconds without a sign of life, after which a worker is killed and started again.
        max_restarts: of all processes together; after that the run fails.
        cpus: processors to keep the workers to, one each, in turn. niceness: added to that of this process.
        on_progress: called twice a second with what there is; a truthy result ends the run.
        describe: plain data that says what make_env makes.
        command, argv, git_diff: as those of collect().
        settings: see training.settings.Settings.

    Raises:
        InvalidOption, TrainingFailed
    """
    end_if_unguarded()
    run = Run(directory)
    if resume:
        if settings or steps is not None or seed is not None:
            raise InvalidOption("a run is resumed with the settings, steps and seed that it was started with")
        about, chosen = run.to_resume(describe, trust)
        seed, limit, begins = int(about["seed"]), about.get("steps"), about.get("begins") or {}
        until_return = about.get("until_return") if until_return is None else until_return
    else:
        chosen, limit, begins = settings_from(settings), steps, {}
        seed = new_root_seed() if seed is None else seed
        if not 0 <= seed < EPISODES:
            raise InvalidOption(f"seed={seed!r}: pass 0 to {EPISODES - 1}")
    if limit is None and seconds is None and until_return is None:
        raise InvalidOption("train needs a limit: pass steps=, seconds= or until_return=")
    for name, least in (("steps", limit), ("seconds", seconds)):
        if least is not None and not least > 0:
            raise InvalidOption(f"{name}={least!r}: pass more than 0")
    check_portable(make_env, None)
    env = clipped(make_env)
    spaces = env.observation_space, env.action_space
    env.close()
    updates = None if limit is None else -(-int(limit) // chosen.batch_steps)
    learner = Learner(*spaces, chosen, seed, updates)
    if not resume:
        other = None if begin_with is None else version_of(begin_with, trust)
        if other is not None:
            begins = {"checkpoint": _BEGIN, "settings": chosen.plain()}
            learner.take_over(other.learner)
        about = {"steps": limit, "until_return": until_return, "environment": describe, "learn": learn}
        about |= {"begins": begins, "begins_with": None if other is None else other.name, "made_with": made_with()}
        run.create(chosen, seed, **about)
        if other is not None:
            other.learner.save(run.checkpoints / _BEGIN)
    if run.is_done:
        last = deque(run.updates(), 1)
        return Trained(run.path, seed, version=last[0].version, steps=last[0].steps, stopped="done")
    events = Events(run.path)
    try:
        origin = provenance_of(command, "ppo", argv, git_diff)
        events("start", settings=chosen.plain(), seed=seed, steps=limit, resumed=resume, provenance=origin, **machine())
        plan = Plan(
            make_env, learner, seed, updates, begins, checkpoint_seconds, keep, milestone_seconds, stall_timeout,
            max_restarts, None if cpus is None else list(cpus), niceness, origin, learn
        )  # fmt: skip
        driver = Driver(plan.cell(run, events), Trained(run.path, seed), seconds, until_return, save_best)
        try:
            progress = drive([driver], on_progress)
        except TrainingFailed as error:
            events("failed", reason=str(error))
            raise
        run.set_done(learn and progress.stopped in ("done", "return"))
        events("end", version=progress.version, steps=progress.steps, stopped=progress.stopped)
        return progress
    finally:
        events.close()


@dataclass(frozen=True)
class Plan:
    """What the processes of a policy are told; see train(), and Learning for updates and begins."""

    make_env: Callable[[], gymnasium.Env[Any, Any]]
    learner: Learner  # as it is before it has learnt
    seed: int
    updates: int | None
    begins: dict[str, Any]
    checkpoint_seconds: float
    keep: int
    milestone_seconds: float | None
    stall_timeout: float
    max_restarts: int
    cpus: list[int] | None
    niceness: int
    provenance: dict[str, Any]
    learn: bool = True

    def cell(self, run: Run, events: Callable[..., None], name: str = "") -> Cell:
        """The processes of a policy whose run is this one. name: of the policy, in those of its processes."""
        learner, shape = self.learner, self.learner.shape
        observation_space, action_space = learner.spaces
        learning = partial(
            Learning,
            path=os.fspath(run.path),
            observation_space=observation_space,
            action_space=action_space,
            settings=learner.settings,
            shape=shape,
            seed=self.seed,
            updates=self.updates,
            begins=self.begins,
            learn=self.learn,
            checkpoint_seconds=self.checkpoint_seconds,
            keep=self.keep,
            milestone_seconds=self.milestone_seconds,
        )
        actor = partial(
            Actor,
            make_env=self.make_env,
            settings=learner.settings,
            shape=shape,
            directory=os.fspath(run.trace),
            seed=self.seed,
            provenance=self.provenance,
        )
        return Cell(
            learning,
            actor,
            learner.settings,
            shape,
            len(learner.weights()),
            self.seed,
            event=events,
            stall_timeout=self.stall_timeout,
            max_restarts=self.max_restarts,
            name=name,
            niceness=self.niceness,
            cpus=self.cpus,
        )


class Driver:
    """Hears the processes of a cell until its run is over."""

    def __init__(
        self, cell: Cell, progress: Trained, seconds: float | None, until_return: float | None, save_best: bool
    ):
        self.cell, self.progress = cell, progress
        self._seconds, self._until_return, self._save_best = seconds, until_return, save_best
        self.forget()
        self._history: deque[tuple[float, int]] = deque()
        self._spent: dict[str, float] = {}
        self._best: float | None = None
        self._first: int | None = None  # steps when it began
        self._begin = time.monotonic()
        self.saved: int | None = None  # the version of the checkpoint that was asked for last, once it is there

    def hear(self) -> None:
        """What its processes have to say; has them end when it is time. Raises TrainingFailed."""
        for who, _, kind, fact in self.cell.poll():
            if who == "worker" and kind == "collected":
                self._collected(fact)
            elif kind == "update":
                self._updated(fact)
            elif who == "learner" and kind == "running":
                self.progress.version, self.progress.steps = fact
                self._first = fact[1] if self._first is None else self._first
            elif who == "learner" and kind == "ended":
                self.cell.end_workers()
            elif who == "learner" and kind == "saved":
                self.saved = fact
        self.progress.workers = [worker.state for worker in self.cell.workers]
        self.progress.restarts, self.progress.trouble = self.cell.restarts, self.cell.trouble
        self._stop_when_due(time.monotonic())

    def _collected(self, told: Any) -> None:
        for total, length in told.episodes:
            self.progress.episodes += 1
            self._recent += 1
            self._returns.add(total)
            self._lengths.add(float(length))
        for name, seconds in told.seconds.items():
            self._spent[name] = self._spent.get(name, 0.0) + seconds
        self.progress.returns, self.progress.lengths = self._returns.summary(), self._lengths.summary()
        mean = self._mean()
        if self._save_best and mean is not None and (self._best is None or mean > self._best):
            self._best = mean
            self.cell.tell(("best", mean))

    def forget(self) -> None:
        """Episodes so far, which another policy has played."""
        self._returns, self._lengths, self._recent = LastReturns(), LastReturns(), 0

    def objective(self, name: str) -> float | None:
        """The mean "return" or "length" of the last episodes; None before there are a few."""
        found = (self._returns if name == "return" else self._lengths).summary()
        return found[0] if found and self._recent >= _FEW and isinstance(found[0], float) else None

    def _mean(self) -> float | None:
        """Of the last 100 returns; None before there are so many."""
        returns = self.progress.returns
        return returns[0] if returns and self.progress.episodes >= 100 and isinstance(returns[0], float) else None

    def _updated(self, told: dict[str, Any]) -> None:
        progress = self.progress
        progress.version, progress.steps = told.pop("version"), told.pop("steps")
        progress.lags, progress.dropped = told.pop("lags"), told.pop("dropped")
        spent = told.pop("seconds")
        self._spent["learning"] = self._spent.get("learning", 0.0) + spent["learning"]
        self._spent["gathering"] = self._spent.get("gathering", 0.0) + spent["waiting"]
        progress.losses = told

    def _stop_when_due(self, now: float) -> None:
        mean = self._mean()
        if self.cell.stopping:
            return
        if self._until_return is not None and mean is not None and mean >= self._until_return:
            self.stop("return")
        elif self._seconds is not None and now - self._begin >= self._seconds:
            self.stop("seconds")

    def stop(self, why: str) -> None:
        """Has it save and end."""
        if not self.cell.stopping:
            self.progress.stopped = why
            self.cell.stop()

    def measure(self) -> None:
        """Brings times and speeds in the progress up to date."""
        progress, now = self.progress, time.monotonic()
        progress.seconds = now - self._begin
        progress.new_steps = progress.steps - (self._first or 0)
        self._history.append((now, progress.new_steps))
        while len(self._history) > 1 and now - self._history[1][0] >= _WINDOWS[-1]:
            self._history.popleft()
        ten, minute, five = (self._speed(now, window) for window in _WINDOWS)
        progress.speeds = ten, minute, five
        for names in (("waiting", "acting", "stepping"), ("gathering", "learning")):
            whole = sum(self._spent.get(name, 0.0) for name in names)
            progress.shares |= {name: self._spent.get(name, 0.0) / whole for name in names if whole}

    def _speed(self, now: float, window: float) -> float:
        earlier = next((sample for sample in self._history if now - sample[0] <= window), self._history[-1])
        before = self._begin if len(self._history) < 2 else earlier[0]
        steps = self.progress.new_steps - (0 if before == self._begin else earlier[1])
        return steps / (now - before) if now > before else 0.0


def drive(
    drivers: Sequence[Driver],
    on_progress: Callable[[Trained], Any] | None,
    between: Callable[[], None] | None = None,
    every: float = 0.5,
) -> Trained:
    """Runs policies side by side until all are over; returns how far the first is. Raises TrainingFailed.

    between: called again and again, for what happens between policies.
    """
    first, interrupted = drivers[0], False
    next_report = time.monotonic()
    try:
        for driver in drivers:
            driver.cell.start()
        while sum(not driver.cell.is_over for driver in drivers):
            try:
                wait([thing for driver in drivers for thing in driver.cell.waitables()], _POLL_SECONDS)
                for driver in drivers:
                    driver.hear()
                if between is not None:
                    between()
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + every
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
            driver.cell.close()
    for driver in drivers:
        driver.measure()
        driver.progress.stopped = driver.progress.stopped or "done"
    return first.progress


def _stop_all(drivers: Sequence[Driver]) -> None:
    for driver in drivers:
        driver.stop("interrupted")
