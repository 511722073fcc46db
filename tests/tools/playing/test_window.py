"""gym-trace play under Xvfb, with a keyboard that xdotool presses; and the command without a display."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shell import ok, process, run, strict_json

pytest.importorskip("pygame")

from gym_trace import open_trace
from gym_trace.errors import TraceError
from gym_trace.playback.episode_index import index_of

_TOOLS = ("Xvfb", "xdotool")
needs_x = pytest.mark.skipif(
    not all(map(shutil.which, _TOOLS)), reason="needs Xvfb and xdotool (Debian: apt install xvfb xdotool)"
)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """An X server of its own, in the environment variables."""
    reading, writing = os.pipe()
    command = ["Xvfb", "-displayfd", str(writing), "-screen", "0", "1024x768x24", "-nolisten", "tcp"]
    with subprocess.Popen(command, pass_fds=[writing], stderr=subprocess.DEVNULL) as server:
        os.close(writing)
        with os.fdopen(reading) as numbers:
            name = f":{numbers.readline().strip()}"
        monkeypatch.setenv("DISPLAY", name)
        monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        yield name
        server.terminate()
        server.wait(60)


def _steps(directory: Path) -> int:
    try:
        return int(open_trace(directory).episodes["steps"].sum())
    except TraceError:
        return -1  # not there yet


def _actions(directory: Path) -> list[int]:
    return open_trace(directory)[0].actions.tolist() if _steps(directory) > 0 else []


def _press(key: str, until: Any, again: float = 60.0) -> None:
    """Press a key and wait for its effect. again: seconds after which it is pressed again."""
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline, f"{key} had no effect"
        subprocess.run(["xdotool", "key", key], check=True, timeout=60)
        pressed = time.monotonic()
        while time.monotonic() < pressed + again and not until():
            time.sleep(0.02)


def _playing(tmp_path: Path, *options: object) -> Any:
    (tmp_path / "keys.toml").write_text("[keys]\nleft = 0\nright = 1\n")
    words = ("play", "CartPole-v1", "-o", tmp_path / "t", "--seed", 1, "--keys", tmp_path / "keys.toml", *options)
    return process(*words, stdin=subprocess.DEVNULL)


@needs_x
def test_keys_of_a_real_window_are_recorded_bit_for_bit(tmp_path: Path, display: str) -> None:
    with _playing(tmp_path, "--json") as playing:
        _press("Left", lambda: _actions(tmp_path / "t"), again=1.0)  # it may come too early for the window
        _press("Right", lambda: _actions(tmp_path / "t").count(1) == 1)
        _press("Right", lambda: _actions(tmp_path / "t").count(1) == 2)
        _press("Left", lambda: _actions(tmp_path / "t")[-1] == 0)
        _press("F9", lambda: len(open_trace(tmp_path / "t")) == 2)
        _press("Right", lambda: len(open_trace(tmp_path / "t")[1]) == 1)
        _press("Escape", lambda: playing.poll() is not None)
        said = strict_json(playing.stdout.read())
    assert playing.returncode == 0
    first, second = open_trace(tmp_path / "t")
    assert first.actions.tolist() == [0] * (len(first) - 3) + [1, 1, 0]
    assert (first.outcome, second.outcome) == ("cut", "closed")
    assert (said["episodes"], said["steps"]) == (2, len(first) + len(second))
    assert "2 identical" in ok("verify", tmp_path / "t").stdout
    assert index_of(open_trace(tmp_path / "t")).readers[0].about.metadata["seed"] == 1


@needs_x
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_a_signal_keeps_everything(tmp_path: Path, display: str, number: signal.Signals, code: int) -> None:
    with _playing(tmp_path) as playing:
        _press("Right", lambda: _steps(tmp_path / "t") >= 1, again=1.0)  # it may come too early for the window
        playing.send_signal(number)
        assert playing.wait(60) == code
        assert "every step up to here is saved" in playing.stderr.read()
    (episode,) = open_trace(tmp_path / "t")
    assert (episode.outcome, episode.actions.tolist()[0]) == ("closed", 1)


@needs_x
def test_a_killed_session_keeps_every_step(tmp_path: Path, display: str) -> None:
    with _playing(tmp_path) as playing:
        _press("Right", lambda: _steps(tmp_path / "t") >= 1, again=1.0)  # it may come too early for the window
        playing.kill()
        playing.wait(60)
    (episode,) = open_trace(tmp_path / "t")
    assert (episode.outcome, episode.actions.tolist()[0]) == ("lost", 1)


def test_the_command_without_a_display_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    result = run("play", "CartPole-v1", "-o", tmp_path / "t")
    assert result.exit_code == 1
    assert "no display" in result.stderr
    assert "xvfb-run gym-trace play" in result.stderr
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [([], "pass an environment"), (["CartPole-v1", "--mark", "good"], "not of the form KEY=NAME"),
     (["CartPole-v1", "--fps", "0"], "--fps")],
)  # fmt: skip
def test_wrong_options_are_usage_errors(options: list[str], problem: str) -> None:
    result = run("play", *options)
    assert result.exit_code == 2
    assert problem in result.stderr
