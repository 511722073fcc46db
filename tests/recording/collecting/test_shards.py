"""Shards of a run: processes that know nothing of each other record its episodes into one directory."""

import os
import random
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st
from long_tests import LONG
from shell import ok, process, run, wait_for
from worker_episodes import whole_episodes

from gym_trace import check_trace, collect, open_trace
from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.recording.collecting.resuming import Shard
from gym_trace.recording.collecting.supervisor import EpisodeSet

pytestmark = pytest.mark.usefixtures("forked_workers")

CARTPOLE = partial(gymnasium.make, "CartPole-v1")
SHARDS, KILLED = (10, 3) if LONG else (3, 1)
EPISODES = 100 * SHARDS
HANGING = """
import time
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

step, steps = CartPoleEnv.step, iter(range(1000))

def hanging(self, action):
    if next(steps, None) is None:
        time.sleep(1000)
    return step(self, action)

CartPoleEnv.step = hanging
"""


@given(st.integers(1, 4), st.data())
def test_an_episode_set_of_a_shard_counts_only_its_numbers(of: int, data: Any) -> None:
    shard = Shard(data.draw(st.integers(0, of - 1)), of)
    numbers = st.sampled_from(shard.below(40))
    done, truth = EpisodeSet([], shard), set()
    for added, number in data.draw(st.lists(st.tuples(st.booleans(), numbers))):
        if added:
            done.add(number)
            truth.add(number)
        else:
            assert done.discard(number) == (number in truth)
            truth.discard(number)
    assert len(done) == len(truth)
    assert [number for number in shard.below(40) if number in done] == sorted(truth)
    assert [done.below(limit) for limit in range(40)] == [sum(n < limit for n in truth) for limit in range(40)]


def test_an_array_with_requeued_jobs_records_what_one_process_records(tmp_path: Path) -> None:
    directory = tmp_path / "array"
    (tmp_path / "hanging.py").write_text(HANGING)

    def start(shard: int, *more: object) -> subprocess.Popen[str]:
        words = ("--episodes", EPISODES, "--seed", 7, "--shard", f"{shard}/{SHARDS}", "--resume")
        where = {"start_new_session": True, "stdout": subprocess.DEVNULL, "cwd": tmp_path}
        return process("record", "CartPole-v1", "-o", directory, *words, *more, **where)

    killed = random.Random(0).sample(range(SHARDS), KILLED)
    jobs = {shard: start(shard, *["--import", "hanging"] * (shard in killed)) for shard in range(SHARDS)}
    for shard in killed:
        wait_for(lambda shard=shard: list(directory.glob(f"*-s{shard}-w0.*")))  # type: ignore[misc]
        os.killpg(jobs[shard].pid, signal.SIGKILL)
        jobs[shard].communicate()
        assert jobs[shard].returncode == -signal.SIGKILL
        jobs[shard] = start(shard)
    for job in jobs.values():
        _, errors = job.communicate(timeout=240)
        assert job.returncode == 0, errors
    ok("record", "CartPole-v1", "-o", tmp_path / "one", "--episodes", EPISODES, "--seed", 7, "-j", 1)
    recorded = whole_episodes(directory, 7)
    assert sorted(recorded) == list(range(EPISODES))
    assert recorded == whole_episodes(tmp_path / "one", 7)
    assert not check_trace(directory).damages
    assert open_trace(directory).metadata["seed"] == 7  # the same of all writers
    again = ok("record", "CartPole-v1", "-o", directory, "--episodes", EPISODES, "--seed", 7, "--shard", f"0/{SHARDS}")
    assert f"all {len(range(0, EPISODES, SHARDS))} episodes are recorded" in again.output


def test_a_shard_counts_its_own_episodes(tmp_path: Path) -> None:
    for shard, count in ((0, 3), (1, 2)):
        done = collect(CARTPOLE, directory=tmp_path, episodes=5, workers=0, seed=1, shard=(shard, 2))
        assert (done.stopped, done.episodes, done.new_episodes) == ("done", count, count)
    more = collect(CARTPOLE, directory=tmp_path, episodes=9, workers=0, seed=1, shard=(0, 2))
    assert (more.episodes, more.new_episodes) == (5, 2)
    assert sorted(whole_episodes(tmp_path, 1)) == [0, 1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize(
    ("other", "said"),
    [({"shard": (1, 3)}, "shards=2, not 3"), ({"seed": 2}, "seed=1, not 2"), ({"policy": lambda o: 1}, "policy")],
)
def test_shards_with_other_settings_raise(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    given = {"directory": tmp_path, "episodes": 4, "workers": 0, "seed": 1}
    collect(CARTPOLE, **given, shard=(0, 2))
    with pytest.raises(InvalidOption, match=said):
        collect(CARTPOLE, **{**given, "shard": (1, 2), **other})
    assert sorted(whole_episodes(tmp_path, 1)) == [0, 2]


def test_a_shard_joins_no_other_trace_unless_asked(tmp_path: Path) -> None:
    collect(CARTPOLE, directory=tmp_path, episodes=2, workers=0, seed=5)
    with pytest.raises(TraceExists):
        collect(CARTPOLE, directory=tmp_path, episodes=2, workers=0, seed=5, shard=(0, 2))
    collect(CARTPOLE, directory=tmp_path, episodes=2, workers=0, seed=5, shard=(0, 2), on_exist="append")
    assert len(open_trace(tmp_path)) == 3


@pytest.mark.parametrize(
    "given", [{"shard": (2, 2), "seed": 1}, {"shard": (0, 2)}, {"shard": (0, 2), "seed": 1, "on_exist": "replace"}]
)
def test_invalid_shards_raise(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match="shard="):
        collect(CARTPOLE, directory=tmp_path, episodes=2, **given)


@pytest.mark.parametrize(("words", "said"), [(["2/2", "--seed", 1], "0/10 to 9/10"), (["0/2"], "--shard needs --seed")])
def test_invalid_shards_are_usage_errors(tmp_path: Path, words: list[object], said: str) -> None:
    refused = run("record", "CartPole-v1", "-o", tmp_path / "t", "--shard", *words)
    assert refused.exit_code == 2
    assert said in refused.output
