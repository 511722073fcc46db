"""Environments of many agents: what is recorded is what their callers saw."""

import importlib
import signal
import subprocess
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS

pytest.importorskip("pettingzoo")

from agent_envs import Meadow, Passing
from agents_log import check, chooser, play_aec, play_parallel, same
from runs import play
from scripted_env import bits

from gym_trace import TraceRecordingWrapper, check_trace, open_trace, verify_trace
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.pettingzoo import record

# Agents are made while an episode runs, and no one knows their names before; the agents of one are tuples.
EXAMPLES = "pettingzoo.test.example_envs"
GENERATED = [
    f"generated_agents_{kind}"
    for kind in ("env_v0", "parallel_v0", "env_cust_agentid_v0", "parallel_cust_agentid_v0", "env_action_mask_info_v0",
                 "env_action_mask_obs_v0")
]  # fmt: skip


def generated(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PettingZoo's own, of its classic games
        module = importlib.import_module(f"{EXAMPLES}.{name}")
    return module.parallel_env() if "parallel" in name else module.env()


def player_of(env: Any) -> Any:
    return play_aec if hasattr(type(env), "agent_iter") else play_parallel


def recorded(directory: Path, make: Any, episodes: int = 4, most: int = 100, **options: Any) -> list[Any]:
    """Record random episodes; return the lists kept beside."""
    state = options.get("state", False)
    with closing(record(make(), directory, record_infos=True, **options)) as env:
        return [player_of(env)(env, seed, chooser(seed), most, state) for seed in range(episodes)]


@pytest.mark.parametrize("make", [Meadow, Passing])
def test_a_trace_holds_what_each_agent_saw_and_did(tmp_path: Path, make: Any) -> None:
    kept = recorded(tmp_path, make)
    for episode, own in zip(open_trace(tmp_path), kept, strict=True):
        check(episode, own)


@pytest.mark.parametrize("make", [Meadow, Passing])
def test_recording_does_not_change_the_run(tmp_path: Path, make: Any) -> None:
    env = make()
    alone = [player_of(env)(env, seed, chooser(seed), 100) for seed in range(4)]
    assert all(map(same, alone, recorded(tmp_path, make)))


def test_agents_are_named_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    recorded(tmp_path, Meadow, 1)
    episode = open_trace(tmp_path)[0]
    assert episode.agents == ["wolf", "hare_0", "hare_1"]
    assert [episode[agent].times.tolist() for agent in episode.agents] == [
        list(range(8)), [0, 1, 2, 3], [2, 3, 4, 5, 6, 7]
    ]  # fmt: skip
    assert episode["hare_0"].terminations.tolist() == [False, False, False, True]
    assert episode["wolf"].truncations[-1]
    assert episode.rewards[0] == 1 - 0.25


def test_an_agent_in_turns_is_given_what_came_since_its_last_turn(tmp_path: Path) -> None:
    kept = recorded(tmp_path, Passing, 1)[0]
    episode = open_trace(tmp_path)[0]
    told = [last for agent, last, _ in kept.turns if agent == "bob"]
    assert episode["bob"].rewards.tolist() == [reward for _, reward, *_ in told[1:]]
    assert [episode.agents[turn] for turn in episode.turns] == [agent for agent, *_ in kept.turns]
    assert episode.outcome in ("terminated", "truncated")


@pytest.mark.parametrize("name", GENERATED)
def test_nothing_is_lost_of_agents_that_no_one_knew_before(tmp_path: Path, name: str) -> None:
    kept = recorded(tmp_path, lambda: generated(name), 3, 60)
    for episode, own in zip(open_trace(tmp_path), kept, strict=True):
        check(episode, own)
    if "parallel" in name:  # turn-based agents sample from unseeded spaces
        verdicts = verify_trace(tmp_path, make_env=lambda: generated(name))
        assert {verdict.verdict for verdict in verdicts} == {"identical"}


def test_an_agent_outside_of_possible_agents_is_kept_too(tmp_path: Path) -> None:
    class Crowded(Meadow):
        def step(self, actions: Any) -> Any:
            told = super().step(actions)
            if self.time == 3:
                for values, value in zip(told, (np.arange(3), 2.5, False, True, {"late": 1})):
                    values["latecomer"] = value
            return told

    with pytest.warns(UserWarning, match="observations"):
        kept = recorded(tmp_path, Crowded, 2)
    for episode, own in zip(open_trace(tmp_path), kept, strict=True):
        check(episode, own)
        assert episode._joint.rewards[3, episode._joint.names.index("latecomer")] == 2.5


def test_an_agent_may_be_called_agents(tmp_path: Path) -> None:
    class Named(Passing):
        def __init__(self) -> None:
            super().__init__()
            self.possible_agents = ["agents", "agents_", "cyd"]

    kept = recorded(tmp_path, Named, 2)
    for episode, own in zip(open_trace(tmp_path), kept, strict=True):
        check(episode, own)
    assert {verdict.verdict for verdict in verify_trace(tmp_path, make_env=Named)} == {"identical"}


def test_the_state_is_kept_where_asked_for(tmp_path: Path) -> None:
    kept = recorded(tmp_path, Meadow, 2, state=True)
    for episode, own in zip(open_trace(tmp_path), kept, strict=True):
        check(episode, own, has_states=True)
        assert episode.observations["agents"]["state"].dtype == np.float64
    assert {verdict.verdict for verdict in verify_trace(tmp_path, trust=True)} == {"identical"}


@pytest.mark.parametrize(
    "reward", [np.float32(0.1), 3, True, np.int64(-4), np.array([1.5, -2.0]), 1 << 70, np.float64("nan")]
)
def test_rewards_of_any_type_are_kept(tmp_path: Path, reward: Any) -> None:
    class Paying(Meadow):
        def step(self, actions: Any) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, dict.fromkeys(rewards, reward), *rest

    with closing(record(Paying(), tmp_path)) as env, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are outside the space
        play_parallel(env, 0, chooser(0), 100)
    found = open_trace(tmp_path)[0]["wolf"].rewards
    assert len(found) == 8
    assert all(np.array_equal(value, reward) or value != value for value in found)


def test_an_agent_whose_turn_did_not_come_again_has_no_final_observation(tmp_path: Path) -> None:
    kept = recorded(tmp_path, Passing, 1, most=3)[0]
    episode = open_trace(tmp_path)[0]
    assert episode.outcome == "closed"
    bob = episode["bob"]
    assert not bob.has_final_observation
    assert bob.times.tolist() == [1]
    assert bob.observations["observation"].tolist() == [kept.turns[1][1][0]["observation"].tolist(), [0, 0, 0, 0]]
    assert bob.rewards.tolist() == [sum(rewards["bob"] for _, rewards, *_ in kept.after[2:])]
    assert len(bob.infos) == 1
    assert bob.first_info == {}


def test_a_loop_that_leaves_out_dead_steps_ends_its_episodes_all_the_same(tmp_path: Path) -> None:
    with closing(record(Passing(), tmp_path)) as env:
        for seed in range(3):
            env.reset(seed=seed)
            while not all(env.terminations[agent] or env.truncations[agent] for agent in env.agents):
                env.step(None if env.terminations[env.agent_selection] else 1)
    assert set(open_trace(tmp_path).episodes["outcome"].tolist()) <= {"terminated", "truncated"}


def test_last_is_handed_out_once_and_then_asked_for_again(tmp_path: Path) -> None:
    asked = []

    class Asked(Passing):
        def observe(self, agent: str) -> Any:
            asked.append(agent)
            return super().observe(agent)

    with closing(record(Asked(), tmp_path)) as env:
        env.reset(seed=0)
        first = env.last()[0]
        assert asked == ["ann"]
        first["observation"][:] = 99  # as a caller may do with what it got
        assert env.last()[0]["observation"].tolist() == [0, 0, 3, 7]
        assert env.observe("cyd")["observation"].tolist() == [0, 2, 3, 7]
        assert env.last(observe=False)[0] is None
        assert asked == ["ann", "ann", "cyd"]
    assert bits(open_trace(tmp_path)[0]["ann"].observations["observation"]) == bits(np.array([[0, 0, 3, 7]], np.int8))


def test_annotations_belong_to_the_next_step(tmp_path: Path) -> None:
    with closing(record(Meadow(), tmp_path)) as env:
        env.reset(seed=0)
        for step in range(3):
            env.annotate(values=np.array([step, 0.5]))
            env.step({agent: env.action_space(agent).sample() for agent in env.agents})
    assert open_trace(tmp_path)[0].annotations["values"].tolist() == [[0, 0.5], [1, 0.5], [2, 0.5]]


def test_an_episode_of_one_agent_has_no_agents(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        play(env, 1)
    episode = open_trace(tmp_path)[0]
    with pytest.raises(TraceError, match="single agent"):
        episode.agents  # noqa: B018
    with pytest.raises(TraceError, match="single agent"):
        episode["player_0"]


def test_an_unknown_agent_and_turns_of_a_parallel_environment_are_errors(tmp_path: Path) -> None:
    recorded(tmp_path, Meadow, 1)
    episode = open_trace(tmp_path)[0]
    with pytest.raises(KeyError, match="no agent 'fox'"):
        episode["fox"]
    with pytest.raises(TraceError, match="parallel environment"):
        episode.turns  # noqa: B018


@pytest.mark.parametrize(("env", "options", "message"), [
    (object(), {}, "neither an AEC nor a parallel"),
    (None, {"record_infos": ["time"]}, "pass True or False"),
])  # fmt: skip
def test_other_environments_and_options_are_rejected(tmp_path: Path, env: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        record(env or Meadow(), tmp_path, **options)


MORTAL = """
import os, signal, sys
sys.path[:0] = sys.argv[3:]
from agent_envs import Meadow, Passing
from gym_trace.pettingzoo import record

KIND = Meadow if sys.argv[2] == "Meadow" else Passing

class Mortal(KIND):
    def step(self, action):
        if self.time == 5 and (KIND is Meadow or not self.terminations[self.agent_selection]):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)

env = record(Mortal(), sys.argv[1])
env.reset(seed=1)
while True:
    if KIND is Meadow:
        env.step({agent: 2 if agent == "wolf" else env.action_space(agent).sample() for agent in env.agents})
    else:
        env.step(None if env.terminations[env.agent_selection] else 2)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a ring")
@pytest.mark.parametrize("kind", ["Meadow", "Passing"])
def test_a_kill_in_mid_turn_loses_nothing_and_the_turn_is_known(tmp_path: Path, kind: str) -> None:
    house = [HELPERS]
    died = forked_python.run([sys.executable, "-c", MORTAL, str(tmp_path / "trace"), kind, *house])
    assert died.returncode == -signal.SIGKILL
    trace = open_trace(tmp_path / "trace")
    episode = trace[0]
    assert episode.outcome == "lost"
    if kind == "Meadow":
        assert len(episode) == 5
        assert episode["wolf"].pending_action == 2
        assert episode["hare_0"].pending_action is None  # it has left
        assert episode["hare_1"].pending_action.shape == (2,)
    else:
        waiting = episode._joint.turn[-1]
        acted = [name for name in episode.agents if episode[name].pending_action == 2]
        assert [episode._joint.names[waiting]] == acted
        assert len(episode.turns) == len(episode) >= 5
    assert not check_trace(tmp_path / "trace").damages
    assert [verdict.verdict for verdict in verify_trace(trace, make_env=Meadow if kind == "Meadow" else Passing)] == [
        "identical"
    ]


def test_without_pettingzoo_the_error_names_the_command(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pettingzoo'] = None\nimport gym_trace.pettingzoo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "pip install 'gym-trace[pettingzoo]'" in done.stderr


def test_a_part_of_an_episode_has_the_steps_of_its_agents(tmp_path: Path) -> None:
    recorded(tmp_path, Passing, 1)
    whole = open_trace(tmp_path)[0]
    part = whole[4:9]
    for name in part.agents:
        times = whole[name].times
        inside = times[(times >= 4) & (times < 9)]
        assert part[name].times.tolist() == inside.tolist()
        assert bits(part[name].actions) == bits(whole[name].actions[np.isin(times, inside)])
    assert part.turns.tolist() == [part.agents.index(whole.agents[turn]) for turn in whole.turns[4:9]]
