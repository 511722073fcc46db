"""The checks of an importer: what was exported comes back."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import numpy as np

from gym_trace.errors import InvalidOption, TraceError
from gym_trace.formats.conformance.comparing import difference, loaded_from
from gym_trace.formats.conformance.zoo import make_zoo
from gym_trace.formats.contract import Exporter, Importer
from gym_trace.formats.exporting import export
from gym_trace.formats.importing import import_trace
from gym_trace.formats.source import Source
from gym_trace.playback.trace import Trace, as_trace, open_trace

_SAME_ROWS = ("lane", "episode_id", "first_step", "steps", "seed", "start_time", "has_final_observation")


def check_importer(
    exporter: Exporter, importer: Importer, directory: Path, *, suffix: str = "", only: Collection[str] = ()
) -> dict[str, str]:
    """Exports traces of every kind and imports them: what the exporter did not say to be lost must have come back.

    Arguments, result and errors as of check_exporter().
    """
    traces = make_zoo(directory / "traces", only)
    refused = {}
    for name in traces:
        try:
            check_round_trip(
                exporter, importer, traces[name], directory / f"{name}{suffix}", directory / f"{name}-back"
            )
        except InvalidOption as error:
            refused[name] = str(error)
    if len(refused) == len(traces):
        raise AssertionError(f"{exporter.name} refuses every trace: {refused}")
    _check_recognises(importer, directory)
    return refused


def check_round_trip(
    exporter: Exporter, importer: Importer, trace: Trace | str | Path, out: Path, back: Path
) -> list[str]:
    """trace -> out -> the trace back. Returns what is lost. Raises AssertionError; InvalidOption if it is refused."""
    source = Source(as_trace(trace))
    name = source.trace.directory.name
    report = export(source.trace, out, exporter)
    lost = {loss.what for loss in report.lost}
    if not importer.recognises(out):
        raise AssertionError(f"{importer.name} does not recognise what {exporter.name} has written of {name}")
    imported = import_trace(out, back, importer)
    made = open_trace(back)
    everything = made
    if "empty_episode" in lost:  # an importer may find more than the loader of the format does
        made = made[made.episodes["steps"] > 0]
    problem = difference(source, loaded_from(made, lost), {*lost, "identity"})
    if problem:
        raise AssertionError(f"{exporter.name} and back, {name}: {problem}; said to be lost: {sorted(lost)}")
    if imported.steps != source.steps or len(everything) != imported.episodes:
        raise AssertionError(f"{name}: {imported.episodes} episodes and {imported.steps} steps were reported")
    if "identity" not in lost:
        _check_identity(source, made, lost, name)
    return sorted(lost)


def _check_identity(source: Source, made: Trace, lost: set[str], name: str) -> None:
    told = source.episodes
    if "empty_episode" in lost:
        told = told[told["steps"] > 0]
    ids = [
        [trace.writers[number] for number in table["writer"]]
        for trace, table in ((source.trace, told), (made, made.episodes))
    ]
    if ids[0] != ids[1]:
        raise AssertionError(f"{name}: of the writers {ids[1]:}, where it should be {ids[0]}")
    for column in _SAME_ROWS:
        if not np.array_equal(told[column], made.episodes[column]):
            raise AssertionError(f"{name}: {column} {made.episodes[column]}, where it should be {told[column]}")
    if source.plain_spaces != Source(made).plain_spaces:
        raise AssertionError(f"{name}: other spaces: {Source(made).plain_spaces}")
    if source.facts != made.facts and "facts" not in lost:
        raise AssertionError(f"{name}: facts {made.facts}, where there should be {source.facts}")


def _check_recognises(importer: Importer, directory: Path) -> None:
    """Check that it recognizes no other format."""
    place = directory / "something-else"
    place.mkdir()
    for name, content in (
        ("empty", b""),
        ("garbage", os.urandom(4096)),
        ("data.json", b"{}"),
        ("text.csv", b"a,b\n1,2\n"),
    ):
        (place / name).write_bytes(content)
    for path in (place, place / "missing", *place.iterdir(), next(iter((directory / "traces").iterdir()))):
        try:
            taken = importer.recognises(path)
        except (TraceError, OSError, ValueError) as error:
            raise AssertionError(f"{importer.name}.recognises({path}) raises {error!r}") from error
        if taken and path.name not in ("data.json", "text.csv"):
            raise AssertionError(f"{importer.name} takes {path} for its own")
