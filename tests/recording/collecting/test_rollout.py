"""Whole episodes, each with its own seed, until the first of the limits is met."""

import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scripted_env import Result, ToyEnv

import gym_trace
from gym_trace.errors import InvalidOption
from gym_trace.recording.collecting.rollout import RolloutProgress, episode_seed


class Countdown(ToyEnv):
    """Episodes of a given number of steps; lists its calls."""

    def __init__(self, length: int = 5):
        super().__init__(spaces.Box(-1, 1, (2,)), spaces.Discrete(1000))
        self.length = length
        self.seeds: list[int | None] = []
        self.actions: list[list[int]] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.actions.append([])
        return super().reset(seed=seed)

    def result(self, action: Any) -> Result:
        if action is not None:
            self.actions[-1].append(int(action))
        observation = self.np_random.random(2, np.float32)
        return Result(observation, float(len(self.actions)), self.t >= self.length)

    def close(self) -> None:
        self.closed += 1


def record_episodes(env: Any, **options: Any) -> RolloutProgress:
    """Record the episodes of an environment, and leave it open."""
    with tempfile.TemporaryDirectory() as directory, gym_trace.TraceRecordingWrapper(Open(env), directory) as recorder:
        return gym_trace.record_episodes(recorder, **options)


class Open(gymnasium.Wrapper[Any, Any, Any, Any]):
    def close(self) -> None:
        pass


def test_episode_k_is_the_same_in_every_run_with_the_same_seed() -> None:
    few, many = Countdown(), Countdown()
    record_episodes(few, episodes=2, seed=7)
    record_episodes(many, episodes=5, seed=7)
    assert few.seeds == many.seeds[:2]
    assert few.actions == many.actions[:2]
    assert many.seeds == [episode_seed(7, k) for k in range(5)]
    assert len({tuple(actions) for actions in many.actions}) == 5


def test_random_actions_do_not_depend_on_earlier_episodes() -> None:
    short, long = Countdown(3), Countdown(5)
    record_episodes(short, episodes=3, seed=7)
    record_episodes(long, episodes=3, seed=7)
    assert [actions[:3] for actions in long.actions] == short.actions


def test_episode_seeds_stay_what_they_are_in_every_release() -> None:
    assert [episode_seed(0, k) for k in range(3)] == [1151150034, 1668693542, 807915961]


def test_without_a_seed_each_run_gets_its_own_and_tells_it() -> None:
    first, second = Countdown(), Countdown()
    runs = [record_episodes(env, episodes=1) for env in (first, second)]
    assert runs[0].seed != runs[1].seed
    assert [first.seeds[0], second.seeds[0]] == [episode_seed(run.seed, 0) for run in runs]


@pytest.mark.parametrize(("steps", "episodes", "open_steps"), [(1, 0, 1), (5, 1, 0), (13, 2, 3), (0, 0, 0)])
def test_a_limit_on_steps_is_exact_and_begins_no_episode_in_vain(steps: int, episodes: int, open_steps: int) -> None:
    env = Countdown(5)
    done = record_episodes(env, steps=steps)
    assert (done.steps, done.episodes, done.open_steps) == (steps, episodes, open_steps)
    assert sum(map(len, env.actions)) == steps
    assert all(env.actions)
    assert env.closed == 0


def test_a_limit_on_seconds_ends_in_the_middle_of_an_episode() -> None:
    done = record_episodes(Countdown(10**9), seconds=0.05)
    assert done.episodes == 0
    assert done.open_steps == done.steps > 0
    assert done.seconds >= 0.05


def test_a_limit_on_seconds_ends_a_run_of_episodes_of_one_step() -> None:
    assert record_episodes(Countdown(1), seconds=0.05).episodes > 0


def test_the_first_limit_that_is_met_ends_the_run() -> None:
    done = record_episodes(Countdown(5), episodes=2, steps=1000, seconds=1000)
    assert (done.episodes, done.steps, done.open_steps) == (2, 10, 0)
    assert record_episodes(Countdown(5), episodes=1000, steps=7, seconds=1000).steps == 7


@pytest.mark.parametrize("limits", [{}, {"steps": -1}, {"seconds": float("nan")}, {"episodes": 1, "seed": -1}], ids=str)
def test_no_limit_and_senseless_limits_are_refused_before_anything_happens(limits: dict[str, Any]) -> None:
    env = Countdown()
    with pytest.raises(InvalidOption):
        record_episodes(env, **limits)
    assert env.seeds == []


