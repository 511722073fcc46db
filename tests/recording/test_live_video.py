"""Videos made while recording: the scheduled episodes are filmed, and errors never harm the trace."""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_python
import gymnasium
import pytest
from forked_python import HELPERS
from rendered_env import make_rendered
from runs import manifest_entries, play
from scripted_env import bits

from gym_trace import TraceRecordingWrapper, check_trace, open_trace
from gym_trace.errors import InvalidOption, MissingExtra, TraceExists

av = pytest.importorskip("av")

_SCRIPT = """
import os, signal, sys
from rendered_env import make_rendered
from gym_trace import TraceRecordingWrapper
env = TraceRecordingWrapper(make_rendered(length=200, render_mode="rgb_array"), sys.argv[1], uid="w", video="cubic")
for episode in range(2):
    env.reset(seed=episode)
    for _ in range(200 if episode == 0 else 120):
        env.step(0)
"""


def filming(directory: Path, video: Any = "cubic", **options: Any) -> Any:
    kwargs = {name: options.pop(name) for name in ("length", "size", "breaks_at") if name in options}
    options = {"uid": "w", **options}
    return TraceRecordingWrapper(make_rendered(render_mode="rgb_array", **kwargs), directory, video=video, **options)


def frames_of(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def listed(directory: Path) -> list[tuple[int, str, int]]:
    entries = [entry for entry in manifest_entries(directory) if entry["type"] == "video"]
    assert all((directory / entry["file"]).stat().st_size == entry["bytes"] for entry in entries)
    return [(entry["episode"], entry["file"], entry["frames"]) for entry in entries]


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([HELPERS, os.environ.get("PYTHONPATH", "")])
    return forked_python.run(
        [sys.executable, "-W", "error", "-c", script, str(directory)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


def test_scheduled_episodes_are_filmed_and_listed(tmp_path: Path) -> None:
    env = filming(tmp_path, length=5)
    said = play(env, 10)
    env.close()
    names = [f"w.video.{episode:06d}.mp4" for episode in (0, 1, 8)]
    assert listed(tmp_path) == [(int(name[8:14]), name, 6) for name in names]
    assert [frames_of(tmp_path / name) for name in names] == [6, 6, 6]
    assert files(tmp_path) == ["w.000000.gtb", "w.manifest.jsonl", *names]
    report = check_trace(tmp_path)
    assert not report.damages
    assert report.episodes == 10
    plain = make_rendered(length=5)
    assert bits(said) == bits(play(plain, 10))
    assert len(open_trace(tmp_path)) == 10


@pytest.mark.parametrize("video", [None, False])
def test_without_a_schedule_nothing_is_filmed_and_no_wrapper_is_added(tmp_path: Path, video: Any) -> None:
    inner = make_rendered()
    env = TraceRecordingWrapper(inner, tmp_path, video=video)
    assert env.env is inner
    play(env, 2)
    env.close()
    assert not list(tmp_path.glob("*.mp4"))


def test_a_function_chooses_episodes_and_unrecorded_ones_are_not_filmed(tmp_path: Path) -> None:
    asked = []

    def third(episode: int) -> bool:
        asked.append(episode)
        return episode % 3 == 0

    env = filming(tmp_path, third, episode_filter=lambda episode: episode != 3)
    play(env, 7)
    env.close()
    assert asked == [0, 1, 2, 4, 5, 6]
    assert [episode for episode, _, _ in listed(tmp_path)] == [0, 6]


@pytest.mark.parametrize("how", ["reset", "close"])
def test_an_unfinished_episode_has_a_video(tmp_path: Path, how: str) -> None:
    env = filming(tmp_path)
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    if how == "reset":
        env.reset()
        assert [(episode, frames) for episode, _, frames in listed(tmp_path)] == [(0, 4)]
    env.close()
    assert [(episode, frames) for episode, _, frames in listed(tmp_path)] == [(0, 4), (1, 1)][: 1 + (how == "reset")]
    env.close()
    assert not check_trace(tmp_path).damages


@pytest.mark.parametrize("video", [True, "sometimes", 3, "every:0"])
def test_an_invalid_schedule_raises_before_anything_is_written(tmp_path: Path, video: Any) -> None:
    with pytest.raises(InvalidOption, match="invalid schedule"):
        filming(tmp_path / "t", video)
    assert not (tmp_path / "t").exists()


def test_an_environment_that_does_not_render_images_raises(tmp_path: Path) -> None:
    for mode in (None, "ansi"):
        with pytest.raises(InvalidOption, match='render_mode="rgb_array"'):
            TraceRecordingWrapper(make_rendered(render_mode=mode), tmp_path / "t", video="cubic")
    assert not (tmp_path / "t").exists()


def test_a_missing_encoder_raises_before_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    monkeypatch.delitem(sys.modules, "gym_trace.recording.video_writers", raising=False)
    with pytest.raises(MissingExtra, match="gym-trace\\[video\\]"):
        filming(tmp_path / "t")
    assert not (tmp_path / "t").exists()


def raises_at_the_second(episode: int) -> bool:
    return 1 / (1 - episode) < 0


@pytest.mark.parametrize(
    ("schedule", "breaks_at", "methods", "message"),
    [
        ("cubic", 3, [], "0: dropped: OSError: the screen is broken"),
        (raises_at_the_second, -1, [], "1: dropped: ZeroDivisionError"),
        *(
            (lambda episode: episode == 1, -1, methods, "1: dropped: RuntimeError: no more room")
            for methods in (["write"], ["close"], ["drop", "write"])
        ),
    ],
    ids=["renderer", "schedule", "write", "close", "drop"],
)
def test_a_failure_drops_the_video_with_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: Any,
    breaks_at: int,
    methods: list[str],
    message: str,
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no more room")

    for method in methods:
        monkeypatch.setattr(f"gym_trace.recording.video_writers.Mp4Writer.{method}", broken)
    env = filming(tmp_path, schedule, breaks_at=breaks_at)
    episodes = 1 if schedule == "cubic" else 2
    with pytest.warns(RuntimeWarning, match=f"video of episode {message}") as caught:
        said = play(env, episodes)
    env.close()
    assert len(caught) == 1
    assert bits(said) == bits(play(make_rendered(), episodes))
    assert files(tmp_path) == ["w.000000.gtb", "w.manifest.jsonl"]
    assert listed(tmp_path) == []
    assert not check_trace(tmp_path).damages
    assert [episode.outcome for episode in open_trace(tmp_path)] == ["terminated"] * episodes


def test_a_killed_run_leaves_no_unfinished_video_under_the_final_name(tmp_path: Path) -> None:
    done = run(_SCRIPT + "env.flush()\nos.kill(os.getpid(), signal.SIGKILL)\n", tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert files(tmp_path) == [
        "w.000000.gtb.part",
        "w.manifest.jsonl",
        "w.ring",
        "w.video.000000.mp4",
        "w.video.000001.mp4.part",
    ]
    assert frames_of(tmp_path / "w.video.000000.mp4") == 201
    assert not check_trace(tmp_path).damages
    assert open_trace(tmp_path).episodes["steps"].tolist() == [200, 120]
    filming(tmp_path, uid="new", on_exist="replace").close()
    assert files(tmp_path) == ["new.manifest.jsonl"]


def test_videos_are_complete_without_close(tmp_path: Path) -> None:
    done = run(_SCRIPT, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(episode, frames) for episode, _, frames in listed(tmp_path)] == [(0, 201), (1, 121)]
    assert frames_of(tmp_path / "w.video.000001.mp4") == 121
    assert not check_trace(tmp_path).damages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_keeps_the_video_of_its_parent_and_films_its_own(tmp_path: Path) -> None:
    script = (
        _SCRIPT
        + """
child = os.fork()
for _ in range(10 if child else 0):
    env.step(1)
if not child:
    env.reset(seed=5)
    for _ in range(200):
        env.step(0)
    env.close()
    del env
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
env.close()
"""
    )
    done = run(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    videos = {name: (episode, frames) for episode, name, frames in listed(tmp_path)}
    assert videos["w.video.000000.mp4"] == (0, 201)
    assert videos["w.video.000001.mp4"] == (1, 131)
    (own,) = set(videos) - {"w.video.000000.mp4", "w.video.000001.mp4"}
    assert videos[own] == (0, 201)
    assert [frames_of(tmp_path / name) for name in ("w.video.000001.mp4", own)] == [131, 201]
    assert not list(tmp_path.glob("*.part"))
    assert not check_trace(tmp_path).damages


def test_a_copied_environment_films_its_own_videos(tmp_path: Path) -> None:
    env = filming(tmp_path)
    env.reset(seed=0)
    env.step(0)
    twin = copy.deepcopy(env)
    env.step(0)
    for recorder in (env, twin):
        recorder.reset(seed=1)
        recorder.step(1)
        recorder.close()
    frames = [(name.startswith("w."), episode, frames) for episode, name, frames in listed(tmp_path)]
    assert sorted(frames) == [(False, 0, 2), (True, 0, 3), (True, 1, 2)]


def test_replace_deletes_only_videos_of_the_trace(tmp_path: Path) -> None:
    env = filming(tmp_path)
    play(env, 2)
    with pytest.raises(TraceExists, match="earlier environment of this process"):
        filming(tmp_path, uid="other", on_exist="replace")
    env.close()
    manifest = (tmp_path / "w.manifest.jsonl").read_bytes()
    video = (tmp_path / "w.video.000000.mp4").read_bytes()
    lies = (
        b'{"type":"video","file":"../outside.mp4"}\n{"type":"video","file":"mine.mp4"}\n{"type":"video","file":[1]}\n'
    )
    (tmp_path / "w.manifest.jsonl").write_bytes(manifest + lies)
    outside = tmp_path.parent / "outside.mp4"
    foreign = ["mine.mp4", "w.video.000005.mp4", "x.video.000000.mp4", "w.video.00000.mp4", "x.video.000000.mp4.part"]
    for path in (outside, *(tmp_path / name for name in foreign)):
        path.write_bytes(video)
    (tmp_path / "w.video.000007.mp4.part").write_bytes(b"not what we write")
    filming(tmp_path, uid="new", on_exist="replace").close()
    assert files(tmp_path) == sorted([*foreign, "w.video.000007.mp4.part", "new.manifest.jsonl"])
    assert outside.exists()


def test_a_rebuilt_environment_films_too(tmp_path: Path) -> None:
    env = filming(tmp_path)
    spec = env.spec
    assert [wrapper.name for wrapper in spec.additional_wrappers] == ["TraceRecordingWrapper"]
    again: Any = gymnasium.make(spec)
    for recorder in (env, again):
        play(recorder, 1)
        recorder.close()
    assert len(listed(tmp_path)) == 2
    assert len(open_trace(tmp_path).writers) == 2


@pytest.mark.skipif(not hasattr(gymnasium.wrappers, "Autoreset"), reason="since gymnasium 1.0")
def test_episodes_started_by_autoreset_are_filmed_from_their_reset(tmp_path: Path) -> None:
    inner = gymnasium.wrappers.Autoreset(make_rendered(render_mode="rgb_array", length=3))
    env = TraceRecordingWrapper(inner, tmp_path, uid="w", video="cubic")
    env.reset()
    for _ in range(9):  # the 4th and the 8th reset
        env.step(0)
    env.close()
    assert [(episode, frames) for episode, _, frames in listed(tmp_path)] == [(0, 4), (1, 4)]
    assert [len(episode) for episode in open_trace(tmp_path)] == [3, 3, 1]
