"""Recording to URLs: what is sealed is published, and what a killed process left, later."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_python
import fsspec
import gymnasium
import numpy as np
import pytest
from faulty_store import FaultyFileSystem
from forked_python import HELPERS
from fsspec.implementations.memory import MemoryFileSystem
from runs import play, recorded
from scripted_env import CountingEnv
from shared_store import SharedStore
from shell import run
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, TraceWriter, check_trace, collect, open_trace, push
from gym_trace.errors import InvalidOption, TraceExists, UnpublishedWarning
from gym_trace.recording.publishing import spool
from gym_trace.storage.remote import objects

fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
fsspec.register_implementation("shared", SharedStore, clobber=True)

KILLED = """
import os, sys, fsspec
sys.path[:0] = sys.argv[3:]
from faulty_store import FaultyFileSystem
from scripted_env import CountingEnv
from gym_trace import TraceRecordingWrapper
from gym_trace.format import batch_files
from gym_trace.storage.remote import objects
fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
FaultyFileSystem.failures[:] = [None] + [ConnectionResetError()] * 10**6  # the store is away from now on
batch_files.BATCH_FRAGMENTS = 7
objects._FIRST_WAIT = 0.001
env = TraceRecordingWrapper(CountingEnv(length=5), sys.argv[1], on_exist="append", uid=sys.argv[2], flush_seconds=0.01)
for episode in range(10**9):
    env.reset(seed=episode)
    for step in range(5):
        env.step(0)
    print(episode, flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(objects, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(spool, "_CHECK_SECONDS", 0.02)
    monkeypatch.setenv(spool.SPOOL_VARIABLE, str(tmp_path / "spool"))
    FaultyFileSystem.reset()
    yield
    FaultyFileSystem.reset()
    for path in (tmp_path / "spool").rglob("*"):
        if path.is_file() and path.name != spool.DESTINATION:
            path.unlink()
    for thread in threading.enumerate():  # which end when there is nothing left to publish
        if thread.name == "gym-trace-publish":
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"faulty:/{tmp_path}/bucket/t"


def play_and_flush(env: Any, episodes: int) -> None:
    for _ in range(episodes):
        play(env, 1)
        env.flush()


def resume_until_published() -> None:
    """Run 'push --resume' until no recorder's own thread is publishing beside it."""
    while "is being published" in (resumed := run("push", "--resume")).output:
        time.sleep(0.02)
    assert resumed.exit_code == 0, resumed.output


def left(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "spool").rglob("*.*") if path.name not in (spool.DESTINATION, "")]


def test_a_recording_to_a_url_is_there_when_it_is_closed(tmp_path: Path, url: str) -> None:
    with TraceRecordingWrapper(CountingEnv(), url) as env:
        play(env, 3)
    assert open_trace(url).episodes["outcome"].tolist() == ["terminated"] * 3
    assert check_trace(url).damages == []
    assert [name for name in left(tmp_path) if "manifest" in name or "gtb" in name] == []


def test_lanes_are_recorded_to_a_url(url: str) -> None:
    envs = TraceRecordingVectorWrapper(gymnasium.vector.SyncVectorEnv([CountingEnv] * 2), url)
    envs.reset(seed=0)
    for _ in range(11):
        envs.step(np.zeros(2, int))
    envs.close()
    assert open_trace(url).episodes["lane"].max() == 1


def test_sealed_batches_are_published_while_recording_goes_on(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)
    with TraceRecordingWrapper(CountingEnv(), url) as env:
        play_and_flush(env, 6)
        until = time.monotonic() + 60
        while sum(name.endswith(".gtb") for name in FaultyFileSystem().find(url)) < 2:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert len(open_trace(url)) >= 4
    assert len(open_trace(url)) == 6
    assert check_trace(url).damages == []


def test_a_store_that_is_away_slows_nothing_and_is_reported(
    tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)
    env = TraceRecordingWrapper(CountingEnv(), url)
    FaultyFileSystem.reset(*[ConnectionResetError("hush")] * 100_000)
    with caplog.at_level(logging.WARNING, "gym_trace"):
        play_and_flush(env, 6)
        until = time.monotonic() + 60
        while "recording continues in" not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert "hush" not in caplog.text
    with pytest.warns(UnpublishedWarning, match="'gym-trace push --resume' publishes them"):
        env.close()
    FaultyFileSystem.reset()
    resume_until_published()
    assert len(open_trace(url)) == 6
    assert check_trace(url).damages == []
    assert run("push", "--resume").output == ""


def test_a_full_spool_stops_recording_like_a_full_disk(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)
    monkeypatch.setattr(spool, "_FULL_SECONDS", 0.3)
    monkeypatch.setenv(spool.LIMIT_VARIABLE, "4000")
    env = TraceRecordingWrapper(CountingEnv(), url, on_error="warn")
    FaultyFileSystem.reset(*[ConnectionResetError()] * 100_000)
    with pytest.warns(RuntimeWarning, match="recording has stopped: .*is full, and faulty://.* does not respond"):
        play_and_flush(env, 20)
    FaultyFileSystem.reset()
    env.close()
    assert len(open_trace(url)) >= 2


@pytest.mark.parametrize("resumed", ["command", "recorder"])
def test_a_killed_recording_is_published_later_without_losing_a_step(tmp_path: Path, url: str, resumed: str) -> None:
    paths = [HELPERS]
    told = {}
    for number in range(3):
        words = [sys.executable, "-c", KILLED, url, f"w{number}", *paths]
        with forked_python.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            lines = [int(child.stdout.readline()) for _ in range(40 + 9 * number)]
            child.send_signal(signal.SIGKILL)
            lines += map(int, child.stdout.read().split())
        told[f"w{number}"] = lines[-1]
    if resumed == "command":
        assert run("push", "--resume").exit_code == 0
    else:
        with TraceRecordingWrapper(CountingEnv(), url, on_exist="append", uid="later") as env:
            play(env, 1)
    trace = open_trace(url)
    assert check_trace(url).damages == []
    for writer, last in told.items():
        mine = [e for e in trace if e.writer == writer]
        assert [e.episode_id for e in mine] == list(range(len(mine)))
        assert len(mine) - 1 >= last
        assert all(len(e) == 5 for e in mine[: last + 1])


def test_an_existing_trace_at_the_url_is_kept(url: str) -> None:
    with TraceRecordingWrapper(CountingEnv(), url) as env:
        play(env, 1)
    with pytest.raises(TraceExists, match="already holds a trace"):
        TraceRecordingWrapper(CountingEnv(), url)
    with pytest.raises(InvalidOption, match="not supported for URLs"):
        TraceRecordingWrapper(CountingEnv(), url, on_exist="replace")
    with TraceRecordingWrapper(CountingEnv(), url, on_exist="append") as env:
        play(env, 1)
    assert len(open_trace(url)) == 2
    with pytest.raises(InvalidOption, match="has credentials in it"):
        TraceRecordingWrapper(CountingEnv(), "faulty://me:hush@bucket/t")


def test_the_record_command_takes_a_url(url: str, tmp_path: Path) -> None:
    words = ("record", "CartPole-v1", "--episodes", "3", "--seed", "0", "--fact", "license=MIT")
    assert run(*words, "-o", url).exit_code == 0
    assert run(*words, "-o", str(tmp_path / "local")).exit_code == 0
    assert open_trace(url).facts["license"] == "MIT"
    assert [e.rewards.tolist() for e in open_trace(url)] == [e.rewards.tolist() for e in open_trace(tmp_path / "local")]


@pytest.mark.parametrize("words", [(), ("--json",), ("--quiet",)])
def test_commands_that_publish_nothing_name_the_spool_and_exit_with_1(
    url: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    FaultyFileSystem.reset(*[PermissionError("hush")] * 100_000)
    command = ("record", "CartPole-v1", "--episodes", "3", "--seed", "0", "--on-exist", "append", *words)
    result = run(*command, "-o", url)
    assert result.exit_code == 1
    assert f"check the credentials that the store uses; unpublished files stay in {tmp_path / 'spool'}" in result.output
    assert "'gym-trace push --resume' publishes them" in result.output
    assert result.output.count("error: ") == 1
    assert "next:" not in result.output
    assert run("push", "--resume").exit_code == 1
    FaultyFileSystem.reset()
    resume_until_published()
    assert len(open_trace(url)) == 3


def test_a_branch_to_a_url_exits_with_1_if_it_is_not_published(url: str, tmp_path: Path) -> None:
    run("record", "CartPole-v1", "-o", str(tmp_path / "t"), "--episodes", "1", "--seed", "0")
    command = ("branch", str(tmp_path / "t"), "--episode", "0", "--step", "3", "--episodes", "1")
    assert f"recorded to {url}" in run(*command, "-o", url).output
    FaultyFileSystem.reset(*[PermissionError()] * 100_000)
    result = run(*command, "-o", url, "--on-exist", "append")
    assert (result.exit_code, "recorded to" in result.output) == (1, False)
    FaultyFileSystem.reset()
    resume_until_published()


# -- directories that must not be published ---------------------------------------------------------------------------


def planted(directory: Path, url: str) -> dict[str, bytes]:
    """Record into a directory, plant a file that names a URL, and return the files of the trace."""
    recorded(directory, episodes=2)
    (directory / spool.DESTINATION).write_text(json.dumps({"url": url}))
    return files(directory)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.*") if path.name != spool.DESTINATION}


@pytest.mark.parametrize("way", ["wrapper", "vector", "writer", "collect", "shard"])
def test_a_file_that_names_a_url_publishes_and_removes_nothing(tmp_path: Path, url: str, way: str) -> None:
    before = planted(tmp_path / "t", url)
    if way == "wrapper":
        with TraceRecordingWrapper(CountingEnv(), tmp_path / "t", on_exist="append") as env:
            play(env, 1)
    elif way == "vector":
        envs = TraceRecordingVectorWrapper(
            gymnasium.vector.SyncVectorEnv([CountingEnv]), tmp_path / "t", on_exist="append"
        )
        envs.reset(seed=0)
        envs.close()
    elif way == "writer":
        with TraceWriter(tmp_path / "t", on_exist="append") as writer:
            writer.begin(0)
            writer.step(0, 0, 0.0, True, False)
    else:
        options: dict[str, Any] = {"shard": (0, 1)} if way == "shard" else {}
        collect(CountingEnv, None, tmp_path / "t", episodes=1, workers=0, seed=1, on_exist="append", **options)
    assert before.items() < files(tmp_path / "t").items()
    assert len(open_trace(tmp_path / "t")) == 3
    assert not FaultyFileSystem().exists(url)


@pytest.mark.parametrize("kind", ["other name", "link", "writable"])
def test_a_planted_spool_is_not_published(tmp_path: Path, url: str, kind: str) -> None:
    right = spool.spool_of(url)
    (right / spool.DESTINATION).unlink()
    place = tmp_path / "mine" if kind == "link" else right if kind == "writable" else right.with_name("t-0123456789ab")
    before = planted(place, url)
    if kind == "link":
        right.rmdir()
        right.symlink_to(place)
    elif kind == "writable":
        right.chmod(0o777)
    assert spool.spools() == []
    assert run("push", "--resume").output == ""
    with pytest.raises(InvalidOption, match="not a spool"):
        spool.publish(place)
    if kind != "other name":
        with pytest.raises(InvalidOption, match="not a spool of this user"):
            TraceRecordingWrapper(CountingEnv(), url)
    assert files(place) == before
    assert not FaultyFileSystem().exists(url)


def test_a_directory_of_spools_that_others_can_write_to_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool").chmod(0o777)
    for call in (lambda: TraceRecordingWrapper(CountingEnv(), url), spool.spools):
        with pytest.raises(InvalidOption, match="spool: writable by others; set GYM_TRACE_SPOOL to"):
            call()
    (tmp_path / "spool").chmod(0o700)
    TraceRecordingWrapper(CountingEnv(), url).close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs other users")
def test_a_directory_of_spools_of_another_user_is_refused(tmp_path: Path, url: str) -> None:
    (tmp_path / "spool").mkdir()
    os.chown(tmp_path / "spool", 12345, 12345)
    with pytest.raises(InvalidOption, match=r"spool: belongs to another user \(uid 12345\)"):
        TraceRecordingWrapper(CountingEnv(), url)
    (tmp_path / "spool").rename(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "spool").symlink_to(tmp_path / "mine")
    os.chown(tmp_path / "spool", 12345, 12345, follow_symlinks=False)
    with pytest.raises(InvalidOption, match=r"spool: is a link of another user \(uid 12345\)"):
        TraceRecordingWrapper(CountingEnv(), url)


def test_a_batch_that_did_not_arrive_stays_in_the_spool_with_a_warning(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = FaultyFileSystem.pipe_file

    def forgets(self: FaultyFileSystem, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        put(self, path, value[:100] if ".gtb" in path else value, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(FaultyFileSystem, "pipe_file", forgets)
        patched.setattr(spool._Publisher, "start", lambda publisher: None)  # a second attempt finds the torn batch
        warned = pytest.warns(RuntimeWarning, match="lists other files than were uploaded; unpublished files stay in")
        with warned, TraceRecordingWrapper(CountingEnv(), url, uid="w") as env:
            play(env, 3)
    assert {name for name in left(tmp_path) if name[0] == "w"} == {"w.000000.gtb", "w.manifest.jsonl"}
    assert len(open_trace(spool.spool_of(url))) == 3


@pytest.mark.parametrize("tags", ["", "md5", "opaque"])
def test_a_damaged_copy_is_replaced_before_the_spool_gives_its_batch_up(tmp_path: Path, url: str, tags: str) -> None:
    FaultyFileSystem.reset(*[None] * 2, *[ConnectionResetError()] * 100_000)
    with pytest.warns(RuntimeWarning, match="push --resume"), TraceRecordingWrapper(CountingEnv(), url, uid="w") as env:
        play(env, 3)
    batch = (spool.spool_of(url) / "w.000000.gtb").read_bytes()
    damaged = batch[:1000] + bytes([batch[1000] ^ 1]) + batch[1001:]
    manifest = (spool.spool_of(url) / "w.manifest.jsonl").read_bytes()
    for name, data in (("w.000000.gtb", damaged), ("w.manifest.jsonl", manifest)):
        MemoryFileSystem.pipe_file(FaultyFileSystem(), f"{url}/{name}", data)  # which does not fail
    FaultyFileSystem.tags = tags
    FaultyFileSystem.failures.clear()
    resume_until_published()
    assert FaultyFileSystem().cat_file(f"{url}/w.000000.gtb") == batch
    assert [name for name in left(tmp_path) if name[0] == "w"] == []


def test_published_batches_are_read_back_once_at_most(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace.format.batch_files.BATCH_FRAGMENTS", 2)
    FaultyFileSystem.tags = "opaque"
    with TraceRecordingWrapper(CountingEnv(), url, uid="w") as env:
        for _ in range(4):
            play_and_flush(env, 3)
            while spool.publish(spool.spool_of(url)) is None:
                time.sleep(0.01)
    read = [name for call, name in FaultyFileSystem.calls if call == "get" and name.endswith(".gtb")]
    assert len(read) == len(set(read))


def test_a_recording_left_open_is_published_at_exit_beside_old_batches(tmp_path: Path) -> None:
    url = f"shared:/{tmp_path}/bucket/t"
    recorded(tmp_path / "old", uid="old")
    push(tmp_path / "old", url)
    for path in (tmp_path / "old").iterdir():  # as after a kill between publishing and removing
        (spool.spool_of(url) / path.name).write_bytes(path.read_bytes())
    code = (
        "import sys, shared_store; from runs import play; from scripted_env import CountingEnv\n"
        "from gym_trace import TraceRecordingWrapper\n"
        "env = TraceRecordingWrapper(CountingEnv(), sys.argv[1], on_exist='append', uid='new'); play(env, 3)"
    )
    paths = {"PYTHONPATH": HELPERS}
    done = forked_python.run(
        [sys.executable, "-c", code, url], env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {episode.writer for episode in open_trace(url)} == {"old", "new"}
    assert [name for name in left(tmp_path) if "gtb" in name] == []
