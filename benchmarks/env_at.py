"""Stand at random recorded steps, go on as recorded, and compare the rest, bit for bit; print what env_at costs.

    python benchmarks/env_at.py [--steps 200] [--every 50] [--only CartPole-v1 ...] [--json FILE]

Environments whose package is not installed are skipped. Times are CPU time of this process. The exit code is 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv

import gym_trace
from gym_trace.data.values import row_of
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.replay.compare import Comparison, EpisodeComparison

_HEADINGS = ("environment", "episode", "replayed", "states", "size", "size with states", "differing")


class Workload(NamedTuple):
    """An environment, the steps that are recorded of it, and the package that it needs.

    lanes: of a SyncVectorEnv; 0: a single environment. has_states: whether the environment offers its state.
    """

    make: Callable[[], Any]
    steps: int
    package: str = "gymnasium"
    lanes: int = 0
    has_states: bool = False


def _made(env_id: str, **kwargs: Any) -> Callable[[], Any]:
    return lambda: gymnasium.make(env_id, **kwargs)


_CHEETAH = _made("HalfCheetah-v5", max_episode_steps=500)
WORKLOADS = {
    "CartPole-v1": Workload(_made("CartPole-v1"), 2000),
    "Acrobot-v1": Workload(_made("Acrobot-v1"), 2000),
    "Taxi-v4": Workload(_made("Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"), 2000),
    "LunarLander-v3": Workload(_made("LunarLander-v3"), 2000, "Box2D"),
    "BipedalWalker-v3": Workload(_made("BipedalWalker-v3", max_episode_steps=300), 900, "Box2D"),
    "MiniGrid-DoorKey-5x5-v0": Workload(_made("MiniGrid-DoorKey-5x5-v0"), 2000, "minigrid"),
    "Pong, sticky actions": Workload(_made("ALE/Pong-v5", max_episode_steps=300), 600, "ale_py", has_states=True),
    "HalfCheetah-v5": Workload(_CHEETAH, 1000, "mujoco", has_states=True),
    "Humanoid-v5": Workload(
        _made("Humanoid-v5", max_episode_steps=300, terminate_when_unhealthy=False), 600, "mujoco", has_states=True
    ),
    "CartPole-v1, 8 lanes": Workload(_made("CartPole-v1"), 300, lanes=8),
    "HalfCheetah-v5, 2 lanes": Workload(_CHEETAH, 1001, "mujoco", lanes=2, has_states=True),
}


def record(workload: Workload, directory: Path, states: int | None) -> gym_trace.Trace:
    """Record random actions."""
    if workload.lanes:
        recorder: Any = gym_trace.TraceRecordingVectorWrapper(
            SyncVectorEnv([workload.make] * workload.lanes), directory, states=states
        )
        recorder.action_space.seed(1)
        recorder.reset(seed=2)
        for _ in range(workload.steps):
            recorder.step(recorder.action_space.sample())
        recorder.close()
    else:
        with gym_trace.TraceRecordingWrapper(workload.make(), directory, states=states) as recorder:
            gym_trace.record_episodes(recorder, steps=workload.steps, seed=1)
    return gym_trace.open_trace(directory)


def differing(trace: gym_trace.Trace, places: list[tuple[int, int]]) -> tuple[int, float]:
    """Return at how many (episode, step) the rest is not as recorded, and the mean seconds of env_at."""
    count, seconds = 0, 0.0
    for index, step in places:
        episode = trace[index]
        compared = EpisodeComparison(
            Comparison(ignore=["infos"]), episode, index_of(trace).locate(index)[0].about.layouts
        )
        begin = time.process_time()
        env = gym_trace.env_at(trace, index, step, trust=True)
        seconds += time.process_time() - begin
        actions = episode.actions
        rest = (compared.step(now, *env.step(row_of(actions, now))) for now in range(step, len(episode)))
        count += any(difference is not None for difference in rest)
        env.close()
    return count, seconds / len(places)


def measured(name: str, steps: int, every: int) -> dict[str, Any]:
    """Return the row of the table of one environment."""
    workload, row = WORKLOADS[name], {"environment": name}
    with tempfile.TemporaryDirectory() as directory:
        places: list[tuple[int, int]] = []
        for kind, states in (("replayed", None), ("states", every))[: 1 + workload.has_states]:
            trace = record(workload, Path(directory) / kind, states)
            if not places:
                random = np.random.default_rng(0)
                starts = np.cumsum([0, *(len(episode) for episode in trace)])
                chosen = random.integers(0, starts[-1], steps)
                episodes = np.searchsorted(starts, chosen, side="right") - 1
                places = list(zip(episodes.tolist(), (chosen - starts[episodes]).tolist()))
                row["episode"] = int(np.mean([len(trace[index]) for index, _ in places]))
            wrong, seconds = differing(trace, places)
            size = sum(file.stat().st_size for file in (Path(directory) / kind).iterdir())
            row |= {kind: seconds, f"{kind}, bytes": size, f"{kind}, differing": wrong}
    return row


def told(row: dict[str, Any]) -> list[str]:
    """Return a row as text."""
    has_states = "states" in row
    wrong = row["replayed, differing"] + row.get("states, differing", 0)
    return [
        row["environment"],
        f"{row['episode']} steps",
        f"{1e3 * row['replayed']:.1f} ms",
        f"{1e3 * row['states']:.1f} ms" if has_states else "",
        f"{row['replayed, bytes'] / 1e3:,.0f} kB",
        f"{row['states, bytes'] / 1e3:,.0f} kB" if has_states else "",
        str(wrong),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="random steps of each environment")
    parser.add_argument("--every", type=int, default=50, help="steps between states")
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS), choices=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--json", help="file for the rows")
    given = parser.parse_args()
    rows = []
    print("| " + " | ".join(_HEADINGS) + " |\n|" + "---|" * len(_HEADINGS))
    for name in given.only:
        package = WORKLOADS[name].package
        if importlib.util.find_spec(package) is None:
            print(f"skipped: {name} needs {package}", file=sys.stderr)
            continue
        if package in ("ale_py", "minigrid"):
            gymnasium.register_envs(importlib.import_module(package))
        rows.append(measured(name, given.steps, given.every))
        print("| " + " | ".join(told(rows[-1])) + " |", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(value for row in rows for key, value in row.items() if key.endswith("differing")))


if __name__ == "__main__":
    sys.exit(main())
