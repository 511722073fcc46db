"""Plots of episodes: what is drawn, how it is named, and how it fails."""

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import forked_python
import numpy as np
import pytest
from gymnasium import spaces
from runs import record_lengths
from scripted_env import CountingEnv, Result, ScriptedEnv
from shell import ok, run

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import InvalidOption

matplotlib = pytest.importorskip("matplotlib")

from gym_trace.tools.statistics import plot  # noqa: E402
from gym_trace.tools.statistics.plot import plot_episodes  # noqa: E402


def _texts(path: Path) -> list[str]:
    return ["".join(node.itertext()).strip() for node in ElementTree.parse(path).iter() if node.tag.endswith("}text")]


def _figure(trace: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """Return the figure that is saved."""
    found = []
    make = plot._figure
    monkeypatch.setattr(plot, "_figure", lambda *args: found.append(make(*args)) or found[-1])
    plot_episodes(trace, trace.parent / "drawn.svg", **options)
    return found[0]


def test_a_plot_shows_every_complete_episode_and_all_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TraceRecordingWrapper(CountingEnv(length=4), tmp_path / "trace") as env:
        for _ in range(3):
            env.reset(seed=0)
            while not any(env.step(0)[2:4]):
                pass
        env.reset(seed=0)
        env.step(0)
    figure = _figure(tmp_path / "trace", monkeypatch)
    returned, length = (axis for axis in figure.axes if axis.get_ylabel() in ("return", "length"))
    table = open_trace(tmp_path / "trace").episodes[:3]
    assert returned.lines[0].get_ydata().tolist() == table["return"].tolist()
    assert length.lines[0].get_ydata().tolist() == [4, 4, 4]
    texts = _texts(tmp_path / "drawn.svg")
    assert {"terminated 3 (75.0%)", "closed 1 (25.0%)"} <= set(texts)
    assert "3 complete episodes in the order of their start" in texts


def test_a_thousand_episodes_more_are_joined_and_no_extreme_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [2] * 1500
    lengths[777] = 9
    script = [(0, [Result(0, 1.0, step == length - 1) for step in range(length)]) for length in lengths]
    with TraceRecordingWrapper(ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), script), tmp_path / "t") as env:
        for length in lengths:
            env.reset(seed=0)
            for _ in range(length):
                env.step(0)
    figure = _figure(tmp_path / "t", monkeypatch)
    (length_axis,) = (axis for axis in figure.axes if axis.get_ylabel() == "length")
    (line,), (band,) = length_axis.lines, length_axis.collections
    assert len(line.get_ydata()) <= 400
    assert band.get_paths()[0].vertices[:, 1].max() == 9
    assert "line: mean, band: min to max" in " ".join(_texts(tmp_path / "drawn.svg"))


def test_group_names_with_math_signs_are_shown_as_they_are(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3, 4], CountingEnv(length=3), split="_$x^2$ <b>")
    record_lengths(tmp_path / "t", [3, 4], CountingEnv(length=3), split="eval", on_exist="append")
    plot_episodes(tmp_path / "t", tmp_path / "p.svg", by="split")
    assert {"_$x^2$ <b>", "eval"} <= set(_texts(tmp_path / "p.svg"))


def test_more_groups_than_colours_are_drawn_as_others(tmp_path: Path) -> None:
    for number in range(10):
        record_lengths(tmp_path / "t", [3], CountingEnv(length=3), uid=f"w{number}", on_exist="append")
    plot_episodes(tmp_path / "t", tmp_path / "p.svg", by="writer")
    assert {"w0", "w6", "3 others"} <= set(_texts(tmp_path / "p.svg"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1.7e308, 9e99, 5e-324])
def test_odd_returns_are_counted_or_drawn(tmp_path: Path, value: float) -> None:
    script = [(0, [Result(0, reward, True)]) for reward in (1.0, value, -9e99)]
    with TraceRecordingWrapper(ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), script), tmp_path / "t") as env:
        for _ in range(3):
            env.reset(seed=0)
            env.step(0)
    plot_episodes(tmp_path / "t", tmp_path / "p.svg")
    left_out = "left out: 1 with NaN or beyond 1e+100" in _texts(tmp_path / "p.svg")
    assert left_out == (not abs(value) < 1e100)


@pytest.mark.filterwarnings("ignore:rewards")
def test_rewards_of_several_objectives_have_a_panel_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [(0, [Result(0, np.array([1.0, -2.0]), True)])] * 2
    with TraceRecordingWrapper(ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), script), tmp_path / "t") as env:
        for _ in range(2):
            env.reset(seed=0)
            env.step(0)
    labels = [axis.get_ylabel() for axis in _figure(tmp_path / "t", monkeypatch).axes]
    assert [label for label in labels if label] == ["return[0]", "return[1]", "length"]


def test_an_empty_trace_is_an_empty_plot(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path / "t").close()
    plot_episodes(tmp_path / "t", tmp_path / "p.svg")
    assert _texts(tmp_path / "p.svg").count("no values") == 2


def test_the_same_trace_gives_the_same_bytes(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3, 4, 5], CountingEnv(length=3))
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plot_episodes(tmp_path / "t", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    pixels = matplotlib.image.imread(tmp_path / "a.png")
    assert pixels.shape[:2] == (870, 1350)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def test_an_unknown_ending_raises(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3], CountingEnv(length=3))
    with pytest.raises(InvalidOption, match=r"p\.jpg: unknown ending; choose a name that ends in \.svg or \.png"):
        plot_episodes(tmp_path / "t", tmp_path / "p.jpg")


# -- gym-trace stats --plot -------------------------------------------------------------------------------------------


def test_stats_draws_the_chosen_episodes_into_a_file(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3, 3, 3], CountingEnv(length=3))
    output = ok("stats", tmp_path / "t", "--episodes", "1:", "--plot", tmp_path / "p.svg").stdout
    assert output.splitlines()[-1] == f"plot: {tmp_path / 'p.svg'}"
    assert any("2 episodes, 6 steps" in text for text in _texts(tmp_path / "p.svg"))


@pytest.mark.parametrize(
    ("name", "problem"), [("p.jpg", "unknown ending"), ("no/p.svg", "is not a writable directory")]
)
def test_a_wrong_file_is_a_usage_error(tmp_path: Path, name: str, problem: str) -> None:
    record_lengths(tmp_path / "t", [3], CountingEnv(length=3))
    result = run("stats", tmp_path / "t", "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert problem in result.stderr


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path) -> None:
    record_lengths(tmp_path / "t", [3], CountingEnv(length=3))
    script = "import sys; sys.modules['matplotlib'] = None; from gym_trace_cli.start import main; main()"
    command = [sys.executable, "-c", script, "stats", str(tmp_path / "t"), "--plot", str(tmp_path / "p.svg")]
    done = forked_python.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'gym-trace[plot]'" in done.stderr
    assert not done.stdout
