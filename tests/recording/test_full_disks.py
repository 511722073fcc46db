"""A full disk, before, during or after the creation of the ring: one clear error or warning, and no signal.

Earlier steps stay readable, and the run can continue.
"""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crash_report
import crash_victims
import endless_recording
import forked_python
import full_disk_run
import pytest
import shell
from crash_report import StepCounts
from crash_runs import HELPERS
from gymnasium import vector
from long_tests import LONG
from runs import acted, recorder_of
from scripted_env import CountingEnv

from gym_trace import TraceRecordingWrapper, check_trace, open_trace, repair_trace
from gym_trace.errors import RecordingError
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.batch_writer import BatchWriter
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.describe import describe

KINDS = ["cartpole", "things"] if LONG else []
KINDS += ["frames", "noise", *(["lanes"] if hasattr(vector, "AutoresetMode") else [])]
PURE = [False, True] if LONG else [False]
STEPS = {"cartpole": 4000, "things": 600, "frames": 300, "noise": 300, "lanes": 150}
SIZES = [100, 600, 1600, 1800, 2500, 5000, 9000, 17000, 30000, 60000]  # kB, smaller and larger than rings

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Make disks of a given size in kB."""
    place = tmp_path / "disk"
    mounted = []

    def of_size(kilobytes: int) -> Path:
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
        if not sys.platform.startswith("linux") or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a tmpfs")
        mounted.append(place)
        return place

    yield of_size
    for found in mounted:
        subprocess.run(["umount", str(found)], check=True)


# -- compared with a diary --------------------------------------------------------------------------------------------


def record_with_a_diary(kind: str, directory: Path, diary: Path, steps: int, filler: str, pure: bool) -> dict[str, Any]:
    path = os.pathsep.join([HELPERS, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "GYM_TRACE_PURE": str(int(pure))}
    command = [sys.executable, full_disk_run.__file__, kind, str(directory), str(diary), str(steps), filler]
    run = subprocess.run if pure else forked_python.run
    done = run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def assert_all_is_there(kind: str, directory: Path, diary: Path, spare: Path, error: bool) -> StepCounts:
    report = check_trace(directory)
    assert report.damages == []
    judge = "lanes-NextStep" if kind == "lanes" else kind
    verdict = crash_report.compare_trace(open_trace(directory), {"w": diary}, judge)
    assert verdict.is_clean
    assert verdict.pending == 0
    assert [writer["state"] for writer in describe(directory)["writers"]] == ["failed" if error else "closed"]
    assert any("No space left on device" in remark for remark in report.remarks) == error
    assert repair_trace(directory, spare).steps == report.steps
    if report.episodes:
        assert crash_report.compare_trace(open_trace(spare), {"w": diary}, judge).recovered == verdict.recovered
    return verdict


@pytest.mark.parametrize("pure", PURE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES if LONG else [600, 5000])
def test_steps_recorded_before_the_disk_was_full_are_readable(
    disk: Disk, tmp_path: Path, size: int, kind: str, pure: bool
) -> None:
    place = disk(size)
    told = record_with_a_diary(kind, place / "t", tmp_path / "diary", STEPS[kind], "", pure)
    assert len(told["errors"]) <= 1
    assert told["errors"] == [] or told["after"] == 50 or told["steps"] == STEPS[kind]
    for error in told["errors"]:
        assert "earlier steps stay readable" in error
    assert_all_is_there(kind, place / "t", tmp_path / "diary", tmp_path / "r", bool(told["errors"]))


@pytest.mark.parametrize("pure", PURE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_filled_by_others_does_not_harm_the_ring(disk: Disk, tmp_path: Path, kind: str, pure: bool) -> None:
    place = disk(80_000)
    told = record_with_a_diary(kind, place / "t", tmp_path / "diary", STEPS[kind], str(place / "filler"), pure)
    (error,) = told["errors"]
    assert "earlier steps stay readable" in error
    (place / "filler").unlink()
    verdict = assert_all_is_there(kind, place / "t", tmp_path / "diary", tmp_path / "r", True)
    assert verdict.recovered >= STEPS[kind] // 3


# -- one error, or one warning -----------------------------------------------------------------------------------------

# Records frames until an error comes, goes on without being recorded, and tells what it has seen; with one limit after
# the other.
_SCRIPT = """
import json, resource, sys, warnings
from gym_trace import TraceRecordingWrapper
from gym_trace.errors import RecordingError
import endless_recording
from scripted_env import small_blocks

directory, limits, options, how = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
if how != "ring":  # one that is smaller than the disk
    small = small_blocks(rows=40, chunk=200_000, values=100_000)
    small.__enter__()

