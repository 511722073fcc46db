"""SuperSuit: its wrappers, and PettingZoo environments as vector environments with one agent per lane."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from independent_log import record_single, record_vector, verify

supersuit = pytest.importorskip("supersuit")
pytest.importorskip("pettingzoo")

from gym_trace import TraceRecordingVectorWrapper, open_trace  # noqa: E402


@pytest.mark.parametrize("way", ["sync", "async"])
def test_gym_vec_env(tmp_path: Path, way: str) -> None:
    record_vector(lambda: supersuit.gym_vec_env_v0(gymnasium.make("CartPole-v1"), 3, way == "async"), tmp_path)
    verify(tmp_path, None if way == "sync" else lambda: gymnasium.make("CartPole-v1"))


def pistons(copies: int) -> Any:
    butterfly = pytest.importorskip("pettingzoo.butterfly.pistonball_v6", exc_type=ImportError)
    agents = supersuit.pettingzoo_env_to_vec_env_v1(
        supersuit.resize_v1(supersuit.color_reduction_v0(butterfly.parallel_env(n_pistons=3, max_cycles=8)), 16, 16)
    )
    return supersuit.concat_vec_envs_v1(agents, copies, num_cpus=0, base_class="gymnasium") if copies else agents


@pytest.mark.parametrize("copies", [0, 1, 2], ids=["bare", "one", "two"])
def test_agents_as_lanes(tmp_path: Path, copies: int) -> None:
    """No batched space; infos are a list with the final observations of reset lanes."""
    envs = TraceRecordingVectorWrapper(pistons(copies), tmp_path, record_infos=True)
    count, random = envs.num_envs, np.random.default_rng(3)
    episodes: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    observations, _ = deepcopy(envs.reset(seed=4))
    for lane in range(count):
        episodes[lane].append({"observations": [observations[lane]], "steps": []})
    for _ in range(30):
        actions = random.uniform(-1, 1, (count, 1)).astype(np.float32)
        observations, rewards, terminations, truncations, infos = deepcopy(envs.step(actions))
        for lane in range(count):
            over = bool(terminations[lane] or truncations[lane])
            last = infos[lane]["terminal_observation"] if over else observations[lane]
            episodes[lane][-1]["observations"].append(last)
            episodes[lane][-1]["steps"].append((actions[lane], rewards[lane]))
            if over:
                episodes[lane].append({"observations": [observations[lane]], "steps": []})
    envs.close()
    assert sum(map(len, episodes)) > 2 * count
    kept: list[list[Any]] = [[] for _ in range(count)]
    for episode in sorted(open_trace(tmp_path), key=lambda one: one.episode_id):
        kept[episode.lane].append(episode)
    for lane in range(count):
        told = [len(episode["steps"]) for episode in episodes[lane]]
        assert [len(episode) for episode in kept[lane]] == told
        for said, found in zip(episodes[lane], kept[lane]):
            assert np.array_equal(found.observations, np.array(said["observations"]))
            assert found.observations.dtype == said["observations"][0].dtype
            if said["steps"]:
                assert np.array_equal(found.actions, np.array([step[0] for step in said["steps"]]))
                assert np.array_equal(found.rewards, np.array([step[1] for step in said["steps"]], np.float64))


def test_wrappers_for_gymnasium(tmp_path: Path) -> None:
    def make() -> Any:
        env = gymnasium.make("Pendulum-v1")
        return supersuit.frame_stack_v1(supersuit.dtype_v0(env, np.float16), 3)

    record_single(make, tmp_path)
    verify(tmp_path, make)
