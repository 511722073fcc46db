"""The directory of a recorder: creation, existing traces (on_exist), and invalid options."""

import copy
import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
from forked_python import HELPERS
from runs import acted, play, recorded, recorder_of
from scripted_env import CountingEnv, bits

import gym_trace
from gym_trace import TraceRecordingWrapper, edit, open_trace
from gym_trace.errors import InvalidOption, TraceExists, UnstorableValue
from gym_trace.tools.video.render import Destination
from gym_trace.training.run import Run


def test_without_a_directory_a_new_one_is_created_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.INFO, "gym_trace"):
        first, second = TraceRecordingWrapper(CountingEnv()), TraceRecordingWrapper(CountingEnv())
    assert first.directory != second.directory
    assert first.directory.parent == tmp_path
    assert str(first.directory) in caplog.text
    play(first, 2)
    first.close()
    second.close()
    assert len(open_trace(first.directory)) == 2


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", Path("gs://bucket/run"), "hf://datasets/me/run"])
def test_a_url_as_directory_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    recorded(tmp_path / "t", 2)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for write in (
        lambda: edit.compact(tmp_path / "t", url),
        lambda: gym_trace.repair_trace(tmp_path / "t", url),
        lambda: gym_trace.export(tmp_path / "t", url, "jsonl"),
        lambda: gym_trace.import_trace(tmp_path / "t", url, "jsonl"),
        lambda: Destination(url),
        lambda: Run(url),
    ):
        with pytest.raises(InvalidOption, match="is a URL; write to a local path"):
            write()
    assert not any(here.iterdir())


def test_a_directory_named_like_a_url_is_used_by_its_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "s3:" / "run", 2)
    assert len(open_trace("s3:/run")) == 2


def test_parent_directories_are_created(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "a" / "b")
    env.close()
    assert (tmp_path / "a" / "b").is_dir()


