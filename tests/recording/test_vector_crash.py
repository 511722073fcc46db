"""Vector runs that are killed, truncated or interrupted: recorded steps are correct, and lanes stay in step."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
from forked_python import HELPERS
from gymnasium import vector
from long_tests import LONG
from numbered_lanes import (
    COUNT,
    DISABLED,
    MODES,
    NEXT_STEP,
    SPACES,
    FixedResultEnv,
    NumberedLaneEnv,
    batched_actions,
    check_lanes,
    expected,
    make_vector_env,
    modes,
    step_lanes,
)
from raising_signals import InterruptsAt
from runs import batch_reader
from scripted_env import bits

import gym_trace
from gym_trace import TraceRecordingVectorWrapper, check_trace, open_trace, repair_trace
from gym_trace.errors import TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.background import SlabWriter

# -- killed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_killed_vector_run_is_an_exact_prefix(tmp_path: Path, kind: str) -> None:
    script = f"""
import sys
sys.path.insert(0, {HELPERS!r})
import numpy as np
import time
from numbered_lanes import *
env = make_vector_env({kind!r}, vector.AutoresetMode.NEXT_STEP, True, SPACES["box"], SPACES["discrete"])
env = TraceRecordingVectorWrapper(env, {str(tmp_path / "t")!r}, record_infos=True, flush_seconds=0.05)
actions = batched_actions(env, 100000)
env.reset(seed=11)
for step, action in enumerate(actions):
    env.step(action)
    time.sleep(0.002)
    if step == 200:
        print("ready", flush=True)
"""
    process = forked_python.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    space, action_space = SPACES["box"], SPACES["discrete"]
    env = make_vector_env("sync", NEXT_STEP, True, space, action_space)
    trace = open_trace(tmp_path / "t")
    episodes = sorted(trace, key=lambda episode: episode.episode_id)
    assert len(episodes) > COUNT
    actions = batched_actions(env, 2 * sum(map(len, episodes)) // COUNT)
    lanes = expected(NEXT_STEP, space, action_space, actions, env.action_space)
    for lane, told in enumerate(lanes):
        for episode, real in zip((e for e in episodes if e.lane == lane), told):
            assert episode.rewards.tolist() == [step[1] for step in real["steps"][: len(episode)]]
            assert bits(episode.observations) == bits(np.array(real["observations"][: len(episode) + 1]))
            assert len(episode) == len(real["steps"]) or episode.outcome == "lost"


# Step lanes that count; each lane of a slab becomes one chunk. Die before a chunk is written.
_MANY_CHUNKS = f"""
import os, signal, sys
sys.path.insert(0, {HELPERS!r})
from numbered_lanes import *
from scripted_env import CountingEnv
from gym_trace.format.batch_writer import BatchWriter
from gym_trace.recording.vector import slabs
from gym_trace.format.ring import chunk_builder

directory, left = sys.argv[1], int(sys.argv[2])
chunk_builder._SMALL_GROUP = 1
slabs._LEAST_BYTES = slabs._MOST_BYTES = 1200
write = BatchWriter.write_chunk

def write_or_die(*chunk):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*chunk)

BatchWriter.write_chunk = write_or_die
makers = [lambda length=length: CountingEnv(length) for length in (3, 4, 50)]
env = vector.SyncVectorEnv(makers, autoreset_mode=SAME_STEP)
env = TraceRecordingVectorWrapper(env, directory, uid="w", flush_seconds=1000.0)
env.reset(seed=0)
steps = 0
while True:
    env.step(np.zeros(3, np.int64))
    steps += 1
    os.write(1, f"{{steps}}\\n".encode())
"""


@pytest.mark.parametrize("last", [1, 5, 7])
def test_a_run_killed_between_the_chunks_of_a_slab_loses_no_step(tmp_path: Path, last: int) -> None:
    command = [sys.executable, "-c", _MANY_CHUNKS, str(tmp_path / "t"), str(last)]
    ended = forked_python.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")
    answered = int(ended.stdout.splitlines()[-1])
    trace = open_trace(tmp_path / "t")
    assert check_trace(tmp_path / "t").damages == []
    (reader,) = index_of(trace).readers
    assert len(set(reader.batches[0].fragments["lane"].tolist())) == min(3, last)
    for lane, length in enumerate((3, 4, 50)):
        parts = [part for part in trace if part.lane == lane]
        rewards = np.concatenate([part.rewards for part in parts])
        assert answered <= len(rewards) <= answered + 1
        assert rewards.tolist() == [step % length + 1 for step in range(len(rewards))]
        for part in parts:
            assert part.observations[:-1, 0].tolist() == (part.rewards - 1).tolist()


# -- a full disk ------------------------------------------------------------------------------------------------------

# Record frames until an error, continue unrecorded, and report the errors.
_SCRIPT = f"""
import json, resource, sys, warnings
sys.path.insert(0, {HELPERS!r})
from numbered_lanes import *
from gym_trace.errors import RecordingError

