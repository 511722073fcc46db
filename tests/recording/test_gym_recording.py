"""Code written for gym_recording runs when one word is changed: its README's example, and its own test of it."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from gym_trace.playback import trace as playback
from gym_trace.playback.trace import scan_recorded_traces
from gym_trace.recording.single.wrapper import TraceRecordingWrapper


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def ten_episodes(env: Any) -> list[tuple[int, float]]:
    """Ten episodes of at most 100 random steps each; for each its steps and its return."""
    env.action_space.seed(1)
    taken = []
    for episode in range(10):
        observation, _ = env.reset(seed=episode)
        steps, total = 0, 0.0
        for _ in range(100):
            assert env.observation_space.contains(observation)
            action = env.action_space.sample()
            assert env.action_space.contains(action)
            observation, reward, terminated, truncated, _ = env.step(action)
            steps, total = steps + 1, total + reward
            if terminated or truncated:
                break
        taken.append((steps, total))
    env.close()
    return taken


def test_trace_recording() -> None:
    env = TraceRecordingWrapper(gym.make("CartPole-v1"))
    directory = env.directory
    taken = ten_episodes(env)

    counted = []

    def handle_ep(observations: Any, actions: Any, rewards: Any) -> None:
        assert observations.shape == (len(actions) + 1, 4)
        assert observations.dtype == np.float32
        assert actions.shape == rewards.shape
        counted.append((len(actions), float(rewards.sum())))

    scan_recorded_traces(directory, handle_ep)
    assert len(counted) == 10
    assert counted == taken


def test_the_directory_can_be_given_and_is_used(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gym.make("CartPole-v1"), str(tmp_path / "traces"))
    taken = ten_episodes(env)
    assert Path(env.directory) == tmp_path / "traces"
    steps = []
    playback.scan_recorded_traces(
        str(tmp_path / "traces"), lambda observations, actions, rewards: steps.append(len(actions))
    )
    assert steps == [count for count, _ in taken]
    assert playback.scan_recorded_traces(env.directory, episode_cb=None) == 10


def test_the_modules_of_gym_recording_are_there_under_their_names() -> None:
    from gym_trace.playback import trace as playback
    from gym_trace.recording.single import episodes as recording
    from gym_trace.recording.single import wrapper as wrappers

    assert callable(playback.scan_recorded_traces)
    assert issubclass(wrappers.TraceRecordingWrapper, gym.Wrapper)
    assert recording.__doc__
