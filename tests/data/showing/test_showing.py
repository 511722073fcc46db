"""Display of traces and episodes in a REPL, a notebook and pandas."""

import builtins
import pickle
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import record_lengths

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.showing.html import page, sparkline, table
from gym_trace.data.showing.pictures import is_picture, thumbnail
from gym_trace.data.showing.text import moment, number, period, spread
from gym_trace.errors import MissingExtra

SAMPLES = Path(__file__).parents[3] / "sample_traces" / "format-1.1"


def test_repr_of_a_trace_has_four_lines() -> None:
    trace = open_trace(SAMPLES / "outcomes")
    assert repr(trace).split("\n") == [
        f"<Trace of 9 episodes in {trace.directory}",
        "  CartPole-v1: 39 steps by 1 writer",
        "  truncated 5, cut 2, terminated 1, closed 1",
        "  recorded 2026-01-01 00:00:00 UTC>",
    ]
    killed = repr(open_trace(SAMPLES / "killed")).split("\n")[2]
    assert killed == "  return 14.67 on average, from 12 to 18; terminated 3, lost 1"
    assert repr(trace[2:4]).startswith("<Trace of 2 of 9 episodes in")
    assert repr(trace[:0]).startswith("<Trace of 0 of 9 episodes in")
    assert repr(open_trace(SAMPLES / "empty")).startswith("<Trace of 0 episodes in")


def test_the_table_of_episodes_shows_the_first_and_last_rows() -> None:
    table = open_trace(SAMPLES / "cartpole").episodes
    lines = str(table).split("\n")
    assert lines[0] == repr(table).split("\n")[0] == "<table of 50 episodes"
    assert len(lines) == 13
    assert lines[1].split() == ["index", "steps", "return", "outcome", "seed", "start_time", "(UTC)"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "3", "4", "…", "45", "46", "47", "48", "49"]
    assert len({len(line.rstrip(">")) for line in lines[1:]}) == 1
    assert str(table[:0]) == "<table of 0 episodes>"
    assert len(str(table[table["return"] > 50]).split("\n")) == 2 + (table["return"] > 50).sum()


def test_columns_and_results_of_the_episode_table_are_plain_arrays() -> None:
    table = open_trace(SAMPLES / "cartpole").episodes
    for plain in (table["return"], table[["steps", "lane"]], table["outcome"] == "lost", table["steps"].cumsum()):
        assert type(plain) is np.ndarray
    assert type(pickle.loads(pickle.dumps(table))) is type(table.copy()) is type(table[::2]) is type(table)
    assert repr(table.reshape(5, 10)).startswith("array(")
    assert table.tobytes() == np.asarray(table).tobytes() == table.copy().tobytes()


def test_repr_of_an_episode_reads_no_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.playback.opened.OnDisk.column", None)
    monkeypatch.setattr("gym_trace.playback.opened.OnDisk.start", None)
    trace = open_trace(SAMPLES / "cartpole")
    assert repr(trace[3]).split("\n") == [
        "<Episode 3 of sample: 18 steps, return 18, terminated",
        "  index 3, lane 0, seed 3, split train",
        "  started 2026-01-01 00:00:00 UTC, took 0.002 s>",
    ]
    assert repr(trace[3][2:5]).startswith("<Episode 3 of sample from step 2: 3 steps, terminated\n")


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.iterdir() if path.is_dir()))
def test_every_sample_has_a_notebook_view(name: str) -> None:
    trace = open_trace(SAMPLES / name)
    shown = trace._repr_html_() + "".join(trace[i]._repr_html_() for i in range(min(2, len(trace))))
    shown = re.sub(r"<iframe .*?</iframe>", "", shown, flags=re.DOTALL)  # the viewer has tests of its own
    assert ("<img" in shown) == (name in ("pictures", "pong", "minigrid", "agents"))
    assert shown.count("<div>") == shown.count("</div>")


def test_text_of_a_trace_is_escaped_in_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "<script>" not in page("<script>", ["a & b", "\x1b[2J"], table(["<b>"], [["</td>"]])) + sparkline(
        np.arange(9.0), '"<script>'
    )
    import gymnasium

    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, split="<img src=x>\x1b]")
    env.reset(seed=0)
    env.step(0)
    env.close()
    episode = open_trace(tmp_path)[0]
    assert "<img" not in episode._repr_html_()
    assert "\x1b" not in repr(episode) + episode._repr_html_()


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (400, 200, 3)])
def test_a_thumbnail_is_a_small_png_of_the_image(shape: tuple[int, ...]) -> None:
    picture = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    png = thumbnail(picture)
    step = 3 if shape[0] == 400 else 1
    small = picture[::step, ::step]
    width, height, _, kind = (int.from_bytes(png[a:b], "big") for a, b in ((16, 20), (20, 24), (24, 25), (25, 26)))
    assert (height, width, kind) == (*small.shape[:2], 2 if shape[-1] == 3 else 0)
    size = int.from_bytes(png[33:37], "big")
    lines = np.frombuffer(zlib.decompress(png[41 : 41 + size]), np.uint8).reshape(height, -1)
    assert np.cumsum(lines[:, 1:], 0, np.uint8).tobytes() == small.tobytes()
    assert (lines[:, 0] == 2).all()  # each line is the difference from the one above


