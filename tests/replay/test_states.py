"""states=K: env_at starts from the last recorded state before a step."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from test_env_at import goes_on_as_recorded

from gym_trace import TraceRecordingWrapper, env_at, open_trace, record_episodes, verify_trace
from gym_trace.envs import states
from gym_trace.errors import InvalidOption
from gym_trace.replay import resimulate


class Walk(gymnasium.Env[Any, Any]):
    """A random walk that offers its state."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    steps_done = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = 0.0
        return np.array([self.place]), {}

    def step(self, action: int) -> Any:
        Walk.steps_done += 1
        self.place += action + float(self.np_random.normal())
        return np.array([self.place]), self.place, False, False, {}

    def get_state(self) -> bytes:
        return struct.pack("<d", self.place)

    def set_state(self, state: bytes) -> None:
        (self.place,) = struct.unpack("<d", state)


def make_walk() -> gymnasium.Env[Any, Any]:
    return TimeLimit(Walk(), 60)


def recorded(env: gymnasium.Env[Any, Any], directory: Path, every: int | None, episodes: int = 2) -> Any:
    with TraceRecordingWrapper(env, directory, states=every) as recorder:
        record_episodes(recorder, episodes=episodes, seed=3)
    return open_trace(directory)


def test_the_environment_starts_from_the_last_state_before_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = recorded(make_walk(), tmp_path / "trace", 20)
    assert [i for i, state in enumerate(trace[0].states["environment"]) if state is not None] == [20, 40]
    assert all(scanned.states["environment"][40] == trace[scanned.index].states["environment"][40] for scanned in trace)
    assert [verdict.verdict for verdict in verify_trace(trace, make_env=make_walk)] == ["identical"] * 2
    for step in (1, 20, 21, 40, 41, 59, 60):
        Walk.steps_done = 0
        with caplog.at_level(logging.INFO, "gym_trace"):
            env_at(trace, 1, step, make_env=make_walk, trust=True).close()
        begin = 0 if step <= 20 else 20 if step <= 40 else 40
        assert Walk.steps_done == step - begin + (0 if begin else len(trace[1]))  # played to its end first
        assert f"started from the state before step {begin}" in caplog.text or not begin
        goes_on_as_recorded(trace, 1, step, make_env=make_walk, trust=True)  # also to the end of the time limit


def test_without_trust_the_episode_is_replayed(tmp_path: Path) -> None:
    trace = recorded(make_walk(), tmp_path / "trace", 20)
    Walk.steps_done = 0
    env_at(trace, 0, 50, make_env=make_walk).close()
    assert Walk.steps_done == 50


def test_a_wrapper_with_a_state_of_its_own_is_replayed(tmp_path: Path) -> None:
    def make() -> Any:
        return FrameStackObservation(make_walk(), 3)

    trace = recorded(make(), tmp_path / "trace", 20)
    Walk.steps_done = 0
    env_at(trace, 0, 50, make_env=make, trust=True).close()
    assert Walk.steps_done == 50
    goes_on_as_recorded(trace, 0, 50, make_env=make, trust=True)


class Lame(Walk):
    """Its states are not the states that it had."""

    def get_state(self) -> bytes:
        return struct.pack("<d", self.place + 1.0)


def test_a_state_after_which_results_differ_is_not_used(tmp_path: Path) -> None:
    def make() -> Any:
        return TimeLimit(Lame(), 60)

    trace = recorded(make(), tmp_path / "trace", 20)
    goes_on_as_recorded(trace, 0, 50, make_env=make, trust=True)


@pytest.mark.parametrize("state", [b"", b"short", 5, None])
def test_a_malformed_state_is_refused_and_the_episode_replayed(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Walk, "get_state", lambda self: b"x" if state is None else state)
        if not isinstance(state, (bytes, type(None))):
            with pytest.raises(InvalidOption, match=r"Walk.get_state\(\) returned int; return bytes"):
                recorded(make_walk(), tmp_path / "trace", 20)
            return
        trace = recorded(make_walk(), tmp_path / "trace", 20)
    goes_on_as_recorded(trace, 0, 50, make_env=make_walk, trust=True)
    assert "state before step 40 not used" in caplog.text


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_mujoco_goes_on_bit_for_bit_from_a_state(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    options = {"terminate_when_unhealthy": False} if env_id == "Humanoid-v5" else {}
    env = gymnasium.make(env_id, max_episode_steps=120, **options)
    trace = recorded(env, tmp_path / "trace", 25, 1)
    monkeypatch.setattr(resimulate.LaneReplay, "stand_at", None)  # the states are enough
    random = np.random.default_rng(0)
    for step in {26, 50, 51, 120, *random.integers(26, 120, 4).tolist()}:
        goes_on_as_recorded(trace, 0, step)


def test_mujoco_refuses_states_of_another_size() -> None:
    pytest.importorskip("mujoco")
    env = gymnasium.make("HalfCheetah-v5")
    env.reset(seed=0)
    offered = states.states_of(env)
    assert offered is not None
    state = offered.get_state()
    for wrong in (b"", state[:-8], state + bytes(8), b"\xff" * len(state)):
        with pytest.raises(ValueError, match=r"bytes, those of this model have|not finite"):
            offered.set_state(wrong)
    offered.set_state(state)
    env.step(env.action_space.sample())


def test_states_need_an_environment_that_offers_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"states=10: CartPoleEnv offers no state; omit it, or give CartPoleEnv"):
        TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "trace", states=10)
    with pytest.raises(InvalidOption, match="states=0: pass a number of steps, 1 or more"):
        TraceRecordingWrapper(Walk(), tmp_path / "trace", states=0)
    with pytest.raises(InvalidOption, match="states=10: not together with filters or autoreset"):
        TraceRecordingWrapper(Walk(), tmp_path / "trace", states=10, frame_filter=bool)
