"""keep_bytes and keep_if: the newest bytes stay, the wanted episodes for ever, and no episode is there in part."""

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from long_tests import LONG
from runs import in_a_child, manifest_entries, recorder_of
from scripted_env import Result, ToyEnv

from gym_trace import TraceWriter, check_trace, open_trace, repair_trace
from gym_trace.edit import compact, filter
from gym_trace.errors import InvalidOption, RecordingError, TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.recording import newest
from gym_trace.storage.local import LocalAppender, LocalStorage
from gym_trace.tools.statistics.describe import describe

KEEP = 20_000
SEEDS = range(40 if LONG else 1)


class Erratic(ToyEnv):
    """Episodes of random lengths, with a NaN now and then; step() raises as often as wanted. Seed it once."""

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, shape: tuple[int, ...] = (6,), raises: float = 0.0):
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        self._raises = raises

    def result(self, action: Any) -> Result:
        if action is None:
            self._length = int(self.np_random.geometric(1 / 20))
        elif self.np_random.random() < self._raises:
            raise RuntimeError("the simulator crashed")
        left = self._length - self.t
        reward = np.inf if action is not None and self.np_random.random() < 1 / 900 else float(left)
        observation = self.np_random.normal(size=self.observation_space.shape).astype(np.float32)
        if self.np_random.random() < 1 / 300:
            observation.flat[3] = self.np_random.choice([np.nan, np.inf, -np.inf])
        return Result(observation, reward, left <= 0)


def run(make: Callable[[], Any], directory: Path, lanes: int, seed: int, steps: int, **options: Any) -> None:
    """Record steps with resets in mid-episode, steps after the end of an episode, and flushes."""
    random = np.random.default_rng(seed)
    env, action = recorder_of(make, directory, lanes, **options)
    env.reset(seed=seed)
    for _ in range(steps):
        try:
            *_, terminated, _, _ = env.step(action)
        except RuntimeError:
            terminated = True
        if not lanes and ((terminated and random.random() < 0.9) or random.random() < 0.01):
            env.reset()
        if random.random() < 0.08:
            env.flush()
    env.close()


def is_odd(episode: Any) -> bool:
    return not (np.isfinite(episode.observations).all() and np.isfinite(episode.rewards).all())


def parts(trace: Any) -> dict[int, list[Any]]:
    """Return the arrays of each episode by its id; an episode is in several parts after an exception."""
    found: dict[int, list[Any]] = {}
    for it in trace:
        arrays = [it.observations, it.actions, it.rewards, it.terminations]
        found.setdefault(it.episode_id, []).append([it.first_step, it.outcome, *(a.tobytes() for a in arrays)])
    return found


def not_dropped(directory: Path) -> int:
    """Return the bytes of the batches that were not dropped."""
    entries = manifest_entries(directory)
    dropped = {entry["file"] for entry in entries if entry["type"] == "dropped"}
    return sum(path.stat().st_size for path in directory.glob("*.gtb") if path.name not in dropped)


def check_kept(directory: Path, truth: Any, wanted: set[int]) -> None:
    """Compare a trace with the one of the same run that kept everything."""
    trace = open_trace(directory)
    found, expected = parts(trace), parts(truth)
    assert {episode: expected[episode] for episode in found} == found
    assert wanted <= found.keys()
    oldest = min(found.keys() - wanted, default=len(expected))
    assert found.keys() == wanted | {episode for episode in expected if episode >= oldest}
    report = check_trace(directory)
    assert not report.damages
    assert report.episodes == len(found)
    assert report.steps == sum(len(episode) for episode in trace) == describe(directory, brief=True)["steps"]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest, "_LEAST_BATCH", 2500)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["single", "raising", "large", "lanes", "large lanes"])
