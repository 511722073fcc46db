"""Whole runs of small networks: the same seed twice, what is damaged afterwards, and environments that misbehave."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from damage import flip
from gymnasium import spaces

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import gym_trace
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TrainingFailed
from gym_trace.training import Run, Trained, verify_run
from gym_trace.training.proof.chain import UPDATE
from gym_trace.training.rollouts import Origin
from gym_trace.training.run import Update
from gym_trace.training.versions import initial_learner

STEPS = 512  # four versions after the first


class Seen(gymnasium.Env[Any, Any]):
    """A picture and numbers at random, in short episodes; may do something from step 20 on."""

    observation_space = spaces.Dict({"p": spaces.Box(0, 255, (12, 12, 1), np.uint8), "x": spaces.Box(0, 1, (3,))})
    action_space = spaces.Discrete(2)

    def __init__(self, misbehave: Callable[[], Any] | None = None):
        self._misbehave, self._all = misbehave, 0

    def _seen(self) -> dict[str, Any]:
        picture = self.np_random.integers(0, 256, (12, 12, 1), dtype=np.uint8)
        return {"p": picture, "x": self.np_random.random(3, dtype=np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        self._all += 1
        reward = float(action)
        if self._misbehave is not None and self._all >= 20:
            reward = self._misbehave() or reward
        return self._seen(), reward, bool(self.np_random.random() < 0.05), self._steps >= 25, {}


class Misbehaving:
    """Makes environments that do something bad: in each of their steps, or if there is a diary one after the other."""

    def __init__(self, *what: str, diary: Path | None = None):
        self._what, self._diary = what, diary

    def __call__(self) -> Seen:
        if self._what == ("make",) and multiprocessing.parent_process() is not None:
            raise ValueError("the floor is gone")
        return Seen(self._now)

    def _now(self) -> Any:
        done = 0
        if self._diary is not None:
            done = self._diary.stat().st_size
            self._diary.write_bytes(bytes(done + 1))
        what = self._what[done] if done < len(self._what) else ""
        if what == "raise":
            raise ValueError("the floor is gone")
        if what == "exit":
            os._exit(3)
        if what == "leave":
            sys.exit(4)
        if what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "hang":
            time.sleep(1000)
        return float("nan") if what == "nan" else None


SMALL = {"num_envs": 4, "rollout": 16, "epochs": 1, "minibatches": 1, "hidden": (16,), "rnn_size": 16}


def trained(directory: Path, make_env: Any = Seen, **settings: Any) -> Trained:
    return gym_trace.train(make_env, directory, steps=STEPS, seed=5, **{**SMALL, **settings})


def digests(directory: Path) -> list[str]:
    """Return the digests of all versions."""
    return [update.digest for update in Run(directory).updates()]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_same_seed_gives_the_same_versions(tmp_path: Path, lag: int) -> None:
    settings = {"lag": lag, "splits": 2, "rnn": "lstm"}
    beside = threading.Thread(target=trained, args=(tmp_path / "b",), kwargs=settings)
    beside.start()
    trained(tmp_path / "a", **settings)
    beside.join()
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) == 3
    assert {verdict.verdict for verdict in gym_trace.verify_trace(tmp_path / "a" / "trace", make_env=Seen)} == {
        "identical"
    }


@pytest.mark.parametrize("settings", [{"rnn": "gru", "stagger": True}, {"lag": "any"}, {"inference": "server"}])
def test_a_run_comes_out_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    trained(tmp_path / "r", **settings)
    found = verify_run(tmp_path / "r")
    assert (found.differs, found.versions, found.checkpoints) == ("", 5, 1)
    assert not gym_trace.check_trace(tmp_path / "r" / "trace").damages


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of version 2 and 4. It is not to be changed."""
    directory = tmp_path_factory.mktemp("runs") / "r"
    trained(directory, on_progress=lambda now: now.version >= 2, rnn="gru")
    gym_trace.train(Seen, directory, resume=True)
    return directory


def newest(run: Path) -> Path:
    return Run(run).checkpoint(4)


def of_writer(run: Path) -> list[Path]:
    return sorted((run / "trace").glob("a0-*"))


