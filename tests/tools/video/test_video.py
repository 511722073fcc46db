"""Rendering recorded episodes: one frame per step, the right speed, and clear errors."""

import json
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from forked_python import HELPERS
from long_tests import LONG
from rendered_env import RenderedEnv, make_rendered
from runs import record_lengths
from scripted_env import ImageEnv, Result, ScriptedEnv
from shell import run

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, MissingExtra, RenderingError
from gym_trace.recording.video_schedules import cubic, schedule_of
from gym_trace.tools.video.render import Destination, Rendered, render
from gym_trace.tools.video.simulate import play_for_humans

av = pytest.importorskip("av")
pytest.importorskip("PIL")

from gym_trace.recording.video_writers import GifWriter, Mp4Writer, PngWriter  # noqa: E402


def pictures_of(path: Path) -> list[Any]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def speed_of(path: Path) -> Fraction:
    with av.open(str(path)) as container:
        return Fraction(container.streams.video[0].average_rate)


def cast_of(path: Path) -> tuple[dict[str, Any], list[Any]]:
    header, *events = map(json.loads, path.read_text().splitlines())
    return header, events


def rendered(directory: Path, out: Path, episodes: Any = (0,), **options: Any) -> list[Rendered]:
    form = options.pop("form", None)
    return list(render(open_trace(directory), out, episodes, form=form, **options))


def recorded(directory: Path, episodes: int = 1, env: Any = None, **options: Any) -> Path:
    env = make_rendered() if env is None else env
    with_trace = TraceRecordingWrapper(env, directory, **options)
    for number in range(episodes):
        with_trace.reset(seed=number)
        over = False
        while not over:
            _, _, terminated, truncated, _ = with_trace.step(number % 3)
            over = terminated or truncated
    with_trace.close()
    return directory


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return recorded(tmp_path / "trace", 3)


# -- contents of videos -----------------------------------------------------------------------------------------------


