"""Whether the weights of a run come out of its trace, its seed and its log again, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gym_trace.errors import CorruptRun, CorruptTrace, TraceError
from gym_trace.playback.trace import open_trace
from gym_trace.training.learnt.versions import checkpoint_files, fresh
from gym_trace.training.network.learning import REMOVE, Learner, made_with, read_checkpoint
from gym_trace.training.processes.learner import learn_again
from gym_trace.training.run import Run, runs_in


@dataclass
class Relearnt:
    """What came of it.

    Attributes:
        versions: how many were made again and are the same. of: how many there are.
        differs: what does not come out, and what is the first that does not; "" if everything does.
        checkpoints: how many were compared, tensor by tensor.
        notes: what else may explain it, such as another version of PyTorch.
    """

    versions: int = 0
    of: int = 0
    differs: str = ""
    checkpoints: int = 0
    notes: list[str] = field(default_factory=list)


def verify_run(
    directory: str | os.PathLike[str],
    on_progress: Callable[[Relearnt], Any] | None = None,
    *,
    trust: bool = False,
) -> Relearnt:
    """Learns everything again, and compares each version and each checkpoint with what the run had.

    Of several policies one after the other.

    on_progress: called after each version; a truthy result ends it. trust: whether the module of a model that the run
    names may be imported.

    Raises:
        TraceNotFound, CorruptTrace: there is no run, or nothing of it can be read.
        InvalidOption: it names a model, and is not trusted.
    """
    found = Relearnt()
    for run in runs_in(directory):
        found = _verified(run, found, on_progress, trust)
        if found.differs:
            break
    return found


def _verified(run: Run, before: Relearnt, on_progress: Callable[[Relearnt], Any] | None, trust: bool) -> Relearnt:
    """What came of this run, and of those before."""
    about = run.about
    updates = list(run.updates())
    if not updates:
        raise CorruptRun("has no versions", run.path, "it never began to learn: 'gym-trace train --resume' does")
    notes = list(dict.fromkeys([*before.notes, *_notes(about.get("made_with"))]))
    found = replace(before, of=before.of + len(updates), notes=notes)
    trace = open_trace(run.trace)
    if not len(trace):
        raise CorruptTrace("has no episodes", run.trace)
    learner = fresh(run, trust, device=None)
    try:
        saved = checkpoint_files(run)
        for update in learn_again(run, learner, updates):
            found.versions += 1
            for path in [path for path, version in saved.items() if version == update.version]:
                _compare(path, learner)
                found.checkpoints += 1
            if on_progress is not None and on_progress(found):
                found.differs = "it was interrupted"
                break
        later = [version for version in saved.values() if version >= found.of]
        if later and not found.differs:
            found.differs = f"{run.path}: the log ends before version {min(later)}, of which there is a checkpoint"
    except (TraceError, MemoryError) as error:
        found.differs = str(error) or "what it says takes more memory than there is"
    return found


def _compare(path: Path, learner: Learner) -> None:
    """Raises CorruptTrace where a checkpoint has other tensors."""
    _, tensors = read_checkpoint(path)
    mine = learner.tensors()
    for name in sorted({*mine, *tensors}):
        if name not in mine or name not in tensors or not torch.equal(mine[name], tensors[name]):
            raise CorruptRun(f"{name} is not what comes out again", path, REMOVE)


def _notes(made: Any) -> list[str]:
    """Where this machine is another one than that of the run, as far as that can change sums of floats."""
    here = made_with()
    made = made if isinstance(made, dict) else {}
    return [f"{name} was {made.get(name)}, and is {now} here" for name, now in here.items() if made.get(name) != now]
