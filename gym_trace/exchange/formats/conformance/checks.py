"""The checks of an exporter and an importer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption, TraceError
from gym_trace.exchange.formats.conformance.comparing import Loaded, difference, loaded_from
from gym_trace.exchange.formats.conformance.zoo import make_zoo
from gym_trace.exchange.formats.contract import LOSSES, Exporter, ExportReport, Importer
from gym_trace.exchange.formats.exporting import export
from gym_trace.exchange.formats.importing import import_trace
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.scan import REPEATED
from gym_trace.playback.trace import Trace, as_trace, open_trace

_SAME_ROWS = ("lane", "episode_id", "first_step", "steps", "seed", "start_time", "has_final_observation")
Load = Callable[[Path], Iterable[Loaded]]


def check_exporter(
    exporter: Exporter,
    load: Load,
    directory: Path,
    *,
    suffix: str = "",
    only: Collection[str] = (),
    run_how_to_load: bool = True,
) -> dict[str, str]:
    """Export traces of every kind, and compare what load returns with them.

    Args:
        load: yields the episodes of an export, with the usual package for the format.
        directory: an empty output directory.
        suffix: of the output, if the format needs one: ".h5".
        only: names of the traces (see zoo.py); empty: all.
        run_how_to_load: run how_to_load of one export in a separate Python process.

    Returns:
        The rejected traces by name, with the reason: spaces that the format cannot hold.

    Raises AssertionError if the exporter violates the contract.
    """
    _check_itself(exporter)
    traces = make_zoo(directory / "traces", only)
    refused: dict[str, str] = {}
    for name, trace in traces.items():
        out = directory / f"{name}{suffix}"
        try:
            report = check_export(exporter, load, trace, out)
        except InvalidOption as error:
            _must(not out.exists(), f"{name} was refused, but something was written")
            refused[name] = str(error)
            continue
        _check_strict(exporter, trace, directory / f"{name}-strict{suffix}", report)
        if run_how_to_load:
            _check_how_to_load(report, directory)
            run_how_to_load = False
    chosen = [name for name in traces if name not in refused]
    _must(bool(chosen), f"{exporter.name} refuses every trace: {refused}")
    whole = as_trace(traces[chosen[0]])
    view = whole[list(range(len(whole)))[::-2]]  # is exported in its own order
    check_export(exporter, load, view, directory / f"selected{suffix}")
    _check_interrupted(exporter, traces[chosen[0]], directory / "interrupted", suffix)
    return refused


def check_export(exporter: Exporter, load: Load, trace: Trace | str | Path, out: Path) -> ExportReport:
    """Export one trace and compare the result of load with it.

    Raises AssertionError; InvalidOption if the exporter rejects the trace.
    """
    told: list[tuple[int, int]] = []
    report = export(trace, out, exporter, on_progress=lambda done, total: told.append((done, total)))
    source = ExportSource(as_trace(trace), finals=getattr(exporter, "finals", REPEATED))
    name = source.trace.directory.name
    problem = difference(source, load(report.path), {loss.what for loss in report.lost})
    _must(not problem, f"{exporter.name}, {name}: {problem}; reported losses: {[loss.what for loss in report.lost]}")
    _must(not source.steps or told[-1:] == [(source.steps, source.steps)], f"{name}: progress ends with {told[-1:]}")
    for loss in report.lost:
        _must(loss.what in LOSSES, f"{name}: a loss of {loss.what!r}, not in contract.LOSSES")
        _must(loss.why.isprintable() and loss.why.strip() == loss.why != "", f"{name}: no sentence: {loss.why!r}")
    return report


def _must(true: bool, otherwise: str) -> None:
    if not true:
        raise AssertionError(otherwise)


def _check_itself(exporter: Any) -> None:
    made = type(exporter)
    is_frozen = getattr(getattr(made, "__dataclass_params__", None), "frozen", False)
    _must(is_frozen, f"{made.__name__} must be a frozen dataclass")
    _must(bool((made.__doc__ or "").strip()), f"{made.__name__} has no docstring")
    _must(exporter.makes in ("directory", "file"), f"it makes {exporter.makes!r}, neither a directory nor a file")
    _must(exporter.name.replace("-", "_").isidentifier(), f"no name to be asked for by: {exporter.name!r}")


def _check_strict(exporter: Exporter, trace: Path, out: Path, report: ExportReport) -> None:
    """Check that strict raises exactly where something is lost, and writes nothing then."""
    if not report.lost:
        export(trace, out, exporter, strict=True)
        return
    try:
        export(trace, out, exporter, strict=True)
    except InvalidOption as error:
        _must(report.lost[0].why in str(error), f"strict does not say what is lost: {error}")
        _must(not out.exists(), "strict has written something")
    else:
        raise AssertionError(f"strict, and it lost {report.lost[0]}")


def _check_interrupted(exporter: Exporter, trace: Path, directory: Path, suffix: str) -> None:
    """Check that Ctrl-C leaves no files, and nothing that blocks another export."""
    directory.mkdir()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out = directory / f"out{suffix}"
    try:
        export(trace, out, exporter, on_progress=interrupt)
    except KeyboardInterrupt:
        _must(not os.listdir(directory), f"an interrupt leaves {os.listdir(directory)}")
    else:
        raise AssertionError("continued despite an interrupt")
    export(trace, out, exporter)


def _check_how_to_load(report: ExportReport, directory: Path) -> None:
    """Run how_to_load in another directory."""
    said = report.how_to_load
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", said], cwd=directory, capture_output=True, text=True, timeout=600
    )
    _must(done.returncode == 0, f"how_to_load fails: {said!r}: {done.stderr[-2000:]}")


# -- importers --------------------------------------------------------------------------------------------------------


def check_importer(
    exporter: Exporter, importer: Importer, directory: Path, *, suffix: str = "", only: Collection[str] = ()
) -> dict[str, str]:
    """Export and import traces of every kind: everything but the reported losses must be restored.

    Arguments, result and errors as in check_exporter().
    """
    traces = make_zoo(directory / "traces", only)
    refused = {}
    for name, trace in traces.items():
        try:
            check_round_trip(exporter, importer, trace, directory / f"{name}{suffix}", directory / f"{name}-back")
        except InvalidOption as error:
            refused[name] = str(error)
    _must(len(refused) < len(traces), f"{exporter.name} refuses every trace: {refused}")
    _check_recognises(importer, directory)
    return refused


def check_round_trip(
    exporter: Exporter, importer: Importer, trace: Trace | str | Path, out: Path, back: Path
) -> list[str]:
    """Export a trace to out, import it into back and compare. Return what is lost.

    Raises AssertionError; InvalidOption if the exporter rejects the trace.
    """
    source = ExportSource(as_trace(trace))
    name = source.trace.directory.name
    report = export(source.trace, out, exporter)
    lost = {loss.what for loss in report.lost}
    _must(importer.recognises(out), f"{importer.name} does not recognise what {exporter.name} has written of {name}")
    imported = import_trace(out, back, importer)
    made = everything = open_trace(back)
    if "empty_episode" in lost:  # an importer may find more than the loader of the format does
        made = made[made.episodes["steps"] > 0]
    problem = difference(source, loaded_from(made, lost), {*lost, "identity"})
    _must(not problem, f"{exporter.name} and back, {name}: {problem}; reported losses: {sorted(lost)}")
    counts = imported.episodes, imported.steps
    _must(counts == (len(everything), source.steps), f"{name}: {counts} episodes and steps were reported")
    if "identity" not in lost:
        _check_identity(source, made, lost, name)
    return sorted(lost)


def _check_identity(source: ExportSource, made: Trace, lost: set[str], name: str) -> None:
    told = source.episodes
    if "empty_episode" in lost:
        told = told[told["steps"] > 0]
    ids, found = (
        [trace.writers[number] for number in table["writer"]]
        for trace, table in ((source.trace, told), (made, made.episodes))
    )
    _must(ids == found, f"{name}: of the writers {found}, where it should be {ids}")
    for column in _SAME_ROWS:
        one, other = told[column], made.episodes[column]
        _must(np.array_equal(one, other), f"{name}: {column} {other}, where it should be {one}")
    spaces = ExportSource(made).plain_spaces
    _must(source.plain_spaces == spaces, f"{name}: other spaces: {spaces}")
    is_same = "facts" in lost or source.facts == made.facts
    _must(is_same, f"{name}: facts {made.facts}, where there should be {source.facts}")


def _check_recognises(importer: Importer, directory: Path) -> None:
    """Check that it recognizes no other format."""
    place = directory / "something-else"
    place.mkdir()
    contents = {"empty": b"", "garbage": os.urandom(4096), "data.json": b"{}", "text.csv": b"a,b\n1,2\n"}
    for name, content in contents.items():
        (place / name).write_bytes(content)
    for path in (place, place / "missing", *place.iterdir(), next((directory / "traces").iterdir())):
        try:
            taken = importer.recognises(path)
        except (TraceError, OSError, ValueError) as error:
            raise AssertionError(f"{importer.name}.recognises({path}) raises {error!r}") from error
        _must(not taken or path.name in ("data.json", "text.csv"), f"{importer.name} takes {path} for its own")
