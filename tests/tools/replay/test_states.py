"""states=K: env_at starts from the last recorded state before a step."""

import logging
import signal
import struct
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation, TimeLimit
from long_tests import LONG
from scripted_env import Result, ToyEnv
from shell import ok, run
from test_env_at import goes_on_as_recorded
from test_verification import needs_vectors
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, collect, env_at, open_trace, record_episodes, verify_trace
from gym_trace.data.packing import pack
from gym_trace.envs import states
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.tools.replay import resimulate


class Walk(ToyEnv):
    """A random walk that offers its state."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    steps_done = 0

    def result(self, action: Any) -> Result:
        if action is None:
            self.place = 0.0
        else:
            Walk.steps_done += 1
            self.place += action + float(self.np_random.normal())
        return Result(np.array([self.place]), self.place)

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
    assert [i for i, state in enumerate(trace[0].states["environment"]) if state is not None] == [0, 20, 40]
    assert all(scanned.states["environment"][40] == trace[scanned.index].states["environment"][40] for scanned in trace)
    assert [verdict.verdict for verdict in verify_trace(trace, make_env=make_walk)] == ["identical"] * 2
    for step in (1, 20, 29, 30, 49, 50, 60):
        Walk.steps_done = 0
        with caplog.at_level(logging.INFO, "gym_trace"):
            env_at(trace, 1, step, make_env=make_walk, trust=True).close()
        begin = 0 if step < 30 else 20 if step < 50 else 40  # at least ten steps are compared
        assert Walk.steps_done == step - begin + (0 if begin else len(trace[1]))  # played to its end first
        assert f"started from the state before step {begin}" in caplog.text or not begin
        goes_on_as_recorded(trace, 1, step, make_env=make_walk, trust=True)  # also to the end of the time limit


def test_without_trust_the_episode_is_replayed(tmp_path: Path) -> None:
    trace = recorded(make_walk(), tmp_path / "trace", 20)
    Walk.steps_done = 0
    env_at(trace, 0, 50, make_env=make_walk).close()
    assert Walk.steps_done == 60 + 50


def test_a_wrapper_with_a_state_of_its_own_is_replayed(tmp_path: Path) -> None:
    def make() -> Any:
        return FrameStackObservation(make_walk(), 3)

    trace = recorded(make(), tmp_path / "trace", 20)
    Walk.steps_done = 0
    env_at(trace, 0, 50, make_env=make, trust=True).close()
    assert Walk.steps_done == 60 + 50
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


class Windy(Walk):
    """Its state lacks the wind, which shows in the third step after a gust."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.gusts, self.wind = 0, 0.0
        return super().reset(seed=seed)

    def step(self, action: int) -> Any:
        self.gusts += 1
        self.place += self.wind if self.gusts % 3 == 0 else 0.0
        self.wind += float(action)
        return super().step(action)


def test_a_state_that_lacks_what_shows_a_few_steps_later_is_not_used(tmp_path: Path) -> None:
    def make() -> Any:
        return TimeLimit(Windy(), 60)

    trace = recorded(make(), tmp_path / "trace", 10)
    for step in (11, 31, 50, 60):
        goes_on_as_recorded(trace, 0, step, make_env=make, trust=True)


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
    assert "its states are not used: a recorded state cannot be set" in caplog.text


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_mujoco_goes_on_bit_for_bit_from_a_state(env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    options = {"terminate_when_unhealthy": False} if env_id == "Humanoid-v5" else {}
    env = gymnasium.make(env_id, max_episode_steps=120, **options)
    trace = recorded(env, tmp_path / "trace", 25, 1)
    monkeypatch.setattr(resimulate.LaneReplay, "env_before", None)  # the states are enough
    random = np.random.default_rng(0)
    for step in {26, 50, 51, 120, *random.integers(26, 120, 4).tolist()}:
        goes_on_as_recorded(trace, 0, step)


@pytest.mark.parametrize("is_over", [True, False])
def test_the_state_after_the_last_step_joins_what_was_known_before(is_over: bool, tmp_path: Path) -> None:
    env = TraceRecordingWrapper(make_walk(), tmp_path / "trace", states=1)
    env.reset(seed=3)
    for step in range(60):
        env.annotate(chosen=step)
        env.step(1)
    if is_over:
        env.close()
    (episode,) = open_trace(tmp_path / "trace")  # the writer still runs: read from its ring
    final = episode.states["final"].tolist()
    assert (final[:59], struct.unpack("<d", final[59]["state"])[0]) == ([None] * 59, episode.observations[60, 0])
    assert [struct.unpack("<d", one["state"])[0] for one in episode.states["environment"]] == (
        episode.observations[:60, 0].tolist()
    )
    assert episode.annotations["chosen"].tolist() == [*range(60)]
    env.close()


def test_mujoco_refuses_states_of_another_size() -> None:
    pytest.importorskip("mujoco")
    env = gymnasium.make("HalfCheetah-v5")
    env.reset(seed=0)
    offered = states.states_of(env)
    assert offered is not None
    state = offered.get_state()
    for wrong in (b"", state[:-8], state + bytes(8), b"\xff" * len(state)):
        with pytest.raises(ValueError, match=r"bytes, a state of this model has|not finite"):
            offered.set_state(wrong)
    offered.set_state(state)
    env.step(env.action_space.sample())


def test_states_need_an_environment_that_offers_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"states=10: CartPoleEnv offers no state; omit it, or give CartPoleEnv"):
        TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "trace", states=10)
    for wrong in (0, 1.5, True, "10"):
        with pytest.raises(InvalidOption, match=f"states={wrong!r}: pass a number of steps, 1 or more"):
            TraceRecordingWrapper(Walk(), tmp_path / "trace", states=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="states=10: not together with filters or autoreset"):
        TraceRecordingWrapper(Walk(), tmp_path / "trace", states=10, frame_filter=bool)


