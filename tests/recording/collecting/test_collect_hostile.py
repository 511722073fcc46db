"""Event logs of runs that are links, pipes, damaged or forged."""

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from runs import recorded

from gym_trace import TraceRecordingWrapper, collect
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TraceError
from gym_trace.recording.collecting.resuming import finished, run_settings
from gym_trace.recording.processes.run_log import EVENTS, Events
from gym_trace.tools.video.asciicast import CastWriter

pytestmark = pytest.mark.usefixtures("forked_workers")
CARTPOLE = partial(gymnasium.make, "CartPole-v1", max_episode_steps=5)
SETTINGS = {"run": "00ff", "seed": 1, "policy": "random", "environment": None, "recording": {}}


def written(path: Path, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / EVENTS).write_text(json.dumps({"event": "start", "settings": {**SETTINGS, **settings}}) + "\n")
    return path


@pytest.mark.parametrize("resume", [True, False])
def test_events_that_are_a_link_are_not_written_through(tmp_path: Path, resume: bool) -> None:
    victim = written(tmp_path / "victim") / EVENTS
    before = victim.read_bytes()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / EVENTS).symlink_to(victim)
    with pytest.raises(TraceError, match="a link, or no regular file"):
        collect(CARTPOLE, directory=tmp_path / "t", episodes=1, resume=resume)
    assert victim.read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
def test_events_that_are_a_pipe_do_not_hang_a_run(tmp_path: Path, resume: bool) -> None:
    os.mkfifo(tmp_path / EVENTS)
    with pytest.raises(TraceError, match="a link, or no regular file"):
        collect(CARTPOLE, directory=tmp_path, episodes=1, resume=resume)


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": "1"}, {"seed": -1}, {"seed": 1.5}, {"seed": True}, {"seed": None}, {"seed": 1 << 4000}, {"run": 5},
        {"run": "\x1b[2J"}, {"run": "x" * 10**6}, {"policy": ["random"]}, {"environment": "\x1b"}, {"recording": None},
        {"\x1b[2J": 1},
    ],
)  # fmt: skip
def test_settings_that_no_run_has_are_not_believed(tmp_path: Path, settings: dict[str, Any]) -> None:
    written(tmp_path, **settings)
    with pytest.raises(CorruptTrace, match="invalid run settings") as error:
        collect(CARTPOLE, directory=tmp_path, episodes=1, resume=True)
    assert str(error.value).isprintable()


def test_lines_that_are_deep_or_no_objects_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path)
    with open(tmp_path / EVENTS, "a") as events:
        events.write("[" * 10**5 + '"start"\n"start"\n["start"]\n{"event": "start", "settings": ' + "{" * 10**5 + "\n")
    assert run_settings(tmp_path) == SETTINGS


def test_a_sparse_file_of_events_is_refused_at_once(tmp_path: Path) -> None:
    written(tmp_path)
    os.truncate(tmp_path / EVENTS, 1 << 40)
    with pytest.raises(CorruptTrace, match="are on disk"):
        run_settings(tmp_path)


def test_the_error_about_other_settings_is_printable(tmp_path: Path) -> None:
    written(tmp_path, policy="\x1b[2Jrandom", environment={"id": "\x1b]0;x\x07"})
    with pytest.raises(InvalidOption, match="the run was started with environment") as error:
        collect(CARTPOLE, directory=tmp_path, episodes=1, resume=True)
    assert str(error.value).isprintable()


def test_episodes_with_seeds_that_no_run_gives_are_not_counted(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CARTPOLE(), tmp_path, metadata={"run": "00ff"}) as env:
        for seed in (1, 2**31, 2**32, 2**62):
            env.reset(seed=seed)
            while not any(env.step(0)[2:4]):
                pass
    assert len(finished(tmp_path, "00ff", 1)) == 1  # the walk back to an episode would never end for the others


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_videos_are_not_written_through_links(tmp_path: Path, suffix: str) -> None:
    av = pytest.importorskip("av")
    assert av
    from gym_trace.recording.video_writers import WRITERS

    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name, make in {"x.mp4": WRITERS["mp4"], "x.gif": WRITERS["gif"], "x.cast": CastWriter}.items():
        link = tmp_path / (name + suffix)
        link.symlink_to(victim)
        writer = make(tmp_path / name, 30)
        frame: Any = "text" if name == "x.cast" else np.zeros((16, 16, 3), np.uint8)
        writer.write(frame)
        writer.close()
        assert not link.is_symlink()
        assert victim.read_text() == "mine"


def test_replacing_a_trace_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    recorded(tmp_path)
    (batch,) = tmp_path.glob("*.gtb")
    os.mkfifo(batch.with_name(batch.name + ".part"))
    recorded(tmp_path, on_exist="replace")
    assert not batch.exists()


def test_events_that_find_no_room_say_what_and_where(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    events = Events(tmp_path)
    events._file.close()
    events._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(RecordingError, match=r"events\.jsonl: write failed: No space left.* resumed"):
        events("report")
    events.close()
