"""Episodes recorded by several processes."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
from failing_workers import DyingEnv, FailingEnv, SeededPolicy, act_on_observation
from hypothesis import given
from hypothesis import strategies as st
from shell import wait_for
from worker_episodes import children, whole_episodes

from gym_trace import check_trace, collect, open_trace
from gym_trace.envs.seeding import EPISODES, episode_of, episode_seed
from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.recording.collecting.resuming import Shard
from gym_trace.recording.collecting.supervisor import EpisodeSet
from gym_trace.recording.processes.fleet import Lost
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.recording.processes.run_log import EVENTS

pytestmark = pytest.mark.usefixtures("forked_workers")
CARTPOLE = partial(gymnasium.make, "CartPole-v1")
needs_lanes = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
LANES = [None, pytest.param(3, marks=needs_lanes)]


class Murderous(LocalProcesses):
    """Kills a worker, any, after each of the first reports."""

    def __init__(self, times: int, seed: int):
        super().__init__()
        self.times, self.random = times, random.Random(seed)

    def poll(self, seconds: float) -> Any:
        said = super().poll(seconds)
        if self.times and self._workers and any(not isinstance(message, Lost) for _, message in said):
            self.times -= 1
            process, _ = self.random.choice(list(self._workers.values()))
            os.kill(process.pid, signal.SIGKILL)
        return said


@given(st.integers(0, 2**70), st.integers(0, EPISODES - 1))
def test_the_seed_of_an_episode_identifies_it(root: int, episode: int) -> None:
    seed = episode_seed(root, episode)
    assert 0 <= seed < EPISODES
    assert episode_of(root, seed) == episode


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12))))
def test_an_episode_set_behaves_like_a_set(changes: list[tuple[bool, int]]) -> None:
    done, truth = EpisodeSet([3], Shard()), {3}
    for added, number in changes:
        if added:
            done.add(number)
            truth.add(number)
        else:
            assert done.discard(number) == (number in truth)
            truth.discard(number)
    assert len(done) == len(truth)
    assert [number in done for number in range(14)] == [number in truth for number in range(14)]
    assert [done.below(limit) for limit in range(14)] == [sum(n < limit for n in truth) for limit in range(14)]


def test_any_number_of_workers_records_the_same_episodes(tmp_path: Path) -> None:
    results = [collect(CARTPOLE, directory=tmp_path / str(n), episodes=60, workers=n, seed=3) for n in (1, 3)]
    assert [result.stopped for result in results] == ["done"] * 2
    one, three = (whole_episodes(tmp_path / str(n), 3) for n in (1, 3))
    assert sorted(one) == list(range(60))
    assert one == three
    assert len({result.steps for result in results}) == 1


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[bytes, ...]]:
    """The episodes of a run without trouble."""
    folder = tmp_path_factory.mktemp("calm")
    collect(partial(FailingEnv, str(folder)), act_on_observation, folder / "t", episodes=90, workers=1, seed=1)
    return whole_episodes(folder / "t", 1)


def test_hung_raising_and_killed_workers_change_nothing_but_the_restarts(tmp_path: Path, calm: Any) -> None:
    result = collect(
        partial(FailingEnv, str(tmp_path), (17, 45, 75), 45),  # 45 fails without hanging
        act_on_observation,
        tmp_path / "t",
        episodes=90,
        workers=3,
        seed=1,
        stall_timeout=5.0,
        flush_seconds=0.05,
        backend=Murderous(2, seed=0),
    )
    assert (result.stopped, result.episodes) == ("done", 90)
    assert whole_episodes(tmp_path / "t", 1) == calm
    assert not check_trace(tmp_path / "t").damages
    assert not list((tmp_path / "t").glob("*.ring"))  # unreadable after a reboot
    events = [json.loads(line) for line in (tmp_path / "t" / EVENTS).read_text().splitlines()]
    reasons = [event["reason"] for event in events if event["event"] == "restart"]
    assert len(reasons) == result.restarts > 0
    for reason in ("no heartbeat", "is out of luck", "its process ended"):
        assert any(reason in given for given in reasons), reasons


@needs_lanes
@pytest.mark.parametrize(("workers", "num_envs"), [(1, 1), (2, 3)])
def test_lanes_of_workers_record_the_same_episodes(tmp_path: Path, calm: Any, workers: int, num_envs: int) -> None:
    make = partial(FailingEnv, str(tmp_path))
    result = collect(make, act_on_observation, tmp_path / "t", episodes=90, workers=workers, num_envs=num_envs, seed=1)
    assert (result.stopped, result.episodes) == ("done", 90)
    assert whole_episodes(tmp_path / "t", 1) == calm
    steps = sum(len(episode) for episode in open_trace(tmp_path / "t") if episode.outcome == "terminated")
    assert result.steps == steps
    for episode in open_trace(tmp_path / "t"):
        assert episode.annotations["value"].tolist() == episode.observations[:-1, 1].tolist()


@needs_lanes
def test_random_actions_are_the_same_with_lanes_as_without(tmp_path: Path) -> None:
    for name, options in (("a", {}), ("b", {"num_envs": 4})):
        collect(CARTPOLE, directory=tmp_path / name, episodes=12, seed=2, **options)
    assert whole_episodes(tmp_path / "a", 2) == whole_episodes(tmp_path / "b", 2)


def test_a_policy_is_seeded_for_each_episode(tmp_path: Path) -> None:
    for workers in (1, 2):
        collect(CARTPOLE, SeededPolicy, tmp_path / str(workers), episodes=8, workers=workers, seed=2)
    assert whole_episodes(tmp_path / "1", 2) == whole_episodes(tmp_path / "2", 2)


@pytest.mark.parametrize("num_envs", LANES)
def test_one_process_records_the_same_episodes_as_workers(tmp_path: Path, calm: Any, num_envs: int | None) -> None:
    pid = os.getpid()

    def make() -> Any:
        assert os.getpid() == pid
        return FailingEnv(str(tmp_path))

    result = collect(
        make, act_on_observation, tmp_path / "t", episodes=90, workers=0, num_envs=num_envs, seed=1, bytes=1 << 30
    )
    assert (result.stopped, result.episodes, result.restarts) == ("done", 90, 0)
    assert [worker.state for worker in result.workers] == ["ended"]
    assert whole_episodes(tmp_path / "t", 1) == calm
    for episode in open_trace(tmp_path / "t"):
        assert episode.annotations["value"].tolist() == episode.observations[:-1, 1].tolist()


def test_an_error_in_one_process_is_raised_unchanged_and_the_run_resumes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        collect(partial(FailingEnv, str(tmp_path), always=4), directory=tmp_path / "t", episodes=8, workers=0, seed=1)
    assert sorted(whole_episodes(tmp_path / "t", 1)) == [0, 1, 2, 3]
    result = collect(partial(FailingEnv, str(tmp_path)), directory=tmp_path / "t", episodes=8, workers=0, resume=True)
    assert (result.stopped, result.new_episodes) == ("done", 4)


def test_a_limit_ends_a_run_in_one_process_in_the_middle_of_an_episode(tmp_path: Path) -> None:
    make = partial(gymnasium.make, "Pendulum-v1", max_episode_steps=10**9)
    result = collect(make, directory=tmp_path / "t", steps=1000, workers=0, seed=1)
    assert (result.stopped, result.episodes) == ("steps", 0)
    assert result.steps >= 1000


def test_an_episode_that_always_fails_is_abandoned_and_reported(tmp_path: Path) -> None:
    make = partial(FailingEnv, str(tmp_path), always=4)
    result = collect(make, directory=tmp_path / "trace", episodes=8, workers=2, seed=1)
    assert result.stopped == "failed"
    assert list(result.failed) == [4]
    assert "out of luck" in result.failed[4]
    assert sorted(whole_episodes(tmp_path / "trace", 1)) == [0, 1, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(("limit", "workers"), [({"episodes": 3}, 2), ({"seconds": 30}, 1)])
def test_a_run_whose_workers_cannot_start_fails_before_its_limit(
    tmp_path: Path, limit: dict[str, Any], workers: int
) -> None:
    make = partial(gymnasium.make, "CartPole-v1", nonsense=1)
    result = collect(make, directory=tmp_path, workers=workers, max_restarts=workers, **limit)
    assert (result.stopped, result.restarts) == ("failed", workers)
    assert all("nonsense" in worker.trouble for worker in result.workers)
    assert "nonsense" in result.trouble


def test_an_interrupted_run_is_resumed_to_the_same_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.collecting.supervisor._REPORT_SECONDS", 0.0)  # before all is done
    first = collect(
        CARTPOLE, directory=tmp_path / "a", episodes=120, workers=2, seed=5, on_progress=lambda now: now.episodes > 20
    )
    assert first.stopped == "interrupted"
    assert 20 < first.episodes < 120
    second = collect(CARTPOLE, directory=tmp_path / "a", episodes=120, workers=1, resume=True)
    assert (second.stopped, second.episodes) == ("done", 120)
    assert second.new_episodes == 120 - len(whole_episodes_before(tmp_path / "a"))
    collect(CARTPOLE, directory=tmp_path / "b", episodes=120, workers=1, seed=5)
    assert whole_episodes(tmp_path / "a", 5) == whole_episodes(tmp_path / "b", 5)
    third = collect(CARTPOLE, directory=tmp_path / "a", episodes=120, workers=2, resume=True)
    assert (third.stopped, third.new_episodes, third.episodes) == ("done", 0, 120)


def whole_episodes_before(directory: Path) -> list[int]:
    """The episodes that were there when the run was resumed."""
    events = [json.loads(line) for line in (directory / EVENTS).read_text().splitlines()]
    return list(range(next(event["resumed"] for event in events if event.get("resumed"))))


def test_metadata_of_the_user_does_not_hide_what_is_recorded(tmp_path: Path) -> None:
    for _ in range(2):
        result = collect(
            CARTPOLE, directory=tmp_path, episodes=9, seed=5, metadata={"mine": 1}, resume=any(tmp_path.iterdir())
        )
    assert (result.new_episodes, result.episodes) == (0, 9)
    assert len(whole_episodes(tmp_path, 5)) == 9
    assert open_trace(tmp_path).metadata["mine"] == 1
    collect(CARTPOLE, directory=tmp_path / "more", episodes=1, metadata={"run": "mine"})
    assert open_trace(tmp_path / "more").metadata["given"] == {"run": "mine"}


def test_a_second_run_beside_the_first_has_episodes_of_its_own(tmp_path: Path) -> None:
    collect(CARTPOLE, directory=tmp_path, episodes=9, seed=5)
    collect(CARTPOLE, SeededPolicy, tmp_path, episodes=4, seed=5, on_exist="append")
    result = collect(CARTPOLE, SeededPolicy, tmp_path, episodes=6, resume=True)
    assert (result.new_episodes, result.episodes) == (2, 6)
    assert len(open_trace(tmp_path)) == 15


def test_a_run_killed_before_its_log_began_is_resumed_as_a_new_one(tmp_path: Path) -> None:
    (tmp_path / EVENTS).touch()
    assert collect(CARTPOLE, directory=tmp_path, episodes=3, resume=True).new_episodes == 3


def test_a_torn_line_of_events_costs_nothing(tmp_path: Path) -> None:
    collect(CARTPOLE, directory=tmp_path, episodes=3, seed=5)
    with open(tmp_path / EVENTS, "a") as events:
        events.write('{"event": "sta')
    assert collect(CARTPOLE, directory=tmp_path, episodes=5, resume=True).new_episodes == 2
    assert collect(CARTPOLE, directory=tmp_path, episodes=5, resume=True).new_episodes == 0


def test_a_second_run_in_a_directory_in_use_raises(tmp_path: Path) -> None:
    refused: list[str] = []

    def look(progress: Any) -> None:
        if not refused:
            with pytest.raises(InvalidOption, match="in use by another run") as error:
                collect(CARTPOLE, directory=tmp_path, episodes=5, resume=True)
            refused.append(str(error.value))

    collect(CARTPOLE, directory=tmp_path, episodes=5, seed=1, on_progress=look)
    assert refused


@pytest.mark.parametrize("option", ["episode_filter", "frame_filter", "uid"])
def test_options_that_skip_episodes_or_steps_raise(tmp_path: Path, option: str) -> None:
    with pytest.raises(InvalidOption, match=option):
        collect(CARTPOLE, directory=tmp_path, episodes=5, **{option: len})


@pytest.mark.parametrize("num_envs", LANES)
def test_an_episode_that_kills_its_process_is_identified_and_abandoned(tmp_path: Path, num_envs: int | None) -> None:
    result = collect(
        DyingEnv, directory=tmp_path, episodes=40, workers=2, num_envs=num_envs, seed=1, flush_seconds=0.05
    )
    assert result.stopped == "failed"
    assert list(result.failed) == [7]
    assert sorted(whole_episodes(tmp_path, 1)) == [k for k in range(40) if k != 7]


@pytest.mark.parametrize("option", [{"keep_bytes": 0}, {"lanes": 1}, {"episode_filter": bool}])
def test_options_that_would_lose_episodes_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=f"{next(iter(option))}: not supported by collect"):
        collect(SeededPolicy, directory=tmp_path / "t", episodes=1, **option)
    assert not (tmp_path / "t").exists()


def test_resuming_with_other_settings_raises(tmp_path: Path) -> None:
    collect(CARTPOLE, directory=tmp_path, episodes=2, seed=5)
    with pytest.raises(InvalidOption, match="seed=5, not 6"):
        collect(CARTPOLE, directory=tmp_path, episodes=2, seed=6, resume=True)
    with pytest.raises(InvalidOption, match="no run to resume"):
        collect(CARTPOLE, directory=tmp_path / "elsewhere", episodes=2, resume=True)
    with pytest.raises(TraceExists):
        collect(CARTPOLE, directory=tmp_path, episodes=2)


@pytest.mark.parametrize("limit", [{"steps": 3000}, {"seconds": 0.5}, {"bytes": 100_000}])
def test_other_limits_end_a_run_soon(tmp_path: Path, limit: dict[str, Any]) -> None:
    result = collect(CARTPOLE, directory=tmp_path, workers=1, seed=0, **limit)
    assert result.stopped == next(iter(limit))
    assert result.episodes > 0 or "seconds" in limit  # before which a busy machine may not have started anything
    assert not check_trace(tmp_path).damages


def test_a_run_needs_a_limit_and_workers() -> None:
    with pytest.raises(InvalidOption, match="needs a limit"):
        collect(CARTPOLE)
    with pytest.raises(InvalidOption, match="workers=-1: pass 0 or more"):
        collect(CARTPOLE, episodes=1, workers=-1)


PARENT = """
    from functools import partial, partialmethod
    import gymnasium, gym_trace, sys
    if __name__ == "__main__":
        gym_trace.collect(
            partial(gymnasium.make, "CartPole-v1"), directory=sys.argv[1], episodes=100_000, workers=2, seed=7,
            on_progress=lambda now: print(now.episodes, flush=True),
        )
"""


def test_workers_end_with_their_parent_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(PARENT))
    parent = forked_python.Popen([sys.executable, str(script), str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    while int(parent.stdout.readline() or 10**9) < 50:
        pass
    workers = children(parent.pid)
    assert len(workers) >= 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    there = len(whole_episodes(tmp_path / "a", 7))
    assert there > 0
    result = collect(CARTPOLE, directory=tmp_path / "a", episodes=there + 200, workers=2, resume=True)
    assert result.stopped == "done"
    found = whole_episodes(tmp_path / "a", 7)
    assert set(found) >= set(range(there + 200))


def test_a_script_that_starts_a_run_on_import_raises_with_advice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    made = "import gymnasium, gym_trace\ngym_trace.collect(make_env, None, 'trace', episodes=2, workers=2)\n"
    script.write_text(made.replace("make_env", "lambda: gymnasium.make('CartPole-v1')"))
    ended = forked_python.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert 'put what it does under if __name__ == "__main__":' in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    typed = subprocess.run([sys.executable, "-"], cwd=tmp_path, input=script.read_text(), text=True, timeout=60)
    assert typed.returncode == 0  # no file to import
    assert len(open_trace(tmp_path / "trace")) == 2