TRACE = "'gym-trace check' lists all damage, 'gym-trace edit repair' saves the rest"
ANOTHER = "begin another run with the newest checkpoint: 'gym-trace train ... --weights {run}@4'"
REMOVE = "remove it; later versions are relearned from the previous checkpoint"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "trace": (lambda run: flip(max(of_writer(run), key=lambda p: p.stat().st_size), 3000), "a0-", TRACE),
    "rollouts": (
        lambda run: [path.unlink() for path in of_writer(run)],
        "lacks steps 0 to 16 of writer a0-",
        "of version 1",
    ),
    "checkpoint": (lambda run: flip(newest(run), -100), "000000004.safetensors: generator differs when", REMOVE),
    "half a checkpoint": (lambda run: os.truncate(newest(run), 999), "4.safetensors: invalid checkpoint", REMOVE),
    "log": (lambda run: flip(run / "updates.msgpack", -9), "updates.msgpack: checksum mismatch", ANOTHER),
    "half a log": (lambda run: os.truncate(run / "updates.msgpack", 700), "the log ends before version", "checkpoint"),
    "run.json": (lambda run: os.truncate(run / "run.json", 99), "run.json: cannot be read", "put back a copy"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_reported_with_the_file_and_the_next_step(run: Path, tmp_path: Path, name: str) -> None:
    damage, what, next_step = DAMAGES[name]
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    damage(copy)
    try:
        said = verify_run(copy).differs
    except CorruptTrace as error:
        said = str(error)
    assert what in said
    assert next_step.format(run=copy) in said
    assert "gym-trace check" not in said or next_step == TRACE


def test_a_damaged_checkpoint_is_made_again_once_it_is_removed(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "r"
    shutil.copytree(run, copy)
    (copy / "done").unlink()
    newest(copy).write_bytes(b"")
    with pytest.raises(CorruptTrace, match=r"learner 0: .*4.safetensors: invalid checkpoint.*; remove it"):
        gym_trace.train(Seen, copy, resume=True)
    newest(copy).unlink()
    assert gym_trace.train(Seen, copy, resume=True).version == 4
    assert newest(copy).read_bytes() == newest(run).read_bytes()


def linger() -> None:
    time.sleep(0.005)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedules_of_an_extended_interrupted_run_cover_all_steps(tmp_path: Path, schedule: str) -> None:
    settings: dict[str, Any] = {"workers": 0, "learning_rate_schedule": schedule, "exploration_schedule": schedule}
    trained(tmp_path, until_return=-1e9, learning_rate=0.5, **settings)
    slow = partial(Seen, linger)  # so that it is not done before it is asked
    stopped = gym_trace.train(slow, tmp_path, resume=True, steps=2 * STEPS, on_progress=lambda now: now.version >= 11)
    assert stopped.stopped == "interrupted"
    done = gym_trace.train(Seen, tmp_path, resume=True)
    assert (done.stopped, done.steps) == ("done", 2 * STEPS)
    rates = [update.results["learning_rate"] for update in Run(tmp_path).updates() if update.results]
    parts = np.array([n / 8 for n in range(1, 9)] + [n / 16 for n in range(9, 17)])
    factors = 1 - parts if schedule == "linear" else (1 + np.cos(np.pi * parts)) / 2
    np.testing.assert_allclose(rates, 0.5 * factors, atol=1e-12)
    assert not verify_run(tmp_path).differs


class Constant(Seen):
    """Episodes of two steps, with the same return."""

    def step(self, action: Any) -> Any:
        observation, *_, info = super().step(action)
        return observation, 1.0, self._steps == 2, False, info


def test_the_first_of_equally_good_versions_stays_best_when_resumed(tmp_path: Path) -> None:
    trained(tmp_path, Constant, workers=0, on_progress=lambda now: now.version >= 6)
    gym_trace.train(Constant, tmp_path, resume=True)
    means = [update.results.get("mean_return") for update in Run(tmp_path).updates()]
    assert means[5:] == [2.0] * 4
    assert verify_run(tmp_path).differs == ""


def test_a_schedule_needs_steps(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"exploration_schedule: depend on the steps of the run; pass steps="):
        gym_trace.train(Seen, tmp_path / "r", seconds=1, learning_rate_schedule="linear", **SMALL)
    assert not (tmp_path / "r").exists()


def test_workers_whose_environments_misbehave_are_started_again(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    diary.touch()
    make_env = Misbehaving("raise", "exit", "leave", "crash", "hang", diary=diary)
    done = trained(tmp_path / "r", make_env, workers=1, stall_timeout=5.0)
    told = (tmp_path / "r" / "events.jsonl").read_text()
    for what in ("ValueError: the floor is gone", "exit code 3", "SystemExit: 4", "exit code -11 (SIGSEGV)",
                 "no heartbeat for 5 s (stall_timeout)"):  # fmt: skip
        assert what in told
    assert done.restarts >= 5
    assert not verify_run(tmp_path / "r").differs


@pytest.mark.parametrize(
    ("what", "most", "said"),
    [
        ("raise", 100, r"worker 0: ValueError: the floor is gone, in step \d+ of episode \d+ .*; it failed 4 times"),
        ("make", 1, "worker 0: ValueError: the floor is gone; max_restarts=1 allows no more restarts"),
    ],
)
def test_a_run_whose_environment_always_misbehaves_ends_and_says_how(
    tmp_path: Path, what: str, most: int, said: str
) -> None:
    with pytest.raises(TrainingFailed, match=said):
        trained(tmp_path / "r", Misbehaving(what), workers=1, rollout=32, max_restarts=most)


class Breaking(Seen):
    """Does something wrong in step 40 of each episode, which none gets past."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def step(self, action: Any) -> Any:
        observation, reward, _, _, info = super().step(action)
        if self._steps == 41:
            if self._what == "raise":
                raise ValueError("the floor is gone")
            if self._what == "shape":
                observation["x"] = observation["x"][:2]
            if self._what == "missing":
                del observation["x"]
            reward = {"pair": (1.0, 2.0), "nan": float("nan")}.get(self._what, reward)
        return observation, reward, False, False, info


IN_STEP = r", in step 40 of episode (\d+) \(seed (\d+), action \d\)"


@pytest.mark.parametrize(
    ("what", "said", "restarts"),
    [
        ("raise", rf"ValueError: the floor is gone{IN_STEP}; it failed 4 times in this step, and no episode got", 3),
        ("shape", rf"observation/x: expected shape \(3,\) of float32, got shape \(2,\) of float32{IN_STEP}", 0),
        ("missing", rf"observation/x: expected shape \(3,\) of float32, got none \(KeyError: 'x'\){IN_STEP}", 0),
        ("pair", rf"reward: expected a number, got \(1.0, 2.0\){IN_STEP}", 0),
        ("nan", r"learner 0: a reward is not finite: step 40 of episode (\d+) \(seed (\d+)\) of .*/trace; nothing", 0),
    ],
)
def test_a_step_that_always_raises_ends_the_run_and_is_located(
    tmp_path: Path, what: str, said: str, restarts: int
) -> None:
    with pytest.raises(TrainingFailed, match=said) as error:
        gym_trace.train(partial(Breaking, what), tmp_path / "r", steps=4 * STEPS, workers=1, **SMALL)
    found = re.search(said, str(error.value))
    assert found is not None
    episode = gym_trace.open_trace(tmp_path / "r" / "trace")[int(found[1])]
    assert episode.seed == int(found[2])
    assert len(episode) >= 40
    assert (tmp_path / "r" / "events.jsonl").read_text().count('"restart"') == restarts
    assert len(Run(tmp_path / "r").updates()) > 1  # rollouts before were learned from
    assert not verify_run(tmp_path / "r").differs


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", rf"^observation/x: expected shape \(3,\) of float32, got shape \(2,\) of float32{IN_STEP}"),
        ("missing", rf"^observation/x: expected shape \(3,\) of float32, got none \(KeyError: 'x'\){IN_STEP}"),
        ("pair", rf"^reward: expected a number, got \(1.0, 2.0\){IN_STEP}"),
    ],
)
def test_without_workers_a_wrong_form_is_named_and_the_log_has_the_reason(tmp_path: Path, what: str, said: str) -> None:
    with pytest.raises(TrainingFailed, match=said) as error:
        gym_trace.train(partial(Breaking, what), tmp_path / "r", steps=4 * STEPS, workers=0, **SMALL)
    end = Run(tmp_path / "r").log.end
    assert end is not None
    assert end["stopped"] == f"failed: {error.value}"
    assert not verify_run(tmp_path / "r").differs


class FailingAnywhere(Seen):
    """Raises in one of 50 steps, at random."""

    def step(self, action: Any) -> Any:
        if self.np_random.random() < 0.02:
            raise ValueError("the floor is gone")
        return super().step(action)


def test_failures_in_many_steps_end_the_run_and_it_says_how_many(tmp_path: Path) -> None:
    said = r"in step \d+ of .*; max_restarts=2 allows no more restarts; events.jsonl .* of each of its 3 failures"
    with pytest.raises(TrainingFailed, match=said):
        trained(tmp_path / "r", FailingAnywhere, workers=1, max_restarts=2)


def test_an_environment_that_cannot_be_carried_to_a_worker_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidOption, match="make_env: not picklable"):
        trained(tmp_path / "r", lambda: lock and Seen())
    assert not (tmp_path / "r").exists()


class FarOff(Seen):
    """Takes actions of which none is near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Box(100, 200, (2,), np.float32)


def test_actions_that_would_all_be_clipped_to_the_same_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match=r"a Box from 100 to 200, .* wrap it in gymnasium.wrappers.RescaleAction"):
        trained(tmp_path / "r", FarOff)
    assert not (tmp_path / "r").exists()


def test_a_second_run_in_the_directory_of_one_that_goes_on_is_refused(tmp_path: Path) -> None:
    refused = []

    def report(now: Trained) -> None:
        if not refused:
            for more in ({"resume": True}, {"steps": 10}):
                with pytest.raises(InvalidOption, match=r"in use by another run|already has a run") as error:
                    gym_trace.train(Seen, tmp_path / "r", **more)
                refused.append(str(error.value))

    assert trained(tmp_path / "r", on_progress=report).stopped == "done"
    assert len(refused) == 2


def test_a_script_that_starts_a_run_on_import_raises_with_advice(tmp_path: Path) -> None:
    script = "import gym_trace, test_train_runs as t\ngym_trace.train(t.Seen, 'r', steps=99)\n"
    (tmp_path / "script.py").write_text(script)
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ended.returncode == 1
    assert 'put what it does under if __name__ == "__main__":' in ended.stderr.splitlines()[-1]
    assert '"restart"' not in (tmp_path / "r" / "events.jsonl").read_text()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if not sys.platform.startswith("linux") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk: Path, room: int = 0) -> Path:
    """Fill the disk except for `room` bytes, until the returned file is removed."""
    status = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(max(0, status.f_bavail * status.f_bsize - room)))
    return disk / "filler"