def record(directory, limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit or resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told = {"errors": [], "steps": 0, "after": 0}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        env = TraceRecordingWrapper(endless_recording.make("frames"), directory, uid="w", **options)
        run = endless_recording.play(env)
        while told["after"] < 300 and told["steps"] < 5_000:
            try:
                told["after" if told["errors"] else "steps"] += len(next(run)) > 1
                if how == "close":
                    if told["steps"] == 100:
                        break
                elif told["steps"] % 20 == 0:
                    env.flush()
            except RecordingError as error:
                told["errors"].append(str(error))
                run = endless_recording.play(env)
        try:
            env.close()
        except RecordingError as error:
            told["errors"].append(str(error))
        env.close()
    told["warnings"] = [str(warning.message) for warning in warned]
    return told

if len(limits) == 1:
    found = [record(directory, limits[0])]
else:
    found = [record(directory + "-" + str(number), limit) for number, limit in enumerate(limits)]
print(json.dumps(found))
"""


def record_until_full(directory: Path, *limits: int, how: str = "step", **options: Any) -> list[dict[str, Any]]:
    """Return the report of each run: one run records into the directory, several into numbered ones."""
    environment = {**os.environ, "PYTHONPATH": HELPERS}
    command = [sys.executable, "-c", _SCRIPT, str(directory), json.dumps(limits), json.dumps(options), how]
    process = forked_python.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert process.stderr == ""
    found: list[dict[str, Any]] = json.loads(process.stdout)
    return found


def assert_readable_up_to_the_error(directory: Path, steps: int, spare: Path) -> None:
    """Assert that the trace is a nonempty prefix of the run."""
    report = check_trace(directory)
    assert report.damages == []
    trace = open_trace(directory)
    run = endless_recording.play(endless_recording.make("frames"))
    kept = 0
    for episode in trace:
        rows = [next(run)[0].tobytes()] + [next(run)[1].tobytes() for _ in range(len(episode))]
        assert episode.observations.tobytes() == b"".join(rows)
        kept += len(episode)
    assert 0 < kept <= steps
    assert repair_trace(directory, spare).steps == kept
    assert check_trace(spare).damages == []


@pytest.fixture(params=["limit", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, int]:
    """Return a directory with 600 kB of space, and the limit of file sizes; 0 if a disk is full instead."""
    if request.param == "limit":
        return tmp_path / "t", 600_000
    return request.getfixturevalue("disk")(600) / "t", 0


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_a_full_disk_is_reported_once_at_a_step_and_the_run_continues(
    small_disk: tuple[Path, int], tmp_path: Path, on_error: str
) -> None:
    directory, limit = small_disk
    (told,) = record_until_full(directory, limit, flush_seconds=0.05, on_error=on_error)
    (message,) = told["errors"] + told["warnings"]
    assert str(directory) in message
    assert "earlier steps stay readable" in message
    assert (told["errors"], told["after"]) == (([message], 300) if on_error == "raise" else ([], 0))
    assert told["steps"] == 5_000 or on_error == "raise"
    assert_readable_up_to_the_error(directory, told["steps"], tmp_path / "r")


def test_a_disk_too_full_for_a_ring_that_grows_keeps_all_steps_before(
    small_disk: tuple[Path, int], tmp_path: Path
) -> None:
    directory, limit = small_disk
    (told,) = record_until_full(directory, limit, how="ring")
    (error,) = told["errors"]
    assert str(directory) in error
    assert told["after"] == 300
    assert_readable_up_to_the_error(directory, told["steps"], tmp_path / "r")
    assert sum(map(len, open_trace(directory))) >= told["steps"] - 1


def test_a_disk_too_full_for_the_ring_raises_before_the_first_step(tmp_path: Path) -> None:
    directory, limit = tmp_path / "t", 20_000
    (told,) = record_until_full(directory, limit, how="ring")
    (error,) = told["errors"]
    assert str(directory) in error
    assert told["after"] == 300
    assert told["steps"] <= 1
    assert not list(directory.glob("*.ring*"))
    assert check_trace(directory).damages == []
    assert len(open_trace(directory)) == 0


def test_steps_that_did_not_fit_on_the_disk_are_read_from_the_ring(small_disk: tuple[Path, int]) -> None:
    directory, limit = small_disk
    (told,) = record_until_full(directory, limit, how="close", flush_seconds=1000.0)
    assert len(told["errors"]) == 1
    assert check_trace(directory).damages == []
    assert told["steps"] - 1 <= sum(map(len, open_trace(directory))) <= told["steps"]


def test_a_disk_that_is_full_at_the_index_keeps_all_steps_or_raises(tmp_path: Path) -> None:
    """For any limit in the last kilobytes (chunk, index, footer), all steps are readable or an error is raised."""
    (whole,) = record_until_full(tmp_path / "whole", 0, how="close")
    assert whole["errors"] == []
    size = (tmp_path / "whole" / "w.000000.gtb").stat().st_size
    shorts = (1, 63, 64, 65, 400, 700)
    runs = record_until_full(tmp_path / "short", *(size - short for short in shorts), how="close")
    for number, (short, told) in enumerate(zip(shorts, runs)):
        # The size of stored times varies by a few bytes, so a limit one byte lower may suffice.
        assert len(told["errors"]) == 1 or (short == 1 and told["errors"] == [])
        assert check_trace(tmp_path / f"short-{number}").damages == []
        kept = sum(map(len, open_trace(tmp_path / f"short-{number}")))
        assert kept == 100 or (kept == 0 and told["errors"])


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_after_a_failure_the_recorder_uses_no_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path, flush_seconds=0.02, on_error="warn")
    monkeypatch.setattr(BatchFiles, "write", full)
    acted(env, "reset", 0)
    with pytest.warns(RuntimeWarning, match="No space left") as told:
        shell.wait_for(lambda: env.step(0) and len(told))
    acted(env, *[0] * 20)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.25
    env.close()


@pytest.mark.parametrize("at", ["reset", "after an exception"])
def test_an_error_is_raised_before_the_environment_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    inner = CountingEnv(length=10**6)
    env = acted(TraceRecordingWrapper(inner, tmp_path, flush_seconds=0.02), "reset")
    if at != "reset":
        with monkeypatch.context() as patch:
            patch.setattr(inner, "step", lambda action: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                env.step(0)
    monkeypatch.setattr(BatchFiles, "write", full)
    with pytest.raises(RecordingError, match="No space left"):
        env._recorder.flush()
    env._recorder._complained.remove("failure")
    calls = list(inner.calls)
    with pytest.raises(RecordingError, match="No space left"):
        _ = env.reset() if at == "reset" else env.step(0)
    assert inner.calls == calls
    acted(env, "reset", 0, "close")


@pytest.mark.parametrize(
    "options", [{}, {"record_infos": True}, {"frame_filter": lambda index: True}], ids=["plain", "infos", "filtered"]
)
@pytest.mark.parametrize("lanes", [0, *([2] if hasattr(vector, "AutoresetMode") else [])])
def test_a_step_in_which_writing_fails_is_kept_and_the_next_one_raises(
    tmp_path: Path, lanes: int, options: dict[str, Any]
) -> None:
    class Failing(CountingEnv):
        def step(self, action: Any) -> Any:
            if len(self.calls) == 3:
                env._recorder.out.fail(OSError(errno.ENOSPC, "No space left on device"))  # as the thread does
            return super().step(action)

    env, action = recorder_of(lambda: Failing(length=6), tmp_path, lanes, **options)
    acted(env, "reset", action, action, action)
    with pytest.raises(RecordingError, match="No space left"):
        env.step(action)
    acted(env, *[action] * 3, "reset", action, "close")
    for episode in open_trace(tmp_path):
        assert (len(episode), episode.outcome, episode.pending_action) == (3, "lost", None)
    assert len(open_trace(tmp_path)) == max(1, lanes)


def full_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Make a batch fail after this number of records."""
    original, left = BatchWriter._append, iter(range(writes))

    def append(writer: BatchWriter, *args: Any) -> None:
        if isinstance(writer._storage, LocalStorage) and next(left, None) is None:
            full()
        original(writer, *args)

    monkeypatch.setattr(BatchWriter, "_append", append)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("writes", [2, 3, 5])
def test_no_step_of_large_frames_is_lost_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, filtered: bool
) -> None:
    full_after(monkeypatch, writes)
    options: dict[str, Any] = {"frame_filter": lambda index: True} if filtered else {}
    env = TraceRecordingWrapper(crash_victims.make_env("noise"), tmp_path / "t", flush_seconds=1000.0, **options)
    told: list[bytes] = []

    def play() -> None:
        for step in range(1000):
            if step % 60 == 0:
                env.reset(seed=1)
            told.append(env.step(step % 6)[0].tobytes())

    with pytest.raises(RecordingError, match="No space left"):
        play()
    env.close()
    trace = open_trace(tmp_path / "t")
    steps = [row.tobytes() for episode in trace for row in episode.observations[1:]]
    assert steps == told
    assert trace[-1].pending_action is None


