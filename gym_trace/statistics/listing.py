"""What gym-trace ls shows: the traces of a directory, and what each of them is."""

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

DEEPEST = 3  # levels of directories that are looked through for traces
STATES = ("recording", "killed", "closed")  # of several writers the first counts


def is_trace(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a trace in a directory, readable or not. Raises TraceNotFound: there is no such directory."""
    return bool(find_writers(LocalStorage(directory)))


def find_traces(directory: str | os.PathLike[str], deepest: int = DEEPEST) -> Iterator[str]:
    """The traces in a directory and in those below it, by name; the directory itself, if it is one.

    Links are not followed, hidden directories and those inside of traces not looked into. Raises TraceNotFound: there
    is no such directory.
    """
    path = os.fspath(directory)
    if is_trace(path):
        yield path
    elif deepest:
        for name in directories_in(path):
            try:
                yield from find_traces(os.path.join(path, name), deepest - 1)
            except (TraceNotFound, PermissionError):  # gone since, or not ours to read
                continue


def list_trace(directory: str | os.PathLike[str], select: Callable[[Trace], Array] | None = None) -> dict[str, Any]:
    """What a trace is, in few words: plain data, fit for JSON. Reads its index; of several objectives the rewards too.

    Args:
        directory: of the trace.
        select: gives the episodes that episodes, steps, return and times are of, as places in the trace; None: all.

    Returns:
        directory; environments: their ids, None for one without; episodes, steps; return: the mean of complete
        episodes, None if there are none, a list of means where rewards are several numbers; bytes: of the directory,
        as du counts them; state: "recording" (a writer lives), "killed" (one died), "closed" (all have ended in order),
        "damaged" (something does not check, of what opening reads), or "unreadable"; writers: how many are recording,
        killed and closed; start_time, end_time: of the first and the last episode, UTC, in ISO 8601, None where
        unknown; problem: why it cannot be read, or the first damage, otherwise None.
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
    problems += (problem for writer in trace.readers for problem in _not_as_told(writer))
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


def _not_as_told(writer: WriterReader) -> Iterator[str]:
    """Batches that do not have the bytes that they had when the manifest took note of them."""
    for entry in writer.files.entries():
        name, size = entry.get("file"), entry.get("bytes")
        if entry.get("type") == "batch" and isinstance(name, str) and batch_number(writer.writer, name) is not None:
            try:
                there = writer.files.storage.size(name)
            except FileNotFoundError:
                yield f"{writer.files.storage.path(name)}: the manifest tells of it, and it is not there"
            else:
                if there != size:
                    yield f"{writer.files.storage.path(name)}: the manifest tells of {size} bytes, and it has {there}"


def _id_of(environment: dict[str, Any]) -> str | None:
    known = environment.get("id")
    return known if isinstance(known, str) else None


def _time(times: Array, which: Callable[[Array], Any]) -> str | None:
    known = times[~np.isnat(times)]
    return f"{np.datetime_as_string(which(known), 'us')}Z" if len(known) else None
