"""gym_trace.train: train a policy with several processes, and record everything it learns from."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from gym_trace.envs.clipping import clipping
from gym_trace.envs.seeding import EPISODES
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.printable import error_text
from gym_trace.recording.collecting.rollout import new_root_seed
from gym_trace.recording.processes.local import end_if_unguarded, portable
from gym_trace.recording.processes.run_log import Events, machine, rings_taken_in
from gym_trace.recording.provenance import provenance_of
from gym_trace.training.driver import Driver, Trained, drive
from gym_trace.training.network.forms import check_bounds
from gym_trace.training.network.learning import Learner
from gym_trace.training.network.model import check_device, source_of
from gym_trace.training.population import Exchange, Population, first_settings, policy_seed
from gym_trace.training.processes.policy_processes import InlineProcesses, PolicyProcesses
from gym_trace.training.processes.shared import PolicyTask
from gym_trace.training.proof.state import made_with
from gym_trace.training.run import new_runs, runs_in, settings_now, steps_now
from gym_trace.training.settings import CONSTANT, settings_from
from gym_trace.training.step_account import log_end
from gym_trace.training.versions import version_of

_BEGIN = "begin.safetensors"


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
    policies: int | Sequence[Mapping[str, Any]] | None = None,
    exchange: Exchange | None = None,
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
    """Train a policy with PPO, and record every step it learns from.

    The directory contains the trace, a log of the steps behind each update, and checkpoints: verify_run() reproduces
    the weights from them. Workers import the script that starts them, so it needs ``if __name__ == "__main__":``
    around this call.

    Args:
        make_env: makes an environment in a worker; a module-level function, or anything that cloudpickle can pickle.
        directory: a new directory, or that of the run to resume.
        steps: to learn from. seconds: time limit. until_return: end when the mean return of the last 100 episodes
            reaches it. One of them is needed.
        seed: 0 or more; None takes one from the system's entropy. With lag 0 and 1 it determines the weights.
        resume: continue a run with its settings and limits. steps extends it, also a finished one; until_return of the
            run then no longer holds. Only steps, seconds and until_return can change.
        begin_with: version of another run whose weights and optimizer to start from: DIR, DIR@VERSION or DIR@best.
        learn: False only records, with the first weights, to measure the throughput of collection.
        trust: allow the import of a module that the run, or that of begin_with, names as its model.
        policies: number of policies that learn side by side, each with its own processes, limits, and run in policy-0,
            policy-1 … of the directory. Policies after the first begin with slightly changed settings; a sequence
            gives the settings of each that differ. None: one, in the directory itself.
        exchange: when policies take over others (population-based training), and how settings change.
        checkpoint_seconds, keep: interval of checkpoints, and how many stay. milestone_seconds: interval of checkpoints
            that stay for good. save_best: keep one with the largest mean return of the last 100 episodes.
        stall_timeout: seconds of silence before a worker is killed and restarted.
        max_restarts: of all processes together; after more the run fails.
        cpus: processors to pin the workers to, one each, in turn. niceness: added to that of this process.
        on_progress: called twice a second with the progress; a truthy result ends the run.
        describe: plain data that describes make_env.
        command, argv, git_diff: see collect().
        settings: see training.settings.Settings. With workers=0, the learner and one worker take turns in this
            process, for a debugger.

    Raises:
        InvalidOption: also if another process trains in the directory
        CorruptTrace: the run to resume is damaged
        TrainingFailed: processes failed repeatedly, a loss is not finite, or a file cannot be written

    Examples:
        >>> from functools import partial
        >>> make_env = partial(gymnasium.make, "CartPole-v1")
        >>> trained = gym_trace.train(make_env, "runs/cartpole", steps=50_000, seed=0)  # doctest: +SKIP
    """
    end_if_unguarded()
    if in_turns := settings.get("workers") in (0, "0"):
        settings["workers"] = 1
        if settings.get("inference") == "server":
            raise InvalidOption("workers=0: runs no server process; pass inference='actor'")
    if resume:
        if settings or seed is not None or policies is not None:
            raise InvalidOption("resume: settings, seed and policies of a run cannot change; omit them")
        runs = runs_in(directory)
        resumed = [run.to_resume(describe, trust) for run in runs]
        about, chosen, seeds = resumed[0][0], [own for _, own in resumed], [int(own["seed"]) for own, _ in resumed]
        limit, seed = steps_now(runs[0]) if steps is None else steps, seeds[0]
        learned = max((update.steps for run in runs for update in run.updates()[-1:]), default=0)
        if steps is not None and steps <= learned:
            raise InvalidOption(f"steps={steps}: the run has learned from {learned:,} steps already; pass more")
        if until_return is None and limit == about.get("steps"):
            until_return = about.get("until_return")
        exchange = Exchange.of(about.get("exchange") or {}) if len(runs) > 1 else None
    else:
        limit = steps
        seed = new_root_seed() if seed is None else seed
        if not 0 <= seed < EPISODES:
            raise InvalidOption(f"seed={seed!r}: pass 0 to {EPISODES - 1}")
        exchange = Exchange() if exchange is None else exchange
        chosen = first_settings(settings_from(settings), 1 if policies is None else policies, exchange, seed)
        seeds = [policy_seed(seed, number) for number in range(len(chosen))]
        runs = new_runs(directory, len(chosen))
        exchange = exchange if len(runs) > 1 else None
    if limit is None and seconds is None and until_return is None:
        raise InvalidOption("train needs a limit: pass steps=, seconds= or until_return=")
    if limit is None and any({own.learning_rate_schedule, own.exploration_schedule} != {CONSTANT} for own in chosen):
        raise InvalidOption("learning_rate_schedule, exploration_schedule: depend on the steps of the run; pass steps=")
    for name, value in (("steps", limit), ("seconds", seconds)):
        if value is not None and not value > 0:
            raise InvalidOption(f"{name}={value!r}: pass more than 0")
    make = make_env if in_turns else portable("make_env", make_env)
    env = make_env()
    original_action_space, env = env.action_space, clipping(env)
    spaces = env.observation_space, env.action_space
    env.close()
    if not resume:
        check_bounds(original_action_space, min(own.initial_std for own in chosen))
    updates = chosen[0].updates_of(limit)
    for own in chosen:
        check_device(own.device)
    learners = [  # on the CPU: this process must not use a GPU
        Learner(*spaces, replace(own, device="cpu"), own_seed, updates) for own, own_seed in zip(chosen, seeds)
    ]
    if not resume:
        source = None if begin_with is None else version_of(begin_with, trust)
        about = {"steps": limit, "until_return": until_return, "environment": describe, "learn": learn}
        about |= {"begins_with": None if source is None else source.name, "made_with": made_with()}
        if chosen[0].model is not None:
            about["model_source"] = source_of(chosen[0].model)
        if exchange is not None:
            about["exchange"] = exchange.plain()
        takeover: dict[str, Any] = {}
        for run, own, own_seed, learner in zip(runs, chosen, seeds, learners):
            if source is not None:
                takeover = {"checkpoint": _BEGIN, "settings": own.plain()}
                learner.take_over(source.learner)
            run.create(own, own_seed, **about, begins=takeover)
            if source is not None:
                source.learner.save(run.checkpoints / _BEGIN)
    if steps is None and all(run.is_done for run in runs):
        last = runs[0].updates()[-1]
        return Trained(runs[0].path, seed, version=last.version, steps=last.steps, stopped="done")
    events = Events(Path(directory).absolute())
    try:
        for run in runs:
            run.set_done(False)
        origin = provenance_of(command, "ppo", argv, git_diff, make_env)
        start = {"settings": [own.plain() for own in chosen], "seed": seed, "steps": limit, "resumed": resume}
        events("start", **start, provenance=origin, **machine())
        current_settings = [settings_now(run) for run in runs] if resume and exchange is not None else chosen
        drivers = []
        for number, (run, own, own_seed, learner) in enumerate(zip(runs, chosen, seeds, learners)):
            task = PolicyTask(
                os.fspath(run.path), spaces, own, learner.shape, len(learner.weights()), own_seed, updates,
                run.about.get("begins") or {}, learn, checkpoint_seconds, keep, milestone_seconds, save_best,
                len(run.log.starts), None if exchange is None else exchange.info_key, origin,
            )  # fmt: skip
            processes = InlineProcesses(task, make) if in_turns else PolicyProcesses(
                task, make, event=partial(events, policy=number), stall_timeout=stall_timeout,
                max_restarts=max_restarts, name=f"policy {number}" if len(runs) > 1 else "", niceness=niceness,
                cpus=None if cpus is None else list(cpus),
            )  # fmt: skip
            processes.shape_rewards(current_settings[number].reward_shaping)
            drivers.append(Driver(processes, Trained(run.path, own_seed), seconds, until_return))
        drivers[0].progress.others = [driver.progress for driver in drivers[1:]]
        population = None if exchange is None else Population(drivers, runs, current_settings, exchange, seed, events)
        try:
            with ExitStack() as rings:
                for number, run in enumerate(runs):
                    rings.enter_context(rings_taken_in(run.trace, partial(events, policy=number)))
                progress = drive(drivers, on_progress, None if population is None else population.turn)
        except Exception as error:
            reason = str(error) if isinstance(error, TraceError) else error_text(error)
            with suppress(TraceError, OSError):  # the disk may be full, or the trace damaged
                events("failed", reason=reason)
                for run in runs:
                    log_end(run, f"failed: {reason}")
            raise
        for run, driver in zip(runs, drivers):
            log_end(run, driver.progress.stopped, driver.until_return)
            if learn and driver.progress.stopped in ("done", "return"):
                run.set_done(True)
        names = ("version", "steps", "stopped", "seconds", "shares")
        events("end", **{name: getattr(progress, name) for name in names})
        return progress
    finally:
        events.close()
