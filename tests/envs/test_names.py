"""Names of actions and observations, as environments know them."""

import enum
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from agent_envs import meadow
from gymnasium.spaces import Box, Discrete
from scripted_env import Result, ToyEnv
from viewer_requests import arrays_of, asked, viewed

from gym_trace import TraceRecordingWrapper, edit
from gym_trace.envs.names import names_of
from gym_trace.pettingzoo import record


class Moves(enum.IntEnum):
    stay, go = range(2)


class Named(ToyEnv):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    actions = Moves

    def result(self, action: Any) -> Result:
        return Result(self.observation_space.sample())


class Meant(Named):
    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE"]


class Broken(Named):
    def get_action_meanings(self) -> list[str]:
        raise RuntimeError("not now")


class Many(Named):
    action_space = Discrete(3)


def test_actions_are_named_by_a_method_or_an_enum_of_their_number() -> None:
    assert [names_of(kind()) for kind in (Meant, Broken, Many)] == [
        {"actions": ["NOOP", "FIRE"]},
        {"actions": ["stay", "go"]},
        {},
    ]


def test_numbers_of_mujoco_are_named_by_joints_and_actuators() -> None:
    pytest.importorskip("mujoco")
    env = gymnasium.make("InvertedPendulum-v5")
    assert names_of(env) == {"actions": ["slide"], "observations": ["slider", "hinge", "slider.v", "hinge.v"]}
    env.close()


def test_the_viewer_shows_recorded_names_and_those_of_a_fact(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Meant(), tmp_path) as env:
        env.reset(seed=0)
        env.step(1)
    edit.annotate(tmp_path, {"names": {"observations": ["x", "speed"], "actions": ["one"]}})
    columns = {one["name"]: one for one in asked(viewed(tmp_path), "/api/episode?episode=0")["columns"]}
    assert columns["observations"]["labels"] == ["x", "speed"]
    assert columns["actions"]["values"] == {"start": 0, "count": 2, "names": ["NOOP", "FIRE"]}
    assert columns["rewards"]["labels"] is columns["rewards"]["values"] is None


def test_the_returns_of_agents_have_their_names(tmp_path: Path) -> None:
    env = record(meadow(), tmp_path)
    env.reset(seed=0)
    total = dict.fromkeys(env.possible_agents, 0.0)
    while env.agents:
        _, rewards, *_ = env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        for agent, reward in rewards.items():
            total[agent] += reward
    env.close()
    answers = viewed(tmp_path)
    columns = {one["name"]: one for one in asked(answers, "/api/episode?episode=0")["columns"]}
    assert columns["returns of agents"]["labels"] == list(total)
    last = arrays_of(answers, "/api/plot?episode=0&column=returns of agents")["y"][:, -1]
    assert last.tolist() == pytest.approx(list(total.values()))
