"""record --engine ray: nodes and drivers that die change nothing about what is recorded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gym_trace import check_trace, collect, open_trace
from gym_trace.envs.seeding import episode_of

ray = pytest.importorskip("ray")
pytest.importorskip("ray.cluster_utils")

EPISODES, NODES, SEED = 2000, 3, 3
SLOW = """
import time
import gymnasium

class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.001)
        return super().step(action)

def make():
    return Slow(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without processors, and three nodes with one each."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # or it kills its workers for the memory of others
    small = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        cluster.grow = lambda: cluster.add_node(num_cpus=1, **small)
        cluster.nodes_of_workers = [cluster.grow() for _ in range(NODES)]
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def whole_episodes(directory: Path) -> dict[int, tuple[bytes, ...]]:
    """By number, the bits of each episode that ended; each is there once."""
    found: dict[int, tuple[bytes, ...]] = {}
    for episode in open_trace(directory).scan():
        if episode.outcome in ("terminated", "truncated"):
            assert episode.seed is not None
            number = episode_of(SEED, episode.seed)
            assert number not in found
            found[number] = tuple(rows.tobytes() for rows in (episode.observations, episode.actions, episode.rewards))
    return found


def count(directory: Path) -> int:
    try:
        return len(open_trace(directory))
    except Exception:  # nothing is there yet
        return 0


def test_a_node_killed_twice_and_the_driver_once_record_each_episode_once(tmp_path: Path, cluster: Any) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ["record", "--make", "slow:make", "-o", "t", "--episodes", EPISODES, "--seed", SEED, "-j", NODES]
    words += ["--engine", "ray", "--address", cluster.address]

    def driver(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gym_trace", *map(str, words), *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def await_episodes(least: int, running: Any) -> None:
        until = time.monotonic() + 240
        while count(tmp_path / "t") < least:
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < until, "recorded too little"
            time.sleep(0.2)

    order = random.Random(0)
    running = driver()
    for least in (150, 500):
        await_episodes(least, running)
        cluster.remove_node(cluster.nodes_of_workers.pop(order.randrange(NODES)), allow_graceful=False)
        cluster.nodes_of_workers.append(cluster.grow())
    await_episodes(900, running)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert len(whole_episodes(tmp_path / "t")) < EPISODES
    running = driver("--resume")
    output = running.communicate(timeout=400)[0]
    assert running.returncode == 0, output
    collect(_cartpole, directory=tmp_path / "one", episodes=EPISODES, workers=0, seed=SEED)
    recorded = whole_episodes(tmp_path / "t")
    assert sorted(recorded) == list(range(EPISODES))
    assert recorded == whole_episodes(tmp_path / "one")
    assert not check_trace(tmp_path / "t").damages
    assert '"restart"' in (tmp_path / "t" / "events.jsonl").read_text()


def _cartpole() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")
