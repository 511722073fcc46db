"""Golden traces of every environment of some packages, to be verified with other versions of them: make corpus.

python tests/corpus.py record golden gymnasium minigrid   # environments that have a trace are skipped
python tests/corpus.py verify golden gymnasium minigrid   # exit code 3 if one differs
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"SDL_VIDEODRIVER": "dummy", "SDL_AUDIODRIVER": "dummy", "MUJOCO_GL": "disable", "OMP_NUM_THREADS": "1"}

import gymnasium
import numpy as np

import gym_trace

EPISODES, STEPS, SEED = 2, 100, 0
SECONDS = 300  # for one environment
# Packages of environments for many agents, which are not registered.
AGENTS = {"pettingzoo": ("pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl"), "mpe2": ("mpe2",)}


class Pool(gymnasium.Env[Any, Any]):
    """One environment of EnvPool, which takes a seed only when it is made."""

    def __init__(self, task: str):
        self._task = task
        self._make(0)

    def _make(self, seed: int) -> None:
        import envpool

        self._pool = envpool.make(self._task, env_type="gymnasium", num_envs=1, seed=seed)
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self._make(seed)
        return tuple(map(_first, self._pool.reset()))

    def step(self, action: Any) -> Any:
        return tuple(map(_first, self._pool.step(np.array([action], self.action_space.dtype))))


def _first(batch: Any) -> Any:
    return {key: _first(value) for key, value in batch.items()} if isinstance(batch, dict) else batch[0]


def register(packages: list[str]) -> None:
    """Import packages, so that their environments are registered."""
    for name in packages:
        package = importlib.import_module(name)
        if name == "ale_py":  # no banner for each environment
            package.ALEInterface.setLoggerMode(package.LoggerMode.Error)
        if name == "envpool":  # its 1,600 tasks are too many: only those that Gymnasium also has
            for task in {*package.list_all_envs()} & {*gymnasium.registry}:
                if "/" not in task:
                    gymnasium.register(f"EnvPool/{task}", "corpus:Pool", kwargs={"task": task})


# -- record ------------------------------------------------------------------------------------------------------------


def recordings(package: str) -> Iterator[tuple[str, Callable[[str, Path], None]]]:
    """Yield the name of each environment of a package, and the function that records it."""
    for name, spec in sorted(gymnasium.registry.items()):
        module = str(getattr(spec.entry_point, "__module__", spec.entry_point))
        owner = "envpool" if spec.namespace == "EnvPool" else module.partition(".")[0].partition(":")[0]
        if owner == package and (package != "ale_py" or spec.namespace == "ALE"):  # ALE/ has all games of older names
            yield name, record_env
    for parent in AGENTS.get(package, ()):
        for module in pkgutil.iter_modules(importlib.import_module(parent).__path__, f"{parent}."):
            if "_v" in module.name:
                yield module.name, record_agents


def record_env(name: str, directory: Path) -> None:
    env = gymnasium.make(name, max_episode_steps=STEPS)
    with gym_trace.TraceRecordingWrapper(env, directory, record_infos=True) as recorded:
        gym_trace.record_episodes(recorded, episodes=EPISODES, seed=SEED)


def record_agents(name: str, directory: Path) -> None:
    from gym_trace.pettingzoo import record

    env = record(importlib.import_module(name).env(), directory, record_infos=True)
    random = np.random.default_rng(SEED)
    for episode in range(EPISODES):
        env.reset(seed=SEED + episode)
        for _, agent in zip(range(STEPS), env.agent_iter()):
            observation, _, terminated, truncated, info = env.last()
            env.step(None if terminated or truncated else _legal(env.action_space(agent), observation, info, random))
    env.close()


def _legal(space: Any, observation: Any, info: Any, random: np.random.Generator) -> Any:
    mask = observation.get("action_mask") if isinstance(observation, dict) else info.get("action_mask")
    if mask is not None:
        return int(random.choice(np.flatnonzero(mask)))
    space.seed(int(random.integers(1 << 31)))
    return space.sample()


def record(golden: Path, packages: list[str]) -> int:
    recorded = 0
    problems: dict[str, list[str]] = {}
    unfinished = golden / ".unfinished"
    for package in packages:
        for name, function in recordings(package):
            directory = golden / package / name.removeprefix(f"{package}.").replace(".", "/")
            if directory.exists():
                continue
            shutil.rmtree(unfinished, ignore_errors=True)
            _, problem = in_a_process(function, name, unfinished)
            if not problem:
                verdicts, problem = in_a_process(verdicts_of, unfinished)
                differing = [verdict["verdict"] for verdict in verdicts or () if verdict["verdict"] != "identical"]
                problem = f"does not repeat itself: {differing[0]}" if differing else problem
            if problem:
                problems.setdefault(problem, []).append(name)
            else:
                directory.parent.mkdir(parents=True, exist_ok=True)
                unfinished.rename(directory)
                recorded += 1
                print(f"recorded {directory}", flush=True)
    shutil.rmtree(unfinished, ignore_errors=True)
    print_problems("not recorded", problems)
    print(f"{recorded} environments recorded")
    return 0


# -- verify ------------------------------------------------------------------------------------------------------------


def verdicts_of(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "episode": verdict.index,
            "verdict": verdict.verdict,
            "difference": str(verdict.difference or verdict.reason),
            "divergences": list(map(str, verdict.divergences)),
        }
        for verdict in gym_trace.verify_trace(directory, trust=True)
    ]


def verify(golden: Path, packages: list[str], report: Path | None) -> int:
    counts = dict.fromkeys(("identical", "different", "not verified"), 0)
    problems: dict[str, list[str]] = {}
    results: dict[str, Any] = {}
    for package in packages:
        for directory in sorted(map(Path, gym_trace.find_traces(golden / package))):
            verdicts, problem = in_a_process(verdicts_of, directory)
            results[str(directory.relative_to(golden))] = problem or verdicts
            different = [verdict for verdict in verdicts or () if verdict["verdict"] == "differs"]
            unverified = [verdict["difference"] for verdict in verdicts or () if verdict["verdict"] == "unverifiable"]
            if different:
                counts["different"] += 1
                print(
                    f"{directory}: episode {different[0]['episode']} differs {different[0]['difference']}", flush=True
                )
            elif problem or unverified:
                counts["not verified"] += 1
                problems.setdefault(problem or unverified[0], []).append(directory.name)
            else:
                counts["identical"] += 1
    print_problems("not verified", problems)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    if report is not None:
        report.write_text(json.dumps(results, indent=1))
    return 3 if counts["different"] else 0


# -- both --------------------------------------------------------------------------------------------------------------


def in_a_process(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """Return what a function returns in a process of its own, and its error, which also is the end of the process."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def run() -> None:
        try:
            answer = function(*arguments), ""
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}".partition("\n")[0]
        sender.send(answer)

    process = fork.Process(target=run)
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(SECONDS) else (None, f"takes longer than {SECONDS} seconds")
    except EOFError:
        process.join()
        result = None, f"its process ended with {process.exitcode}"
    process.kill()
    process.join()
    return result


def print_problems(what: str, problems: dict[str, list[str]]) -> None:
    for problem, names in problems.items():
        print(f"{what}: {problem} ({len(names)}: {', '.join(names[:5])}{', …' * (len(names) > 5)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "verify"))
    parser.add_argument("golden", type=Path)
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--report", type=Path, help="write the verdicts of all episodes as JSON (verify)")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    register(given.packages)
    if given.command == "record":
        sys.exit(record(given.golden, given.packages))
    sys.exit(verify(given.golden, given.packages, given.report))
