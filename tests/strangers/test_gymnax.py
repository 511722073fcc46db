"""Rollouts of gymnax under jax.lax.scan: equal to the arrays that the scan returned, and the guide's examples run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")
gymnax = pytest.importorskip("gymnax")

from gym_trace import Episode, TraceWriter, check_trace, open_trace  # noqa: E402

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "writer.md"
STEPS, LANES = 150, 16


def rollouts(name: str, calls: int) -> list[list[Any]]:
    """Return observations, actions, rewards, terminations, truncations and last observations of each call."""
    env, params = gymnax.make(name)
    space = env.action_space(params)

    def act(carry: Any, key: Any) -> Any:
        observation, state = carry
        to_act, to_step = jax.random.split(key)
        action = jax.vmap(space.sample)(jax.random.split(to_act, LANES))
        following, state, reward, terminated, truncated, info = jax.vmap(env.step, (0, 0, 0, None))(
            jax.random.split(to_step, LANES), state, action, params
        )
        return (following, state), (observation, action, reward, terminated, truncated, info["final_observation"])

    carry = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(0), LANES), params)
    found = []
    for number in range(calls):
        carry, (observations, *others) = jax.jit(lambda carry, keys: jax.lax.scan(act, carry, keys))(
            carry, jax.random.split(jax.random.key(number + 1), STEPS)
        )
        found.append([jax.numpy.concatenate([observations, carry[0][None]]), *others])
    return found


def expected(calls: list[list[Any]]) -> list[tuple[Any, ...]]:
    """Return the episodes of each lane: lane, observations, actions, rewards."""
    seen, *others, finals = ([np.asarray(call[i]) for call in calls] for i in range(6))
    seen = np.concatenate([part[:-1] for part in seen] + [seen[-1][-1:]])
    actions, rewards, terminated, truncated, finals = map(np.concatenate, [*others, finals])
    over, found = terminated.astype(bool) | truncated.astype(bool), []
    for lane in range(LANES):
        begin = 0
        for end in [*np.flatnonzero(over[:, lane]).tolist(), len(over)]:
            after = min(end + 1, len(over))
            last = finals[end, lane] if end < len(over) else seen[-1, lane]
            rows = np.concatenate([seen[begin:after, lane], last[None]])
            if after > begin or end == len(over):
                found.append((lane, rows, actions[begin:after, lane], rewards[begin:after, lane]))
            begin = after
    return found


def content(episode: Episode) -> tuple[Any, ...]:
    return episode.lane, episode.observations, episode.actions, episode.rewards


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"])
def test_a_scan_is_recorded_as_it_was(tmp_path: Path, name: str) -> None:
    calls = rollouts(name, 3)
    with TraceWriter(tmp_path, environment={"id": name, "package": "gymnax"}) as writer:
        for *arrays, final in calls:
            writer.rollouts(*arrays, final_observations=final, autoreset="SameStep")
    trace = open_trace(tmp_path)
    mine = sorted(trace, key=lambda episode: (episode.lane, episode.episode_id))
    theirs = expected(calls)
    assert len(mine) == len(theirs)
    for episode, other in zip(mine, theirs):
        lane, *columns = content(episode)
        assert lane == other[0]
        for a, b in zip(columns, other[1:]):
            assert (a.shape, a.tobytes()) == (b.shape, b.tobytes())
    assert sum(map(len, mine)) == 3 * STEPS * LANES
    assert not check_trace(tmp_path).damages


def test_the_examples_of_the_guide_run() -> None:
    command = [sys.executable, str(GUIDE.parents[2] / "tests" / "snippets.py"), str(GUIDE)]
    assert "4 blocks ran" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
