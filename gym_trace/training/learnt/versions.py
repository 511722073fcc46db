"""Any version of a run: from a checkpoint, or learnt again from the nearest one before it. It takes PyTorch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption
from gym_trace.playback.trace import open_trace
from gym_trace.training.network.learning import REMOVE, Learner, read_checkpoint
from gym_trace.training.processes.learner import learn_again
from gym_trace.training.run import Run

BEST = "best"
_NAMED = re.compile(r"(?P<directory>.+?)(@(?P<version>\d{1,9}|best))?", re.DOTALL)


class Version(NamedTuple):
    """A version of a run. directory: as it was written. learner: on the CPU, as it was then."""

    directory: str
    learner: Learner

    @property
    def name(self) -> str:
        return f"{self.directory}@{self.learner.version}"


def version_of(name: str, trust: bool = False) -> Version:
    """DIR, which is the newest checkpoint there, DIR@NUMBER, or DIR@best, of the largest mean return.

    trust: whether a module that the run names as its model may be imported.

    Raises InvalidOption, TraceNotFound, CorruptTrace.
    """
    match = _NAMED.fullmatch(name)
    if match is None:
        raise InvalidOption(f"{name!r}: pass DIR, DIR@VERSION or DIR@best")
    directory, wanted = match["directory"], match["version"]
    run = Run(directory)
    learner = fresh(run, trust)
    if wanted == BEST:
        path = run.checkpoints / f"{BEST}.safetensors"
        if not path.exists():
            raise InvalidOption(f"{directory}: no version is the best yet: that takes 100 episodes")
        learner.load(path)
        return Version(directory, learner)
    files = {version: path for path, version in checkpoint_files(run).items()}
    number = int(wanted) if wanted is not None else max(files, default=None)
    _bring(run, learner, files, number)
    return Version(directory, learner)


def fresh(run: Run, trust: bool, device: str | None = "cpu") -> Learner:
    """The learner of a run as it began. device: None for that of the run.

    Raises InvalidOption, TraceNotFound, CorruptTrace.
    """
    about, settings = run.about, run.trusted_settings(trust)
    trace = open_trace(run.trace)
    limit = about.get("steps")
    total = None if limit is None else -(-int(limit) // settings.batch_steps)
    settings = settings if device is None else replace(settings, device=device)
    try:
        return Learner(trace.observation_space, trace.action_space, settings, about["seed"], total)
    except (RuntimeError, MemoryError) as error:
        raise CorruptTrace(f"{run.path}: no network can be made of what it says: {error}") from error


def checkpoint_files(run: Run) -> dict[Path, int]:
    """The versions of those that there are, also of milestones and of the best. Raises CorruptTrace."""
    found = {run.checkpoint(version): version for version in run.saved()}
    for path in sorted(run.checkpoints.glob("milestone-*.safetensors")):
        if match := re.fullmatch(r"milestone-(\d{9})\.safetensors", path.name):
            found[path] = int(match[1])
    best = run.checkpoints / f"{BEST}.safetensors"
    if best.exists():
        version = read_checkpoint(best)[0].get("version")
        if type(version) is not int:
            raise CorruptRun("is no checkpoint: it does not say of which version", best, REMOVE)
        found[best] = version
    return found


def _bring(run: Run, learner: Learner, files: dict[int, Path], number: int | None) -> None:
    """number: None for the newest of the log."""
    known = [version for version in files if number is None or version <= number]
    if known:
        learner.load(files[max(known)], max(known))
    if learner.version == number:
        return
    updates = [update for update in run.updates() if number is None or update.version <= number]
    if not updates or (number is not None and updates[-1].version < number):
        there = f"0 to {updates[-1].version}" if updates else "none"
        raise InvalidOption(f"{run.path}: there is no version {number}; of versions there are {there}")
    for _ in learn_again(run, learner, updates[learner.version :]):
        pass
