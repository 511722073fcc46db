"""Environments of dm_env: what they return is what is read, and their episodes are verified."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from shell import ok

from gym_trace import open_trace, verify_trace
from gym_trace.envs.dm_env import DmEnvView
from gym_trace.errors import InvalidOption

dm_env = pytest.importorskip("dm_env")
specs = pytest.importorskip("dm_env.specs")
record = pytest.importorskip("gym_trace.dm_env").record


class Walk(dm_env.Environment):  # type: ignore[misc]
    """A random walk in a nest of observations: it terminates at 3 or more, and is truncated after 12 steps."""

    def __init__(self) -> None:
        self.random_state = np.random.RandomState(5)
        self.place, self.steps, self.is_over = np.zeros(2, np.float32), 0, True

    def reset(self) -> Any:
        self.place, self.steps = self.random_state.randn(2).astype(np.float32), 0
        self.is_over = False
        return dm_env.restart(self._observed())

    def step(self, action: Any) -> Any:
        if self.is_over:
            return self.reset()
        self.steps += 1
        self.place += (
            self.random_state.randn(2).astype(np.float32) * np.float32(0.4 + 0.1 * action["gear"]) + action["push"]
        )
        reward = float(self.place.sum())
        self.is_over = self.steps == 12 or bool(abs(self.place).max() >= 3)
        if abs(self.place).max() >= 3:
            return dm_env.termination(reward, self._observed())
        if self.steps == 12:
            return dm_env.truncation(reward, self._observed(), discount=0.9)
        return dm_env.transition(reward, self._observed(), discount=0.5 + 0.01 * self.steps)

    def _observed(self) -> dict[str, Any]:
        return {"place": self.place.copy(), "clock": (np.array(self.steps, np.int32), self.place.max() > 0)}

    def observation_spec(self) -> Any:
        clock = specs.BoundedArray((), np.int32, 0, 12, "steps"), specs.Array((), bool, "positive")
        return {"place": specs.Array((2,), np.float32, "place"), "clock": clock}

    def action_spec(self) -> Any:
        return {"push": specs.BoundedArray((2,), np.float32, -1, 1), "gear": specs.DiscreteArray(3)}


def actions(seed: int) -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(seed)
    while True:
        yield {"push": random.uniform(-1, 1, 2).astype(np.float32), "gear": int(random.integers(3))}


def steps_of(env: Any, count: int) -> list[Any]:
    return [env.step(action) for action, _ in zip(actions(0), range(count))]


def recorded(directory: Path, count: int = 80) -> list[Any]:
    with record(Walk(), directory) as env:
        return steps_of(env, count)


def test_recording_does_not_change_the_returned_time_steps(tmp_path: Path) -> None:
    for ours, bare in zip(recorded(tmp_path / "trace"), steps_of(Walk(), 80)):
        np.testing.assert_equal(ours, bare)


def test_episodes_hold_the_time_steps_bit_for_bit(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timesteps = recorded(tmp_path / "trace")
    trace = open_trace(tmp_path / "trace")
    at = 0
    for episode in trace:
        seen = timesteps[at : at + len(episode) + 1]
        at += len(episode) + 1
        assert [timestep.first() for timestep in seen] == [True] + [False] * len(episode)
        np.testing.assert_array_equal(episode.observations["place"], [step.observation["place"] for step in seen])
        assert episode.observations["place"].dtype == np.float32
        clock, positive = episode.observations["clock"]
        assert clock.dtype == np.int32
        assert clock.tolist() == list(range(len(episode) + 1))
        assert positive.astype(bool).tolist() == [bool(step.observation["clock"][1]) for step in seen]
        assert episode.rewards.tolist() == [step.reward for step in seen[1:]]
        assert episode.annotations["discount"].tolist() == [step.discount for step in seen[1:]]
        wanted = "closed" if not seen[-1].last() else "truncated" if seen[-1].discount else "terminated"
        assert episode.outcome == wanted
    assert at == len(timesteps)
    assert {episode.outcome for episode in trace} >= {"terminated", "truncated"}


def test_episodes_without_seeds_verify_because_the_random_state_is_kept(tmp_path: Path) -> None:
    recorded(tmp_path / "trace")
    verdicts = list(verify_trace(tmp_path / "trace", make_env=Walk))
    assert {verdict.verdict for verdict in verdicts} == {"identical"}
    assert len(verdicts) == len(open_trace(tmp_path / "trace"))


def test_a_changed_environment_is_found_at_its_first_step(tmp_path: Path) -> None:
    class Heavier(Walk):
        def step(self, action: Any) -> Any:
            return super().step({**action, "push": action["push"] * np.float32(0.5)})

    recorded(tmp_path / "trace", 10)
    verdict = next(iter(verify_trace(tmp_path / "trace", make_env=Heavier)))
    assert verdict.difference is not None
    assert verdict.difference.step == 0


def test_the_command_line_records_and_verifies_what_make_returns(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    made = "--make", "test_dm_env:Walk"
    ok("record", *made, "-o", "trace", "--episodes", 4, "--seed", 3, "--quiet")
    assert ok("verify", "trace", *made).stdout == "4 episodes replayed: 4 identical, bit for bit\n"


def test_a_seed_makes_an_episode_the_same_again() -> None:
    view = DmEnvView(Walk())
    first, _ = view.reset(seed=1 << 40 | 7)
    view.step({"push": np.zeros(2, np.float32), "gear": 0})
    again, _ = view.reset(seed=1 << 40 | 7)
    np.testing.assert_equal(first, again)


def test_a_reset_in_mid_episode_keeps_the_episode_as_cut(tmp_path: Path) -> None:
    with record(Walk(), tmp_path) as env:
        env.reset()
        steps_of(env, 1)
        env.reset()
    assert [episode.outcome for episode in open_trace(tmp_path)] == ["cut", "closed"]


def test_attributes_of_the_environment_stay_within_reach(tmp_path: Path) -> None:
    with record(Walk(), tmp_path) as env:
        assert env.random_state is not None
        with pytest.raises(AttributeError, match="physics"):
            _ = env.physics


def test_an_invalid_spec_is_named() -> None:
    class Odd(Walk):
        def observation_spec(self) -> Any:
            return {"place": "two numbers"}

    with pytest.raises(InvalidOption, match=r"observation_spec\(\)\['place'\]: got str"):
        DmEnvView(Odd())


def test_specs_become_the_spaces_of_their_values() -> None:
    view = DmEnvView(Walk())
    assert view.action_space["push"] == gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    assert view.action_space["gear"] == gymnasium.spaces.Discrete(3)
    assert view.observation_space["clock"][0] == gymnasium.spaces.Box(0, 12, (), np.int32)
