"""Pending actions of killed recordings: kept, reported, repaired, and executed again."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import numpy as np
import pytest
import rings
from forked_python import HELPERS
from gymnasium import spaces
from scripted_env import Result, ToyEnv
from shell import ok

from gym_trace import check_trace, open_trace, repair_trace, verify_trace
from gym_trace.tools.statistics.describe import describe

HERE = [str(Path(__file__).parent), HELPERS]
needs_vectors = pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")


class Fragile(ToyEnv):
    """Count steps; run a given function at the seventh step of the second episode."""

    observation_space = spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = spaces.Dict({"a": spaces.Discrete(9), "b": spaces.Box(0, 1, (2,), np.float32)})

    def __init__(self, end: str = "nothing"):
        self.end = end

    def result(self, action: Any) -> Result:
        if self.t == 7 and self.options:
            if self.end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.end == "segfault":
                import ctypes

                ctypes.string_at(0)
            elif self.end == "exit":
                os._exit(3)
            elif self.end == "raise":
                raise ValueError("unstable")
        return Result(np.array([self.t, action["a"] if action else 0], float), 1.5, self.t == 20)


def action_at(step: int) -> dict[str, Any]:
    return {"a": step % 9, "b": np.array([step / 8, 0.5], np.float32)}


def record(directory: str, end: str) -> None:
    from gym_trace import TraceRecordingWrapper

    env = TraceRecordingWrapper(Fragile(end), directory, uid="w")
    for second in (False, True):
        env.reset(seed=1, options={"second": 1} if second else None)
        for step in range(20):
            env.step(action_at(step))


def crashed(directory: Path, end: str = "segfault") -> Path:
    """Return the trace of a recording with this end."""
    script = f"import sys; sys.path[:0] = {HERE!r}\nimport test_pending as t"
    script += f"\nt.record({str(directory)!r}, {end!r})"
    done = forked_python.run([sys.executable, "-c", script], stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == {"kill": -9, "segfault": -11, "exit": 3}[end], done.stderr.decode()
    return directory


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("end", ["kill", "segfault", "exit"])
def test_the_pending_action_of_a_crash_survives_a_repair(tmp_path: Path, end: str) -> None:
    crashed(tmp_path / "t", end)
    before = check_trace(tmp_path / "t")
    assert (before.damages, before.steps) == ([], 26)
    (remark,) = before.remarks
    assert re.fullmatch(
        r"writer w was killed; 26 steps are only in a ring, without checksums; "
        r"an action was never answered, at the end of episode 1, in step 6: \{'a': .*",
        remark,
    )
    report = repair_trace(tmp_path / "t", tmp_path / "r")
    assert (report.losses, report.steps) == ([], 26)
    again = repair_trace(tmp_path / "r", tmp_path / "rr")
    assert (again.losses, again.steps) == ([], 26)
    after = check_trace(tmp_path / "rr")
    assert (after.damages, after.remarks) == ([], [])
    for name in ("t", "r", "rr"):
        trace = open_trace(tmp_path / name)
        assert [(len(episode), episode.outcome) for episode in trace] == [(20, "terminated"), (6, "lost")]
        first, last = trace
        for episode in (
            last,
            trace[1],
            trace[1][3:],
            trace[1:][0],
            *map(pickle.loads, map(pickle.dumps, (last, trace[1]))),
        ):
            action = episode.pending_action
            assert (action["a"], action["b"].tolist(), action["b"].dtype) == (6, [0.75, 0.5], np.float32)
        assert first.pending_action is trace[0].pending_action is trace[1][:3].pending_action is None
        assert last.actions["a"].tolist() == list(range(6))
        (told,) = describe(trace)["writers"][0]["pending"]
        assert (told["episode"], told["lane"], told["step"]) == (1, 0, 6)
        shown = ok("info", tmp_path / name).output
        assert "the action that was being executed at the end of episode 1, in step 6: {'a'" in shown
        assert ("was killed; 26 steps of it are in its ring" in shown) == (name == "t")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("nothing", "it returned: reward 1.5, terminated False, truncated False"),
        ("raise", "it raised ValueError: unstable"),
        ("kill", "the process died of SIGKILL"),
        ("segfault", "the process died of SIGSEGV"),
        ("exit", "the process exited with 3"),
    ],
)
def test_a_crash_is_executed_again_in_a_separate_process(tmp_path: Path, end: str, told: str) -> None:
    crashed(tmp_path)
    verdicts = list(verify_trace(tmp_path, make_env=lambda: Fragile(end), through_the_crash=True))
    assert [(v.verdict, v.steps, v.crash) for v in verdicts] == [("identical", 20, ""), ("identical", 6, told)]
    verdicts = list(verify_trace(tmp_path, make_env=lambda: Fragile(end)))
    assert [(v.verdict, v.steps, v.crash) for v in verdicts] == [("identical", 20, ""), ("identical", 6, "")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_command_reports_the_result_of_the_pending_action(tmp_path: Path) -> None:
    crashed(tmp_path)
    make = ("--make", "test_pending:Fragile", "--through-the-crash")
    told = ok("verify", tmp_path, *make).output
    assert "episode 1: action in progress at its end, {'a': " in told
    assert "  it returned: reward 1.5, terminated False, truncated False" in told
    lines = ok("verify", tmp_path, *make, "--json").output.splitlines()
    assert [json.loads(line)["crash"][:11] for line in lines if line[:1] == "{"] == ["", "it returned"]


def test_an_answered_action_is_not_pending(tmp_path: Path) -> None:
    run = rings.Run().play(3, 7, 2, open_end=True)
    rings.killed(tmp_path / "answered", run)
    run.slab.ask(4)
    rings.killed(tmp_path / "asked", run)
    assert [episode.pending_action for episode in open_trace(tmp_path / "answered")] == [None] * 3
    assert [episode.pending_action for episode in open_trace(tmp_path / "asked")] == [None, None, 4]


class Unsteady(Fragile):
    """Raise once, at the third step."""

    def step(self, action: Any) -> Any:
        if self.t == 2 and self.end == "kill" and not hasattr(self, "raised"):
            self.raised = self.t
            raise ValueError("unstable")
        return super().step(action)


def record_after_a_gap(directory: str) -> None:
    from gym_trace import TraceRecordingWrapper

    env = TraceRecordingWrapper(Unsteady("kill"), directory, uid="w")
    env.reset(seed=1, options={"second": 1})
    for step in range(20):
        with contextlib.suppress(ValueError):
            env.step(action_at(step))


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_the_pending_action_after_a_gap_belongs_to_the_run_that_follows_it(tmp_path: Path) -> None:
    script = f"import sys; sys.path[:0] = {HERE!r}\nimport test_pending as t\nt.record_after_a_gap({str(tmp_path)!r})"
    assert forked_python.run([sys.executable, "-c", script], timeout=120).returncode == -9
    found = [(episode.first_step, len(episode), episode.pending_action) for episode in open_trace(tmp_path)]
    assert [(first, steps) for first, steps, _ in found] == [(0, 2), (4, 3)]
    assert found[0][2] is None
    assert found[1][2]["a"] == 7


def test_a_running_writer_has_no_pending_action(tmp_path: Path) -> None:
    writer, run = rings.Writer(tmp_path), rings.Run().play(2, open_end=True)
    run.slab.ask(4)
    writer.put(run.ring())
    trace = open_trace(tmp_path)
    running = trace[0]
    pickled = pickle.dumps(trace)
    assert running.pending_action is None
    writer.die()
    trace.refresh()
    assert trace[0].pending_action == running.pending_action == 4
    assert pickle.loads(pickled)[0].pending_action is None
    assert pickle.loads(pickle.dumps(trace))[0].pending_action == 4


class Talkative(Fragile):
    """Infos grow with each step, so the recorder's space estimate is too small."""

    def __init__(self, length: int = 20_000):
        super().__init__()
        self.text, self.length = "", length

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        self.text += "x" * self.length
        return (*result, {"text": self.text})


