"""Gymnasium's own environments and wrappers, single and vector."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import wrappers
from gymnasium.utils import RecordConstructorArgs
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as vector_wrappers
from independent_log import LoggingVectorWrapper, LoggingWrapper, compare, record_single, record_vector, verify

from gym_trace import TraceRecordingVectorWrapper, TraceRecordingWrapper

ENVIRONMENTS = [
    "Acrobot-v1", "Blackjack-v1", "CartPole-v1", "CliffWalking-v1", "FrozenLake-v1", "MountainCar-v0",
    "MountainCarContinuous-v0", "Pendulum-v1", "Taxi-v4", "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5",
    "HumanoidStandup-v5", "InvertedDoublePendulum-v5", "InvertedPendulum-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5",
    "Walker2d-v5",
]  # fmt: skip
MODES = list(AutoresetMode)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_single(tmp_path: Path, name: str) -> None:
    record_single(lambda: gymnasium.make(name), tmp_path)
    verify(tmp_path, None)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1", "HalfCheetah-v5"])
def test_vector(tmp_path: Path, name: str, way: str, mode: Any) -> None:
    options = {"autoreset_mode": mode}
    record_vector(lambda: gymnasium.make_vec(name, 3, way, vector_kwargs=options), tmp_path)
    verify(tmp_path, None)


def test_vectorized_cartpole(tmp_path: Path) -> None:
    record_vector(lambda: gymnasium.make_vec("CartPole-v1", 5, "vector_entry_point"), tmp_path)


def pixels() -> Any:
    return gymnasium.make("CartPole-v1", render_mode="rgb_array")


SINGLE_WRAPPERS = {
    "AddRenderObservation": lambda: wrappers.AddRenderObservation(pixels(), render_only=True),
    "AddRenderObservation beside": lambda: wrappers.AddRenderObservation(pixels(), render_only=False),
    "ClipAction": lambda: wrappers.ClipAction(gymnasium.make("Pendulum-v1")),
    "ClipReward": lambda: wrappers.ClipReward(gymnasium.make("Pendulum-v1"), -1.0, 1.0),
    "DelayObservation": lambda: wrappers.DelayObservation(gymnasium.make("CartPole-v1"), 2),
    "DiscretizeAction": lambda: wrappers.DiscretizeAction(gymnasium.make("Pendulum-v1"), 5),
    "DtypeObservation": lambda: wrappers.DtypeObservation(gymnasium.make("CartPole-v1"), np.float16),
    "FilterObservation": lambda: wrappers.FilterObservation(
        wrappers.AddRenderObservation(pixels(), render_only=False), ["state"]
    ),
    "FlattenObservation": lambda: wrappers.FlattenObservation(gymnasium.make("Blackjack-v1")),
    "FrameStackObservation": lambda: wrappers.FrameStackObservation(gymnasium.make("CartPole-v1"), 4),
    "GrayscaleObservation": lambda: wrappers.GrayscaleObservation(wrappers.AddRenderObservation(pixels())),
    "MaxAndSkipObservation": lambda: wrappers.MaxAndSkipObservation(gymnasium.make("CartPole-v1")),
    "NormalizeObservation": lambda: wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")),
    "NormalizeReward": lambda: wrappers.NormalizeReward(gymnasium.make("CartPole-v1")),
    "RecordEpisodeStatistics": lambda: wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1")),
    "RescaleAction": lambda: wrappers.RescaleAction(gymnasium.make("Pendulum-v1"), np.float32(-1), np.float32(1)),
    "RescaleObservation": lambda: wrappers.RescaleObservation(
        gymnasium.make("MountainCarContinuous-v0"), np.float32(-1), np.float32(1)
    ),
    "ReshapeObservation": lambda: wrappers.ReshapeObservation(gymnasium.make("CartPole-v1"), (2, 2)),
    "StickyAction": lambda: wrappers.StickyAction(gymnasium.make("CartPole-v1"), 0.3),
    "TimeAwareObservation": lambda: wrappers.TimeAwareObservation(gymnasium.make("CartPole-v1")),
    "TimeLimit": lambda: wrappers.TimeLimit(gymnasium.make("CartPole-v1"), 7),
    "TransformObservation": lambda: wrappers.TransformObservation(
        gymnasium.make("CartPole-v1"), lambda observation: observation * 2, None
    ),
    "TransformReward": lambda: wrappers.TransformReward(gymnasium.make("CartPole-v1"), lambda reward: reward / 3),
}
REMEMBERS = {"NormalizeObservation", "NormalizeReward", "RecordEpisodeStatistics", "StickyAction"}


@pytest.mark.parametrize("name", SINGLE_WRAPPERS)
def test_wrapper(tmp_path: Path, name: str) -> None:
    record_single(SINGLE_WRAPPERS[name], tmp_path)
    if name not in REMEMBERS:  # running means span episodes; times come from the clock
        verify(tmp_path, SINGLE_WRAPPERS[name])


def test_numpy_to_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    make = lambda: wrappers.NumpyToTorch(gymnasium.make("Pendulum-v1"))  # noqa: E731
    record_single(make, tmp_path, act=lambda env, _: torch.tensor(env.unwrapped.action_space.sample()))
    verify(tmp_path, lambda: gymnasium.make("Pendulum-v1"))


def test_a_jax_environment(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    from gymnasium.envs.phys2d.cartpole import CartPoleJaxEnv

    record_single(lambda: wrappers.JaxToNumpy(CartPoleJaxEnv()), tmp_path, steps=40)


def cartpoles(mode: Any = AutoresetMode.NEXT_STEP) -> Any:
    return gymnasium.make_vec("CartPole-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode})


def pendulums(mode: Any) -> Any:
    return gymnasium.make_vec("Pendulum-v1", 3, "sync", vector_kwargs={"autoreset_mode": mode})


VECTOR_WRAPPERS = {
    "DictInfoToList": lambda mode: vector_wrappers.DictInfoToList(cartpoles(mode)),
    "RecordEpisodeStatistics": lambda mode: vector_wrappers.RecordEpisodeStatistics(cartpoles(mode)),
    "NormalizeObservation": lambda mode: vector_wrappers.NormalizeObservation(cartpoles(mode)),
    "NormalizeReward": lambda mode: vector_wrappers.NormalizeReward(cartpoles(mode)),
    "ClipAction": lambda mode: vector_wrappers.ClipAction(pendulums(mode)),
    "ClipReward": lambda mode: vector_wrappers.ClipReward(pendulums(mode), -1.0, 1.0),
    "DtypeObservation": lambda mode: vector_wrappers.DtypeObservation(cartpoles(mode), np.float64),
    "FlattenObservation": lambda mode: vector_wrappers.FlattenObservation(cartpoles(mode)),
    "RescaleAction": lambda mode: vector_wrappers.RescaleAction(pendulums(mode), np.float32(-1), np.float32(1)),
    "ReshapeObservation": lambda mode: vector_wrappers.ReshapeObservation(cartpoles(mode), (2, 2)),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", VECTOR_WRAPPERS)
def test_vector_wrapper(tmp_path: Path, name: str, mode: Any) -> None:
    try:
        VECTOR_WRAPPERS[name](mode).close()
    except (AssertionError, ValueError) as error:
        pytest.skip(f"Gymnasium refuses it: {error}")
    record_vector(lambda: VECTOR_WRAPPERS[name](mode), tmp_path)


TENSORS = {
    "NumpyToTorch": lambda envs: vector_wrappers.NumpyToTorch(envs),
    "ArrayConversion": lambda envs: vector_wrappers.ArrayConversion(envs, env_xp=np, target_xp=sys.modules["torch"]),
}


@pytest.mark.parametrize("mode", MODES[:1] + MODES[2:], ids=lambda mode: mode.value)
@pytest.mark.parametrize("infos", [False, True], ids=["bare", "statistics"])
@pytest.mark.parametrize("name", TENSORS)
def test_vector_of_tensors(tmp_path: Path, name: str, infos: bool, mode: Any) -> None:
    """Skip same-step autoreset: Gymnasium cannot convert its final observations to tensors."""
    torch = pytest.importorskip("torch")

    def make() -> Any:
        envs = cartpoles(mode)
        return TENSORS[name](vector_wrappers.RecordEpisodeStatistics(envs) if infos else envs)

    record_vector(make, tmp_path, act=lambda env: torch.tensor([0, 1, env.log.steps // 3 % 2]))


@pytest.mark.parametrize("target", ["NumPy", "PyTorch"])
def test_vector_of_jax(tmp_path: Path, target: str) -> None:
    """A JAX environment under a wrapper that converts to NumPy or PyTorch."""
    pytest.importorskip("jax")
    torch = pytest.importorskip("torch")
    from gymnasium.envs.phys2d.cartpole import CartPoleJaxVectorEnv

    def make() -> Any:
        envs = CartPoleJaxVectorEnv(num_envs=3, max_episode_steps=20)
        return vector_wrappers.JaxToNumpy(envs) if target == "NumPy" else vector_wrappers.JaxToTorch(envs)

    def act(env: Any) -> Any:
        actions = np.array([0, 1, env.log.steps // 3 % 2])
        return actions if target == "NumPy" else torch.tensor(actions)

    record_vector(make, tmp_path, act=act)


class Checked(LoggingWrapper, RecordConstructorArgs):
    """A log wrapper with constructor arguments: check_env rebuilds the environment from those of each wrapper."""

    def __init__(self, env: Any):
        RecordConstructorArgs.__init__(self)
        LoggingWrapper.__init__(self, env)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1"])
def test_check_env_passes_on_a_recorded_environment(tmp_path: Path, name: str) -> None:
    inner = Checked(gymnasium.make(name))
    env = TraceRecordingWrapper(inner, tmp_path, record_infos=True)
    check_env(env, skip_render_check=True)
    env.close()
    assert compare(inner.log, tmp_path).episodes >= 5


def test_the_wrappers_that_cleanrl_uses(tmp_path: Path) -> None:
    inner = LoggingWrapper(
        TraceRecordingWrapper(
            wrappers.RecordEpisodeStatistics(wrappers.FlattenObservation(gymnasium.make("Pendulum-v1"))),
            tmp_path,
            record_infos=True,
        )
    )
    env = wrappers.NormalizeReward(wrappers.NormalizeObservation(wrappers.ClipAction(inner)))
    envs = SyncVectorEnv([lambda: env])
    envs.action_space.seed(7)
    envs.reset(seed=1)
    for _ in range(450):
        envs.step(envs.action_space.sample())
    envs.close()
    assert compare(inner.log, tmp_path).steps == 448  # two of the 450 steps are autoresets
    verify(tmp_path, None, ignore=("infos",))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_vector_statistics_above_and_below_the_recorder(tmp_path: Path, mode: Any) -> None:
    below = vector_wrappers.RecordEpisodeStatistics(cartpoles(mode), stats_key="below")
    inner = LoggingVectorWrapper(TraceRecordingVectorWrapper(below, tmp_path, record_infos=True))
    env = vector_wrappers.RecordEpisodeStatistics(inner)
    env.action_space.seed(7)
    env.reset(seed=2)
    for _ in range(60):
        _, _, terminations, truncations, _ = env.step(env.action_space.sample())
        over = terminations | truncations
        if mode == AutoresetMode.DISABLED and over.any():
            env.reset(options={"reset_mask": over})
    env.close()
    assert compare(inner.log, tmp_path).steps >= 150
