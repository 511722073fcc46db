"""env_at: the environment in the state that it had at a recorded step."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import TransformReward
from long_tests import LONG
from scripted_env import Result, ToyEnv
from test_verification import PLAIN, Forgetful, Whimsical, needs_vectors, record
from vector_wrapper import TraceRecordingVectorWrapper

import gym_trace
from gym_trace import Trace, open_trace
from gym_trace.data.values import row_of
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.playback.episode_index import index_of
from gym_trace.tools.replay.compare import Comparison, EpisodeComparison
from gym_trace.tools.replay.resimulate import Verdict

PACKAGES = {
    **dict.fromkeys(("LunarLander-v3", "BipedalWalker-v3"), "Box2D"),
    **dict.fromkeys(("HalfCheetah-v5", "Humanoid-v5"), "mujoco"),
    "ALE/Pong-v5": "ale_py",
    "MiniGrid-DoorKey-5x5-v0": "minigrid",
}
IDS = list(dict.fromkeys([*PLAIN, "Acrobot-v1", "Taxi-v4", *PACKAGES]))


def goes_on_as_recorded(trace: Trace, index: int, step: int, **options: Any) -> None:
    """Assert that the environment continues as recorded, from a step to the end of the episode."""
    episode, layouts = trace[index], index_of(trace).locate(index)[0].about.layouts
    compared = EpisodeComparison(Comparison(ignore=["infos"]), episode, layouts)
    env = gym_trace.env_at(trace, index, step, **options)
    for now in range(step, len(episode)):
        assert compared.step(now, *env.step(row_of(episode.actions, now))) is None
    env.close()


@pytest.mark.parametrize("env_id", IDS)
def test_the_environment_goes_on_as_recorded_from_any_step(env_id: str, tmp_path: Path) -> None:
    package = PACKAGES.get(env_id)
    if package is not None:
        pytest.importorskip(package)
    if env_id not in gymnasium.registry:
        pytest.skip(f"no {env_id} here")
    episodes = 1 if package == "ale_py" and not LONG else 3
    path = record(gymnasium.make(env_id), tmp_path / "trace", episodes)
    trace, random = open_trace(path), np.random.default_rng(1)
    for index in range(len(trace)):
        steps = len(trace[index])
        for step in {0, steps, *random.integers(0, steps + 1, 2).tolist()}:
            goes_on_as_recorded(trace, index, step)


def test_an_unseeded_episode_is_reached_through_its_generator(tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("CartPole-v1"), tmp_path / "trace", 5, seeded=0))
    goes_on_as_recorded(trace, 4, 7)
    goes_on_as_recorded(trace, -1, 0)


class Counting(ToyEnv):
    """Counts its episodes, and shows the number only from the tenth step on."""

    observation_space, action_space = gymnasium.spaces.Box(0, 99, (1,)), gymnasium.spaces.Discrete(2)

    def result(self, action: Any) -> Result:
        return Result(np.full(1, self.episode + 1 if self.t >= 10 else 0, np.float32), 0.0, self.t >= 20)


def test_env_at_carries_over_what_an_earlier_episode_left_before_it_shows(tmp_path: Path) -> None:
    trace = open_trace(record(Counting(), tmp_path / "trace", 4, seeded=[0, 1, 2, 3]))
    assert (trace.episodes["seed"] >= 0).all()
    env = gym_trace.env_at(trace, 3, 5, make_env=Counting)
    assert (env.unwrapped.episode, env.unwrapped.t) == (3, 5)  # type: ignore[attr-defined]
    goes_on_as_recorded(trace, 3, 5, make_env=Counting)


@needs_vectors
def test_a_lane_becomes_a_single_environment(tmp_path: Path) -> None:
    envs = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 3)
    recorder = TraceRecordingVectorWrapper(envs, tmp_path / "trace")
    recorder.action_space.seed(2)
    recorder.reset(seed=4)
    for _ in range(120):
        recorder.step(recorder.action_space.sample())
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    for index in range(0, len(trace), 2):
        goes_on_as_recorded(trace, index, len(trace[index]) // 2)


def test_an_episode_of_a_view_is_counted_in_the_view(tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("CartPole-v1"), tmp_path / "trace", 4, seeded=0))
    goes_on_as_recorded(trace[[3, 1]], 1, 5)


def test_the_environment_has_the_render_mode_that_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    trace = open_trace(record(gymnasium.make("CartPole-v1"), tmp_path / "trace", 1))
    env = gym_trace.env_at(trace, 0, 3, render_mode="rgb_array")
    picture: Any = env.render()
    assert picture.shape == (400, 600, 3)
    env.close()


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1")
    trace = open_trace(record(TransformReward(env, lambda reward: reward), tmp_path / "trace", 1))

    def changed() -> Any:
        return TransformReward(gymnasium.make("CartPole-v1"), lambda reward: 2 * reward)

    with pytest.raises(ReplayDiverged, match=r"^episode 0: .* at step 0, rewards: recorded 1.0, seen 2.0$"):
        gym_trace.env_at(trace, 0, 5, make_env=changed)
    with pytest.warns(
        UserWarning, match=r"^episode 0: it matches before step 0, but .* at step 0, rewards: recorded 1.0"
    ):
        env = gym_trace.env_at(trace, 0, 0, make_env=changed)
    assert verdict_of(env).difference is not None
    env.close()


def verdict_of(env: Any) -> Verdict:
    verdict: Verdict = env.replay_verdict
    return verdict


class Secretive(Counting):
    """Draws a number that no seed restores, and shows it only from the tenth step on."""

    drawn = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        Secretive.drawn += 1
        told = super().reset(seed=seed)
        self.episode = Secretive.drawn
        return told


def test_a_difference_after_the_step_warns_and_is_an_attribute(tmp_path: Path) -> None:
    trace = open_trace(record(Secretive(), tmp_path / "trace", 4, seeded=[0, 1, 2, 3]))
    for index in range(4):
        with pytest.warns(
            UserWarning, match=rf"^episode {index}: it matches before step 5, but .* differs .* at step 9"
        ):
            env = gym_trace.env_at(trace, index, 5, make_env=Secretive)
        verdict = verdict_of(env)
        assert (verdict.verdict, verdict.index) == ("differs", index)
        assert verdict.difference is not None
        assert verdict.difference.step == 9
        with pytest.raises(
            ReplayDiverged, match=rf"^episode {index}: the replay differs .* at step 9, .*not determini"
        ):
            gym_trace.env_at(trace, index, 10, make_env=Secretive)
        with pytest.warns(UserWarning, match=rf"^episode {index}: it matches before step 5, but .* differs"):
            gym_trace.branch(trace, index, 5, directory=tmp_path / f"if-{index}", episodes=2, make_env=Secretive)


def test_env_at_and_branch_skip_the_columns_that_verify_skips(tmp_path: Path) -> None:
    trace = open_trace(record(Whimsical(length=9), tmp_path / "trace", 2, seeded=[0, 1], record_infos=True))
    with pytest.raises(ReplayDiverged, match="at the reset, infos/whim"):
        gym_trace.env_at(trace, 1, 5, make_env=lambda: Whimsical(length=9))
    options: Any = {"make_env": lambda: Whimsical(length=9), "ignore": ["infos"]}
    env = gym_trace.env_at(trace, 1, 5, **options)
    assert verdict_of(env).verdict == "identical"
    gym_trace.branch(trace, 1, 5, directory=tmp_path / "if", episodes=1, **options)
    with pytest.raises(InvalidOption, match=r"^ignore: unknown column 'info'"):
        gym_trace.env_at(trace, 1, 5, ignore=["info"])


def test_env_at_keeps_a_difference_within_the_tolerance(tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("Pendulum-v1", g=10.0), tmp_path / "trace", 1, steps=5))
    changed = {"g": 10.0 + 1e-6}
    with pytest.raises(ReplayDiverged):
        gym_trace.env_at(trace, 0, 3, env_kwargs=changed)
    assert verdict_of(gym_trace.env_at(trace, 0, 3, env_kwargs=changed, atol=1e-3)).verdict == "close"
    with pytest.raises(ReplayDiverged, match="rewards"):
        gym_trace.env_at(trace, 0, 3, env_kwargs=changed, tolerances={"observations": 1e-3})


def test_an_episode_that_replays_stands_with_its_verdict(tmp_path: Path) -> None:
    trace = open_trace(record(Counting(), tmp_path / "trace", 4, seeded=[0, 1, 2, 3]))
    env = gym_trace.env_at(trace[2:], 1, 5, make_env=Counting)
    assert (verdict_of(env).verdict, verdict_of(env).index, verdict_of(env).needed) == ("identical", 1, 3)


def test_an_environment_that_no_replay_repeats_diverges(tmp_path: Path) -> None:
    trace = open_trace(record(Forgetful(length=9), tmp_path / "trace", 1))
    with pytest.raises((ReplayDiverged, EnvironmentUnavailable), match=r"^episode 0: "):
        gym_trace.env_at(trace, 0, 5, make_env=lambda: Forgetful(length=9))


@pytest.mark.parametrize("step", [-1, 61, 10**9])
def test_a_step_that_was_not_recorded_is_rejected(step: int, tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("Pendulum-v1"), tmp_path / "trace", 1))
    with pytest.raises(InvalidOption, match=rf"^step={step}: episode 0 has 60 steps; pass 0 to 60$"):
        gym_trace.env_at(trace, 0, step)
    with pytest.raises(IndexError):
        gym_trace.env_at(trace, 1, 0)


def test_filtered_steps_cannot_be_repeated(tmp_path: Path) -> None:
    path = record(gymnasium.make("Pendulum-v1"), tmp_path / "trace", 1, frame_filter=lambda step: step > 3)
    trace = open_trace(path)
    with pytest.raises(EnvironmentUnavailable, match=r"^episode 0: cannot be replayed: earlier steps were filtered"):
        gym_trace.env_at(trace, 0, 5)


@pytest.mark.parametrize("step", [1.5, True, None, "3"])
def test_a_wrong_step_or_episode_raises_an_error_that_names_it(step: Any, tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("Pendulum-v1"), tmp_path / "trace", 1))
    with pytest.raises(InvalidOption, match=r"^step=.*: pass a whole number, 0 to 60$"):
        gym_trace.env_at(trace, 0, step)
    with pytest.raises(IndexError, match=r"^episode 7: the trace has 1 episodes$"):
        gym_trace.env_at(trace, 7, 0)


def test_a_function_that_makes_no_environment_is_said_to_do_so(tmp_path: Path) -> None:
    trace = open_trace(record(gymnasium.make("Pendulum-v1"), tmp_path / "trace", 1))
    with pytest.raises(EnvironmentUnavailable, match=r"make_env: returned NoneType; return a gymnasium.Env$"):
        gym_trace.env_at(trace, 0, 3, make_env=lambda: None)  # type: ignore[arg-type, return-value]
