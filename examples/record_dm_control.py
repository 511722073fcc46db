"""Record a task of dm_control, and verify it: bit for bit what the environment returned.

pip install 'gym-trace[dm-env]' dm_control
python examples/record_dm_control.py [DOMAIN TASK DIRECTORY]
gym-trace verify traces/cheetah-run --make examples.record_dm_control:make
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
from dm_control import suite

import gym_trace
import gym_trace.dm_env


def make(domain: str = "cheetah", task: str = "run") -> Any:
    return suite.load(domain, task, task_kwargs={"time_limit": 2.0})


def main(domain: str = "cheetah", task: str = "run", directory: str | None = None, episodes: int = 3) -> list[Any]:
    """Record episodes of random actions; return the time steps of all of them."""
    directory = directory or f"traces/{domain}-{task}"
    random, timesteps = np.random.default_rng(0), []
    with gym_trace.dm_env.record(make(domain, task), directory) as env:
        spec = env.action_spec()
        for _ in range(episodes):
            timestep = env.reset()
            timesteps.append(timestep)
            while not timestep.last():
                action = random.uniform(spec.minimum, spec.maximum, spec.shape).astype(spec.dtype)
                timestep = env.step(action)
                timesteps.append(timestep)
    verdicts = list(gym_trace.verify_trace(directory, make_env=partial(make, domain, task)))
    print(f"{directory}: {len(verdicts)} episodes, {', '.join(sorted({verdict.verdict for verdict in verdicts}))}")
    return timesteps


if __name__ == "__main__":
    main(*sys.argv[1:4])
