"""Copies and forks of a recorded vector environment continue the open episodes of all lanes."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import forked_python
import pytest
from forked_python import HELPERS
from gymnasium import vector
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import LONG
from numbered_lanes import (
    COUNT,
    MODES,
    NEXT_STEP,
    SPACES,
    NumberedLaneEnv,
    check_lanes,
    make_vector_env,
    modes,
    step_lanes,
)

from gym_trace import TraceRecordingVectorWrapper, open_trace


def wrapped(directory: Path, mode: Any, space: str = "box", **options: Any) -> Any:
    makers = [partial(NumberedLaneEnv, lane, SPACES[space], SPACES["discrete"]) for lane in range(COUNT)]
    envs = vector.SyncVectorEnv(makers, autoreset_mode=mode)
    return TraceRecordingVectorWrapper(envs, directory, record_infos=True, on_exist="append", **options)


def steps(env: Any, count: int) -> None:
    for _ in range(count):
        step_lanes(env)


def steps_of(mode: Any, count: int, directory: Path) -> Counter[tuple[int, int, int]]:
    """Return the expected steps of a run of this length."""
    env = wrapped(directory, mode)
    env.reset(seed=11)
    steps(env, count)
    env.close()
    return check_lanes(open_trace(directory))


COPIERS = {"copy": copy.deepcopy, "pickle": lambda env: pickle.loads(pickle.dumps(env))}
BEFORE = (0, 1, 3, 4, 9)


@modes
@pytest.mark.parametrize(
    ("copier", "before"),
    list(itertools.product(COPIERS, BEFORE)) if LONG else list(zip(itertools.cycle(COPIERS), BEFORE)),
)
def test_a_copy_continues_mid_episode_with_its_own_writer(tmp_path: Path, mode: Any, copier: str, before: int) -> None:
    env = wrapped(tmp_path / "t", mode, uid="first")
    env.reset(seed=11, options={"level": 1})
    steps(env, before)
    twin = COPIERS[copier](env)
    steps(twin, 5)
    steps(env, 3)
    env.close()
    twin.close()
    trace = open_trace(tmp_path / "t")
    first, second = (steps_of(mode, before + more, tmp_path / str(more)) for more in (3, 5))
    assert check_lanes(trace) == first + second - steps_of(mode, before, tmp_path / "0")
    (writer,) = (writer for writer in trace.readers if writer.schema["writer"] != "first")
    assert writer.schema["copied_from"] == "first"
    for part in trace:
        number = int(part.reset_info["began"])
        assert part.seed == (11 + part.lane if number == 0 else None)
        assert part.options == ({"level": 1} if number == 0 else None)
    ids = [part.episode_id for part in trace if part.writer != "first"]
    assert sorted(ids) == list(range(len(ids)))


@settings(max_examples=settings().max_examples // 2)
@given(
    st.sampled_from(MODES),
    st.sampled_from(["box", "frames"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.sets(st.integers(0, 4)) | st.none(),
    st.booleans(),
)
def test_copies_of_copies_apply_the_filters(
    tmp_path_factory: Any, mode: Any, space: str, runs: list[int], kept: Any, flushes: bool
) -> None:
    directory = tmp_path_factory.mktemp("traces")
    envs = [wrapped(directory / "t", mode, space, frame_filter=None if kept is None else kept.__contains__)]
    envs[0].reset(seed=11)
    for run in runs:
        steps(envs[-1], run)
        if flushes:
            envs[-1].flush()
        envs.append(copy.deepcopy(envs[-1]))
    steps(envs[-1], 3)
    for env in envs:
        env.close()
    whole = steps_of(mode, sum(runs) + 3, directory / "whole")
    assert check_lanes(open_trace(directory / "t")) == Counter(
        step for step in whole.elements() if kept is None or step[2] in kept
    )


def test_a_copy_does_not_record_a_filtered_episode(tmp_path: Path) -> None:
    env = wrapped(tmp_path, NEXT_STEP, episode_filter=lambda episode: episode != 1)
    env.reset(seed=11)
    twin = copy.deepcopy(env)
    steps(twin, 1)
    twin.close()
    env.close()
    parts = [part for part in open_trace(tmp_path) if len(part)]
    assert [(part.lane, part.episode_id, len(part)) for part in parts] == [(0, 0, 1), (2, 1, 1)]


@modes
def test_a_copy_that_takes_no_step_writes_nothing(tmp_path: Path, mode: Any) -> None:
    env = wrapped(tmp_path, mode)
    env.reset(seed=11)
    steps(env, 3)
    twin = copy.deepcopy(env)
    twin.flush()
    second = copy.deepcopy(twin)
    twin.close()
    del twin
    assert len(list(tmp_path.glob("*.manifest.jsonl"))) == 1
    second.reset(seed=5)
    steps(second, 1)
    second.close()
    env.close()
    assert len(list(tmp_path.glob("*.manifest.jsonl"))) == 2
    ids = sorted((part.writer, part.episode_id, part.first_step) for part in open_trace(tmp_path) if part.seed == 5)
    assert [first for *_, first in ids] == [0]


def test_a_copy_of_a_closed_recorder_records_its_next_episodes(tmp_path: Path) -> None:
    env = wrapped(tmp_path, NEXT_STEP)
    env.reset(seed=11)
    env.close()
    twin = copy.deepcopy(env)
    twin.reset(seed=12)
    steps(twin, 2)
    twin.close()
    assert check_lanes(open_trace(tmp_path)).total() == 2 * COUNT


def test_a_failed_copy_of_asynchronous_environments_loses_nothing(tmp_path: Path) -> None:
    env = TraceRecordingVectorWrapper(
        make_vector_env("async", NEXT_STEP, True, SPACES["box"], SPACES["discrete"]),
        tmp_path,
        record_infos=True,
    )
    env.reset(seed=11)
    steps(env, 2)
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="AsyncVectorEnv"):
            copier(env)
    steps(env, 3)
    env.close()
    assert check_lanes(open_trace(tmp_path)) == steps_of(NEXT_STEP, 5, tmp_path / "whole")
    assert len(list(tmp_path.glob("*.manifest.jsonl"))) == 1


# -- forks ------------------------------------------------------------------------------------------------------------

_PREAMBLE = f"""
import os, sys
sys.path[:0] = {[os.path.dirname(__file__), HELPERS]!r}
from test_vector_copies import *
mode = vector.AutoresetMode(sys.argv[2])
env = wrapped(Path(sys.argv[1]), mode)
env.reset(seed=11)
"""
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def run_script(script: str, directory: Path, mode: Any) -> None:
    command = [sys.executable, "-c", _PREAMBLE + script, str(directory), mode.value]
    ended = forked_python.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


FILTER = "frame_filter=lambda step: step != 1"


@needs_fork
@pytest.mark.parametrize(
    ("mode", "options"),
    list(itertools.product(MODES, ["", FILTER])) if LONG else [*((mode, "") for mode in MODES), (MODES[0], FILTER)],
)
def test_a_forked_child_continues_all_open_episodes(tmp_path: Path, mode: Any, options: str) -> None:
    script = f"""