def test_an_existing_trace_raises_and_stays_unchanged(tmp_path: Path) -> None:
    for number in range(7):
        recorded(tmp_path, on_exist="append", uid=f"run-{number}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TraceExists) as caught:
        TraceRecordingWrapper(CountingEnv(), tmp_path)
    message = str(caught.value)
    for part in ("run-0", "run-4", "2 more", 'on_exist="append"', 'on_exist="replace"'):
        assert part in message
    assert "run-5" not in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_append_adds_a_writer_to_an_existing_trace(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    recorded(tmp_path, 3, on_exist="append")
    trace = open_trace(tmp_path)
    assert len(trace) == 5
    assert len(trace.writers) == 2
    assert len({(episode.writer, episode.episode_id) for episode in trace}) == 5
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())


def test_replace_deletes_only_files_of_the_trace(tmp_path: Path) -> None:
    recorded(tmp_path, 2, uid="ours")
    recorded(tmp_path, 2, uid="ours2", on_exist="append")
    torn = tmp_path / "ours.000001.gtb.part"  # as after a killed writer
    torn.write_bytes((tmp_path / "ours.000000.gtb").read_bytes()[:500])
    foreign = {
        "notes.txt": b"mine",
        "ours.gtb": b"no number",
        "ours.00.gtb": b"short number",
        "theirs.000000.gtb": b"not a batch at all",
        "empty.000000.gtb": b"",
        "theirs.manifest.jsonl": b'{"type": "something else"}\n',
        "renamed.manifest.jsonl": (tmp_path / "ours.manifest.jsonl").read_bytes(),
        "ours.000000.gtb.bak": b"a copy",
        ".ours.000000.gtb": b"hidden",
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.000000.gtb").mkdir()
    (tmp_path / "folder.000000.gtb" / "inside").write_text("kept")
    recorded(tmp_path, 1, uid="new", on_exist="replace")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, "folder.000000.gtb", "new.manifest.jsonl", "new.000000.gtb"}
    assert all((tmp_path / name).read_bytes() == content for name, content in foreign.items())


def test_replace_does_not_follow_symbolic_links(tmp_path: Path) -> None:
    recorded(tmp_path / "elsewhere", uid="ours")
    here = tmp_path / "here"
    here.mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (here / path.name).symlink_to(path)
    recorded(here, uid="new", on_exist="replace")
    assert len(open_trace(tmp_path / "elsewhere")) == 1


def test_a_trace_recorded_by_this_process_is_not_replaced(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    play(env, 1)
    with pytest.raises(TraceExists, match=r"an earlier environment of this process.* call \.close\(\)"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, on_exist="replace")
    env.close()
    assert len(open_trace(tmp_path)) == 1


def test_a_trace_recorded_by_another_process_is_not_replaced(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    script = f"""
import sys
sys.path.insert(0, {HELPERS!r})
from scripted_env import CountingEnv
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(), {str(tmp_path)!r}, on_exist="append")
print(flush=True)
sys.stdin.read()
"""
    with forked_python.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(TraceExists, match="another process"):
            TraceRecordingWrapper(CountingEnv(), tmp_path, on_exist="replace")
        other.communicate()
    assert len(open_trace(tmp_path)) == 1


def _exists_in(directory: Path, said: Any) -> None:
    try:
        TraceRecordingWrapper(CountingEnv(), directory)
    except TraceExists as error:
        said.put(str(error))


def test_in_a_child_process_the_error_explains_how_to_share_a_directory(tmp_path: Path) -> None:
    recorded(tmp_path)
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    process = context.Process(target=_exists_in, args=(tmp_path, said), name="Worker-3")
    process.start()
    process.join()
    assert process.exitcode == 0
    assert 'on_exist="append" to add to it (needed if other processes of this run have closed' in said.get()


@pytest.mark.parametrize("kind", ["single", "vector", "copy"])
def test_a_relative_directory_survives_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    env, action = recorder_of(CountingEnv, Path("trace"), kind == "vector")
    assert env.directory == tmp_path / "trace"
    monkeypatch.chdir("elsewhere")
    if kind == "copy":
        env = copy.deepcopy(env)
    acted(env, "reset", action, "close")
    assert [len(episode) for episode in open_trace(tmp_path / "trace")] == [1]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {"on_exist": "ask"},
        {"flush_seconds": -1},
        {"flush_seconds": float("nan")},
        {"level": 99},
        {"on_error": "ignore"},
        {"record_infos": "lives"},
        {"reward_classes": [0.0], "frame_filter": bool},
        {"reward_classes": []},
        {"reward_classes": [float("nan")]},
        {"uid": "../escape"},
        {"uid": ".hidden"},
        {"uid": "a/b"},
        {"uid": "x.000000.gtb"},
        {"uid": "x" * 200},
    ],
    ids=repr,
)
def test_an_invalid_option_raises_before_anything_is_written(tmp_path: Path, options: Any) -> None:
    directory = tmp_path / "trace"
    with pytest.raises(InvalidOption) as caught:
        TraceRecordingWrapper(CountingEnv(), directory, **options)
    assert "\n" not in str(caught.value)
    assert not directory.exists() or not list(directory.iterdir())


def test_a_duplicate_writer_id_raises(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    with pytest.raises(InvalidOption, match="exists in"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, uid="a", on_exist="append")
    assert len(open_trace(tmp_path)) == 1


def test_metadata_round_trips(tmp_path: Path) -> None:
    metadata = {"name": "é", "table": np.arange(3, dtype=np.int8), "big": 2**100, "pair": (1, None), 3: b"\0"}
    recorded(tmp_path, metadata=metadata)
    assert bits(open_trace(tmp_path).metadata) == bits(metadata)


def test_metadata_that_cannot_be_stored_raises_before_recording(tmp_path: Path) -> None:
    with pytest.raises(UnstorableValue):
        TraceRecordingWrapper(CountingEnv(), tmp_path / "trace", metadata={"what": object()})
    assert not (tmp_path / "trace").exists()
