"""The checks of an exporter."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption
from gym_trace.formats.conformance.comparing import Loaded, difference
from gym_trace.formats.conformance.wrong import WRONG, wrong_trace
from gym_trace.formats.conformance.zoo import FOR_WRONG, make_zoo
from gym_trace.formats.contract import LOSSES, Exporter, ExportReport
from gym_trace.formats.exporting import export
from gym_trace.formats.source import Source
from gym_trace.formats.steps.windows import REPEATED
from gym_trace.playback.trace import Trace, as_trace

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
    """Exports traces of every kind, right ones and wrong ones, and compares what load gives with them.

    Args:
        load: gives the episodes of an export, with the package that people read the format with.
        directory: an empty one for all that is written.
        suffix: of what is exported, where the format needs one: ".h5".
        only: names of the traces (see zoo.py); none: all.
        run_how_to_load: whether to run how_to_load of one export in a Python of its own.

    Returns:
        Which of the traces the exporter refused, by name, and why: those whose spaces the format cannot hold.

    Raises AssertionError if something is not as the contract says.
    """
    _check_itself(exporter)
    traces = make_zoo(directory / "traces", only)
    refused: dict[str, str] = {}
    ran = not run_how_to_load
    for name in traces:
        out = directory / f"{name}{suffix}"
        try:
            report = check_export(exporter, load, traces[name], out)
        except InvalidOption as error:
            _must(not out.exists(), f"{name} was refused, but something was written")
            refused[name] = str(error)
            continue
        _check_strict(exporter, traces[name], directory / f"{name}-strict{suffix}", report)
        if not ran:
            _check_how_to_load(report, directory)
            ran = True
        if name in FOR_WRONG:
            found = check_wrong(exporter, load, traces[name], directory / f"{name}-wrong", suffix=suffix)
            _must(len(found) > 3, f"{name}: only {found} could be wrong")
    chosen = [name for name in traces if name not in refused]
    _must(bool(chosen), f"{exporter.name} refuses every trace: {refused}")
    _check_selection(exporter, load, traces[chosen[0]], directory / f"selected{suffix}")
    _check_interrupted(exporter, traces[chosen[0]], directory / "interrupted", suffix)
    return refused


def check_export(exporter: Exporter, load: Load, trace: Trace | str | Path, out: Path) -> ExportReport:
    """Exports one trace and compares what load gives with it. Raises AssertionError; InvalidOption if it is refused."""
    told: list[tuple[int, int]] = []
    report = export(trace, out, exporter, on_progress=lambda done, total: told.append((done, total)))
    source = Source(as_trace(trace), finals=getattr(exporter, "finals", REPEATED))
    name = source.trace.directory.name
    problem = difference(source, load(report.path), {loss.what for loss in report.lost})
    _must(not problem, f"{exporter.name}, {name}: {problem}; said to be lost: {[loss.what for loss in report.lost]}")
    _must(not source.steps or told[-1:] == [(source.steps, source.steps)], f"{name}: progress ends with {told[-1:]}")
    for loss in report.lost:
        _must(loss.what in LOSSES, f"{name}: a loss of {loss.what!r}, not in contract.LOSSES")
        _must(loss.why.isprintable() and loss.why.strip() == loss.why != "", f"{name}: no sentence: {loss.why!r}")
    return report


def check_adapter(
    load: Callable[[Trace], Iterable[Loaded]], directory: Path, *, lost: Collection[str], only: Collection[str] = ()
) -> dict[str, str]:
    """Convert traces of every kind, right ones and wrong ones, to objects of a library, and compare their steps.

    Args:
        load: converts a trace and yields the episodes of the result. Raises InvalidOption for spaces that the library
            does not support.
        directory: an empty one for all that is written.
        lost: what the objects cannot hold (see contract.LOSSES).
        only: names of the traces (see zoo.py); none: all.

    Returns:
        The rejected traces by name, with the reason.

    Raises AssertionError if an object differs from its trace, or if a wrong trace gives the same object.
    """
    rejected: dict[str, str] = {}
    for name, path in make_zoo(directory / "traces", only).items():
        source = Source(as_trace(path))
        try:
            problem = difference(source, load(source.trace), lost, only_steps=True)
        except InvalidOption as error:
            rejected[name] = str(error)
            continue
        _must(not problem, f"{name}: {problem}")
        for number, (what, wrong) in enumerate(WRONG.items() if name in FOR_WRONG else ()):
            place = directory / f"{name}-wrong-{number}"
            if wrong.hidden_by.isdisjoint(lost) and wrong_trace(source.trace, what, place):
                shown = difference(source, load(as_trace(place)), lost, only_steps=True)
                _must(bool(shown), f"{name}: {what} goes unnoticed")
    return rejected


def check_wrong(
    exporter: Exporter, load: Load, trace: Trace | str | Path, directory: Path, *, suffix: str = ""
) -> list[str]:
    """Exports traces that are wrong in place of a right one, and makes sure that load shows it; returns which.

    Nothing is compared but steps. What the plan reports as lost need not show. Raises AssertionError.
    """
    source = Source(as_trace(trace), finals=getattr(exporter, "finals", REPEATED))
    lost = {loss.what for loss in exporter.plan(source).losses}
    found = []
    for number, (what, wrong) in enumerate(WRONG.items()):
        place, out = directory / f"trace-{number}", directory / f"{number}{suffix}"
        if wrong.hidden_by & lost or not wrong_trace(source.trace, what, place):
            continue
        found.append(what)
        try:
            export(place, out, exporter)
        except InvalidOption:  # not even exported
            continue
        try:
            shown = difference(source, load(out), lost, only_steps=True)
        except Exception:  # that what is wrong cannot be loaded is a way of showing it
            continue
        _must(bool(shown), f"{exporter.name}, {source.trace.directory.name}: {what}, not noticed")
    return found


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


def _check_selection(exporter: Exporter, load: Load, trace: Path, out: Path) -> None:
    """Check that a view is exported in its own order."""
    whole = as_trace(trace)
    check_export(exporter, load, whole[list(range(len(whole)))[::-2]], out)


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
        raise AssertionError("it went on despite an interrupt")
    export(trace, out, exporter)


def _check_how_to_load(report: ExportReport, directory: Path) -> None:
    """Run how_to_load in another directory."""
    said = report.how_to_load
    try:
        ast.parse(said)
    except SyntaxError as error:
        raise AssertionError(f"how_to_load: invalid Python: {said!r}") from error
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", said], cwd=directory, capture_output=True, text=True, timeout=600
    )
    _must(done.returncode == 0, f"how_to_load fails: {said!r}: {done.stderr[-2000:]}")