def test_a_video_has_one_frame_per_step_at_the_speed_of_the_environment(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    directory = recorded(tmp_path / "t", 2, gymnasium.make("CartPole-v1"))
    (made,) = rendered(directory, tmp_path / "v.mp4", [1])
    steps = len(open_trace(directory)[1])
    pictures = pictures_of(tmp_path / "v.mp4")
    assert made.frames == len(pictures) == steps + 1
    assert made.verdict is not None
    assert made.verdict.verdict == "identical"
    assert speed_of(made.path) == 50
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    env.reset(seed=1)
    for number, picture in enumerate(pictures):
        expected: Any = env.render()
        assert np.abs(picture.astype(int) - expected).mean() < 1
        if number < steps:
            env.step(1)
    env.close()
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("ending", ["mp4", "gif", "cast"])
def test_a_foreign_unfinished_video_file_is_not_overwritten(tmp_path: Path, ending: str) -> None:
    env = make_rendered() if ending != "cast" else gymnasium.make("FrozenLake-v1")
    directory = recorded(tmp_path / "t", env=env)
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    os.link(theirs, tmp_path / f"v.{ending}.part")
    (made,) = rendered(directory, tmp_path / f"v.{ending}")
    assert made.path.stat().st_size > 100
    assert theirs.read_text() == "theirs"


def test_odd_sizes_are_padded_by_repeating_the_edge(tmp_path: Path) -> None:
    writer = Mp4Writer(tmp_path / "v.mp4", 12.5)
    picture = np.zeros((33, 47, 3), np.uint8)
    picture[:, 40:] = (200, 30, 60)
    for _ in range(5):
        writer.write(picture)
    writer.close()
    for shown in pictures_of(tmp_path / "v.mp4"):
        assert shown.shape == (34, 48, 3)
        assert np.abs(shown[:, 42:].astype(int) - (200, 30, 60)).max() < 12  # and the colours are right
        assert shown[:, :38].max() < 12
    assert speed_of(tmp_path / "v.mp4") == Fraction(25, 2)
    with av.open(str(tmp_path / "v.mp4")) as container:
        assert container.streams.video[0].codec_context.pix_fmt == "yuv420p"
        assert container.streams.video[0].codec_context.name == "h264"


def test_a_gif_keeps_colours_and_speed_and_skips_too_fast_frames(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (200, 3), np.uint8)
    first, second = (np.roll(np.resize(colours, (40, 50, 3)), n, axis=0) for n in (0, 7))
    for fps, kept in ((10, 20), (100, 10)):
        writer = GifWriter(tmp_path / "v.gif", fps)
        for number in range(20):
            writer.write(first if number % 4 < 2 else second)
        writer.close()
        pictures = pictures_of(tmp_path / "v.gif")
        assert len(pictures) == kept
        assert np.abs(pictures[0].astype(int) - first).max() <= 1
        assert np.abs(pictures[-1].astype(int) - second).max() <= 1
        with av.open(str(tmp_path / "v.gif")) as container:
            times = [frame.time for frame in container.decode(video=0)]
        assert times == pytest.approx([number / (kept / (20 / fps)) for number in range(kept)])


def test_png_frames_equal_the_recorded_observations(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [7, 30], ImageEnv(100))
    (made,) = rendered(tmp_path / "t", tmp_path / "v.png", [1], source="observations")
    assert made.path == tmp_path / "v"
    assert made.verdict is None
    files = sorted(made.path.iterdir())
    assert [path.name for path in files] == [f"frame-{number:06d}.png" for number in range(31)]
    expected = open_trace(tmp_path / "t")[1].observations
    assert np.array_equal(np.concatenate([pictures_of(path) for path in files]), expected)


def test_png_frames_of_a_simulation_equal_its_renderings(tmp_path: Path, trace: Path) -> None:
    rendered(trace, tmp_path / "v", [2], form="png")
    files = sorted((tmp_path / "v" / "episode-000002").iterdir())
    assert len(files) == 7
    for step, path in enumerate(files):
        assert np.array_equal(pictures_of(path)[0], RenderedEnv().picture(step))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((20, 30), lambda o: np.repeat(o[:, :, None], 3, 2)),
        ((20, 30, 1), lambda o: np.repeat(o, 3, 2)),
        ((20, 30, 3), lambda o: o),
        ((4, 20, 30), lambda o: np.repeat(o[-1][:, :, None], 3, 2)),
        ((20, 30, 4), lambda o: np.repeat(o[:, :, -1:], 3, 2)),
        ((4, 20, 30, 3), lambda o: o[-1]),
    ],
    ids=["HW", "HW1", "HW3", "stack HW", "HW stack", "stack HW3"],
)
def test_the_last_image_of_a_stack_is_shown(tmp_path: Path, shape: tuple[int, ...], expected: Any) -> None:
    space = gymnasium.spaces.Dict(
        {"speed": gymnasium.spaces.Box(0, 1, (20, 30)), "view": gymnasium.spaces.Box(0, 255, shape, np.uint8)}
    )
    random = np.random.default_rng(0)
    views = [random.integers(0, 256, shape, np.uint8) for _ in range(3)]
    seen = [{"speed": np.zeros((20, 30), np.float32), "view": view} for view in views]
    env = ScriptedEnv(space, gymnasium.spaces.Discrete(2), [(seen[0], [Result(o) for o in seen[1:]])])
    record_lengths(tmp_path / "t", [2], env)
    (made,) = rendered(tmp_path / "t", tmp_path / "v.png", source="observations")
    for path, view in zip(sorted(made.path.iterdir()), views, strict=True):
        assert np.array_equal(pictures_of(path)[0], expected(view))


def test_an_asciicast_shows_what_the_environment_prints(tmp_path: Path) -> None:
    env = gymnasium.make("FrozenLake-v1", render_mode=None)
    directory = recorded(tmp_path / "t", 1, env)
    (made,) = rendered(directory, tmp_path / "v.cast")
    header, events = cast_of(made.path)
    episode = open_trace(directory)[0]
    assert header["version"] == 2
    assert header["width"] >= 4
    *shown, last = events
    assert len(shown) == len(episode) + 1 == made.frames
    assert [kind for _, kind, _ in events] == ["o"] * len(events)
    assert [at for at, _, _ in events] == pytest.approx([number / 4 for number in range(len(events))])
    assert last[2] == ""
    again: Any = gymnasium.make("FrozenLake-v1", render_mode="ansi")
    again.reset(seed=0)
    for number, (_, _, text) in enumerate(shown):
        assert text.removeprefix("\x1b[H\x1b[2J").replace("\r\n", "\n") == again.render().rstrip("\n")
        if number < len(episode):
            again.step(episode.actions[number])


