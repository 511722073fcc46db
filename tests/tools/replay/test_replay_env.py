"""Recorded episodes as an environment."""

import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from scripted_env import CountingEnv, bits
from test_verification import record

from gym_trace import ReplayEnv, TraceRecordingWrapper, open_trace
from gym_trace.errors import InvalidOption, ReplayDiverged


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    return record(gymnasium.make("CartPole-v1"), tmp_path, 3, 500, [4, None, 9], record_infos=True)


def test_it_returns_what_was_recorded_bit_for_bit(cartpole: Path) -> None:
    env = ReplayEnv(cartpole)
    for episode in open_trace(cartpole):
        observation, info = env.reset()
        assert bits(observation) == bits(episode.observations[0])
        assert info == episode.reset_info
        for i, action in enumerate(episode.actions):
            observation, reward, terminated, truncated, info = env.step(int(action))
            assert bits(observation) == bits(episode.observations[i + 1])
            assert (reward, terminated, truncated) == (
                episode.rewards[i], bool(episode.terminations[i]), bool(episode.truncations[i])
            )  # fmt: skip
            assert info == episode.infos[i]
        assert terminated or truncated


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "Pendulum-v1"])
def test_gymnasium_finds_nothing_wrong_with_it(tmp_path: Path, env_id: str) -> None:
    record(gymnasium.make(env_id), tmp_path, 5, 500, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(infinity|render|spec|symmetric|flatten).*")
        check_env(ReplayEnv(tmp_path))
        check_env(gymnasium.make("gym_trace.replay_env:Replay-v0", directory=tmp_path).unwrapped)


def test_a_seed_plays_the_episode_that_was_recorded_with_it(cartpole: Path) -> None:
    env = ReplayEnv(cartpole)
    env.reset(seed=9)
    assert env.episode is not None
    assert env.episode.index == 2
    env.reset()
    assert env.episode.index == 0
    env.reset(options={"episode": 1})
    assert env.episode.index == 1
    with pytest.raises(InvalidOption, match="episode 7 cannot be played"):
        env.reset(options={"episode": 7})


def test_a_step_after_the_end_needs_a_reset(cartpole: Path) -> None:
    env = ReplayEnv(cartpole)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset()
    assert env.episode is not None
    for action in env.episode.actions:
        env.step(action)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)


def test_an_episode_that_was_cut_is_truncated_after_its_last_step(tmp_path: Path) -> None:
    recorder = TraceRecordingWrapper(CountingEnv(length=9), tmp_path)
    recorder.reset()
    recorder.step(0)
    recorder.step(0)
    recorder.close()
    env = ReplayEnv(tmp_path)
    env.reset()
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)


def test_another_action_than_recorded_is_dealt_with_as_asked(cartpole: Path) -> None:
    wrong = [1 - action for action in open_trace(cartpole)[0].actions]
    ReplayEnv(cartpole).reset()
    for choice in ("warn", "raise", "truncate", "ignore"):
        env = ReplayEnv(cartpole, on_divergence=choice)
        first, _ = env.reset()
        if choice == "raise":
            with pytest.raises(ReplayDiverged, match="step 0: the action is"):
                env.step(wrong[0])
        elif choice == "warn":
            with pytest.warns(UserWarning, match="step 0: the action is"):
                env.step(wrong[0])
            env.step(wrong[1])  # is said once an episode
        elif choice == "truncate":
            observation, reward, terminated, truncated, info = env.step(wrong[0])
            assert (reward, terminated, truncated, info) == (0.0, False, True, {"diverged": 0})
            assert bits(observation) == bits(first)
        else:
            assert not env.step(wrong[0])[2]
    with pytest.raises(InvalidOption, match="on_divergence"):
        ReplayEnv(cartpole, on_divergence="explode")


def test_actions_that_are_equal_in_another_type_are_as_recorded(tmp_path: Path) -> None:
    record(gymnasium.make("Pendulum-v1", max_episode_steps=3), tmp_path, 1, seeded=0)
    env = ReplayEnv(tmp_path, on_divergence="raise")
    env.reset()
    assert env.episode is not None
    for action in env.episode.actions:
        env.step([float(action[0])])


def test_an_agent_may_change_the_arrays_it_gets(cartpole: Path) -> None:
    env = ReplayEnv(cartpole)
    first, _ = env.reset()
    first[:] = 7
    again, _ = env.reset(options={"episode": 0})
    assert np.abs(again).max() < 1


def test_a_trace_without_steps_cannot_be_played(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    with pytest.raises(InvalidOption, match="no playable episode"):
        ReplayEnv(tmp_path)


AGENT = """
import sys
sys.modules["simulator"] = None  # importing it fails: it is not installed
{imports}
env = gymnasium.make("gym_trace.replay_env:Replay-v0", directory=sys.argv[1], on_divergence="raise")
total, ended = 0.0, False
observation, info = env.reset()
while not ended:
    observation, reward, terminated, truncated, info = env.step(int(observation[0]) % 2)  # the agent
    total, ended = total + reward, terminated or truncated
print(observation.tolist(), total)
"""


@pytest.mark.parametrize("imports", ["import gym_trace, gymnasium", "import gymnasium, gym_trace", "import gymnasium"])
def test_an_agent_runs_against_a_trace_without_the_simulator(tmp_path: Path, imports: str) -> None:
    recorder = TraceRecordingWrapper(CountingEnv(length=4), tmp_path)
    observation, _ = recorder.reset()
    for _ in range(4):
        observation, *_ = recorder.step(int(observation[0]) % 2)
    recorder.close()
    done = subprocess.run(
        [sys.executable, "-c", AGENT.format(imports=imports), tmp_path], capture_output=True, text=True, check=False
    )
    episode = open_trace(tmp_path)[0]
    assert done.stdout.split("] ") == [str(episode.observations[-1].tolist())[:-1], f"{episode.total_reward}\n"], (
        done.stderr
    )