class Busy(Walk):
    """A walk without a state at even places."""

    def get_state(self) -> bytes | None:  # type: ignore[override]
        return None if int(self.place) % 2 == 0 else super().get_state()


def test_a_state_that_cannot_be_taken_is_taken_before_a_later_step(tmp_path: Path) -> None:
    trace = recorded(TimeLimit(Busy(), 60), tmp_path / "trace", 20)
    for episode in trace:
        odd = [step for step in range(1, 60) if int(episode.observations[step, 0]) % 2]
        kept = [step for step, state in enumerate(episode.states["environment"]) if state is not None]
        assert kept == [min(step for step in odd if step >= due) for due in (0, 20, 40)]


@pytest.mark.parametrize("chance", [0.0, 0.25, 0.6] if LONG else [0.25])
def test_an_atari_game_goes_on_bit_for_bit_from_a_state(
    chance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ale_py")
    env = gymnasium.make("ALE/Seaquest-v5", repeat_action_probability=chance, frameskip=(2, 5), max_episode_steps=60)
    trace = recorded(env, tmp_path / "trace", 5, 1)
    kept = [step for step, state in enumerate(trace[0].states["environment"]) if state is not None]
    assert len(kept) > 3  # with sticky actions, some of them later than every five steps
    monkeypatch.setattr(resimulate.LaneReplay, "env_before", None)  # the states are enough
    for step in kept[::2] if LONG else kept[1:5:3]:
        goes_on_as_recorded(trace, 0, step + 1, trust=True)


def test_states_of_ale_need_trust(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("ale_py")
    trace = recorded(gymnasium.make("ALE/Pong-v5", max_episode_steps=30), tmp_path / "trace", 10, 1)
    with caplog.at_level(logging.INFO, "gym_trace"):
        goes_on_as_recorded(trace, 0, 29)
        assert "started from the state" not in caplog.text
        goes_on_as_recorded(trace, 0, 29, trust=True)
        assert "started from the state" in caplog.text


class Poses(Walk):
    """A walk whose state is a dict of arrays, as ManiSkill's; get_state() gives an array."""

    def get_state(self) -> Any:
        return np.array([self.place])

    def get_state_dict(self) -> dict[str, Any]:
        return {"actors": {"walker": np.array([self.place, 0.0])}, "articulations": {}}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.place = float(state["actors"]["walker"][0])


def test_dicts_of_arrays_are_states(tmp_path: Path) -> None:
    def make() -> Any:
        return TimeLimit(Poses(), 60)

    trace = recorded(make(), tmp_path / "trace", 20)
    Walk.steps_done = 0
    env_at(trace, 0, 50, make_env=make, trust=True).close()
    assert Walk.steps_done == 10
    goes_on_as_recorded(trace, 0, 50, make_env=make, trust=True)


def test_dicts_of_other_arrays_are_refused() -> None:
    env = Poses()
    env.reset(seed=0)
    offered = states.states_of(env)
    assert offered is not None
    state = offered.get_state()
    assert state is not None
    for wrong in (b"", b"\x01", pack({"actors": {}, "articulations": {}}), state.replace(b"walker", b"hunter")):
        with pytest.raises((ValueError, CorruptTrace)):
            offered.set_state(wrong)
    more = pack({"actors": {"walker": np.zeros(3)}, "articulations": {}})
    with pytest.raises(ValueError, match="it has arrays of other dtypes or shapes"):
        offered.set_state(more)


# -- lanes ------------------------------------------------------------------------------------------------------------


def make_short_walk() -> gymnasium.Env[Any, Any]:
    return TimeLimit(Walk(), 35)


@needs_vectors
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_a_lane_starts_from_its_own_state(mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    envs = SyncVectorEnv([make_short_walk] * 3, autoreset_mode=gymnasium.vector.AutoresetMode(mode))
    recorder = TraceRecordingVectorWrapper(envs, tmp_path / "trace", states=10)
    recorder.action_space.seed(2)
    recorder.reset(seed=4)
    for step in range(1, 120):
        recorder.step(recorder.action_space.sample())
        if mode == "Disabled" and not step % 35:
            recorder.reset()
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    assert all(verdict.verdict == "identical" for verdict in verify_trace(trace, make_env=make_short_walk))
    begun = []
    for index, episode in enumerate(trace):
        kept = [step for step, state in enumerate(episode.states["environment"]) if state is not None]
        assert len(kept) >= len(episode) // 10 - 1
        last = [state and struct.unpack("<d", state["state"])[0] for state in episode.states.get("final", [])][-1:]
        is_known = episode.outcome == "truncated" and mode != "SameStep"
        assert last == ([episode.observations[-1, 0]] if is_known else [None] * len(last))
        for step in (0, 25, len(episode)):
            caplog.clear()
            with caplog.at_level(logging.INFO, "gym_trace"):
                goes_on_as_recorded(trace, index, min(step, len(episode)), make_env=make_short_walk, trust=True)
            begun.append("started from the state" in caplog.text)
    assert sum(begun) > len(trace)


@needs_vectors
def test_lanes_of_a_dead_writer_have_their_states(tmp_path: Path) -> None:
    code = f"""if True:
        import sys, os, signal
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        sys.path.insert(0, {HELPERS!r})
        from test_states import *
        recorder = TraceRecordingVectorWrapper(SyncVectorEnv([make_walk] * 2), {str(tmp_path / "trace")!r}, states=10)
        recorder.reset(seed=4)
        for _ in range(45):
            recorder.step(recorder.action_space.sample())
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert forked_python.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    trace = open_trace(tmp_path / "trace")
    for index in range(2):
        kept = [step for step, state in enumerate(trace[index].states["environment"]) if state is not None]
        assert kept == [0, 10, 20, 30, 40]
        goes_on_as_recorded(trace, index, 42, make_env=make_walk, trust=True)


@needs_vectors
def test_lanes_that_give_no_access_have_no_states(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidOption, match="states=5: the lanes of AsyncVectorEnv give no access to their states; use"
    ):
        TraceRecordingVectorWrapper(AsyncVectorEnv([make_walk] * 2), tmp_path / "trace", states=5)
    with pytest.raises(InvalidOption, match="states=5: not together with filters of steps; omit it"):
        TraceRecordingVectorWrapper(SyncVectorEnv([make_walk] * 2), tmp_path / "trace", states=5, frame_filter=bool)
    with pytest.raises(InvalidOption, match="states=5: CartPoleEnv offers no state"):
        TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", 2, "sync"), tmp_path / "trace", states=5)


@needs_vectors
@pytest.mark.parametrize("num_envs", [None, 2])
def test_workers_keep_states(num_envs: int | None, tmp_path: Path) -> None:
    collect(make_walk, directory=tmp_path / "trace", episodes=3, workers=0, seed=1, num_envs=num_envs, states=25)
    trace = open_trace(tmp_path / "trace")
    assert all(any(state is not None for state in episode.states["environment"]) for episode in trace)
    goes_on_as_recorded(trace, 2, 55, make_env=make_walk, trust=True)


def test_record_keeps_states_on_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    path, options = tmp_path / "trace", ["--episodes", "1", "--seed", "0", "--states", "400"]
    ok("record", "HalfCheetah-v5", "-o", path, *options)
    assert [i for i, state in enumerate(open_trace(path)[0].states["environment"]) if state is not None] == [
        0,
        400,
        800,
    ]
    refused = run("record", "CartPole-v1", "-o", tmp_path / "other", *options)
    assert refused.exit_code == 2
    assert "states=400: CartPoleEnv offers no state; omit it" in refused.stderr