def test_an_asciicast_grows_with_its_screens(tmp_path: Path) -> None:
    directory = recorded(tmp_path / "t", 1, make_rendered(length=60))
    (made,) = rendered(directory, tmp_path / "v.cast")
    header, events = cast_of(made.path)
    assert (header["width"], header["height"]) == (40, 10)
    assert [data for _, kind, data in events if kind == "r"][-1] == "61x10"


@pytest.mark.parametrize("source", ["simulation", "observations"])
def test_the_overlay_lies_below_the_frame_and_changes_with_each_step(tmp_path: Path, source: str) -> None:
    directory = recorded(tmp_path / "t", 1, make_rendered(pictures=True))
    (made,) = rendered(directory, tmp_path / "v.png", overlay=True, source=source)
    bands = []
    for step, path in enumerate(sorted(made.path.iterdir())):
        (picture,) = pictures_of(path)
        assert picture.shape[1] == 6 * 41  # enlarged, so that the text fits
        assert np.array_equal(picture[: 6 * 30 : 6, ::6], RenderedEnv().picture(step))
        bands.append(picture[6 * 30 :].tobytes())
        assert 20 < np.count_nonzero(picture[6 * 30 :]) < picture[6 * 30 :].size / 2
    assert len(set(bands)) == 7


def test_the_overlay_of_an_asciicast_is_text(tmp_path: Path, trace: Path) -> None:
    rendered(trace, tmp_path / "v.cast", [1], overlay=True)
    _, events = cast_of(tmp_path / "v.cast")
    assert "step 0   return 0\r\nreset" in events[0][2]
    assert "step 4   return 2\r\nreward 0.5   action 1" in events[4][2]


# -- errors and warnings ----------------------------------------------------------------------------------------------


def test_a_differing_replay_is_rendered_with_a_warning(tmp_path: Path, trace: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"episode 1: the replay differs from the recording, at step 2, observations\[0\]"
    ):
        (made,) = rendered(trace, tmp_path / "v.mp4", [1], env_kwargs={"offset": 1})
    assert made.verdict is not None
    assert made.verdict.verdict == "differs"
    assert made.frames == len(pictures_of(made.path)) == 7


def test_a_nondeterministic_episode_is_rendered_with_a_warning(tmp_path: Path) -> None:
    directory = tmp_path / "t"
    env = TraceRecordingWrapper(make_rendered(luck=True), directory)
    env.reset()
    env.step(0)
    env.close()
    with pytest.warns(UserWarning, match="the replay may differ from the recording: .*so do two replays"):
        (made,) = rendered(directory, tmp_path / "v.mp4")
    assert made.frames == 2


def test_an_episode_without_its_first_steps_is_skipped_with_a_warning(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 1, frame_filter=lambda step: step >= 3)
    with pytest.warns(UserWarning, match="episode 0: not rendered: earlier steps were filtered out"):
        assert rendered(tmp_path / "t", tmp_path / "v.mp4") == []
    assert not (tmp_path / "v.mp4").exists()


def test_a_missing_render_mode_raises_and_suggests_a_format(tmp_path: Path) -> None:
    record_lengths(tmp_path / "images", [2], ImageEnv(5))
    with pytest.raises(EnvironmentUnavailable, match="does not describe how to make its environment"):
        rendered(tmp_path / "images", tmp_path / "v.mp4")
    directory = recorded(tmp_path / "t", 1, gymnasium.make("CartPole-v1"))
    with pytest.warns(UserWarning, match="ansi"), pytest.raises(EnvironmentUnavailable, match=r"'ansi', only .*mp4"):
        rendered(directory, tmp_path / "v.cast")
    with pytest.raises(RenderingError, match="observations: no images"):
        rendered(directory, tmp_path / "v.mp4", source="observations")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("name", ["v.mp4", "v.gif", "v.png", "v.cast"])
