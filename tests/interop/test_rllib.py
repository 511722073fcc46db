"""RLlib: BC, MARWIL and CQL train on episodes of a trace, and env runners step recorded environments."""

from __future__ import annotations

import importlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import local_ray
import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.tune.registry import register_env
from scripted_env import bits
from traces import EXAMPLES, recorded, run_example

import gym_trace


@pytest.fixture(scope="module")
def running() -> None:
    """Ray."""
    local_ray.start()


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_example_trains(tmp_path: Path) -> None:
    assert "BC: " in run_example("train_rllib", recorded("CartPole-v1", 20, tmp_path / "trace"))


@pytest.mark.parametrize(
    ("name", "algorithm"), [("CartPole-v1", "BC"), ("CartPole-v1", "MARWIL"), ("Pendulum-v1", "CQL")]
)
def test_its_algorithms_train(
    running: None, name: str, algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    train_rllib = importlib.import_module("train_rllib")
    monkeypatch.setattr(train_rllib, "UPDATES", 3)
    trace = gym_trace.open_trace(recorded(name, 8, tmp_path / "trace"))
    train_rllib.written(trace, tmp_path / "out")
    losses, steps = train_rllib.trained(trace, algorithm, tmp_path / "out")
    assert np.isfinite(losses).all()
    assert 0 < steps <= 2 * 3 * 256


# -- recorded environments --------------------------------------------------------------------------------------------


def test_an_env_runner_steps_recorded_environments(tmp_path: Path) -> None:
    def make(_: Any) -> gym_trace.TraceRecordingWrapper:
        env = gymnasium.make("CartPole-v1")
        return gym_trace.TraceRecordingWrapper(env, tmp_path / "trace", on_exist="append")

    register_env("recorded-cartpole", make)
    config = PPOConfig().environment("recorded-cartpole").env_runners(num_env_runners=0, num_envs_per_env_runner=3)
    runner = SingleAgentEnvRunner(config=config)
    sampled = runner.sample(num_episodes=9, random_actions=True)
    runner.stop()
    recorded = {
        (episode.observations.tobytes(), episode.actions.tobytes(), episode.rewards.tobytes(), episode.outcome)
        for episode in gym_trace.open_trace(tmp_path / "trace")
    }
    for episode in sampled:
        rows = (episode.get_observations(), episode.get_actions().astype(np.int64), episode.get_rewards())
        observations, actions, rewards = (np.asarray(column) for column in rows)
        assert episode.is_terminated
        assert (
            observations.tobytes(),
            actions.tobytes(),
            rewards.astype(np.float64).tobytes(),
            "terminated",
        ) in recorded


# -- many agents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Passing", "Meadow"])
def test_episodes_of_many_agents_are_those_that_ray_collects(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    import agent_envs
    from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv, PettingZooEnv

    from gym_trace.pettingzoo import record

    recorder = record(getattr(agent_envs, kind)(), tmp_path, record_infos=True)
    env = (PettingZooEnv if kind == "Passing" else ParallelPettingZooEnv)(recorder)
    collected = []
    for seed in range(10):
        random = np.random.default_rng(seed)
        observations, infos = env.reset(seed=seed)
        spaces = [{a: space(a) for a in recorder.possible_agents}
                  for space in (recorder.observation_space, recorder.action_space)]  # fmt: skip
        episode = MultiAgentEpisode(observation_space=spaces[0], action_space=spaces[1], len_lookback_buffer=0)
        episode.add_env_reset(observations=deepcopy(observations), infos=infos)
        while not episode.is_done:
            acting = [recorder.agent_selection] if kind == "Passing" else list(recorder.agents)
            actions = {a: random.random(2).astype(np.float32) if "hare" in a else random.integers(3) for a in acting}
            observations, rewards, terminateds, truncateds, infos = env.step(actions)
            if not recorder.agents and not truncateds["__all__"]:
                terminateds["__all__"] = True  # which is what the episode is to Ray too, whose wrapper does not say so
            told = deepcopy([observations, actions, rewards, infos])
            episode.add_env_step(*told, terminateds=terminateds, truncateds=truncateds)
        collected.append(episode.to_numpy())
    env.close()
    found = list(gym_trace.exchange.rllib.episodes(tmp_path))
    for own, other in zip(found, collected, strict=True):
        assert own.env_t == other.env_t
        assert own.agent_episodes.keys() == other.agent_episodes.keys()
        for name in own.agent_episodes:
            assert own.env_t_to_agent_t[name].data == other.env_t_to_agent_t[name].data
            assert state_bits(own.agent_episodes[name]) == state_bits(other.agent_episodes[name])


def state_bits(episode: SingleAgentEpisode) -> Any:
    ends = episode.is_terminated, episode.is_truncated
    told = episode.get_observations(), episode.get_actions(), episode.get_rewards().astype(np.float64)
    return bits([*told, *ends, episode.get_infos()])


def test_an_episode_of_many_agents_that_was_cut_is_truncated(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    import agent_envs

    from gym_trace.pettingzoo import record

    env = record(agent_envs.Passing(), tmp_path)
    env.reset(seed=0)
    for _ in range(3):
        env.step(1)
    env.close()
    (episode,) = gym_trace.exchange.rllib.episodes(tmp_path)
    assert episode.is_truncated
    assert {name: len(own) for name, own in episode.agent_episodes.items()} == {"ann": 1}
