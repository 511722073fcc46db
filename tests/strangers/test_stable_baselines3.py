"""Train Stable-Baselines3 in recorded environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from independent_log import LoggingWrapper, compare, verify

stable_baselines3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from gym_trace import TraceRecordingWrapper, open_trace  # noqa: E402

LEARNERS = [
    ("PPO", "CartPole-v1"),
    ("A2C", "CartPole-v1"),
    ("DQN", "CartPole-v1"),
    ("SAC", "Pendulum-v1"),
    ("TD3", "Pendulum-v1"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "PPO": {"n_steps": 128}, "DQN": {"learning_starts": 50}, "SAC": {"learning_starts": 100, "train_freq": 20},
    "TD3": {"learning_starts": 100, "train_freq": 20},
}  # fmt: skip


@pytest.mark.parametrize(("learner", "name"), LEARNERS)
def test_learning(tmp_path: Path, learner: str, name: str) -> None:
    env = LoggingWrapper(TraceRecordingWrapper(gymnasium.make(name), tmp_path, record_infos=True))
    model = getattr(stable_baselines3, learner)("MlpPolicy", env, seed=5, **SETTINGS.get(learner, {}))
    model.learn(300)
    env.close()
    assert compare(env.log, tmp_path).steps >= 300
    verify(tmp_path, None)


def test_monitor_below_and_vector_wrappers_above(tmp_path: Path) -> None:
    made: list[LoggingWrapper] = []

    def make() -> Any:
        env = Monitor(gymnasium.make("CartPole-v1"))
        made.append(LoggingWrapper(TraceRecordingWrapper(env, tmp_path / str(len(made)), record_infos=True)))
        return made[-1]

    envs = VecFrameStack(VecNormalize(DummyVecEnv([make, make])), 3)
    stable_baselines3.PPO("MlpPolicy", envs, seed=5, n_steps=64).learn(256)
    envs.close()
    for number, env in enumerate(made):
        assert compare(env.log, tmp_path / str(number)).steps >= 128
        verify(tmp_path / str(number), lambda: gymnasium.make("CartPole-v1"), ignore=("infos",))


def test_make_vec_env_and_monitors_around(tmp_path: Path) -> None:
    made: list[LoggingWrapper] = []

    def wrap(env: Any) -> Any:
        made.append(LoggingWrapper(TraceRecordingWrapper(env, tmp_path / str(len(made)), record_infos=True)))
        return made[-1]

    envs = VecMonitor(make_vec_env("CartPole-v1", 3, seed=5, wrapper_class=wrap))
    model = stable_baselines3.PPO("MlpPolicy", envs, seed=5, n_steps=32)
    model.learn(192)
    assert envs.env_is_wrapped(TraceRecordingWrapper) == [True] * 3
    assert envs.get_attr("directory") == [tmp_path / str(number) for number in range(3)]
    evaluate_policy(model, envs, 3)
    envs.close()
    for number, env in enumerate(made):
        assert compare(env.log, tmp_path / str(number)).steps >= 64


class Processes:
    """Make an environment in a worker process; all workers record into one directory."""

    def __init__(self, directory: Path):
        self.directory = directory

    def __call__(self) -> Any:
        return TraceRecordingWrapper(gymnasium.make("CartPole-v1"), self.directory, on_exist="append")


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_subproc_vec_env(tmp_path: Path, start: str) -> None:
    envs = SubprocVecEnv([Processes(tmp_path)] * 2, start_method=start)
    stable_baselines3.PPO("MlpPolicy", envs, seed=5, n_steps=64).learn(256)
    envs.close()
    trace = open_trace(tmp_path)
    assert int(trace.episodes["steps"].sum()) == 256
    assert "lost" not in trace.episodes["outcome"]
    verify(tmp_path, None)
