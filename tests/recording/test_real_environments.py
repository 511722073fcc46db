"""Real environments, recorded and played back bit-equal to a run without the recorder."""

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from scripted_env import bits

from gym_trace import TraceRecordingWrapper, open_trace, scan_recorded_traces
from gym_trace.envs.spaces import StandIn

ENVIRONMENTS = [
    ("CartPole-v1", 200, None),
    ("Taxi-v4", 250, None),
    ("Blackjack-v1", 100, None),
    ("FrozenLake-v1", 150, None),
    ("ALE/Pong-v5", 150, "ale_py"),
    ("HalfCheetah-v5", 150, "mujoco"),
    ("MiniGrid-Empty-5x5-v0", 150, "minigrid"),
]


def make(name: str, package: str | None) -> Any:
    if package is not None:
        module = pytest.importorskip(package)
        if package == "ale_py":
            gymnasium.register_envs(module)
    if name == "Taxi-v4" and name not in gymnasium.registry:
        name = "Taxi-v3"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gymnasium.make(name)


def run(env: Any, steps: int) -> list[dict[str, Any]]:
    """Episodes as lists of exact values, with seeds for the first two and actions that depend on nothing else."""
    env.action_space.seed(7)
    episodes: list[dict[str, Any]] = []
    over = True
    for step in range(steps):
        if over or step == steps // 2:  # also once in the middle of an episode
            seed = len(episodes) + 10 if len(episodes) < 2 else None
            observation, info = env.reset(seed=seed)
            episodes.append({"seed": seed, "observations": [bits(observation)], "infos": [bits(info)], "said": []})
        action = env.action_space.sample()
        observation, reward, terminated, truncated, info = env.step(action)
        current = episodes[-1]
        current["observations"].append(bits(observation))
        current["infos"].append(bits(info))
        current["said"].append((bits(action), float(reward), bool(terminated), bool(truncated)))
        over = terminated or truncated
    env.close()
    return episodes


def row(columns: Any, i: int) -> Any:
    """Row i of what an episode's observations or actions are."""
    if isinstance(columns, dict):
        return {key: row(column, i) for key, column in columns.items()}
    if isinstance(columns, tuple):
        return tuple(row(column, i) for column in columns)
    return columns[i]


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium.*", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "steps", "package"), ENVIRONMENTS, ids=[name for name, _, _ in ENVIRONMENTS])
def test_a_real_environment_is_played_back_bit_for_bit(
    tmp_path: Path, name: str, steps: int, package: str | None
) -> None:
    expected = run(make(name, package), steps)
    recorded = run(TraceRecordingWrapper(make(name, package), tmp_path, record_infos=True), steps)
    assert recorded == expected

    trace = open_trace(tmp_path)
    assert trace.damage == []
    assert len(trace) == len(expected)
    if name == "MiniGrid-Empty-5x5-v0":  # its missions are a space of its own
        assert isinstance(trace.observation_space["mission"], StandIn)
        assert trace.observation_space["image"] == make(name, package).observation_space["image"]
    else:
        assert trace.observation_space == make(name, package).observation_space
    handed: list[Any] = []
    scan_recorded_traces(tmp_path, lambda *arrays: handed.append(arrays))
    for got, again, (observations, actions, rewards), episode in zip(
        trace, map(trace.__getitem__, range(len(trace))), handed, expected, strict=True
    ):
        said = episode["said"]
        for seen, done in (
            (got.observations, got.actions),
            (again.observations, again.actions),
            (observations, actions),
        ):
            assert [canonical(row(seen, i)) for i in range(len(said) + 1)] == list(
                map(canonical_bits, episode["observations"])
            )
            assert [canonical(row(done, i)) for i in range(len(said))] == [canonical_bits(step[0]) for step in said]
        for told in (got.rewards, again.rewards, rewards):
            assert [float(reward) for reward in told] == [step[1] for step in said]
        assert got.terminations.tolist() == [step[2] for step in said]
        assert got.truncations.tolist() == [step[3] for step in said]
        assert got.seed == episode["seed"]
        assert bits(got.reset_info) == episode["infos"][0]
        assert [bits(info) for info in got.infos] == episode["infos"][1:]
    assert "lost" not in trace.episodes["outcome"]


def canonical(value: Any) -> Any:
    return canonical_bits(bits(value))


def canonical_bits(form: Any) -> Any:
    """Bits of a value in which a plain integer is the int64 that its Discrete space says."""
    if isinstance(form, tuple) and form[0] == "int":
        return bits(np.int64(form[1]))
    if isinstance(form, tuple) and form[0] == "map":
        return form[0], frozenset((key, canonical_bits(item)) for key, item in form[1])
    if isinstance(form, tuple) and form[0] in ("tuple", "list"):
        return "tuple", tuple(map(canonical_bits, form[1]))
    return form


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium.*")
def test_an_unseeded_run_can_be_run_again_from_its_trace(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    run(env, 60)
    trace = open_trace(tmp_path)
    again = trace.make_env().unwrapped
    for episode in trace:
        if episode.seed is None:
            again.np_random.bit_generator.state = episode.rng_state
        observations = [again.reset(seed=episode.seed)[0]]
        observations += [again.step(action)[0] for action in episode.actions]
        assert bits(np.array(observations)) == bits(episode.observations)