def test_the_newest_bytes_and_the_wanted_episodes_stay_each_whole(tmp_path: Path, kind: str, seed: int) -> None:
    shape, lanes = ((40, 40) if "large" in kind else (6,)), 5 if "lanes" in kind else 0
    steps = {"large": 500, "large lanes": 200, "lanes": 400}.get(kind, 1200)
    keep = KEEP * {"large": 40, "large lanes": 100}.get(kind, 1)

    def record(name: str, **options: Any) -> None:
        run(
            lambda: Erratic(shape, 0.01 * (kind == "raising")),
            tmp_path / name,
            lanes,
            seed,
            steps,
            **options,
        )

    record("all")
    truth = open_trace(tmp_path / "all")
    asked: list[Any] = []

    def is_short(episode: dict[str, Any]) -> bool:
        return bool(episode["steps"] == 1 or episode["outcome"] == "cut")

    def keep_if(episode: dict[str, Any]) -> bool:
        asked.append(episode)
        return is_short(episode)

    record("odd", keep_bytes=keep, keep_if="nan")
    check_kept(tmp_path / "odd", truth, {it.episode_id for it in truth if is_odd(it)})
    sizes = [entry["bytes"] for entry in manifest_entries(tmp_path / "odd") if entry["type"] == "batch"]
    assert 0.75 * keep <= not_dropped(tmp_path / "odd")
    if "large" not in kind:  # where open episodes may take more
        assert not_dropped(tmp_path / "odd") <= 0.75 * keep + max(sizes)
    record("few", keep_bytes=0, keep_if=keep_if)
    record("new", keep_bytes=keep)
    check_kept(tmp_path / "new", truth, set())
    if kind == "single":
        check_kept(tmp_path / "few", truth, {it["episode_id"] for it in asked if is_short(it)})
        assert not_dropped(tmp_path / "few") < 11_000
    expected = {it.episode_id for it in truth}
    assert {it["episode_id"] for it in asked} == expected
    told, found = {it["episode_id"]: it for it in asked}, parts(truth)
    for it in truth:
        mine = told[it.episode_id]
        assert mine["lane"] == it.lane
        if len(found[it.episode_id]) == 1 and mine["steps"] == len(it):  # not after an exception or its end
            assert (mine["outcome"], mine["has_nan"]) == (it.outcome, is_odd(it))
            np.testing.assert_equal(mine["return"], it.rewards.sum())


# -- at every moment --------------------------------------------------------------------------------------------------


@contextmanager
def between_calls(do: Callable[[], None]) -> Iterator[None]:
    """Do something before each call that changes a file."""
    with pytest.MonkeyPatch.context() as patches:
        for owner, name in [
            *((LocalStorage, name) for name in ("create", "rename", "remove", "sync")),
            *((LocalAppender, name) for name in ("write", "copy", "truncate", "sync", "close")),
        ]:
            original = getattr(owner, name)

            def surrounded(*given: Any, original: Any = original, **options: Any) -> Any:
                do()
                return original(*given, **options)

            patches.setattr(owner, name, surrounded)
        yield


def record_known(directory: Path, episodes: int, told: Callable[[int], None] = lambda _: None) -> None:
    """Record episodes k of 1 + k % 40 steps, whose values are k; those with k % 23 == 7 have a NaN."""
    box = gymnasium.spaces.Box(-np.inf, np.inf, (20,), np.float64)
    space = gymnasium.spaces.Discrete(2)
    with TraceWriter(
        directory, observation_space=box, action_space=space, uid="w", keep_bytes=2 * KEEP, keep_if="nan"
    ) as writer:
        random = np.random.default_rng(0)
        for k in range(episodes):
            writer.begin(random.normal(size=20) + k)
            for step in range(1 + k % 40):
                observation = random.normal(size=20) + k
                observation[3] = np.nan if k % 23 == 7 and step == k % 40 else k
                writer.step(1, observation, float(k), terminated=step == k % 40)
                if random.random() < 0.04:
                    writer.flush()
            told(k)


