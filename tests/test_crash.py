"""kill -9 in the middle of a recording: what is there is an exact prefix of the run, what is lost is recent.

With GYM_TRACE_LONG=1 four hundred recordings are killed, and how much each has lost is compared with what is promised.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import victim
from gymnasium import vector

from gym_trace import Trace, check_trace, open_trace, repair_trace

LONG = os.environ.get("GYM_TRACE_LONG") == "1"
KILLS = 80 if LONG else 2  # of each kind
FLUSH_SECONDS = 1.0 if LONG else 0.1
SECONDS = (0.02, 2.5) if LONG else (0.3, 0.8)  # that a recording lives

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")


class Killed(NamedTuple):
    """What is known of a killed recording: how many steps were done, and how long before the kill each was done."""

    steps: int
    ages: np.ndarray


def kill_after(seconds: float, kind: str, directory: Path, progress: Path) -> Killed:
    """Starts a recording and kills it when it has lived for so long since its first step."""
    times = victim.new_progress(progress)
    command = [sys.executable, victim.__file__, kind, str(directory), str(progress), str(FLUSH_SECONDS)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        while not times[0] and process.poll() is None:
            time.sleep(0.001)
        time.sleep(seconds)
    finally:
        killed_at = time.monotonic_ns()
        process.kill()
        said = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, said.decode()
    steps = int(times[0])
    return Killed(steps, (killed_at - times[1 : steps + 1]) / 1e9)


def assert_prefix(trace: Trace, kind: str) -> int:
    """Compares a trace with the run it should be the beginning of; returns how many steps it has."""
    env = victim.make(kind)
    run = victim.play(env)
    total = 0
    for number, episode in enumerate(trace):
        assert (episode.episode_id, episode.first_step, episode.seed) == (number, 0, number)
        observations = [np.array(next(run)[0])]
        told = []
        for _ in range(len(episode)):
            action, observation, *rest, _ = next(run)
            observations.append(np.array(observation))
            told.append((action, *rest))
        assert episode.observations.tobytes() == np.array(observations).tobytes()
        assert episode.observations.dtype == observations[0].dtype
        columns = episode.actions, episode.rewards, episode.terminations, episode.truncations
        assert list(zip(*(column.tolist() for column in columns))) == told
        over = bool(told) and (told[-1][2] or told[-1][3])
        assert (episode.outcome in ("terminated", "truncated")) == over
        assert over or (number == len(trace) - 1 and episode.outcome == "lost")
        total += len(episode)
    env.close()
    return total


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("kind", ["cartpole", "frames"])
def test_a_killed_recording_is_an_exact_prefix_and_can_be_repaired(kind, number, tmp_path):
    seconds = random.Random(f"{kind} {number}").uniform(*SECONDS)
    killed = kill_after(seconds, kind, tmp_path / "t", tmp_path / "progress")
    kept = assert_prefix(open_trace(tmp_path / "t"), kind)
    # A step may have been recorded whose end the run itself did not live to see.
    lost = max(0, killed.steps - kept)
    longest = float(killed.ages[kept]) if lost else 0.0
    print(f"{kind} {seconds:.2f} s {killed.steps} steps {lost} lost, {longest:.3f} s")
    if LONG:
        assert longest <= FLUSH_SECONDS
    assert kept > 0 or seconds <= FLUSH_SECONDS

    before = check_trace(tmp_path / "t")
    assert before.damages == []
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert (report.losses, report.steps) == ([], kept)
    assert [path.suffix for path in sorted((tmp_path / "r").iterdir())] in (
        [".gtb", ".jsonl"], [".gtb", ".gtb", ".jsonl"], [".jsonl"]
    )  # fmt: skip
    after = check_trace(tmp_path / "r")
    assert (after.damages, after.remarks, after.steps) == ([], [], kept)
    assert_prefix(open_trace(tmp_path / "r"), kind)
    (tmp_path / "progress").unlink()


@pytest.mark.skipif(not hasattr(vector, "AutoresetMode"), reason="vector environments need gymnasium 1.1")
@pytest.mark.parametrize("number", range(KILLS if LONG else 1))
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_killed_lanes_are_exact_prefixes_and_lose_no_more_than_is_promised(mode, number, tmp_path):
    import telling

    seconds = random.Random(f"{mode} {number}").uniform(*SECONDS)
    killed = kill_after(seconds, f"lanes-{mode}", tmp_path / "t", tmp_path / "progress")
    (tmp_path / "progress").unlink()
    kept = telling.look_at(open_trace(tmp_path / "t"), dead=True)
    assert set(kept.values()) <= {1}
    missing = []  # of each lane, the first step of the environment that is not there
    for lane in range(telling.COUNT):
        mine = sorted((episode, step) for of, episode, step in kept if of == lane)
        lengths = [1 + (2 * lane + episode) % 4 for episode in range(len(mine) + 1)]
        whole = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
        assert mine == whole[: len(mine)]
        missing.append(len(mine) + (whole[len(mine)][0] if mode == "NextStep" else 0))
    first = min(missing)
    longest = float(killed.ages[first]) if first < killed.steps else 0.0
    print(f"{mode} {seconds:.2f} s {killed.steps} steps {max(0, killed.steps - first)} lost, {longest:.3f} s")
    if LONG:
        assert longest <= FLUSH_SECONDS
    assert repair_trace(tmp_path / "t", tmp_path / "r").steps == len(kept)
    assert telling.look_at(open_trace(tmp_path / "r"), dead=True) == kept