def test_a_failed_rendering_leaves_no_files(tmp_path: Path, name: str) -> None:
    directory = recorded(tmp_path / "t", 1)
    with pytest.raises(RenderingError, match=r"render\(\) failed: OSError: the screen is broken"):
        rendered(directory, tmp_path / name, env_kwargs={"breaks_at": 4})
    frames = iter(range(3))

    def interrupt() -> None:
        if next(frames, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rendered(directory, tmp_path / name, on_frame=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_change_of_the_image_size_raises(tmp_path: Path) -> None:
    writer = Mp4Writer(tmp_path / "v.mp4", 30)
    writer.write(np.zeros((10, 20, 3), np.uint8))
    with pytest.raises(RenderingError, match="from 20x10 to 20x12"):
        writer.write(np.zeros((12, 20, 3), np.uint8))
    for odd in (np.zeros((10, 20, 3), np.float32), np.zeros((10, 20, 5), np.uint8), None):
        with pytest.raises(RenderingError, match="not an image"):
            writer.write(odd)  # type: ignore[arg-type]
    writer.drop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("package", "module"), [("av", "recording.video_writers"), ("PIL", "tools.video.overlay")])
def test_a_missing_package_raises_with_the_pip_command(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"gym_trace.{module}", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'gym-trace\[video\]'"):
        rendered(trace, tmp_path / "v.mp4", overlay=True)
    rendered(trace, tmp_path / "v.cast", overlay=True)


# -- choice of episodes and output paths ------------------------------------------------------------------------------


def test_out_determines_format_and_file_names(tmp_path: Path) -> None:
    def names(out: str, indices: list[int], form: str | None = None) -> list[str]:
        return [str(path) for path in Destination(out, form).paths(indices).values()]

    assert names("a/b.mp4", [3]) == ["a/b.mp4"]
    assert names("a/b-{}.GIF", [3, 12]) == ["a/b-000003.GIF", "a/b-000012.GIF"]
    assert names("a", [3]) == ["a/episode-000003.mp4"]
    assert names("a.d", [3], "cast") == ["a.d/episode-000003.cast"]
    assert names("a", [3], "png") == ["a/episode-000003"]
    assert names("a-{}.png", [3]) == ["a-000003"]
    with pytest.raises(InvalidOption, match=r"2 episodes.* a/b-\{\}\.mp4"):
        names("a/b.mp4", [1, 2])
    with pytest.raises(InvalidOption, match=r"ends in \.mp4"):
        Destination("a.mp4", "gif")
    with pytest.raises(InvalidOption, match="unknown format"):
        Destination("a", "avi")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_frames_of_a_killed_rendering_are_not_among_those_of_the_next(tmp_path: Path) -> None:
    picture = np.zeros((8, 8, 3), np.uint8)
    child = os.fork()
    if not child:
        writer = PngWriter(tmp_path / "frames", 10)
        for _ in range(5):
            writer.write(picture)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert len(list(tmp_path.rglob("frame-*.png"))) == 5
    writer = PngWriter(tmp_path / "frames", 10)
    for _ in range(2):
        writer.write(picture)
    writer.close()
    assert sorted(path.name for path in (tmp_path / "frames").iterdir()) == ["frame-000000.png", "frame-000001.png"]
    assert [path.name for path in tmp_path.iterdir()] == ["frames"]


def test_an_existing_directory_of_frames_raises(tmp_path: Path, trace: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "mine").touch()
    with pytest.raises(InvalidOption, match="already exists"):
        rendered(trace, tmp_path / "v.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "v"]


def test_schedules() -> None:
    assert [n for n in range(3500) if cubic(n)] == [0, 1, 8, 27, 64, 125, 216, 343, 512, 729, 1000, 2000, 3000]
    assert [n for n in range(10) if schedule_of("every:4")(n)] == [0, 4, 8]
    for wrong in ("every:0", "every", "cube", True, 3):
        with pytest.raises(InvalidOption, match="invalid schedule"):
            schedule_of(wrong)


def test_best_episodes_returns_the_best_and_the_worst(tmp_path: Path) -> None:
    returns = [3.0, float("nan"), -1.0, 7.0, 3.0]
    env = ScriptedEnv(
        gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2), [(0, [Result(1, value, True)]) for value in returns]
    )
    record_lengths(tmp_path / "t", [1] * 5, env)
    trace = open_trace(tmp_path / "t")
    assert trace.select(sort="-return", limit=3).indices.tolist() == [3, 0, 4]
    assert trace.select(sort="return", limit=2).indices.tolist() == [2, 0]


# -- memory -----------------------------------------------------------------------------------------------------------

_MEASURE = """
import resource, sys
import rendered_env
from gym_trace import open_trace
from gym_trace.tools.video.render import render
frames, early = 0, 0
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def count():
    global frames, early
    frames += 1
    if frames == 250:
        early = peak()
(made,) = render(open_trace(sys.argv[1]), sys.argv[2], [0], source=sys.argv[3], on_frame=count)
print(made.frames, peak() - early)
"""


FRAMES = 5000 if LONG else 800


@pytest.fixture(scope="module")
def long_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("long") / "trace"
    return recorded(
        directory, 1, make_rendered(length=FRAMES, size=(160, 160), pictures=True, disable_env_checker=True)
    )


@pytest.mark.parametrize(("name", "source"), [("v.mp4", "simulation"), ("v.gif", "observations")])
def test_memory_does_not_grow_with_the_number_of_frames(
    tmp_path: Path, long_trace: Path, name: str, source: str
) -> None:
    """The frames alone are 61 MB, and more with GYM_TRACE_LONG=1."""
    path = os.pathsep.join([HELPERS, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(long_trace), str(tmp_path / name), source],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    frames, growth = map(int, done.stdout.split())
    assert frames == FRAMES + 1
    assert growth < 20_000  # kB


# -- in a window ------------------------------------------------------------------------------------------------------


class Clock:
    """Fake of the module time: sleep() advances the clock immediately."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_episodes_are_played_at_their_speed(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("gym_trace.tools.video.simulate.time", clock)
    verdicts = list(play_for_humans(open_trace(trace), [0, 2], speed=2))
    assert [(verdict.index, verdict.verdict) for verdict in verdicts] == [(0, "identical"), (2, "identical")]
    assert clock.now == pytest.approx(2 * 7 / (20 * 2))
    with pytest.raises(InvalidOption, match="speed"):
        list(play_for_humans(open_trace(trace), [0], speed=0))


def test_a_window_opens_for_environments_of_gymnasium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pygame: Any = pytest.importorskip("pygame")
    monkeypatch.setattr("gym_trace.tools.video.simulate.time", Clock())
    flips = []
    monkeypatch.setattr(pygame.display, "flip", lambda: flips.append(1))
    directory = recorded(tmp_path / "t", 1, gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    (verdict,) = play_for_humans(open_trace(directory), [0])
    assert verdict.verdict == "identical"
    assert len(flips) == verdict.steps + 1  # no flips during verification


def test_a_window_that_cannot_be_opened_is_not_an_identical_replay(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = RenderedEnv.step

    def needs_more(self: RenderedEnv, action: Any) -> Any:
        if self.render_mode == "human":
            raise gymnasium.error.DependencyNotInstalled("no pygame; pip install 'gymnasium[classic-control]'")
        return step(self, action)

    monkeypatch.setattr(RenderedEnv, "step", needs_more)
    shown = run("replay", trace, "--human")
    assert shown.exit_code == 1
    assert "identical" not in shown.output
    assert "cannot render the environment: at step 0: gymnasium.error.DependencyNotInstalled: no pygame" in shown.output


@pytest.mark.parametrize("out", ["x.avi", "x.mp3", "x-{}.webm"])
def test_an_unknown_suffix_raises_and_creates_no_directory(trace: Path, tmp_path: Path, out: str) -> None:
    refused = run("render", trace, "-o", tmp_path / "new" / out)
    assert refused.exit_code == 2
    assert f"{out}: unknown suffix {Path(out).suffix}" in refused.output
    assert ".mp4, .gif, .png, .cast" in refused.output
    assert not (tmp_path / "new").exists()