def check_known(directory: Path, done: int) -> list[int]:
    """Check what record_known has left once this many episodes were reported done; return their numbers."""
    trace = open_trace(directory)
    lengths = {}
    for it in trace:
        k = it.episode_id
        assert k not in lengths
        assert it.first_step == 0
        assert (it.rewards == k).all()
        assert (it.observations[1:-1, 3] == k).all()
        lengths[k] = len(it)
    assert all(length == 1 + k % 40 or (k >= done and length < 1 + k % 40) for k, length in lengths.items())
    wanted = {k for k in range(done) if k % 23 == 7}
    assert wanted <= lengths.keys()
    oldest = min(lengths.keys() - wanted, default=done)
    assert set(range(oldest, done)) <= lengths.keys()
    assert done == 0 or done - 1 in lengths
    assert not check_trace(directory).damages
    return sorted(lengths)


def test_a_kill_between_any_two_calls_leaves_every_episode_whole_or_gone(tmp_path: Path) -> None:
    copies: list[tuple[Path, int]] = []
    done, calls = [0], itertools.count()

    def photograph() -> None:
        if 60 <= done[0] < 80 and next(calls) % (1 if LONG else 4) == 0:  # batches are dropped by then
            copies.append((tmp_path / str(len(copies)), done[0]))
            shutil.copytree(tmp_path / "t", copies[-1][0])

    def told(k: int) -> None:
        done[0] = k + 1

    with between_calls(photograph):
        record_known(tmp_path / "t", 80, told)
    entries = manifest_entries(tmp_path / "t")
    assert sum(entry["type"] == "dropped" for entry in entries) > 20
    found = [check_known(directory, at) for directory, at in copies]
    assert len(found) > 25
    assert len({tuple(numbers) for numbers in found}) > 10


@pytest.mark.parametrize("calls", range(75, 175, 1 if LONG else 20))
def test_a_killed_recorder_leaves_every_episode_whole_or_gone(tmp_path: Path, calls: int) -> None:
    left = [calls]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    def told(k: int) -> None:
        (tmp_path / "done").write_text(str(k + 1))

    def record() -> None:
        with between_calls(count):
            record_known(tmp_path / "t", 200, told)

    with pytest.raises(AssertionError):
        in_a_child(record)
    check_known(tmp_path / "t", int((tmp_path / "done").read_text()))


def test_a_trace_that_is_open_while_batches_are_dropped_goes_on_or_says_so(tmp_path: Path) -> None:
    opened: dict[str, Any] = {}
    raised: list[str] = []

    def told(k: int) -> None:
        if k == 30:
            trace = opened["trace"] = open_trace(tmp_path / "t")
            opened["episodes"] = [trace[i] for i in range(len(trace)) if trace[i].outcome == "terminated"]
            opened["later"] = open_trace(tmp_path / "t")
        elif k > 30:
            opened["trace"].refresh()
            known = {it.episode_id: len(it) for it in opened["trace"]}
            assert known == {it.episode_id: len(it) for it in open_trace(tmp_path / "t")}
            assert all(length == 1 + number % 40 for number, length in known.items())

    record_known(tmp_path / "t", 150, told)
    for episode in opened["episodes"]:
        k = episode.episode_id
        try:
            np.testing.assert_array_equal(episode.rewards, np.full(1 + k % 40, float(k)))
        except TraceError as error:
            raised.append(str(error))
    assert 0 < len(raised) < len(opened["episodes"])
    assert all("open the trace again" in text or "look it up again" in text for text in raised)
    with pytest.raises(TraceError, match="removed or replaced since it was opened; call refresh"):
        list(opened["later"].scan(on_damage="skip"))


# -- what else has to know of it --------------------------------------------------------------------------------------


def test_edits_and_repairs_leave_no_trace_of_dropped_episodes(tmp_path: Path) -> None:
    record_known(tmp_path / "t", 120)
    known = check_known(tmp_path / "t", 120)
    trace = open_trace(tmp_path / "t")
    hidden = sum(int(reader.start_dropped.sum()) for reader in index_of(trace).readers)
    assert hidden > 0
    compact(tmp_path / "t", tmp_path / "compact")
    filter(trace, tmp_path / "filtered")
    filter(trace[:1], tmp_path / "first")
    repair_trace(tmp_path / "t", tmp_path / "repaired")
    for name in ("compact", "filtered", "repaired"):
        assert check_known(tmp_path / name, 120) == known
    assert not any(reader.start_dropped.any() for reader in index_of(open_trace(tmp_path / "compact")).readers)
    assert not any(reader.start_dropped.any() for reader in index_of(open_trace(tmp_path / "filtered")).readers)
    assert [it.episode_id for it in open_trace(tmp_path / "first")] == known[:1]
    compact(tmp_path / "t", in_place=True)
    assert check_known(tmp_path / "t", 120) == known