def record_until_a_slab_is_turned_within_a_step(directory: str, lanes: int) -> None:
    """Die when the next slab has begun but does not hold the pending action yet."""
    from scripted_env import small_blocks

    from gym_trace import TraceRecordingWrapper
    from gym_trace.format.ring.lanes.writer import LaneWriter
    from gym_trace.format.ring.row_slab import RowSlab

    kind, name = (LaneWriter, "record_actions") if lanes else (RowSlab, "record_packed_action")
    usual = getattr(kind, name)

    def dies_if_again(self: Any, action: Any) -> None:
        if sys._getframe(1).f_code.co_name in ("switch_slab", "_begin"):
            os.kill(os.getpid(), signal.SIGKILL)
        usual(self, action)

    setattr(kind, name, dies_if_again)
    env: Any
    with small_blocks(rows=50, chunk=200_000, values=60_000):
        if lanes:
            from gym_trace import TraceRecordingVectorWrapper

            envs = gymnasium.vector.SyncVectorEnv([lambda: Talkative(200_000)] * lanes)
            env = TraceRecordingVectorWrapper(envs, directory, uid="w", record_infos=True)
        else:
            env = TraceRecordingWrapper(Talkative(), directory, uid="w", record_infos=True)
        env.reset()
        for step in range(19):
            action = action_at(step)
            env.step({name: np.array([part] * lanes) for name, part in action.items()} if lanes else action)


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("lanes", [0, pytest.param(3, marks=needs_vectors)])
def test_the_pending_action_is_known_if_the_slab_turns_within_a_step(tmp_path: Path, lanes: int) -> None:
    script = f"import sys; sys.path[:0] = {HERE!r}\nimport test_pending as t"
    script += f"\nt.record_until_a_slab_is_turned_within_a_step({str(tmp_path / 't')!r}, {lanes})"
    environment = {**os.environ, "GYM_TRACE_PURE": "1"}
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, timeout=120, env=environment)
    assert done.returncode == -9, done.stderr.decode()
    repair_trace(tmp_path / "t", tmp_path / "r")
    for name in ("t", "r"):
        episodes = list(open_trace(tmp_path / name))
        assert len(episodes) == (lanes or 1)
        for episode in episodes:
            assert len(episode) > 0
            action = action_at(len(episode))
            assert episode.pending_action["a"] == action["a"]
            assert (episode.pending_action["b"] == action["b"]).all()
        assert len(describe(open_trace(tmp_path / name))["writers"][0]["pending"]) == len(episodes)
