"""Stable-Baselines3's PPO, with the settings of a job or with its own."""

from __future__ import annotations

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from trainers import Job, Progress

PACKAGES = ("stable-baselines3", "torch", "gymnasium")


class Marking(BaseCallback):
    """Reports each update when the next rollout starts."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def _on_rollout_start(self) -> None:
        last = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        self._progress.record(self.num_timesteps, sum(last) / 100 if len(last) == 100 else None)

    def _on_training_end(self) -> None:
        self._progress.record(self.num_timesteps + 1, None)

    def _on_step(self) -> bool:
        return self._progress.reached is None


def train(job: Job, progress: Progress, defaults: bool = False) -> None:
    if defaults:
        one = PPO("MlpPolicy", job.make_env(), seed=job.seed, device="cpu")
        one.learn(job.steps, callback=Marking(progress))
        return
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([job.make_env] * job.lanes),
        learning_rate=job.learning_rate,
        n_steps=job.rollout,
        batch_size=job.rollout * job.lanes // job.minibatches,
        n_epochs=job.epochs,
        gamma=job.gamma,
        gae_lambda=job.lam,
        clip_range=job.clip,
        ent_coef=job.entropy,
        seed=job.seed,
        device="cpu",
    )
    model.learn(job.steps, callback=Marking(progress))