directory, limit, options, how = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
told = dict(errors=[], steps=0, after=0)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    env = make_vector_env("sync", vector.AutoresetMode.SAME_STEP, True, SPACES["frames"], SPACES["discrete"])
    env = TraceRecordingVectorWrapper(env, directory, uid="w", record_infos=True, **options)
    env.reset(seed=11)
    if limit:  # after the ring is there
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    while told["after"] < 100 and told["steps"] < (20 if how == "close" else 500):
        try:
            env.step(np.zeros(COUNT, np.int64))
            told["after" if told["errors"] else "steps"] += 1
            if told["steps"] == 10 or (how == "flush" and told["steps"] % 10 == 0):
                env.flush()
        except RecordingError as error:
            told["errors"].append(str(error))
    try:
        env.close()
    except RecordingError as error:
        told["errors"].append(str(error))
    env.close()
told["warnings"] = [str(warning.message) for warning in warned]
print(json.dumps(told))
"""


def record_until_full(directory: Path, limit: int, how: str, **options: Any) -> dict[str, Any]:
    pytest.importorskip("resource")
    command = [sys.executable, "-c", _SCRIPT, str(directory), str(limit), json.dumps(options), how]
    ended = forked_python.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.stderr == ""
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("how", ["step", "flush"])
def test_a_full_disk_is_reported_once_and_the_run_continues(tmp_path: Path, how: str, on_error: str) -> None:
    told = record_until_full(tmp_path / "t", 600_000, how, on_error=on_error, flush_seconds=0.05)
    (said,) = told["errors"] + told["warnings"]
    assert (len(told["warnings"]), told["after"] + told["steps"]) == ((0, told["steps"] + 100), (1, 500))[
        on_error == "warn"
    ]
    assert str(tmp_path / "t") in said
    assert "earlier steps stay readable" in said
    steps = check_lanes(open_trace(tmp_path / "t"), dead=True)
    assert set(steps.values()) == {1}
    assert 0 < len(steps) <= COUNT * told["steps"]
    assert repair_trace(tmp_path / "t", tmp_path / "r").steps == len(steps)
    assert check_lanes(open_trace(tmp_path / "r"), dead=True) == steps


def test_a_disk_that_is_full_at_the_index_keeps_all_steps_or_raises(tmp_path: Path) -> None:
    whole = record_until_full(tmp_path / "whole", 0, "close")
    assert whole["errors"] == []
    size = (tmp_path / "whole" / "w.000000.gtb").stat().st_size
    for short in (200, 700):  # the size of stored times varies by a few bytes
        told = record_until_full(tmp_path / f"{short}", size - short, "close")
        assert len(told["errors"]) == 1
        assert len(check_lanes(open_trace(tmp_path / f"{short}"), dead=True)) in (0, COUNT * 20)


# -- bytes that are gone ----------------------------------------------------------------------------------------------


def record_small(directory: Path, mode: Any, **options: Any) -> Any:
    env = make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"])
    wrapped = TraceRecordingVectorWrapper(env, directory, uid="w", record_infos=True, flush_seconds=1000.0, **options)
    wrapped.reset(seed=11)
    for t in range(9):
        step_lanes(wrapped)
        if t % 2:
            wrapped.flush()
    return wrapped


@pytest.mark.parametrize(
    ("mode", "state", "filtered"),
    [
        (mode, state, filtered)
        for number, mode in enumerate(MODES)
        for state in ("sealed", "open")
        for filtered in (False, True)
        if LONG or filtered is ((number + (state == "open")) % 2 == 1)
    ],
)
def test_a_truncated_batch_keeps_exactly_its_complete_chunks(
    tmp_path: Path, mode: Any, state: str, filtered: bool
) -> None:
    env = record_small(tmp_path / "t", mode, frame_filter=(lambda step: step != 1) if filtered else None)
    if state == "open":
        env.flush()
    else:
        env.close()
    (batch,) = (tmp_path / "t").glob("*.gtb*")
    whole = batch.read_bytes()
    if state == "open":
        env.close()
        batch.with_suffix("").unlink()
        batch.write_bytes(whole)
    trace = open_trace(tmp_path / "t")
    numbers = {part.episode_id: (part.lane, int(part.reset_info["began"])) for part in trace}
    every, chunks, first = check_lanes(trace, dead=True), [], 0
    reader = batch_reader(batch)
    for offset, length, count, _ in reader.chunks.tolist():
        table = reader.fragments[first : first + count][["episode", "first_step", "steps"]].tolist()
        first += count
        steps = {(*numbers[e], f + s) for e, f, number in table for s in range(number)}
        chunks.append((offset + length, steps))
    assert set(every) == set().union(*(steps for _, steps in chunks))
    assert len(chunks) > 3
    edges = {end + near for end, _ in chunks for near in (-1, 0)}
    for length in range(len(whole)) if LONG else sorted(edges | set(range(0, len(whole), 701))):
        batch.write_bytes(whole[:length])
        complete = set().union(*(steps for end, steps in chunks if end <= length))
        if state == "sealed":
            assert check_trace(tmp_path / "t").damages
            with pytest.raises(TraceError):
                list(open_trace(tmp_path / "t"))
            kept = repair_trace(tmp_path / "t", tmp_path / str(length)).writers
            found = check_lanes(open_trace(tmp_path / str(length)), dead=True) if kept else {}
        else:
            found = check_lanes(open_trace(tmp_path / "t"), dead=True)
        assert (set(found), set(found.values()) - {1}) == (complete, set()), f"{length} of {len(whole)} bytes"


# -- interrupted ------------------------------------------------------------------------------------------------------

HOUSE = os.path.dirname(gym_trace.__file__)
NAMES = ("vector/wrapper", "vector/steps", "vector/slabs", "vector/batches", "recorder", "background")
SLABS = ("lanes/slab", "lanes/events", "lanes/decoder", "log", "memory")
HOT = {
    os.path.join(HOUSE, room, f"{name}.py")
    for room, names in (("recording", NAMES), ("format/ring", SLABS))
    for name in names
}
assert all(map(os.path.exists, HOT))


@modes
@pytest.mark.parametrize("raises", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_signal_exception_at_any_line_of_the_recorder_corrupts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, filtered: bool, raises: type[BaseException]
) -> None:
    monkeypatch.setattr("gym_trace.recording.vector.slabs._MOST_BYTES", 300)  # a block is full after a few steps
    monkeypatch.setattr("gym_trace.recording.vector.slabs._AHEAD", 0)  # and waited for
    options: dict[str, Any] = {"frame_filter": lambda step: step != 1} if filtered else {}
    first = 13 * (2 * list(MODES).index(mode) + filtered)  # each at other lines of what they have in common
    number, lines = 0 if LONG else first, set()
    while True:
        env = make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"])
        directory = tmp_path / str(number)
        wrapped = TraceRecordingVectorWrapper(env, directory, record_infos=True, flush_seconds=1000.0, **options)
        wrapped.reset(seed=11)
        interrupts = InterruptsAt(number, raises, lambda code: code.co_filename in HOT, returns=False)
        for t in range(14):
            try:
                if t == 4:
                    with interrupts:
                        for _ in range(3):
                            step_lanes(wrapped)
                else:
                    step_lanes(wrapped)
            except raises:
                if mode == DISABLED:
                    wrapped.reset()
        assert not wrapped._recorder.failed, interrupts.line
        wrapped.close()
        steps = check_lanes(open_trace(directory))
        assert set(steps.values()) == {1}, interrupts.line
        ids = [part.episode_id for part in open_trace(directory) if part.first_step == 0]
        assert len(ids) == len(set(ids)), interrupts.line
        assert {lane for lane, *_ in steps} == set(range(COUNT))
        if not interrupts.line:
            break
        lines.add(interrupts.line)
        number += 1 if LONG else 311
    assert len(lines) > 3
    assert not LONG or {line.split(",")[0] for line in lines} >= {
        "step",
        "ready",
        "switch_slab",
        "_begin",
        "submit",
        "wait",
        "add",
    }


@pytest.mark.parametrize("line", range(6))
def test_ctrl_c_while_a_slab_is_submitted_loses_none_of_the_steps_after_it(tmp_path: Path, line: int) -> None:
    env, code = TraceRecordingVectorWrapper(FixedResultEnv(), tmp_path), SlabWriter.submit.__code__
    env.reset()
    env.step(np.zeros(COUNT, np.int64))
    with contextlib.suppress(KeyboardInterrupt), InterruptsAt(line, KeyboardInterrupt, lambda it: it is code):
        env.flush()
    for _ in range(9):
        env.step(np.zeros(COUNT, np.int64))
    env.close()
    assert [len(episode) for episode in open_trace(tmp_path)] == [10] * COUNT


@pytest.mark.parametrize(
    ("mode", "lane", "when", "at"),
    [
        case
        for number, case in enumerate(itertools.product(MODES, range(COUNT), ["before", "after"], [1, 3, 4]))
        if LONG or number % 5 in (0, 2)  # which goes through all pairs
    ],
)
def test_ctrl_c_between_two_lanes_keeps_their_step_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, lane: int, when: str, at: int
) -> None:
    calls = 0
    original = NumberedLaneEnv.step

    def interrupted(self: Any, action: Any) -> Any:
        nonlocal calls
        calls += self.lane == lane
        stops = self.lane == lane and calls == at
        if stops and when == "before":
            raise KeyboardInterrupt
        result = original(self, action)
        if stops:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(NumberedLaneEnv, "step", interrupted)
    env = make_vector_env("sync", mode, True, SPACES["box"], SPACES["discrete"])
    wrapped = TraceRecordingVectorWrapper(env, tmp_path, record_infos=True)
    wrapped.reset(seed=11)
    interruptions = 0
    for _ in range(24):
        try:
            step_lanes(wrapped)
        except KeyboardInterrupt:
            interruptions += 1
            if mode == DISABLED:
                wrapped.reset()
    wrapped.close()
    assert interruptions == 1
    steps = check_lanes(open_trace(tmp_path))
    assert set(steps.values()) == {1}
    assert min(Counter(lane for lane, *_ in steps).values()) > 8
    assert {part.outcome for part in open_trace(tmp_path)} >= {"cut", "terminated", "truncated"}


def test_after_an_error_recording_resumes_with_the_next_episodes(tmp_path: Path) -> None:
    class Failing(vector.SyncVectorEnv):
        def step(self, actions: Any) -> Any:
            if (actions == 5).all():
                raise ValueError("no such action")
            return super().step(actions)

    makers = [lambda lane=lane: NumberedLaneEnv(lane, SPACES["box"], SPACES["discrete"]) for lane in range(COUNT)]
    env = TraceRecordingVectorWrapper(Failing(makers), tmp_path, record_infos=True)
    env.reset(seed=11)
    step_lanes(env)
    with pytest.raises(ValueError, match="no such action"):
        env.step(np.full(COUNT, 5))
    for _ in range(9):
        step_lanes(env)
    env.close()
    trace = open_trace(tmp_path)
    assert set(check_lanes(trace).values()) == {1}
    firsts = [next(part for part in trace if part.lane == lane) for lane in range(COUNT)]
    assert [(len(part), part.outcome) for part in firsts] == [(1, "terminated"), (1, "cut"), (1, "terminated")]
    assert Counter(part.lane for part in trace if len(part)) == {0: 3, 1: 3, 2: 3}


def test_closing_the_recorder_during_a_step_does_not_stop_the_environment(tmp_path: Path) -> None:
    env = make_vector_env("sync", NEXT_STEP, True, SPACES["box"], SPACES["discrete"])
    wrapped, told = TraceRecordingVectorWrapper(env, tmp_path, record_infos=True), env.step
    wrapped.reset(seed=11)
    step_lanes(wrapped)

    def step_and_close(actions: Any) -> Any:
        said = told(actions)
        wrapped._recorder.close()
        return said

    env.step = step_and_close
    step_lanes(wrapped)
    step_lanes(wrapped)
    assert check_lanes(open_trace(tmp_path)) == {(lane, 0, 0): 1 for lane in range(COUNT)}


def test_closing_the_recorder_as_its_first_slab_begins_raises_nothing(tmp_path: Path) -> None:
    env = make_vector_env("sync", NEXT_STEP, True, SPACES["box"], SPACES["discrete"])
    wrapped = TraceRecordingVectorWrapper(env, tmp_path)
    wait = wrapped._recorder.out.wait

    def close_and_wait(sequence: int | None = None) -> None:
        wrapped._recorder.close()
        wait(sequence)

    wrapped._recorder.out.wait = close_and_wait  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="the recorder is closed"):
        wrapped.reset(seed=11)
    assert len(open_trace(tmp_path)) == 0


def test_a_closed_recorder_steps_unrecorded_with_one_warning(tmp_path: Path) -> None:
    env = record_small(tmp_path, NEXT_STEP)
    env.close()
    size = len(open_trace(tmp_path))
    with pytest.warns(UserWarning, match="closed"):
        env.reset()
    step_lanes(env)
    env.reset()  # a second warning would be an error
    env.close()
    assert len(open_trace(tmp_path)) == size
