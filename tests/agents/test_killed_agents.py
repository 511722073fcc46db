"""Recordings of many agents that are killed at random moments: no answered step is lost, and the turn is known."""

import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import forked_python
import pytest
from forked_python import HELPERS
from long_tests import LONG

pytest.importorskip("pettingzoo")

from gym_trace import open_trace

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a ring")

# It keeps a diary: what each step was asked, once the recorder has the action, and that it was answered.
VICTIM = """
import pickle, sys
sys.path[:0] = sys.argv[4:]
from agents_log import chooser
from gym_trace.pettingzoo import record
from agent_envs import Meadow, Passing

kind, choose = {"Meadow": Meadow, "Passing": Passing}[sys.argv[1]], chooser(0)
diary = open(sys.argv[3], "wb", buffering=0)

class LoggedEnv(kind):
    def step(self, action):
        acting = sorted(action) if kind is Meadow else [self.agent_selection] * (action is not None)
        pickle.dump(("asked", acting), diary)
        return super().step(action)

env = record(LoggedEnv(), sys.argv[2])
print("ready", flush=True)
for seed in range(10**9):
    env.reset(seed=seed)
    pickle.dump(("reset", None), diary)
    while env.agents:
        if kind is Meadow:
            env.step({agent: choose(env.action_space(agent), None, None) for agent in env.agents})
        else:
            observation, _, terminated, truncated, info = env.last()
            space = env.action_space(env.agent_selection)
            env.step(None if terminated or truncated else choose(space, observation, info))
        pickle.dump(("answered", None), diary)
"""


def entries(path: Path) -> list[Any]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found


@pytest.mark.parametrize("kind", ["Meadow", "Passing"])
def test_a_kill_at_any_moment_loses_no_step_of_any_agent(tmp_path: Path, kind: str) -> None:
    chance, house = random.Random(kind), [HELPERS]
    for number in range(150 if LONG else 3):
        trace, diary = tmp_path / f"trace{number}", tmp_path / f"diary{number}"
        command = [sys.executable, "-c", VICTIM, kind, str(trace), str(diary), *house]
        with forked_python.Popen(command, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0.01, 0.15))
            victim.send_signal(signal.SIGKILL)
        answered: list[int] = []
        asked = None
        for word, acting in entries(diary):
            asked = acting if word == "asked" else None
            if word == "reset":
                answered.append(0)
            elif answered and word == "answered":
                answered[-1] += 1
        found = list(open_trace(trace))
        assert [len(episode) for episode in found[: len(answered) - 1]] == answered[:-1]
        if answered:
            last = found[len(answered) - 1]
            assert 0 <= len(last) - answered[-1] <= 1  # answered, but not told the diary
            if asked is not None and len(last) == answered[-1]:
                pending = [agent for agent in last.agents if last[agent].pending_action is not None]
                assert sorted(map(str, pending)) == asked
