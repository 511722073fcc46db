"""Where a recorder writes, what it does with what is there, and which options it refuses."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import cradle
import gymnasium
import numpy as np
import pytest
from runs import play, recorded
from zoo import CountingEnv, bits

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import InvalidOption, TraceExists, UnstorableValue


def test_without_a_directory_a_fresh_one_is_made_and_logged(
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


def test_the_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "a" / "b")
    env.close()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_trace_that_exists_is_named_and_left_alone(tmp_path: Path) -> None:
    for number in range(7):
        recorded(tmp_path, on_exist="append", uid=f"run-{number}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TraceExists) as caught:
        TraceRecordingWrapper(CountingEnv(), tmp_path)
    message = str(caught.value)
    assert "run-0" in message
    assert "run-4" in message
    assert "run-5" not in message
    assert "2 more" in message
    assert 'on_exist="append"' in message
    assert 'on_exist="replace"' in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_append_records_beside_what_is_there(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    recorded(tmp_path, 3, on_exist="append")
    trace = open_trace(tmp_path)
    assert len(trace) == 5
    assert len(trace.writers) == 2
    assert len({(episode.writer, episode.episode_id) for episode in trace}) == 5
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())


def test_replace_deletes_our_files_and_nothing_else(tmp_path: Path) -> None:
    recorded(tmp_path, 2, uid="ours")
    recorded(tmp_path, 2, uid="ours2", on_exist="append")
    torn = tmp_path / "ours.000001.gtb.part"  # as a killed writer leaves it
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


def test_replace_does_not_follow_links_out_of_the_directory(tmp_path: Path) -> None:
    recorded(tmp_path / "elsewhere", uid="ours")
    here = tmp_path / "here"
    here.mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (here / path.name).symlink_to(path)
    recorded(here, uid="new", on_exist="replace")
    assert len(open_trace(tmp_path / "elsewhere")) == 1


def test_a_trace_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    play(env, 1)
    with pytest.raises(TraceExists, match=r"an environment that this process made earlier .* call \.close\(\)"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, on_exist="replace")
    env.close()
    assert len(open_trace(tmp_path)) == 1


def test_what_another_process_records_is_not_replaced_nor_is_anything_beside_it(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from zoo import CountingEnv
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(CountingEnv(), {str(tmp_path)!r}, on_exist="append")
print(flush=True)
sys.stdin.read()
"""
    with cradle.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
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


def test_one_of_several_processes_is_told_how_they_can_share_a_directory(tmp_path: Path) -> None:
    recorded(tmp_path)
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    process = context.Process(target=_exists_in, args=(tmp_path, said), name="Worker-3")
    process.start()
    process.join()
    assert process.exitcode == 0
    assert 'on_exist="append" to record beside it (as a process must that starts when others' in said.get()


@pytest.mark.parametrize("kind", ["single", "vector", "copy"])
def test_a_relative_directory_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    env: Any
    if kind == "vector":
        vector = pytest.importorskip("gym_trace.recording.vector.wrapper", exc_type=ImportError)
        env = vector.TraceRecordingVectorWrapper(gymnasium.vector.SyncVectorEnv([CountingEnv]), "trace")
    else:
        env = TraceRecordingWrapper(CountingEnv(), "trace")
    assert env.directory == tmp_path / "trace"
    monkeypatch.chdir("elsewhere")
    if kind == "copy":
        env = copy.deepcopy(env)
    env.reset()
    env.step(np.zeros(1, np.int64) if kind == "vector" else 0)
    env.close()
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
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_written(tmp_path: Path, options: Any) -> None:
    directory = tmp_path / "trace"
    with pytest.raises(InvalidOption) as caught:
        TraceRecordingWrapper(CountingEnv(), directory, **options)
    assert "\n" not in str(caught.value)
    assert not directory.exists() or not list(directory.iterdir())


def test_a_writer_id_that_is_taken_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    with pytest.raises(InvalidOption, match="taken"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, uid="a", on_exist="append")
    assert len(open_trace(tmp_path)) == 1


def test_metadata_comes_back_as_it_was_given(tmp_path: Path) -> None:
    metadata = {"name": "é", "table": np.arange(3, dtype=np.int8), "big": 2**100, "pair": (1, None), 3: b"\0"}
    recorded(tmp_path, metadata=metadata)
    assert bits(open_trace(tmp_path).metadata) == bits(metadata)


def test_metadata_that_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnstorableValue):
        TraceRecordingWrapper(CountingEnv(), tmp_path / "trace", metadata={"what": object()})
    assert not (tmp_path / "trace").exists()