def test_a_full_disk_ends_the_run_which_resumes_with_free_space(disk: Path) -> None:
    run = disk / "r"

    def report(now: Trained) -> None:
        if now.version and not (disk / "filler").exists():
            fill(disk, 100_000)

    with pytest.raises(TrainingFailed, match="No space left on device"):
        gym_trace.train(Seen, run, until_return=1e9, seed=1, on_progress=report, **{**SMALL, "workers": 1})
    assert '"restart"' not in (run / "events.jsonl").read_text()
    assert not gym_trace.check_trace(run / "trace").damages
    before = len(digests(run))
    (disk / "filler").unlink()
    gym_trace.train(Seen, run, resume=True, on_progress=lambda now: now.version > before)
    found = verify_run(run)
    assert not found.differs
    assert found.versions > before


def test_a_full_disk_leaves_log_and_checkpoints_unchanged(run: Path, disk: Path) -> None:
    shutil.copytree(run, disk / "r")
    full, before = Run(disk / "r"), digests(run)
    with full.open_log() as log:
        filler = fill(disk)
        update = Update(5, (Origin("w" * 9000, 0, 0),), 0, "")
        with pytest.raises(RecordingError, match="log of updates: write failed: No space left on device"):
            log.append(UPDATE, update.plain())
        assert digests(disk / "r") == before
        with pytest.raises(RecordingError, match=r"a checkpoint cannot be written to .*: No space left on device"):
            initial_learner(full, False).save(full.checkpoints / "new")
        assert not (full.checkpoints / "new").exists()
        filler.unlink()
        log.append(UPDATE, update.plain())
    assert len(digests(disk / "r")) == len(before) + 1
