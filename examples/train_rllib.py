"""Train an offline algorithm of RLlib on a trace: BC, MARWIL, or CQL (Box actions only).

    python examples/train_rllib.py traces/cartpole [BC | MARWIL | CQL]

Needs ray[rllib], torch and msgpack-numpy. Uses at most two processes.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import msgpack_numpy
import ray

import gym_trace

UPDATES = 20


def config_of(algorithm: str, trace: gym_trace.Trace, data: Path) -> Any:
    """Return the configuration of the algorithm, with all work in this process."""
    made = getattr(importlib.import_module(f"ray.rllib.algorithms.{algorithm.lower()}"), f"{algorithm}Config")()
    spaces = {"observation_space": trace.observation_space, "action_space": trace.action_space}
    if algorithm == "CQL":
        made = made.environment(trace.env_spec["id"], **spaces)
        made = made.training(lr=None, actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3)
    else:
        made = made.environment(**spaces)
    return (
        made.env_runners(num_env_runners=0)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=256)
        .offline_data(
            input_=[str(data)],
            input_compress_columns=[],
            input_read_episodes=True,
            input_read_batch_size=16,
            dataset_num_iters_per_learner=UPDATES,
            map_batches_kwargs={"concurrency": 1, "num_cpus": 1},
        )
        .evaluation(evaluation_interval=None)
        .debugging(seed=0)
    )


def written(trace: gym_trace.Trace, data: Path) -> None:
    """Write the episodes as RLlib's own env runners do."""
    states = (episode.get_state() for episode in gym_trace.exchange.rllib.episodes(trace))
    items = [msgpack.packb(state, default=msgpack_numpy.encode) for state in states]
    ray.data.from_items(items).write_parquet(str(data))


def trained(trace: gym_trace.Trace, algorithm: str, data: Path) -> tuple[list[float], int]:
    """Train for two rounds of UPDATES updates; return their losses and the trained steps. Needs a running Ray."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    learner = config_of(algorithm, trace, data).build_algo()
    losses, steps = [], 0
    for _ in range(2):
        told = learner.train()["learners"]["default_policy"]
        losses.append(float(told["total_loss"]))
        steps += int(told["num_module_steps_trained"])
    learner.stop()
    return losses, steps


def main(directory: str, algorithm: str = "BC") -> None:
    trace = gym_trace.open_trace(directory)
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
        try:
            written(trace, Path(folder) / "data")
            losses, steps = trained(trace, algorithm, Path(folder) / "data")
        finally:
            ray.shutdown()
    print(f"{algorithm}: {losses[0]:.4f}, then {losses[1]:.4f}, after {UPDATES} updates each, of {steps} steps in all")


if __name__ == "__main__":
    main(*sys.argv[1:])
