"""Lanes that are reset without a seed: the states of their random generators are recorded."""

import signal
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import open_trace, verify_trace
from gym_trace.envs.seeding import has_own_generator

pytestmark = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
MODES = ("NextStep", "SameStep", "Disabled")


def make() -> Any:
    return gymnasium.make("CartPole-v1")


class NoGenerator(gymnasium.Env[Any, Any]):
    """Raises where its generator is asked for."""

    observation_space, action_space = gymnasium.spaces.Box(0, 99, (1,)), gymnasium.spaces.Discrete(2)

    @property
    def np_random(self) -> Any:
        raise NotImplementedError

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.ones(1, np.float32), 1.0, False, False, {}


def run(envs: Any, mode: str, steps: int = 80, seed: Any = None) -> list[Any]:
    """Step an environment; return all observations."""
    actions = np.random.default_rng(1)
    seen = [envs.reset(seed=seed)[0].copy()]
    for _ in range(steps):
        observations, _, terminated, truncated, _ = envs.step(actions.integers(0, 2, envs.num_envs))
        seen.append(observations.copy())
        ended = terminated | truncated
        if mode == "Disabled" and ended.any():
            seen.append(envs.reset(options={"reset_mask": ended})[0].copy())
    return seen


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", MODES)
def test_lanes_reset_without_a_seed_are_verified(kind: Any, mode: str, tmp_path: Path) -> None:
    envs = kind([make] * 3, autoreset_mode=gymnasium.vector.AutoresetMode(mode))
    recorder = TraceRecordingVectorWrapper(envs, tmp_path / "trace")
    run(recorder, mode)
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    assert len(trace) > 6
    assert trace[0].seed is None
    assert trace[0].rng_state["bit_generator"] == "PCG64"
    found = list(verify_trace(trace, make_env=make))
    assert {verdict.verdict for verdict in found} == {"identical"}
    assert any(verdict.needed for verdict in found) == (mode != "Disabled" or kind is AsyncVectorEnv)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_keeping_generator_states_does_not_change_the_run(kind: Any, tmp_path: Path) -> None:
    plain, recorder = (kind([make] * 2) for _ in range(2))
    recorder = TraceRecordingVectorWrapper(recorder, tmp_path / "trace")
    runs = []
    for envs in (plain, recorder):
        seen = run(envs, "NextStep", 20, seed=3) + run(envs, "NextStep", 20)
        runs.append(np.array(seen))
        envs.close()
    assert runs[0].tobytes() == runs[1].tobytes()
    assert {verdict.verdict for verdict in verify_trace(tmp_path / "trace", make_env=make)} == {"identical"}


def test_some_recorded_lanes_and_some_seeds_have_their_own_starts(tmp_path: Path) -> None:
    recorder = TraceRecordingVectorWrapper(SyncVectorEnv([make] * 4), tmp_path / "trace", lanes=[1, 3])
    run(recorder, "NextStep", 30, seed=[None, 5, None, None])
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    first = {episode.lane: episode for episode in trace if episode.seed is not None or episode.rng_state is not None}
    assert {lane: (one.seed, one.rng_state is None) for lane, one in first.items()} == {1: (5, True), 3: (None, False)}
    assert {verdict.verdict for verdict in verify_trace(trace, make_env=make)} == {"identical"}


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_lanes_without_a_generator_go_on_and_are_unverifiable(kind: Any, tmp_path: Path) -> None:
    recorder = TraceRecordingVectorWrapper(kind([NoGenerator] * 2), tmp_path / "trace")
    run(recorder, "NextStep", 5)
    recorder.close()
    found = list(verify_trace(tmp_path / "trace", make_env=NoGenerator))
    assert [verdict.verdict for verdict in found] == ["unverifiable"] * 2
    assert {len(episode) for episode in open_trace(tmp_path / "trace")} == {5}


def test_only_classes_that_keep_the_generator_of_gymnasium_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()
    assert has_own_generator(str(env))
    assert has_own_generator(str(env.unwrapped))
    for told in ("", "<NoGenerator instance>", "<Other<CartPole-v1>>", "<CartPoleEnv<Nothing-v0>>", str(NoGenerator())):
        assert not has_own_generator(told)
    for entry in (NoGenerator, f"{__name__}:NoGenerator", "not.imported:NoGenerator"):
        spec = gymnasium.envs.registration.EnvSpec("Bare-v0", entry_point=entry)
        monkeypatch.setitem(gymnasium.registry, "Bare-v0", spec)
        assert not has_own_generator("<TimeLimit<NoGenerator<Bare-v0>>>")


def test_generator_states_of_a_dead_writer_are_in_its_ring(tmp_path: Path) -> None:
    code = f"""if True:
        import os, signal, sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {HELPERS!r}]
        from test_vector_generators import *
        recorder = TraceRecordingVectorWrapper(SyncVectorEnv([make] * 3), {str(tmp_path / "trace")!r})
        run(recorder, "NextStep", 40)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert forked_python.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    found = list(verify_trace(tmp_path / "trace", make_env=make))
    assert len(found) >= 3
    assert {verdict.verdict for verdict in found} == {"identical"}


def test_generator_states_of_many_lanes_find_room_in_the_log(tmp_path: Path) -> None:
    recorder = TraceRecordingVectorWrapper(SyncVectorEnv([make] * 700), tmp_path / "trace")
    for _ in range(3):
        run(recorder, "NextStep", 2)
    recorder.close()
    trace = open_trace(tmp_path / "trace")
    assert len(trace) == 2100
    assert all(trace[index].rng_state is not None for index in range(0, 2100, 100))
    assert {verdict.verdict for verdict in verify_trace(trace, episodes=range(0, 2100, 100))} == {"identical"}
