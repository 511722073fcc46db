"""Checks of exporters and importers."""

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

_SAME_COLUMNS = ("lane", "episode_id", "first_step", "steps", "seed", "start_time", "has_final_observation")
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
    """Export traces of every kind, load them, and compare.

    Args:
        load: yields the episodes of an export, with the usual package for the format.
        directory: an empty output directory.
        suffix: of the output, if the format needs one, such as ".h5".
        only: names of the traces (see zoo.py); empty: all.
        run_how_to_load: run how_to_load of one export in a separate Python process.

    Returns:
        The rejected traces by name, with the reason: spaces that the format cannot hold.

    Raises AssertionError if the exporter violates the contract.

    Examples:
        >>> gym_trace.testing.check_exporter(MyExporter(), load, tmp_path, suffix=".mine")  # doctest: +SKIP
    """
    _check_class(exporter)
    traces = make_zoo(directory / "traces", only)
    rejected: dict[str, str] = {}
    for name, trace in traces.items():
        out = directory / f"{name}{suffix}"
        try:
            report = check_export(exporter, load, trace, out)
        except InvalidOption as error:
            _must(not out.exists(), f"{name}: the exporter rejected it, but wrote something")
            rejected[name] = str(error)
            continue
        _check_strict(exporter, trace, directory / f"{name}-strict{suffix}", report)
        if run_how_to_load:
            _check_how_to_load(report, directory)
            run_how_to_load = False
    chosen = [name for name in traces if name not in rejected]
    _must(bool(chosen), f"{exporter.name} rejects every trace: {rejected}")
    whole = as_trace(traces[chosen[0]])
    view = whole[list(range(len(whole)))[::-2]]  # must be exported in its own order
    check_export(exporter, load, view, directory / f"selected{suffix}")
    _check_interrupted(exporter, traces[chosen[0]], directory / "interrupted", suffix)
    return rejected


def check_export(exporter: Exporter, load: Load, trace: Trace | str | Path, out: Path) -> ExportReport:
    """Export one trace and compare the result of load with it.

    Raises AssertionError; InvalidOption if the exporter rejects the trace.
    """
    progress: list[tuple[int, int]] = []
    report = export(trace, out, exporter, on_progress=lambda done, total: progress.append((done, total)))
    source = ExportSource(as_trace(trace), finals=getattr(exporter, "finals", REPEATED))
    name = source.trace.directory.name
    problem = difference(source, load(report.path), {loss.what for loss in report.lost})
    _must(not problem, f"{exporter.name}, {name}: {problem}; reported losses: {[loss.what for loss in report.lost]}")
    is_complete = progress[-1:] == [(source.steps, source.steps)]
    _must(is_complete or not source.steps, f"{name}: progress ends with {progress[-1:]}")
    for loss in report.lost:
        _must(loss.what in LOSSES, f"{name}: unknown loss {loss.what!r}; use one of contract.LOSSES")
        _must(loss.why.isprintable() and loss.why.strip() == loss.why != "", f"{name}: not a sentence: {loss.why!r}")
    return report


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _check_class(exporter: Any) -> None:
    cls = type(exporter)
    is_frozen = getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)
    _must(is_frozen, f"{cls.__name__} must be a frozen dataclass")
    _must(bool((cls.__doc__ or "").strip()), f"{cls.__name__} has no docstring")
    _must(exporter.makes in ("directory", "file"), f"makes={exporter.makes!r}: must be 'directory' or 'file'")
    _must(exporter.name.replace("-", "_").isidentifier(), f"name={exporter.name!r}: must be an identifier")


def _check_strict(exporter: Exporter, trace: Path, out: Path, report: ExportReport) -> None:
    """Check that strict raises if and only if there are losses, and then writes nothing."""
    if not report.lost:
        export(trace, out, exporter, strict=True)
        return
    try:
        export(trace, out, exporter, strict=True)
    except InvalidOption as error:
        _must(report.lost[0].why in str(error), f"strict: the error does not name the loss: {error}")
        _must(not out.exists(), "strict: wrote something despite a loss")
    else:
        raise AssertionError(f"strict: no error despite a loss: {report.lost[0]}")


def _check_interrupted(exporter: Exporter, trace: Path, directory: Path, suffix: str) -> None:
    """Check that Ctrl-C leaves no files, and nothing that blocks another export."""
    directory.mkdir()

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out = directory / f"out{suffix}"
    try:
        export(trace, out, exporter, on_progress=interrupt)
    except KeyboardInterrupt:
        _must(not os.listdir(directory), f"an interrupted export leaves {os.listdir(directory)}")
    else:
        raise AssertionError("the export continued after an interrupt")
    export(trace, out, exporter)


