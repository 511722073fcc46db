"""record --ray: actors, nodes and drivers that die change nothing about what is recorded."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import shared_store  # noqa: F401 - registers shared://
from forked_python import HELPERS
from shell import wait_for
from worker_episodes import children, whole_episodes

from gym_trace import check_trace, collect, open_trace
from gym_trace.errors import TraceNotFound
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.collecting.supervisor import Collected
from gym_trace.recording.publishing import spool

ray = pytest.importorskip("ray")
pytest.importorskip("ray.cluster_utils")
engine = pytest.importorskip("gym_trace.recording.processes.ray")

EPISODES, NODES, SEED = 2000, 3, 3
SLOW = """
import time
import gymnasium
import shared_store

class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.002)
        return super().step(action)

class Once(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(1)
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info

def make():
    return Slow(shared_store.make())

def make_once():
    return Once(shared_store.make())
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without processors, and three nodes with one each. Each node has a spool, as a machine has."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # or it kills its workers for the memory of others
    for name, most in (("period_ms", 1000), ("timeout_ms", 2000), ("failure_threshold", 5)):
        monkeypatch.setenv(f"RAY_health_check_{name}", str(most))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([HELPERS, str(tmp_path)]))
    monkeypatch.setenv(spool.SPOOL_VARIABLE, str(tmp_path / "spool of the driver"))
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "shared-1.dist-info").mkdir()  # fsspec finds it in all processes
    (tmp_path / "shared-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: shared\nVersion: 1\n")
    (tmp_path / "shared-1.dist-info" / "entry_points.txt").write_text(
        "[fsspec.specs]\nshared = shared_store:SharedStore\n"
    )
    small = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})

    def grow(number: int) -> Any:
        mine = {spool.SPOOL_VARIABLE: str(tmp_path / f"spool of {number}")}
        return cluster.add_node(num_cpus=1, env_vars=mine, **small)

    try:
        cluster.grow, cluster.nodes_of_workers = grow, [grow(number) for number in range(NODES)]
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def count(place: str) -> int:
    try:
        return len(open_trace(place))
    except TraceNotFound:  # nothing is there yet
        return 0


def processes_of(node: Any) -> list[int]:
    """The raylet of a node, and its actor, once it has one."""
    raylet = node.all_processes["raylet"][0].process.pid
    return [raylet, *(one for one in children(raylet) if b"ray::_Actor" in Path(f"/proc/{one}/cmdline").read_bytes())]


@pytest.mark.parametrize("remote", [False, True], ids=["directory", "url"])
def test_killed_nodes_actors_and_drivers_record_each_episode_once(tmp_path: Path, cluster: Any, remote: bool) -> None:
    """The nodes come back with their spools."""
    place = f"shared:/{tmp_path}/bucket/t" if remote else str(tmp_path / "t")
    words = ["record", "--make", "slow:make", "-o", place, "--episodes", EPISODES, "--seed", SEED, "-j", NODES]
    words += ["--ray", cluster.address, "--fact", "author=me"]

    def driver(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "gym_trace", *map(str, words), *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def await_episodes(least: int, running: Any) -> None:
        until = time.monotonic() + 240
        while count(place) < least:
            assert running.poll() is None, running.communicate()[0]
            assert time.monotonic() < until, "recorded too little"
            time.sleep(0.2)

    events = spool.recording_path(place) / "events.jsonl"
    running = driver()
    await_episodes(150, running)
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()
    assert len(whole_episodes(place, SEED)) < EPISODES
    running = driver("--resume")
    wait_for(lambda: '"resume"' in events.read_text())
    await_episodes(count(place) + 100, running)
    os.kill(processes_of(cluster.nodes_of_workers[0])[1], signal.SIGKILL)
    for number in (1, 2):
        await_episodes(count(place) + 150, running)
        cluster.remove_node(cluster.nodes_of_workers[number], allow_graceful=False)
        cluster.nodes_of_workers[number] = cluster.grow(number)
    output = running.communicate(timeout=400)[0]
    assert running.returncode == 0, output
    collect(_cartpole, directory=tmp_path / "one", episodes=EPISODES, workers=0, seed=SEED)
    recorded = whole_episodes(place, SEED)
    assert sorted(recorded) == list(range(EPISODES))
    assert recorded == whole_episodes(tmp_path / "one", SEED)
    assert not check_trace(place).damages
    assert open_trace(place).facts["author"] == "me"
    assert events.read_text().count('"restart"') >= 3
    left = [path.name for path in tmp_path.glob("spool of */*/*") if ".gtb" in path.name or "manifest" in path.name]
    assert all(name.endswith(".superseded") for name in left)
    assert bool(left) == remote


def test_an_actor_frozen_in_mid_episode_duplicates_no_episode(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(engine, "_RELEASE_SECONDS", 5.0)
    make = importlib.import_module("slow").make_once
    backend = engine.RayActors(cluster.address)
    frozen: list[int] = []

    def freeze(progress: Collected) -> None:
        if not frozen and progress.episodes > 2 and len(found := processes_of(cluster.nodes_of_workers[1])) == 2:
            frozen.extend(found)
            for process in frozen:
                os.kill(process, signal.SIGSTOP)

    run = partial(collect, make, None, tmp_path / "t", episodes=20, workers=NODES, seed=SEED, backend=backend)
    try:
        first = run(on_progress=freeze)
        assert len(frozen) == 2
        assert first.stopped == "failed"
        assert "may still run: end its process, and resume the run" in str(first.workers)
    finally:
        for process in frozen:
            os.kill(process, signal.SIGCONT)
    # Its job ends, as no driver has polled it. Its process lives until its raylet learns that the node counts as dead.
    wait_for(lambda: not any(writer.alive for writer in index_of(open_trace(tmp_path / "t")).readers))
    last = run(resume=True)
    backend.close()
    assert (last.stopped, last.episodes) == ("done", 20)
    assert sorted(whole_episodes(tmp_path / "t", SEED)) == list(range(20))


def _cartpole() -> Any:
    return gymnasium.make("CartPole-v1")