def test_images_are_detected_by_dtype_and_shape() -> None:
    assert is_picture(np.uint8, (84, 84))
    assert is_picture(np.dtype("u1"), (4, 84, 84, 3))
    assert not is_picture(np.uint8, (128,))
    assert not is_picture(np.float32, (84, 84, 3))
    assert not is_picture(None, None)
    assert not is_picture(np.uint8, (0, 84))


@pytest.mark.parametrize(
    ("values", "is_drawn"),
    [
        ([], False),
        ([1.0], False),
        ([np.nan, np.inf], False),
        ([1e308, -1e308, 1e308], False),
        ([5.0] * 7, True),
        (list(range(1000)), True),
        ([np.nan, 1.0, 2.0], True),
    ],
)
def test_a_sparkline_is_drawn_for_at_least_two_finite_returns(values: list[float], is_drawn: bool) -> None:
    drawn = sparkline(np.array(values, float), "returns")
    heights = [float(y) for y in re.findall(r"[\d.]+,([-\d.]+)", drawn)]
    assert all(0 <= height <= 40 for height in heights)
    assert bool(heights) == is_drawn


def test_numbers_and_times_are_formatted_briefly() -> None:
    assert [number(value) for value in (0.0123456, 12.3456, 12345.6, 1e20, float("nan"))] == [
        "0.01235", "12.35", "12,346", "1e+20", "nan",
    ]  # fmt: skip
    nat, times = np.datetime64("NaT", "ns"), np.array(["2026-11-01T10:00", "2026-11-01T12:00", "2026-11-03"], "M8[ns]")
    assert moment(nat) == "unknown"
    assert period(times[:1], times[:2]) == "2026-11-01 10:00:00 to 12:00:00 UTC"
    assert period(times, np.array([nat])) == "2026-11-01 10:00:00 to 2026-11-03 00:00:00 UTC"
    assert period(np.array([nat]), times) == ""
    assert spread(np.array([np.nan, np.inf])) == ""


def test_without_pandas_the_error_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError("No module named 'pandas'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtra, match=r"gym-trace\[pandas\]"):
        open_trace(SAMPLES / "cartpole").to_pandas()


def test_episodes_convert_to_a_dataframe() -> None:
    pandas = pytest.importorskip("pandas")
    frame = open_trace(SAMPLES / "two-writers").to_pandas()
    assert len(frame) == 7
    assert frame.index.name == "index"
    assert frame["split"].tolist() == ["train"] * 5 + ["eval"] * 2
    assert set(frame["writer"]) == {"sample-train", "sample-eval"}
    assert frame["seed"].dtype == "Int64"
    assert str(frame["start_time"].dt.tz) == "UTC"
    killed = open_trace(SAMPLES / "killed").to_pandas()
    assert pandas.isna(killed["duration"].iloc[-1])
    assert pandas.isna(killed["end_time"].iloc[-1])
    values = open_trace(SAMPLES / "values")
    assert [seed if pandas.notna(seed) else None for seed in values.to_pandas()["seed"]] == [e.seed for e in values]
    assert len(open_trace(SAMPLES / "empty").to_pandas()) == 0
    assert len(values[:0].to_pandas()) == 0


@pytest.mark.parametrize("name", ["cartpole", "minigrid", "values", "mismatch", "filtered", "pong", "empty"])
def test_steps_convert_to_a_dataframe(name: str) -> None:
    pytest.importorskip("pandas")
    for episode in open_trace(SAMPLES / name):
        frame = episode.to_pandas()
        assert len(frame) == len(episode)
        assert frame["terminated"].tolist() == episode.terminations.tolist()
        if name == "cartpole":
            names = [f"observation[{i}]" for i in range(4)]
            assert frame[names].to_numpy().tobytes() == episode.observations[:-1].tobytes()
            assert frame["action"].dtype == episode.actions.dtype


def test_a_notebook_shows_episodes_by_their_index_in_the_whole_trace(tmp_path: Path) -> None:
    record_lengths(tmp_path, [1, 2, 3, 4])
    view = open_trace(tmp_path)[[3, 1]]
    rows = re.findall(r"<tr><td>(\d+)</td><td>(\d+)</td>", view._repr_html_())
    assert rows == [("3", "4"), ("1", "2")]
    assert view.episodes["index"].tolist() == [0, 1]
