"""Filter, merge and split traces. Every episode keeps its writer and its id."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.format import wire
from gym_trace.format.facts import write_facts
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.sampling.permutation import GOLDEN, mixed
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.staging import StagedStorage, new_directory
from gym_trace.tools.editing.in_place import edited, report_for, writing
from gym_trace.tools.editing.rewrite import EditReport, Progress, rewrite
from gym_trace.tools.editing.sources import TraceOrPath, opened, outputs_of, selections_of

BY = ("split", "writer", "outcome", "seed-hash")
_MOST_PARTS = 1000
_DIRECTORY_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}")


def filter_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str] | None = None,
    episodes: slice | Sequence[int] | Array | None = None,
    *,
    in_place: bool = False,
    on_progress: Progress | None = None,
) -> EditReport:
    """Write a new trace with some episodes of a trace, or with the episodes of a view.

    Episodes keep their writer, id and order; writers without episodes are skipped. Batches and chunks whose episodes
    are all selected are copied as stored, without being decoded.

    Args:
        trace: a trace, a view (``trace[mask]``), or a directory. Running episodes are skipped.
        destination: a new or empty directory. It appears when it is complete.
        episodes: a slice, indices, or a boolean array over the trace; None: all episodes.
        in_place: replace the trace instead, atomically, and keep all other files in its directory.
        on_progress: called periodically with the bytes done and the total.

    Raises:
        InvalidOption: an unknown episode, no destination, one inside the trace, or the trace cannot be edited in place
            here; nothing was written.
        TraceError: in place: a writer is still recording, or another process edits the trace.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> report = gym_trace.edit.filter(trace.select("return > 20"), "traces/filtered")
        >>> report.episodes, report.steps
        (12, 346)
    """
    source = opened(trace)
    source = source if episodes is None else source[episodes]
    report = report_for(source, destination, in_place)
    selections, report.running = selections_of(source, np.ones(len(source), np.bool_))
    outputs = outputs_of(selections, report)
    with edited(report, [source], in_place) as storage:
        rewrite(outputs, storage, report, copies_videos=not in_place, on_progress=on_progress)
    return report


def merge_traces(
    traces: Sequence[TraceOrPath], destination: str | os.PathLike[str], *, on_progress: Progress | None = None
) -> EditReport:
    """Write a new trace with the episodes of several.

    Episodes keep their writer and id. If several traces have parts of a writer, as after split_trace(), it becomes one
    writer again. An episode of several traces is written once. Facts are kept where all traces agree. Batches that
    need no change are copied as files, without being read.

    Args:
        traces: traces, views, or directories. Running episodes are skipped.
        destination: a new or empty directory. It appears when it is complete.
        on_progress: called periodically with the bytes done and the total.

    Raises:
        TraceError: an episode, or the metadata of a writer, differs between two traces; nothing was written.
        TraceNotFound, TraceExists, InvalidOption, CorruptTrace, UnsupportedTrace
        RecordingError: the new trace could not be written.

    Examples:
        >>> _ = gym_trace.edit.merge(["traces/cartpole"], "traces/merged")
        >>> len(gym_trace.open_trace("traces/merged"))
        20
    """
    if isinstance(traces, (str, os.PathLike, Trace)) or not traces:
        raise InvalidOption("traces: pass a list of one or more")
    sources = list(map(opened, traces))
    report, selections = EditReport(Path(destination)), []
    for trace in sources:
        of_trace, running = selections_of(trace)
        selections += of_trace
        report.running += running
    outputs = outputs_of(selections, report)
    with edited(report, sources) as storage:
        rewrite(outputs, storage, report, on_progress=on_progress)
    return report


def split_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str],
    by: str | None = None,
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    *,
    on_progress: Progress | None = None,
) -> dict[str, EditReport]:
    """Write each episode of a trace into one of several new traces, destination/NAME.

    Episodes keep their writer and id; merge_traces joins the parts again.

    Args:
        trace: a trace, a view, or a directory. Running episodes are skipped.
        destination: a new or empty directory. It appears when all parts are complete.
        by: "split", "writer" or "outcome": one part per value, named after it. "seed-hash": parts of about the sizes in
            fractions. A hash of `seed` and of its reset seed chooses the part of an episode, so equal reset seeds get
            the same part, also after more was recorded. Without a reset seed, its writer and id are hashed. None:
            "seed-hash" with fractions, "split" without.
        fractions: for "seed-hash": shares of the parts by name; they must sum to 1: {"train": 0.8, "test": 0.2}.
        seed: for "seed-hash": other seeds give other parts.
        on_progress: called periodically with the bytes done and the total.

    Returns:
        The reports, by the names of the parts.

    Raises:
        InvalidOption: invalid arguments, or a part would be empty; nothing was written.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new traces could not be written.

    Examples:
        >>> parts = gym_trace.edit.split("traces/cartpole", "parts", fractions={"train": 0.8, "test": 0.2})
        >>> {name: report.episodes for name, report in parts.items()}
        {'train': 15, 'test': 5}
    """
    by = by or ("split" if fractions is None else "seed-hash")
    if by not in BY:
        raise InvalidOption(f"by={by!r}: pass {', '.join(map(repr, BY))}")
    if (by == "seed-hash") != bool(fractions):
        raise InvalidOption('fractions: pass them with by="seed-hash", such as {"train": 0.8, "test": 0.2}')
    source = opened(trace)
    names, part = (
        _parts_by_hash(source, _checked_fractions(fractions), seed) if fractions else _parts_by_value(source, by)
    )
    ended = source.episodes["outcome"] != "running"
    for number, name in enumerate(names):
        if not (ended & (part == number)).any():
            raise InvalidOption(f"part {name!r} would get no episode of {ended.sum()}; nothing was written")
    reports: dict[str, EditReport] = {}
    with new_directory(destination, source.directory) as staged:
        for number, name in enumerate(names):
            selections, running = selections_of(source, part == number)
            report = reports[name] = EditReport(Path(destination) / name, running=running)
            with writing(report):
                storage = StagedStorage(staged / name)
                storage.make()
                rewrite(outputs_of(selections, report), storage, report, on_progress=on_progress)
                if facts := source.facts:
                    write_facts(storage, facts)
    for report in reports.values():
        report.bytes = LocalStorage(report.destination).allocated()
    return reports


def _checked_fractions(fractions: Mapping[str, float]) -> Mapping[str, float]:
    if names := [name for name in fractions if not _DIRECTORY_NAME.fullmatch(name)]:
        raise InvalidOption(f"fractions: {names[0]!r} will be a directory; name it with letters, digits, - and _")
    if len({name.lower() for name in fractions}) < len(fractions):
        raise InvalidOption("fractions: names differ only in case; rename one")
    if not all(isinstance(share, (int, float)) and 0 < share <= 1 for share in fractions.values()):
        raise InvalidOption("fractions: pass numbers above 0, up to 1")
    if not math.isclose(total := sum(fractions.values()), 1, abs_tol=1e-6):
        raise InvalidOption(f"fractions add up to {total:.6g}; they must add up to 1")
    return fractions


def _parts_by_value(trace: Trace, by: str) -> tuple[list[str], Array]:
    """Return the names of the parts, and the part of each episode."""
    table = trace.episodes
    if by == "outcome":
        ended = table["outcome"] != "running"
        outcomes, part = np.unique(table["outcome"][ended], return_inverse=True)
        of_episode = np.full(len(ended), -1)
        of_episode[ended] = part
        return outcomes.tolist(), of_episode
    of_writer = trace.writers if by == "writer" else [reader.split for reader in index_of(trace).readers]
    values = list(dict.fromkeys(of_writer[number] for number in np.unique(table["writer"]).tolist()))
    if len(values) > _MOST_PARTS:
        raise InvalidOption(f"by={by!r}: there would be {len(values):,} parts; at most {_MOST_PARTS}")
    part_of_writer = np.array([values.index(value) if value in values else -1 for value in of_writer])
    return _directory_names(values), part_of_writer[table["writer"]]


def _directory_names(values: list[str]) -> list[str]:
    """Return unique directory names for untrusted texts."""
    names: list[str] = []
    for value in values:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", value)[:100].lstrip(".") or "none"
        used, name, number = {name.lower() for name in names}, plain, 2
        while name.lower() in used:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names


def _parts_by_hash(trace: Trace, fractions: Mapping[str, float], seed: int) -> tuple[list[str], Array]:
    table = trace.episodes
    keys = table["seed"].astype(np.uint64)
    for index in np.flatnonzero(table["seed"] == wire.SEED_ELSEWHERE).tolist():  # too large for the table
        keys[index] = crc32(str(trace[index].seed).encode()) | 1 << 63
    unseeded = table["seed"] == wire.NO_SEED
    writers = np.array([crc32(writer.encode()) for writer in trace.writers], np.uint64)
    ids = table["episode_id"].astype(np.uint64)
    keys[unseeded] = mixed((ids[unseeded] ^ (writers[table["writer"][unseeded]] << np.uint64(32))) + GOLDEN)
    try:
        start = np.array([seed % (1 << 64)], np.uint64)
    except TypeError as error:
        raise InvalidOption(f"seed={shown(seed)}: pass an integer") from error
    fractions_of_episodes = mixed((keys ^ mixed(start + GOLDEN)) + GOLDEN) / 2.0**64
    bounds = np.cumsum(list(fractions.values()))[:-1]
    return list(fractions), np.searchsorted(bounds, fractions_of_episodes, side="right")
