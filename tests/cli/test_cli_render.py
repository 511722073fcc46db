"""gym-trace render: output files, options and errors."""

import re
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from click.testing import Result
from rendered_env import make_rendered
from shell import ok, run
from terminals import console

import gym_trace
from gym_trace import TraceRecordingWrapper

av = pytest.importorskip("av")
pytest.importorskip("PIL")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    env = TraceRecordingWrapper(make_rendered(length=9, pictures=True), "t")
    for episode, length in enumerate([4, 2, 9, 1, 3]):  # the return is half the length
        env.reset(seed=episode)
        for _ in range(length):
            env.step(0)
    env.close()
    return tmp_path


def made(*args: object) -> list[str]:
    ok("render", "t", *args)
    return sorted(str(path) for path in Path().rglob("*") if path.is_file() and path.parts[0] != "t")


def refused(*args: object) -> str:
    result: Result = run("render", "t", *args)
    assert result.exit_code in (1, 2)
    line = result.stderr
    assert line.startswith("error: ")
    assert line.count("\n") == 1
    return line


def test_progress_is_shown_on_a_terminal() -> None:
    with console("render", "t", "-o", "videos", "--from", "observations") as terminal:
        assert terminal.ended() == 0
    assert b"frames/s" in terminal.raw
    assert re.findall(rb"(?:^|\n|\x1b\[2K)(episode \d): videos", terminal.raw) == [
        f"episode {number}".encode() for number in range(5)
    ]


@pytest.mark.parametrize(
    ("choice", "indices"),
    [
        ((), [0, 1, 2, 3, 4]),
        (("--episodes", "1,-1"), [1, 4]),
        (("--episodes", "3:"), [3, 4]),
        (("--sort", "-return", "--limit", 1), [2]),  # the other episodes were cut
        (("--sort", "-return", "--limit", 2, "--where", "outcome in ['terminated', 'cut']"), [0, 2]),
        (("--sort", "return", "--limit", 1, "--where", "outcome != 'lost'"), [3]),
        (("--where", "index > 0 and index % 2 == 0"), [2, 4]),
        (("--sort=-return", "--limit", 2), [0, 2]),
    ],
)
def test_episodes_are_chosen_in_several_ways(choice: Any, indices: list[int]) -> None:
    assert made("-o", "v", "--format", "gif", *choice) == [f"v/episode-{index:06d}.gif" for index in indices]


@pytest.mark.filterwarnings("always:episode 2")
def test_options_reach_the_video() -> None:
    assert made("-o", "a.mp4", "--episodes", "2", "--fps", "12") == ["a.mp4"]
    with av.open("a.mp4") as container:
        assert container.streams.video[0].average_rate == 12
        assert sum(1 for _ in container.decode(video=0)) == 10
    size = len(Path("a.mp4").read_bytes())
    ok("render", "t", "-o", "b.mp4", "--episodes", "2", "--overlay", "--from", "observations")
    assert len(Path("b.mp4").read_bytes()) != size
    result = ok("render", "t", "-o", "c.mp4", "--episodes", "2", "--env-arg", "offset=1")
    assert "warning: episode 2: the replay differs from the recording, at the reset" in result.stderr
    assert result.stdout == "episode 2: c.mp4, 10 frames\n"


def test_an_impossible_rendering_is_an_error_in_one_line(tmp_path: Path) -> None:
    missing = run("render", "t", "-o", "a.mp4", "--episodes", "5")
    assert (missing.exit_code, "no episode 5; the trace has 5 episodes" in missing.stderr) == (2, True)
    assert "none of 5 episodes matches" in refused("-o", "a.mp4", "--episodes", "9:")
    assert "v-{}.mp4" in refused("-o", "v.mp4")
    assert "ends in .mp4" in refused("-o", "v.mp4", "--format", "gif", "--episodes", "0")
    assert "the screen is broken" in refused("-o", "v.mp4", "--episodes", "0", "--env-arg", "breaks_at=2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


@pytest.mark.filterwarnings("always:episode 0")
def test_nothing_rendered_is_an_error() -> None:
    env = TraceRecordingWrapper(make_rendered(), "filtered", frame_filter=lambda step: step > 2)
    env.reset()
    for _ in range(6):
        env.step(0)
    env.close()
    result = run("render", "filtered", "-o", "v.mp4")
    assert result.exit_code == 1
    assert "error: nothing rendered" in result.stderr


def test_a_module_that_is_not_loaded_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gymnasium.registry, "Rendered-v0")
    assert "not registered" in refused("-o", "v.mp4", "--episodes", "0")
    assert made("-o", "v.cast", "--episodes", "0", "--trust") == ["v.cast"]


def test_an_episode_of_a_lane_is_rendered_by_itself(tmp_path: Path) -> None:
    if not hasattr(gymnasium.vector, "AutoresetMode"):
        pytest.skip("vector environments need gymnasium 1.1")
    pytest.importorskip("pygame")
    ok("record", "CartPole-v1", "-o", "lanes", "--num-envs", 2, "--episodes", 3, "--seed", 0)
    ok("render", "lanes", "-o", "v", "--format", "gif")
    trace = gym_trace.open_trace("lanes")
    assert len(list(Path("v").glob("*.gif"))) == len(trace) >= 3