def _check_how_to_load(report: ExportReport, directory: Path) -> None:
    """Run how_to_load in another directory."""
    code = report.how_to_load
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=directory, capture_output=True, text=True, timeout=600
    )
    _must(done.returncode == 0, f"how_to_load fails: {code!r}: {done.stderr[-2000:]}")


# -- importers --------------------------------------------------------------------------------------------------------


def check_importer(
    exporter: Exporter, importer: Importer, directory: Path, *, suffix: str = "", only: Collection[str] = ()
) -> dict[str, str]:
    """Export and import traces of every kind: all but the reported losses must be restored.

    Arguments, result and errors are those of check_exporter().

    Examples:
        >>> gym_trace.testing.check_importer(MyExporter(), MyImporter(), tmp_path, suffix=".mine")  # doctest: +SKIP
    """
    traces = make_zoo(directory / "traces", only)
    rejected = {}
    for name, trace in traces.items():
        try:
            check_round_trip(exporter, importer, trace, directory / f"{name}{suffix}", directory / f"{name}-back")
        except InvalidOption as error:
            rejected[name] = str(error)
    _must(len(rejected) < len(traces), f"{exporter.name} rejects every trace: {rejected}")
    _check_recognises(importer, directory)
    return rejected


def check_round_trip(
    exporter: Exporter, importer: Importer, trace: Trace | str | Path, out: Path, back: Path
) -> list[str]:
    """Export a trace to `out`, import it into `back` and compare. Return what is lost.

    Raises AssertionError; InvalidOption if the exporter rejects the trace.
    """
    source = ExportSource(as_trace(trace))
    name = source.trace.directory.name
    report = export(source.trace, out, exporter)
    lost = {loss.what for loss in report.lost}
    _must(importer.recognises(out), f"{importer.name} does not recognise the export of {name} by {exporter.name}")
    imported = import_trace(out, back, importer)
    restored = whole = open_trace(back)
    if "empty_episode" in lost:  # an importer may find more than the loader of the format does
        restored = whole[whole.episodes["steps"] > 0]
    problem = difference(source, loaded_from(restored, lost), {*lost, "identity"})
    _must(not problem, f"{exporter.name} and back, {name}: {problem}; reported losses: {sorted(lost)}")
    counts = imported.episodes, imported.steps
    _must(counts == (len(whole), source.steps), f"{name}: {counts} episodes and steps were reported")
    if "identity" not in lost:
        _check_identity(source, restored, lost, name)
    return sorted(lost)


def _check_identity(source: ExportSource, restored: Trace, lost: set[str], name: str) -> None:
    exported = source.episodes
    if "empty_episode" in lost:
        exported = exported[exported["steps"] > 0]
    expected, writers = (
        [trace.writers[number] for number in table["writer"]]
        for trace, table in ((source.trace, exported), (restored, restored.episodes))
    )
    _must(expected == writers, f"{name}: writers {writers}, where there should be {expected}")
    for column in _SAME_COLUMNS:
        values, rows = exported[column], restored.episodes[column]
        _must(np.array_equal(values, rows), f"{name}: {column} {rows}, where it should be {values}")
    spaces = ExportSource(restored).plain_spaces
    _must(source.plain_spaces == spaces, f"{name}: other spaces: {spaces}")
    is_same = "facts" in lost or source.facts == restored.facts
    _must(is_same, f"{name}: facts {restored.facts}, where there should be {source.facts}")


def _check_recognises(importer: Importer, directory: Path) -> None:
    """Check that the importer recognizes no other format."""
    others = directory / "something-else"
    others.mkdir()
    contents = {"empty": b"", "garbage": os.urandom(4096), "data.json": b"{}", "text.csv": b"a,b\n1,2\n"}
    for name, content in contents.items():
        (others / name).write_bytes(content)
    for path in (others, others / "missing", *others.iterdir(), next((directory / "traces").iterdir())):
        try:
            is_recognised = importer.recognises(path)
        except (TraceError, OSError, ValueError) as error:
            raise AssertionError(f"{importer.name}.recognises({path}) raises {error!r}") from error
        may_be = path.name in ("data.json", "text.csv")
        _must(may_be or not is_recognised, f"{importer.name}.recognises({path}) is True, but it is another format")
