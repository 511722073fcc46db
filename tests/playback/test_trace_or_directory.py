"""Functions that take a trace take its directory as well, as text or as a path, and tell the same of both."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import recorded
from scripted_env import CountingEnv

from gym_trace import (
    ReplayEnv,
    check_trace,
    diff_traces,
    load_results,
    open_trace,
    repair_trace,
    scan_recorded_traces,
    summarize,
    verify_trace,
)
from gym_trace.errors import TraceNotFound
from gym_trace.playback.trace import Trace, as_trace, storage_of
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.replay.verify import differing_versions, played_in_registered
from gym_trace.tools.statistics.describe import describe
from gym_trace.tools.video.render import render
from gym_trace.tools.video.simulate import play_for_humans

Given = Trace | str | os.PathLike[str]
EVERYWHERE: dict[str, Callable[[Given], Any]] = {
    "scan_recorded_traces": lambda trace: scan_recorded_traces(trace),
    "summarize": lambda trace: summarize(trace, by="writer", columns=True),
    "load_results": load_results,
    "verify_trace": lambda trace: list(verify_trace(trace, make_env=CountingEnv)),
    "differing_versions": differing_versions,
    "played_in_registered": played_in_registered,
    "diff_traces": lambda trace: list(diff_traces(trace, trace)),
    "ReplayEnv": lambda trace: ReplayEnv(trace).reset(seed=0)[0].tolist(),
    "check_trace": check_trace,
    "describe": describe,
    "progress": lambda trace: describe(trace, brief=True),
    "render": lambda trace: list(render(trace, "none.cast", [])),
    "play_for_humans": lambda trace: list(play_for_humans(trace, [])),
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_trace_and_its_directory_are_the_same_to_a_function(name: str, tmp_path: Path) -> None:
    recorded(tmp_path / "t", 3)
    function = EVERYWHERE[name]
    assert function(open_trace(tmp_path / "t")) == function(tmp_path / "t") == function(str(tmp_path / "t"))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_directory_without_a_trace_raises(name: str, tmp_path: Path) -> None:
    with pytest.raises(TraceNotFound):
        EVERYWHERE[name](tmp_path)


@pytest.mark.parametrize("name", ["scan_recorded_traces", "summarize", "verify_trace", "describe", "load_results"])
def test_a_view_is_a_trace_to_a_function(name: str, tmp_path: Path) -> None:
    recorded(tmp_path / "t", 3)
    trace = open_trace(tmp_path / "t")
    assert EVERYWHERE[name](trace[:2]) != EVERYWHERE[name](trace)


def test_a_trace_is_repaired_by_its_directory(tmp_path: Path) -> None:
    recorded(tmp_path / "t", 3)
    report = repair_trace(open_trace(tmp_path / "t")[:1], tmp_path / "copy")
    assert report.found.episodes == 3
    assert all(found.difference is None for found in diff_traces(tmp_path / "t", tmp_path / "copy"))


def test_a_trace_stays_itself(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    trace = open_trace(tmp_path / "t")
    assert as_trace(trace) is trace
    storage = LocalStorage(trace.directory)
    assert all(storage_of(given) == storage for given in (trace, tmp_path / "t", str(tmp_path / "t")))
