"""Lists kept beside a recording of many agents, and what the trace must say of them."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scripted_env import bits, row_bits

from gym_trace import Episode

Choose = Callable[[Any, Any, Any], Any]  # takes the space, the observation and the info


@dataclass
class Kept:
    """One episode as its caller saw it.

    turns: of an AEC environment, (agent, what last() gave, action) of each turn.
    after: for the reset and each step, the agents and the dicts of what is known of them; of a parallel environment
        (agents, observations, rewards, terminations, truncations, infos).
    actions: what each step was given.
    """

    turns: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)
    actions: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)


def chooser(seed: int) -> Choose:
    """Return a random policy that keeps to action masks; of equal seeds it acts alike."""
    random = np.random.default_rng(seed)

    def choose(space: Any, observation: Any, info: Any) -> Any:
        mask = observation.get("action_mask") if isinstance(observation, dict) else None
        mask = info.get("action_mask") if mask is None and isinstance(info, dict) else mask
        if mask is not None and np.any(mask):
            return int(random.choice(np.flatnonzero(mask)))
        if hasattr(space, "n") and np.ndim(space.n) == 0:
            return int(random.integers(space.n)) + int(getattr(space, "start", 0))
        space.seed(int(random.integers(1 << 31)))
        return space.sample()

    return choose


def play_aec(env: Any, seed: int | None, choose: Choose, most: int, state: bool = False) -> Kept:
    """Play one episode, or its first turns."""
    env.reset(seed=seed)
    kept = Kept()
    kept.after.append(_known(env))
    for turn, agent in enumerate(env.agent_iter()):
        if turn == most:
            break
        told = env.last()
        kept.states += [deepcopy(env.state())] if state else []
        observation, _, terminated, truncated, info = told
        action = None if terminated or truncated else choose(env.action_space(agent), observation, info)
        kept.turns.append((agent, deepcopy(told), deepcopy(action)))
        env.step(action)
        kept.actions.append(action)
        kept.after.append(_known(env))
    return kept


def _known(env: Any) -> Any:
    return deepcopy((list(env.agents), env.rewards, env.terminations, env.truncations, env.infos))


def play_parallel(env: Any, seed: int | None, choose: Choose, most: int, state: bool = False) -> Kept:
    """Play one episode, or its first steps."""
    observations, infos = env.reset(seed=seed)
    kept = Kept()
    kept.after.append(deepcopy((list(env.agents), observations, {}, {}, {}, infos)))
    kept.states += [deepcopy(env.state())] if state else []
    while env.agents and len(kept.actions) < most:
        actions = {a: choose(env.action_space(a), observations.get(a), infos.get(a)) for a in env.agents}
        kept.actions.append(deepcopy(actions))
        observations, *_, infos = told = env.step(actions)
        kept.after.append(deepcopy((list(env.agents), *map(dict, told))))
        kept.states += [deepcopy(env.state())] if state else []
    return kept


def same(kept: Kept, other: Kept) -> bool:
    """Return True if two runs gave the same, bit for bit."""
    return bits([kept.turns, kept.after]) == bits([other.turns, other.after])


def assert_played_back(again: Kept, kept: Kept) -> None:
    """Assert that a replay gave what was recorded; an episode that was cut is truncated after its last step."""
    assert len(again.turns) >= len(kept.turns)
    assert len(again.after) >= len(kept.after)
    for turn, other in zip(again.turns, kept.turns):
        assert turn[0] == _name(other[0])
        assert _alike(turn[2], other[2])
        (observation, reward, *flags, info), (observed, rewarded, *flagged, informed) = turn[1], other[1]
        assert _alike(observation, observed)
        assert (reward, flags, bits(info)) == (rewarded, flagged, bits(informed))
    for row, ((agents, *told), (there, *dicts)) in enumerate(zip(again.after, kept.after)):
        if row + 1 == len(kept.after) and there:
            break
        assert agents == list(map(_name, there))
        for values, others in zip(told, dicts):
            assert values.keys() == set(map(_name, others))
            assert all(
                _alike(values[_name(agent)], value) or values[_name(agent)] == value for agent, value in others.items()
            )


def check(episode: Episode, kept: Kept, has_infos: bool = True, has_states: bool = False) -> None:
    """Assert that an episode of a trace is what was kept."""
    assert len(episode) == len(kept.actions)
    came = list(dict.fromkeys(_name(agent) for agents, *_ in kept.after for agent in agents))
    assert episode.agents == came
    if kept.turns or not kept.after[0][1:2] or len(kept.after[0]) == 5:
        _check_turns(episode, kept, has_infos)
    else:
        _check_steps(episode, kept, has_infos)
    if has_states:
        for row, state in enumerate(kept.states):
            assert bits(_row(episode._joint.states, row)) == bits(state)


def _check_turns(episode: Episode, kept: Kept, has_infos: bool) -> None:
    agents = episode.agents
    assert [agents[turn] for turn in episode.turns] == [_name(agent) for agent, *_ in kept.turns]
    rows = episode._joint
    for row, (there, rewards, terminations, truncations, infos) in enumerate(kept.after):
        place = rows.place[row].tolist()
        assert [place[rows.names.index(_name(agent))] for agent in there] == list(range(len(there)))
        assert sum(p >= 0 for p in place) == len(there)
        for told, column in (
            (rewards, rows.rewards),
            (terminations, rows.terminations),
            (truncations, rows.truncations),
        ):
            for agent, value in told.items():
                assert column[row][rows.names.index(_name(agent))] == value, (row, agent)
        if has_infos:
            found = episode.infos[row - 1] if row else episode.reset_info
            assert bits(_plain(found)) == bits(_plain({_name(agent): info for agent, info in infos.items()}))
    for agent in agents:
        own, steps = episode[agent], [i for i, turn in enumerate(kept.turns) if _name(turn[0]) == agent]
        acted = [i for i in steps if not (kept.turns[i][1][2] or kept.turns[i][1][3])]
        assert own.times.tolist() == acted
        assert len(own) == len(acted)
        for number, i in enumerate(acted):
            assert _alike(_row(own.actions, number), kept.turns[i][2])
            assert _alike(_row(own.observations, number), kept.turns[i][1][0]), (agent, i)
            following = [j for j in steps if j > i]
            if not following:
                assert (
                    number == len(acted) - 1 and i >= len(kept.turns) - len(agents) - 1
                ) or not own.has_final_observation
                continue
            observation, reward, terminated, truncated, info = kept.turns[following[0]][1]
            assert _alike(_row(own.observations, number + 1), observation)
            assert own.rewards[number] == reward
            assert (own.terminations[number], own.truncations[number]) == (terminated, truncated)
            if has_infos:
                assert bits(_plain(own.infos[number])) == bits(_plain(info))


def _check_steps(episode: Episode, kept: Kept, has_infos: bool) -> None:
    for agent in episode.agents:
        own = episode[agent]
        acted = [step for step, actions in enumerate(kept.actions) if agent in map(_name, actions)]
        assert own.times.tolist() == acted
        found = {_name(a): value for a, value in kept.after[acted[0]][1].items()}[agent] if acted else None
        assert not acted or _alike(_row(own.observations, 0), found)
        for number, step in enumerate(acted):
            actions = {_name(a): value for a, value in kept.actions[step].items()}
            assert _alike(_row(own.actions, number), actions[agent])
            _, *told = kept.after[step + 1]
            observed, rewards, terminations, truncations, infos = ({_name(a): v for a, v in d.items()} for d in told)
            assert _alike(_row(own.observations, number + 1), observed[agent])
            assert own.rewards[number] == rewards[agent]
            assert own.terminations[number] == terminations[agent]
            assert own.truncations[number] == truncations[agent]
            if has_infos:
                assert bits(_plain(own.infos[number])) == bits(_plain(infos[agent]))
    rows = episode._joint
    for row, (there, *dicts) in enumerate(kept.after):
        place = rows.place[row].tolist()
        assert [place[rows.names.index(_name(agent))] for agent in there] == list(range(len(there)))
        for bit, told in zip((1, 2, 4, 8, 16), dicts):
            given = {name for name, bits_of in zip(rows.names, rows.given[row].tolist()) if bits_of & bit}
            assert given == set(map(_name, told)), (row, bit)


def _name(agent: Any) -> Any:
    return agent if type(agent) in (str, int) else str(agent)


def _row(rows: Any, index: int) -> Any:
    if isinstance(rows, dict):
        return {key: _row(part, index) for key, part in rows.items()}
    return tuple(_row(part, index) for part in rows) if isinstance(rows, tuple) else rows[index]


def _plain(value: Any) -> Any:
    """Return a value with NumPy arrays and plain containers; None as it is."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _alike(kept: Any, said: Any) -> bool:
    """Return True if two values are alike, bit for bit; integers may become those of the space."""
    if kept is None or said is None:
        return kept is said
    if isinstance(said, dict):
        return set(kept) == set(said) and all(_alike(kept[key], value) for key, value in said.items())
    if type(said) is int or (isinstance(said, np.generic) and said.dtype.kind in "iu"):
        return bool(kept == said)
    return bool(row_bits(kept) == row_bits(said))