def test_a_policy_sees_each_observation_and_is_reset_before_each_episode() -> None:
    class Policy:
        def __init__(self) -> None:
            self.seeds: list[int] = []
            self.seen: list[Any] = []

        def reset(self, seed: int) -> None:
            self.seeds.append(seed)

        def __call__(self, observation: Any) -> int:
            self.seen.append(observation)
            return len(self.seen)

    policies = [Policy(), Policy()]
    env = Countdown(2)
    for policy in policies:
        record_episodes(env, policy=policy, episodes=3, seed=1)
    assert env.actions[:3] == [[1, 2], [3, 4], [5, 6]]
    assert policies[0].seeds == policies[1].seeds
    assert len(set(policies[0].seeds)) == 3
    reset_observations = np.array(policies[0].seen[::2])
    expected = [np.random.default_rng(episode_seed(1, k)).random(2, np.float32) for k in range(3)]
    np.testing.assert_array_equal(reset_observations, expected)


def test_a_truthy_result_of_on_progress_ends_the_run_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.collecting.rollout.LOOK_SECONDS", 0.0)
    env = Countdown(10**9)
    seen: list[int] = []

    def enough(progress: RolloutProgress) -> bool:
        seen.append(progress.open_steps)
        return progress.steps >= 4

    done = record_episodes(env, steps=100, on_progress=enough)
    assert done.steps == done.open_steps == 4 == len(env.actions[0])
    assert seen == [1, 2, 3, 4]


def test_progress_tells_the_returns_of_the_last_hundred_episodes() -> None:
    done = record_episodes(Countdown(1), episodes=250)  # the return of episode k is k + 1
    assert (done.min_return, done.mean_return, done.max_return) == (151, 200.5, 250)
    assert record_episodes(Countdown(5), steps=3).mean_return is None


def test_bytes_are_counted_wherever_the_recorder_is_among_the_wrappers(tmp_path: Path) -> None:
    recorder = gym_trace.TraceRecordingWrapper(Countdown(), tmp_path / "trace")
    with gymnasium.wrappers.TimeLimit(recorder, 3) as env:
        done = gym_trace.record_episodes(env, episodes=2, seed=0)
        files = [path for path in (tmp_path / "trace").iterdir() if path.suffix != ".ring"]
        assert done.bytes == sum(path.stat().st_size for path in files) > 0


def test_a_run_ends_after_so_many_bytes_where_something_is_written(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(Countdown(10**9), tmp_path, flush_seconds=0) as env:
        assert gym_trace.record_episodes(env, bytes=20_000).bytes >= 20_000


def test_the_trace_has_the_actions_and_seeds_that_the_environment_got(tmp_path: Path) -> None:
    played = Countdown()
    with gym_trace.TraceRecordingWrapper(played, tmp_path) as env:
        gym_trace.record_episodes(env, steps=33, seed=3)
    trace = gym_trace.open_trace(tmp_path)
    assert [episode.actions.tolist() for episode in trace] == played.actions
    assert [episode.seed for episode in trace] == played.seeds
    assert trace[-1].outcome == "closed"


def test_an_environment_without_a_recorder_is_refused(tmp_path: Path) -> None:
    env = Countdown()
    with pytest.raises(InvalidOption, match=r"env: is not recorded; wrap it: TraceRecordingWrapper\(env, directory\)"):
        gym_trace.record_episodes(env, episodes=1)
    envs = gymnasium.vector.SyncVectorEnv([Countdown])
    with pytest.raises(InvalidOption, match="wrap it: TraceRecordingVectorWrapper"):
        gym_trace.record_episodes(envs, episodes=1)
    assert env.seeds == envs.envs[0].unwrapped.seeds == []
    other: Any = "CartPole-v1"
    advice = r"str: is not an environment of Gymnasium; pass gymnasium.make\('CartPole-v1'\)"
    with pytest.raises(InvalidOption, match=advice):
        gym_trace.record_episodes(other, episodes=1)
    with pytest.raises(InvalidOption, match=advice):
        gym_trace.record(other, None, tmp_path / "t", episodes=1)
    assert not (tmp_path / "t").exists()


@pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
def test_a_vector_environment_of_recorded_lanes_is_recorded(tmp_path: Path) -> None:
    envs = gymnasium.vector.SyncVectorEnv([lambda: gym_trace.TraceRecordingWrapper(Countdown(), tmp_path)] * 2)
    assert gym_trace.record_episodes(envs, episodes=4, seed=0).episodes == 4
    envs.close()
    assert len(gym_trace.open_trace(tmp_path).select('outcome == "terminated"')) == 4
