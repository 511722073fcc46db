"""Workloads: environments and the loops that step them.

This file and the contestants run in every interpreter of a contestant, some without gymnasium: it is imported lazily.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Workload(NamedTuple):
    """An environment, and the number of steps to record.

    Attributes:
        steps: for gym-trace, at most some seconds; of all lanes together.
        images: the size of observations dominates.
        lanes: number of sub-environments; 0 for a single environment.
    """

    name: str
    title: str
    make: Callable[[], Any]
    steps: int
    images: bool = False
    lanes: int = 0

    def actions(self, env: Any, steps: int) -> list[Any]:
        """Return the same actions on every call, sampled in advance, so that sampling is not measured."""
        if self.lanes:
            random = np.random.default_rng(0)
            return [random.integers(0, 2, self.lanes) for _ in range(max(1, steps // self.lanes))]
        env.action_space.seed(0)
        return [env.action_space.sample() for _ in range(steps)]


def run(env: Any, actions: Any) -> None:
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()


def run_lanes(envs: Any, actions: Any) -> None:
    for action in actions:
        envs.step(action)


def preload() -> None:
    """Import the installed packages of the environments."""
    modules = {"gymnasium": "gymnasium.wrappers", "mujoco": "gymnasium.envs.mujoco"}
    for package in ("gymnasium", "mujoco", "cv2", "ale_py", "minigrid"):
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(modules.get(package, package))


# -- environments -----------------------------------------------------------------------------------------------------


def _made(env_id: str, **options: Any) -> Any:
    import gymnasium

    if env_id.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
    if env_id.startswith("MiniGrid"):
        import minigrid

        gymnasium.register_envs(minigrid)
    return gymnasium.make(env_id, **options)


def _stacked_pong() -> Any:
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(_made("ALE/Pong-v5", frameskip=1)), 4)


def _cartpoles(count: int, mode: str) -> Any:
    import gymnasium

    return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode=mode)


def _sampled() -> Any:
    from environments import SampledFrames
    from gymnasium.vector import SyncVectorEnv

    return SyncVectorEnv([SampledFrames] * 64)


def _noise() -> Any:
    from environments import NoiseEnvs

    return NoiseEnvs(64)


def _blink() -> Any:
    from environments import BlinkEnv

    return BlinkEnv()


SINGLE = [
    Workload("cartpole", "CartPole-v1", lambda: _made("CartPole-v1"), 400_000),
    Workload("halfcheetah", "HalfCheetah-v5", lambda: _made("HalfCheetah-v5"), 120_000),
    Workload("pong", "ALE/Pong-v5, raw RGB (210 x 160 x 3)", lambda: _made("ALE/Pong-v5"), 10_000, True),
    Workload("breakout", "ALE/Breakout-v5, raw RGB (210 x 160 x 3)", lambda: _made("ALE/Breakout-v5"), 4_000, True),
    Workload("pong-stack", "ALE/Pong-v5, 84 x 84 grey, 4 frames stacked", _stacked_pong, 3_000, True),
    Workload("minigrid", "MiniGrid-Empty-8x8-v0, Dict with text", lambda: _made("MiniGrid-Empty-8x8-v0"), 15_000),
]
VECTOR = [
    Workload(
        "cartpole-x1024", "1,024 CartPoles, one vectorized environment",
        lambda: _cartpoles(1024, "vector_entry_point"), 12_000 * 1024, lanes=1024,
    ),
    Workload("cartpole-x16", "16 CartPoles, SyncVectorEnv", lambda: _cartpoles(16, "sync"), 24_000 * 16, lanes=16),
    Workload(
        "frames-x64", "64 environments of random frames, 84 x 84 x 4, SyncVectorEnv", _sampled, 100 * 64,
        images=True, lanes=64,
    ),
    Workload("noise-x64", "64 lanes of noise, 84 x 84 x 4, made at once", _noise, 100 * 64, images=True, lanes=64),
]  # fmt: skip
BLINK = Workload("blink", "episodes of one and two steps", _blink, 0)
WORKLOADS = {workload.name: workload for workload in [*SINGLE, *VECTOR, BLINK]}
