"""CleanRL's own scripts (Huang et al., 2022; https://github.com/vwxyzjn/cleanrl, MIT), started with their defaults.

CLEANRL names a checkout; its scripts need Gymnasium 0.29, which has LunarLander-v2: the same dynamics as v3.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import deque

import gymnasium

from trainers import Job, Progress

PACKAGES = ("torch", "gymnasium")
_EPISODE = re.compile(r"global_step=(\d+), episodic_return=\[?\s*([-\d.e+]+)")


def train(job: Job, progress: Progress) -> None:
    environment = job.environment.replace("LunarLander-v3", "LunarLander-v2")
    continuous = isinstance(gymnasium.make(environment).action_space, gymnasium.spaces.Box)
    script = f"{os.environ['CLEANRL']}/cleanrl/{'ppo_continuous_action' if continuous else 'ppo'}.py"
    command = [sys.executable, "-u", script, "--env-id", environment, "--seed", str(job.seed), "--no-cuda"]
    os.makedirs(job.directory)
    last: deque[float] = deque(maxlen=100)
    with subprocess.Popen(command, cwd=job.directory, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _EPISODE.match(line):
                steps = int(found[1])
                last.append(float(found[2]))
                mean = sum(last) / 100 if len(last) == 100 else None
                if progress.record(steps, mean, marks=False) or steps >= job.steps:
                    process.kill()
                    break
