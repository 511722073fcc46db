"""Sample Factory's asynchronous PPO (APPO), with the same processes and lanes as the others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from trainers import Job, Progress, make

PACKAGES = ("sample-factory", "torch", "gymnasium")


def make_for(full_env_name: str, cfg: Any = None, env_config: Any = None, render_mode: Any = None) -> Any:
    return make(full_env_name)


def train(job: Job, progress: Progress) -> None:
    register_env(job.environment, make_for)
    batch = job.rollout * job.lanes
    options = {
        "env": job.environment,
        "experiment": "run",
        "train_dir": str(Path(job.directory)),
        "device": "cpu",
        "seed": job.seed,
        "num_workers": job.workers,
        "num_envs_per_worker": job.lanes // job.workers,
        "worker_num_splits": 2,
        "num_policies": 1,
        "rollout": job.rollout,
        "batch_size": batch // job.minibatches,
        "num_batches_per_epoch": job.minibatches,
        "num_epochs": job.epochs,
        "train_for_env_steps": job.steps,
        "learning_rate": job.learning_rate,
        "gamma": job.gamma,
        "gae_lambda": job.lam,
        "exploration_loss_coeff": job.entropy,
        "encoder_mlp_layers": (64, 64),
        "nonlinearity": "tanh",
        "use_rnn": False,
        "normalize_input": True,
        "normalize_returns": True,
        "actor_critic_share_weights": False,
        "save_every_sec": 3600,
        "with_wandb": False,
    }
    argv = [f"--{name}={value}" for name, value in options.items() if not isinstance(value, tuple)]
    argv += ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv)
    cfg = parse_full_cfg(parser, argv)
    cfg, runner = make_runner(cfg)
    runner.init()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            progress.record(sum(runner.env_steps.values()), None)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        status = runner.run()
    finally:
        over.set()
        watcher.join()
    if status:
        raise RuntimeError(f"Sample Factory: failed with status {status}")
