"""Traces and episodes in a notebook cell: the viewer in an iframe, and what is shown without scripts."""

import base64
import gzip
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_env import Result, scripted
from viewer_requests import cartpoles

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import TraceError
from gym_trace.tools.viewer import notebook, page
from gym_trace.tools.viewer.container import unpacked


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cartpoles(tmp_path_factory.mktemp("notebook") / "cartpole", 30)


def framed(shown: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the head and the answers of the page in a cell."""
    (inside,) = re.findall(r"<iframe [^>]*srcdoc='([^']*)'></iframe>", shown)
    text = html.unescape(inside)
    assert text.startswith("<!doctype html>")
    (data,) = re.findall(r'<script type="application/x-gym-trace-saved">([^<]*)</script>', text)
    head, arrays = unpacked(gzip.decompress(base64.b64decode(data)))
    return head, {name: array.tobytes() for name, array in arrays.items()}


def test_a_trace_shows_all_episodes_and_has_the_first_ones_inside(directory: Path) -> None:
    shown = open_trace(directory)._repr_html_()
    head, found = framed(shown)
    assert (head["page"], head["start"]) == ("notebook", None)
    assert len(unpacked(found["/api/episodes?trace=0"])[1]["episode"]) == 30
    inside = {int(url.partition("episode=")[2]) for url in found if url.startswith("/api/episode?")}
    assert inside == set(range(20))


def test_an_episode_shows_itself(directory: Path) -> None:
    episode = open_trace(directory)[7]
    head, found = framed(episode._repr_html_())
    assert head["start"] == "#trace=0&episode=7"
    assert unpacked(found["/api/episodes?trace=0"])[1]["episode"].tolist() == [7]
    _, arrays = unpacked(found["/api/plot?trace=0&episode=7&column=observations&full=1"])
    np.testing.assert_array_equal(arrays["y"], episode.observations.T)
    assert json.loads(found["/api/episode?trace=0&episode=7"])["renderable"] is False


def test_a_view_shows_its_own_episodes(directory: Path) -> None:
    _, found = framed(open_trace(directory)[[3, 9]]._repr_html_())
    assert unpacked(found["/api/episodes?trace=0"])[1]["episode"].tolist() == [3, 9]
    assert "/api/episode?trace=0&episode=9" in found


def test_the_frame_is_sandboxed_and_text_stays_without_scripts(directory: Path) -> None:
    shown = open_trace(directory)[0]._repr_html_()
    frame = shown.index("<iframe")
    assert re.match(r"<iframe sandbox='allow-scripts' ", shown[frame:])
    assert "<script" not in shown[:frame]
    assert "return" in shown[:frame]
    assert "<svg" in shown[:frame]
    assert shown.endswith("</iframe></div>")
    inside = html.unescape(shown[frame:])
    still = inside[inside.index('<div id="app">') :]
    assert still.startswith('<div id="app"><div class="still"><p>Episode 0 of ')
    assert "<svg" in still
    assert "noscript" not in inside


def test_a_cell_does_not_say_where_the_trace_lies(directory: Path) -> None:
    shown = open_trace(directory)[0]._repr_html_()
    assert not [body for body in framed(shown)[1].values() if str(directory.parent).encode() in body]


def test_a_cell_is_at_most_about_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [Result(0, reward=float(value)) for value in np.random.default_rng(0).standard_normal(3000)]
    with TraceRecordingWrapper(scripted(steps), tmp_path) as env:
        env.reset()
        for _ in steps:
            env.step(0)
    assert len(open_trace(tmp_path)[0]._repr_html_()) < 1_200_000
    monkeypatch.setattr(notebook, "_MOST_BYTES", 200_000)
    assert "<iframe" not in open_trace(tmp_path)[0]._repr_html_()
    monkeypatch.setattr(notebook, "_MOST_BYTES", 1_000_000)
    monkeypatch.setattr(notebook, "_MOST_STEPS", 2999)
    assert "<iframe" not in open_trace(tmp_path)[0]._repr_html_()
    assert "<iframe" not in open_trace(tmp_path)._repr_html_()


def test_parts_and_copies_of_an_episode_are_shown_without_the_viewer(directory: Path) -> None:
    trace = open_trace(directory)
    (scanned,) = trace.scan(episodes=[0])
    for shown in (trace[0][2:5], scanned):
        assert "<iframe" not in shown._repr_html_()
        assert "Episode 0" in shown._repr_html_()


def test_a_trace_without_episodes_is_shown_without_the_viewer(tmp_path: Path) -> None:
    TraceRecordingWrapper(scripted([]), tmp_path).close()
    assert "<iframe" not in open_trace(tmp_path)._repr_html_()


def test_a_page_that_was_not_built_leaves_the_text(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise TraceError("missing")

    monkeypatch.setattr(page, "static_files", missing)
    assert "Episode 0" in open_trace(directory)[0]._repr_html_()
    assert "<iframe" not in open_trace(directory)[0]._repr_html_()