def test_a_batch_that_was_not_dropped_and_is_missing_is_damage(tmp_path: Path) -> None:
    record_known(tmp_path / "t", 120)
    last = sorted((tmp_path / "t").glob("*.gtb"))[-2]
    last.unlink()
    assert [damage.path for damage in check_trace(tmp_path / "t").damages] == [str(last)]
    with pytest.raises(TraceError, match="this batch is missing"):
        compact(tmp_path / "t", tmp_path / "compact")


def test_a_damaged_old_batch_stays_and_the_recording_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(k: int) -> None:
        if k == 20:
            (path,) = list((tmp_path / "t").glob("*.000001.gtb"))
            path.write_bytes(path.read_bytes()[:200] + bytes(len(path.read_bytes()) - 200))

    record_known(tmp_path / "t", 120, told)
    assert (tmp_path / "t" / "w.000001.gtb").exists()
    assert "kept as it is" in caplog.text
    assert len(open_trace(tmp_path / "t")) > 5
    assert not (tmp_path / "t" / "w.000001.gtb.part").exists()


def test_an_error_in_keep_if_stops_the_recording(tmp_path: Path) -> None:
    def keep_if(episode: dict[str, Any]) -> bool:
        return bool(episode["retrun"] > 0)

    with pytest.raises(RecordingError, match=r"keep_if raised KeyError\('retrun'\) for episode 0"):
        run(Erratic, tmp_path / "t", 0, 0, 500, keep_bytes=0, keep_if=keep_if)


@pytest.mark.parametrize(
    ("keep_if", "error"),
    [
        (lambda episode: sys.exit(3), r"SystemExit\(3\)"),
        (lambda episode: np.array([True, False]), r"ValueError\(.The truth value of an array"),
    ],
)
def test_keep_if_that_exits_or_returns_an_array_stops_the_recording(
    tmp_path: Path, keep_if: Callable[[dict[str, Any]], bool], error: str
) -> None:
    with pytest.raises(RecordingError, match=f"keep_if raised {error}"):
        run(Erratic, tmp_path / "t", 0, 0, 500, keep_bytes=0, keep_if=keep_if)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_if": "nan"}, "keep_if: all episodes are kept without keep_bytes"),
        ({"keep_if": "inf", "keep_bytes": 1}, "keep_if='inf': pass \"nan\" or a function"),
        ({"keep_bytes": -1}, "keep_bytes=-1: pass a number of bytes"),
        ({"keep_bytes": 1, "directory": "s3://bucket/run"}, "nothing can be dropped from s3://bucket/run"),
    ],
)
def test_options_that_make_no_sense_are_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        TraceWriter(**{"directory": tmp_path / "t", **options})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_mid_episode_drops_batches_of_its_own(tmp_path: Path) -> None:
    env, action = recorder_of(Erratic, tmp_path / "t", 0, keep_bytes=KEEP, keep_if="nan")
    env.reset(seed=0)
    env.step(action)

    def go_on() -> None:
        env.reset()
        for _ in range(800):
            if env.step(action)[2]:
                env.reset()
                env.flush()
        env.close()

    in_a_child(go_on)
    go_on()
    dropped = [entry["file"] for entry in manifest_entries(tmp_path / "t") if entry["type"] == "dropped"]
    assert len({name.rpartition(".0")[0] for name in dropped}) == 2
    assert not check_trace(tmp_path / "t").damages
    assert all(
        it.first_step == 0 and it.outcome in ("terminated", "closed", "cut") for it in open_trace(tmp_path / "t")
    )
