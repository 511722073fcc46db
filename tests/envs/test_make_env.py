"""Rebuilding recorded spaces and environments, without executing what only the trace names."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium import spaces
from runs import NESTED, record_lengths, record_nested
from scripted_env import OddSpace, Result, ScriptedEnv, bits

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import EnvironmentUnavailable


def test_spaces_come_back_equal(tmp_path: Path) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    assert trace.observation_space == NESTED
    assert list(trace.observation_space) == list(NESTED)
    assert trace.action_space == spaces.Box(-1, 1, (2,))


def test_a_stand_in_names_a_custom_space_and_its_values_are_readable(tmp_path: Path) -> None:
    inner = spaces.Dict({"odd": OddSpace(), "even": spaces.Discrete(2)})
    first = inner.sample()
    env = ScriptedEnv(inner, OddSpace(), [(copy.deepcopy(first), [Result(copy.deepcopy(first))])])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    wrapped.reset()
    wrapped.step({"anything": 1})
    wrapped.close()
    trace = open_trace(tmp_path)
    assert "OddSpace" in repr(trace.observation_space["odd"])
    assert trace.observation_space["even"] == spaces.Discrete(2)
    assert "OddSpace" in repr(trace.action_space)
    assert bits(trace[0].observations["odd"][0]) == bits(first["odd"])
    assert trace[0].actions.tolist() == [{"anything": 1}]


def test_the_recorded_environment_is_made_again(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("FrozenLake-v1", max_episode_steps=9, map_name="8x8"), tmp_path)
    env.reset(seed=1)
    env.close()
    trace = open_trace(tmp_path)
    assert trace.env_spec["id"] == "FrozenLake-v1"
    again = trace.make_env()
    assert again.spec.max_episode_steps == 9
    assert again.unwrapped.desc.shape == (8, 8)
    assert again.reset(seed=1)[0] == trace[0].observations[0]
    assert trace.make_env(map_name="4x4").unwrapped.desc.shape == (4, 4)


def test_wrappers_that_gymnasium_knows_are_made_again(tmp_path: Path) -> None:
    inner = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "inner")
    env = TraceRecordingWrapper(gymnasium.wrappers.NormalizeObservation(inner), tmp_path / "outer")
    env.close()
    before = sorted(path.name for path in (tmp_path / "inner").iterdir())
    again = open_trace(tmp_path / "outer").make_env()
    assert isinstance(again, gymnasium.wrappers.NormalizeObservation)
    again.reset()
    again.close()
    # Playing back does not record: the recorder among the wrappers is left out.
    assert sorted(path.name for path in (tmp_path / "inner").iterdir()) == before


MODULE = """
import gymnasium, pathlib
pathlib.Path({mark!r}).write_text("imported")

class Env(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {{}}
    def step(self, action):
        return 0, 0.0, False, False, {{}}

class Wrapper(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env):
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)

def make(env, **kwargs):
    return env

gymnasium.register("Recorded/Unheard-v0", "{name}:Env")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that leaves a mark when it is imported, and a way to forget that it ever was."""
    name = "environments_of_another_package"
    mark = tmp_path / "imported.txt"
    (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(mark), name=name))
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        sys.modules.pop(name, None)
        gymnasium.registry.pop("Recorded/Unheard-v0", None)
        mark.unlink(missing_ok=True)

    yield name, mark, forget
    forget()


@pytest.mark.parametrize("kind", ["Env", "Wrapper"])
def test_a_module_that_only_the_trace_names_is_not_imported_unless_allowed(
    tmp_path: Path, module: Any, kind: str
) -> None:
    name, mark, forget = module
    recorded = __import__(name)
    made = gymnasium.make("Recorded/Unheard-v0" if kind == "Env" else "CartPole-v1", disable_env_checker=True)
    env = TraceRecordingWrapper(made if kind == "Env" else recorded.Wrapper(made), tmp_path / "trace")
    env.reset()
    env.close()
    forget()
    trace = open_trace(tmp_path / "trace")
    assert [len(episode) for episode in trace] == [0]
    with pytest.raises(EnvironmentUnavailable, match="trust") as caught:
        trace.make_env()
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    again = trace.make_env(trust=True, disable_env_checker=True)
    assert type(again).__name__ == ("OrderEnforcing" if kind == "Env" else "Wrapper")
    again.reset()
    assert mark.exists()


def test_an_environment_without_a_spec_cannot_be_made_and_says_so(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1])
    with pytest.raises(EnvironmentUnavailable, match=r"scripted_env\.CountingEnv"):
        open_trace(tmp_path).make_env()


def test_a_trace_is_read_where_gymnasium_is_not_installed(tmp_path: Path) -> None:
    record_nested(tmp_path)
    script = f"""
import sys
sys.modules["gymnasium"] = None
import gym_trace
trace = gym_trace.open_trace({str(tmp_path)!r})
assert len(trace) == 4
for episode in (*trace, trace[2]):
    assert episode.observations["image"].shape == (30, 8, 8)
    assert episode.observations["pair"][1][2] == "ab"
    assert len(episode.infos) == len(episode.rewards) == 29
    assert episode.annotations["logits"].shape == (29, 2)
assert gym_trace.scan_recorded_traces({str(tmp_path)!r}, lambda o, a, r: None) == 4
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=60)