env.close()
env = wrapped(Path(sys.argv[1]) / "t", mode, {options})
env.reset(seed=11)
steps(env, 4)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    steps(env, 3)
else:
    steps(env, 6)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        steps(env, 2)
    env.close()
    os._exit(0)
"""
    run_script(script, tmp_path, mode)
    trace = open_trace(tmp_path / "t")
    assert len(trace.writers) == 3
    runs = [steps_of(mode, count, tmp_path / str(count)) for count in (7, 12, 4)]
    every = runs[0] + runs[1] - runs[2]
    assert check_lanes(trace) == Counter(step for step in every.elements() if not options or step[2] != 1)


ENDS = ("os._exit(0)", "sys.exit()", "env.close()")


@needs_fork
@pytest.mark.parametrize(("mode", "end"), list(itertools.product(MODES, ENDS) if LONG else zip(MODES, ENDS)))
def test_a_child_that_takes_no_step_writes_no_file(tmp_path: Path, mode: Any, end: str) -> None:
    script = f"""
steps(env, 3)
if not (child := os.fork()):
    {end}
else:
    os.waitpid(child, 0)
    steps(env, 2)
    env.close()
"""
    run_script(script, tmp_path / "t", mode)
    assert check_lanes(open_trace(tmp_path / "t")) == steps_of(mode, 5, tmp_path / "whole")
    assert len(list((tmp_path / "t").iterdir())) == 2