def test_a_recording_ended_by_a_full_disk_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_after(monkeypatch, 2)
    env = acted(TraceRecordingWrapper(CountingEnv(), tmp_path / "t", uid="w"), "reset", 0)
    with pytest.raises(RecordingError, match="No space left"):
        env.close()
    monkeypatch.undo()
    (writer,) = describe(tmp_path / "t")["writers"]
    assert (writer["state"], writer["problem"], writer["steps"]) == ("failed", "No space left on device", 1)
    remarks = check_trace(tmp_path / "t").remarks
    assert any("stopped recording: No space left on device" in remark for remark in remarks)
    assert not any("killed" in remark for remark in remarks)
    assert "writer w stopped recording: No space left on device" in shell.ok("info", tmp_path / "t").output
    for command in (["info"], ["check"], ["edit", "repair", "-o", tmp_path / "r"]):
        assert "killed" not in shell.ok(*command, tmp_path / "t").output
    assert sum(map(len, open_trace(tmp_path / "r"))) == 1


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_missing_space_for_a_ring_raises_before_the_environment_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str, lanes: bool
) -> None:
    inner = CountingEnv()
    env, action = recorder_of(lambda: inner, tmp_path, lanes, on_error=on_error)
    monkeypatch.setattr(LocalStorage, "map", full)
    before = list(inner.calls)
    if on_error == "warn":
        with pytest.warns(RuntimeWarning, match="No space left"):
            env.reset()
    else:
        with pytest.raises(RecordingError, match="No space left"):
            env.reset()
        assert inner.calls == before
        env.reset()
    acted(env, action, "close")
