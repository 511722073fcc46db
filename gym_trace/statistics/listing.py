"""Find the traces below a directory and summarize each, for gym-trace ls."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.errors import TraceError, TraceNotFound
from gym_trace.format.directory import batch_number, find_writers
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.statistics.describe import state_of
from gym_trace.statistics.summary import summarize
from gym_trace.storage.local import LocalStorage, directories_in

DEEPEST = 3  # levels of directories searched for traces
STATES = ("recording", "killed", "failed", "closed")  # the first state of any writer is the state of the trace


def is_trace(directory: str | os.PathLike[str]) -> bool:
    """Return True if the directory holds a trace, even an unreadable one. Raises TraceNotFound if it is missing."""
    return bool(find_writers(LocalStorage(directory)))


def find_traces(directory: str | os.PathLike[str], deepest: int = DEEPEST) -> Iterator[str]:
    """Yield the traces in a directory and below it, by name; only the directory itself if it is a trace.

    Skips links, hidden directories and directories inside traces. Raises TraceNotFound for a missing directory.
    """
    path = os.fspath(directory)
    if is_trace(path):
        yield path
    elif deepest:
        for name in directories_in(path):
            try:
                yield from find_traces(os.path.join(path, name), deepest - 1)
            except (TraceNotFound, PermissionError):  # removed since, or not readable
                continue


def list_trace(directory: str | os.PathLike[str], select: Callable[[Trace], Array] | None = None) -> dict[str, Any]:
    """Summarize a trace as plain data for JSON. Reads the index; with several objectives, also the rewards.

    Args:
        directory: directory of the trace.
        select: returns the indices of the episodes that episodes, steps, return and times describe; None: all.

    Returns:
        directory; environments: their ids, None for one without; episodes; steps; return: mean of complete episodes,
        None without any, a list of means if rewards are several numbers; bytes: size of the directory on disk, like du;
        state: "recording" (a writer lives), "killed" (a writer died), "failed" (a writer could not write), "closed"
        (all writers closed), "damaged" (opening found damage), or "unreadable"; writers: numbers of recording, killed,
        failed and closed writers; start_time, end_time: of the first and last episode, UTC, in ISO 8601, None if
        unknown; problem: the reading error or the first damage, otherwise None.
    """
    row: dict[str, Any] = dict.fromkeys(
        ("directory", "environments", "episodes", "steps", "return", "bytes", "state", "writers", "start_time")
    )
    row |= {"directory": os.fspath(directory), "environments": [], "end_time": None, "problem": None}
    try:
        trace = Trace(directory)
    except (TraceError, OSError) as error:
        return row | {"state": "unreadable", "problem": shown(str(error), 1000)[1:-1]}
    places = range(len(trace)) if select is None else select(trace)
    chosen = trace if len(places) == len(trace) else trace[places]
    summary = summarize(chosen)
    means = [objective["mean"] for objective in summary["objectives"]]
    writers = Counter(state_of(writer) for writer in trace.readers)
    problems = [f"{damage.path}: {damage.problem}" for damage in trace.damage]
    problems += (problem for writer in trace.readers for problem in _manifest_mismatches(writer))
    ids = dict.fromkeys(_id_of(writer.about_or_empty.environment) for writer in chosen.readers)
    return row | {
        "environments": list(ids),
        "episodes": summary["episodes"],
        "steps": summary["steps"],
        "return": means if means and summary["return"]["mean"] is None else summary["return"]["mean"],
        "bytes": trace.bytes_on_disk,
        "state": "damaged" if problems else next(state for state in STATES if writers[state]),
        "writers": {state: writers[state] for state in STATES if writers[state]},
        "start_time": _time(chosen.episodes["start_time"], np.min),
        "end_time": _time(chosen.episodes["end_time"], np.max),
        "problem": problems[0] if problems else None,
    }


def _manifest_mismatches(writer: WriterReader) -> Iterator[str]:
    """Yield a problem for each batch that is missing or whose size differs from the manifest."""
    for entry in writer.files.entries():
        name, size = entry.get("file"), entry.get("bytes")
        if entry.get("type") == "batch" and isinstance(name, str) and batch_number(writer.writer, name) is not None:
            try:
                there = writer.files.storage.size(name)
            except FileNotFoundError:
                yield f"{writer.files.storage.path(name)}: missing, but listed in the manifest"
            else:
                if there != size:
                    yield f"{writer.files.storage.path(name)}: {there} bytes, but {size} in the manifest"


def _id_of(environment: dict[str, Any]) -> str | None:
    known = environment.get("id")
    return known if isinstance(known, str) else None


def _time(times: Array, which: Callable[[Array], Any]) -> str | None:
    known = times[~np.isnat(times)]
    return f"{np.datetime_as_string(which(known), 'us')}Z" if len(known) else None
