"""Runs of several processes to a URL: kills, resumed runs, and shards."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
import shared_store
from forked_python import HELPERS
from shell import ok, run, wait_for
from worker_episodes import children, whole_episodes

from gym_trace import TraceRecordingWrapper, check_trace, collect, open_trace
from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.recording.collecting.supervisor import Collected
from gym_trace.recording.processes.fleet import Job, Key, Lost
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.recording.publishing import spool

EPISODES = 120
CARTPOLE = partial(gymnasium.make, "CartPole-v1")
DRIVER = """
import sys
sys.path[:0] = sys.argv[2:]
import shared_store
from gym_trace import collect
if __name__ == "__main__":
    collect(shared_store.make, None, sys.argv[1], episodes=int(sys.argv[3]), workers=2, seed=1, flush_seconds=0.02)
"""


@pytest.fixture(autouse=True)
def spools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(spool.SPOOL_VARIABLE, str(tmp_path / "spool"))


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"shared:/{tmp_path}/bucket/t"


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The episodes of a run without trouble."""
    directory = tmp_path_factory.mktemp("calm") / "t"
    collect(CARTPOLE, None, directory, episodes=EPISODES, workers=0, seed=1)
    return whole_episodes(directory, 1)


def events(url: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (spool.spool_of(url) / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pushed", [False, True])
def test_a_run_with_killed_workers_and_driver_has_each_episode_once(
    tmp_path: Path, url: str, calm: Any, pushed: bool
) -> None:
    paths = HELPERS
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    words = [sys.executable, str(script), url, paths, str(EPISODES)]
    environ = {**os.environ, "GYM_TRACE_QUICK": "25"}
    driver = forked_python.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ)
    sealed = tmp_path / "bucket" / "t"
    wait_for(lambda: len(list(sealed.glob("*.gtb"))) > 3)
    for worker in children(driver.pid):
        if b"spawn_main" in Path(f"/proc/{worker}/cmdline").read_bytes():
            os.kill(worker, signal.SIGKILL)
            break
    wait_for(lambda: any(event["event"] == "restart" for event in events(url)))
    driver.kill()
    driver.wait()
    if pushed:
        ok("push", "--resume")
    done = collect(shared_store.make, None, url, episodes=EPISODES, workers=1, resume=True, flush_seconds=0.02)
    assert (done.stopped, done.episodes) == ("done", EPISODES)
    assert 0 < done.new_episodes < EPISODES
    assert whole_episodes(url, 1) == calm
    assert check_trace(url).damages == []
    assert not [path for path in spool.spool_of(url).iterdir() if ".gtb" in path.name or "manifest" in path.name]


class Machine(LocalProcesses):
    """A cluster of one machine, which may be out of reach when a worker is lost."""

    def __init__(self, reachable: bool):
        super().__init__()
        self.jobs: dict[Key, Job] = {}
        self.reachable = reachable

    def start(self, key: Key, job: Job) -> None:
        self.jobs[key] = job
        super().start(key, job)

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        heard = super().poll(seconds)
        for key, message in heard:
            if isinstance(message, Lost) and (self.reachable or "SIGKILL" not in message.reason):
                wait_for(self.jobs[key].is_over)
        return heard

    def everywhere(self, call: Callable[[], None]) -> None:
        call()


@pytest.mark.parametrize("reachable", [True, False])
def test_a_cluster_publishes_or_repeats_episodes_of_a_killed_worker(
    tmp_path: Path, url: str, calm: Any, reachable: bool
) -> None:
    killed: list[int] = []

    def kill(progress: Collected) -> None:
        if not killed and progress.episodes > 20:
            found = [one for one in children(os.getpid()) if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()]
            killed.append(found[0])
            os.kill(found[0], signal.SIGKILL)

    options: dict[str, Any] = {"episodes": EPISODES, "workers": 2, "seed": 1, "facts": {"author": "me"}}
    done = collect(shared_store.make, None, url, backend=Machine(reachable), on_progress=kill, **options)
    assert (done.stopped, done.episodes, done.restarts) == ("done", EPISODES, 1)
    assert whole_episodes(url, 1) == calm
    assert check_trace(url).damages == []
    assert open_trace(url).facts["author"] == "me"
    left = [path.name for path in spool.spool_of(url).iterdir() if ".gtb" in path.name or "manifest" in path.name]
    assert bool(left) != reachable
    assert all(name.endswith(".superseded") for name in left)


def test_shards_of_several_machines_record_one_trace(
    tmp_path: Path, url: str, calm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shard(number: int, machine: str) -> Collected:
        monkeypatch.setenv(spool.SPOOL_VARIABLE, str(tmp_path / machine))
        return collect(CARTPOLE, None, url, episodes=EPISODES, workers=0, seed=1, shard=(number, 2))

    assert shard(0, "one").new_episodes == EPISODES // 2
    assert shard(1, "other").new_episodes == EPISODES // 2
    assert shard(0, "third").new_episodes == 0
    assert whole_episodes(url, 1) == calm


def test_a_shard_joins_no_other_trace_at_a_url(url: str) -> None:
    TraceRecordingWrapper(CARTPOLE(), url).close()
    with pytest.raises(TraceExists):
        collect(CARTPOLE, None, url, episodes=4, workers=0, seed=1, shard=(0, 2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bytes": 1000}, "bytes=1000: not supported for URLs"),
        ({"resume": True, "episodes": 1}, "no run of this machine to resume"),
    ],
)
def test_unsupported_options_of_runs_to_urls_raise(url: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        collect(CARTPOLE, None, url, seed=1, **given)


def test_the_record_command_records_to_a_url_with_workers(url: str, calm: Any) -> None:
    words = ("record", "CartPole-v1", "-o", url, "--import", "shared_store", "--seed", 1, "-j", 1)
    ok(*words, "--episodes", EPISODES // 2)
    refused = run(*words, "--episodes", EPISODES)
    assert refused.exit_code == 1
    assert "already holds a trace; pass --resume to continue its run" in refused.output
    ok(*words, "--episodes", EPISODES, "--resume")
    assert whole_episodes(url, 1) == calm
    assert "not supported for URLs" in run(*words, "--bytes", 1000).output
