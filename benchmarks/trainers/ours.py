"""gym_trace.train with the settings of a job, and defaults for the rest; or with defaults alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from gym_trace.training.api import train as train_and_record
from gym_trace.training.driver import Trained
from gym_trace.training.processes import actor
from trainers import Job, Progress, make

PACKAGES = ("torch", "gymnasium")


class Unrecorded(VectorWrapper):
    """Stand-in for the recorder that records nothing."""

    def __init__(self, envs: VectorEnv[Any, Any, Any], *_: Any, **__: Any):
        super().__init__(envs)

    def annotate(self, **values: Any) -> None:
        pass

    def secure(self) -> None:
        pass


def unrecorded(name: str) -> gymnasium.Env[Any, Any]:
    """Remove the recorder when the worker makes its environment."""
    vars(actor)["TraceRecordingVectorWrapper"] = Unrecorded
    return make(name)


def train(job: Job, progress: Progress, records: bool = True, defaults: bool = False, **settings: Any) -> None:
    def record(trained: Trained) -> bool:
        mean = trained.returns[0] if trained.returns and trained.episodes >= 100 else None
        goes_on = trained.steps < job.steps  # afterwards the CPU seconds of processes that have ended are not there
        return progress.record(trained.steps, mean if isinstance(mean, float) else None, marks=goes_on)

    chosen: dict[str, Any] = {
        "workers": job.workers,
        "num_envs": job.lanes // job.workers,
        "rollout": job.rollout,
        "minibatches": job.minibatches,
        "epochs": job.epochs,
        "learning_rate": job.learning_rate,
        "learning_rate_schedule": "linear" if job.anneal else "constant",
        "gamma": job.gamma,
        "lam": job.lam,
        "clip": job.clip,
        "exploration_coefficient": job.entropy,
        **settings,
    }
    if defaults:
        chosen = settings
    make_env = job.make_env if records else partial(unrecorded, job.environment)
    record(train_and_record(make_env, job.directory, steps=job.steps, seed=job.seed, on_progress=record, **chosen))
