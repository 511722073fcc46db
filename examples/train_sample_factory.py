"""Record an APPO run of Sample Factory on CartPole-v1, and compare the trace with what Sample Factory reports.

    python examples/train_sample_factory.py [traces/appo] [--steps 200000] [--no-record]

Needs an environment of its own: pip install gym-trace sample-factory==2.1.1 (Gymnasium 0.29, NumPy 1).
Two workers step eight environments each. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections import Counter
from typing import Any

import gymnasium
from sample_factory.algo.utils.misc import EPISODIC, ExperimentStatus
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

import gym_trace
from gym_trace.recording import take_in_rings

ARGUMENTS = [
    "--env=CartPole-v1",
    "--experiment=cartpole",
    "--device=cpu",
    "--num_workers=2",
    "--num_envs_per_worker=8",
    "--rollout=32",
    "--batch_size=512",
    "--use_rnn=False",
    "--recurrence=1",
    "--with_vtrace=False",
    "--normalize_input=False",
    "--serial_mode=False",
    "--decorrelate_envs_on_one_worker=False",  # or its first episodes are reported without their first steps
    "--save_every_sec=1000",
]


def make_env(name: str, cfg: Any = None, env_config: Any = None, render_mode: str | None = None) -> gymnasium.Env:
    return gymnasium.make(name, render_mode=render_mode)


def train(steps: int, folder: str) -> tuple[list[tuple[int, float]], float]:
    """Return the length and return of each episode that Sample Factory reports, and the seconds of the run."""
    words = [*ARGUMENTS, f"--train_for_env_steps={steps}", f"--train_dir={folder}"]
    parser, _ = parse_sf_args(argv=words)
    reported: list[tuple[int, float]] = []

    def hear(runner: Any, message: dict[str, Any], policy: int) -> None:
        stats = message[EPISODIC]
        reported.append((int(stats["len"]), float(stats["reward"])))

    _, runner = make_runner(parse_full_cfg(parser, words))
    runner.register_episodic_stats_handler(hear)
    assert runner.init() == ExperimentStatus.SUCCESS
    begin = time.monotonic()
    assert runner.run() == ExperimentStatus.SUCCESS
    return reported, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", default="traces/appo")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--no-record", action="store_true")
    given = parser.parse_args()
    register_env("CartPole-v1", make_env)
    if not given.no_record:
        gym_trace.exchange.sample_factory.record(given.directory)
    folder = tempfile.mkdtemp()
    try:
        reported, seconds = train(given.steps, folder)
    finally:
        shutil.rmtree(folder)
    cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    result: dict[str, Any] = {"seconds": seconds, "cpu": cpu, "reported": len(reported)}
    if not given.no_record:
        take_in_rings(given.directory)
        table = gym_trace.open_trace(given.directory).episodes
        ended = table[(table["outcome"] == "terminated") | (table["outcome"] == "truncated")]
        recorded = Counter(zip(ended["steps"].tolist(), ended["return"].tolist()))
        missing = Counter(reported) - recorded
        result |= {"recorded": len(ended), "steps": int(table["steps"].sum()), "missing": sum(missing.values())}
        result |= {"writers": len(gym_trace.open_trace(given.directory).writers)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
