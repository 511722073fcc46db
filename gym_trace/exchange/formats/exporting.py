"""Export: a trace in the format of another package."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, TraceError
from gym_trace.exchange.formats.contract import Exporter, ExportReport, Loss, Target
from gym_trace.exchange.formats.registry import exporter_named, format_for
from gym_trace.exchange.formats.source import ExportSource, Progress
from gym_trace.playback.scan import REPEATED
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.storage.staging import bytes_in, new_directory, new_file


def export(
    trace: Trace | str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str | Exporter | None = None,
    *,
    strict: bool = False,
    on_progress: Progress | None = None,
    **options: Any,
) -> ExportReport:
    """Export a trace to the format of another package, in bounded memory. See docs/guides/export.md.

    Args:
        trace: a trace, a view (``trace.select("return > 100")``), or a directory. Episodes that are still being
            recorded are left out.
        out: a new or empty directory, or a new file, depending on the format. It appears when complete.
        format: a name such as "minari", or an exporter; None: by the ending of out, such as ".jsonl".
        strict: raise if the format cannot hold all of the trace.
        on_progress: called periodically with the steps done and their total number.
        options: of the format.

    Raises:
        InvalidOption: unknown format or option; the format cannot hold this trace; strict, and something would be
            lost; out lies in the trace. Nothing was written.
        MissingExtra: a package that writes this format is not installed.
        TraceExists: out already exists.
        TraceNotFound, CorruptTrace
        RecordingError: writing failed.

    Examples:
        >>> report = gym_trace.export("traces/cartpole", "cartpole.csv")
        >>> report.format, report.episodes, [loss.what for loss in report.lost][:2]
        ('csv', 20, ['dtype', 'seed'])
    """
    began = time.perf_counter()
    format = format_for(Path(out)) if format is None else format
    exporter = exporter_named(format, options) if isinstance(format, str) else format
    if options and not isinstance(format, str):
        raise InvalidOption("options: need a format name; configure the exporter itself")
    finals = getattr(exporter, "finals", REPEATED)
    source = ExportSource(as_trace(trace), on_progress, finals, getattr(exporter, "keeps_branch_prefix", False))
    report = ExportReport(exporter.name, Path(out), len(source.trace), source.steps, source.running)
    plan = exporter.plan(source)
    report.lost = list(plan.losses)
    if unknown := source.unknown_finals():
        report.lost.append(Loss("final_observation", unknown))
    if repeated := source.lost_branch_prefix():
        report.lost.append(Loss("repeated_steps", repeated))
    if not getattr(exporter, "keeps_states", False) and (states := source.lost_states()):
        report.lost.append(Loss("states", states))
    if strict and report.lost:
        lost = "; ".join(map(str, report.lost))
        raise InvalidOption(f"{exporter.name} cannot store all of {source.trace.directory}: {lost}; nothing written")
    if any(loss.what == "empty_episode" for loss in report.lost):
        report.episodes = int((source.episodes["steps"] > 0).sum())
    new_output = new_directory if exporter.makes == "directory" else new_file
    try:
        with new_output(out, source.trace.directory) as staged:
            plan.write(Target(staged, Path(out).resolve()))
            report.bytes = bytes_in(staged)
    except OSError as error:
        if isinstance(error, TraceError):
            raise
        raise RecordingError(f"{os.fspath(out)}: write failed: {error}") from error
    report.how_to_load, report.seconds = plan.how_to_load(Path(out)), time.perf_counter() - began
    return report
