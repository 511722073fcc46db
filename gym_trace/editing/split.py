"""One trace as several, each episode in one of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from gym_trace.editing.sources import TraceOrPath, groups_of, opened, taken_of, write_groups
from gym_trace.editing.writer_copy import EditReport, Progress
from gym_trace.errors import InvalidOption
from gym_trace.format import wire
from gym_trace.format.facts import write_facts
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.staging import StagedStorage, new_directory

BY = ("split", "writer", "outcome", "seed-hash")
_MOST_PARTS = 1000
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119}")


def split_trace(
    trace: TraceOrPath,
    destination: str | os.PathLike[str],
    by: str | None = None,
    fractions: Mapping[str, float] | None = None,
    seed: int = 0,
    *,
    on_progress: Progress | None = None,
) -> dict[str, EditReport]:
    """Writes several new traces, destination/NAME each, that have the episodes of a trace between them.

    Every episode keeps its writer and its id; merge_traces makes one trace of the parts again.

    Args:
        trace: a trace, a view, or a directory. Episodes that are being recorded are left out.
        destination: a new or empty directory. It is there when all parts are complete.
        by: "split", "writer" or "outcome": a part for each that there is, with its name. "seed-hash": parts of about
            the sizes that fractions say. An episode goes where a hash of the seed of its reset and of `seed` says: with
            the same seed always into the same part, also when more has been recorded. One that was reset without a seed
            goes by its writer and its id. None: "seed-hash" with fractions, "split" without.
        fractions: of "seed-hash": name of a part to its share, which add up to 1, such as {"train": 0.8, "test": 0.2}.
        seed: of "seed-hash": another one gives other parts.
        on_progress: called now and then with the bytes done and the bytes there are.

    Returns:
        What was written, by the names of the parts.

    Raises:
        InvalidOption: arguments that make no sense, or a part that no episode falls into; nothing was written.
        TraceNotFound, TraceExists, CorruptTrace, UnsupportedTrace
        RecordingError: the new traces could not be written.
    """
    by = by or ("split" if fractions is None else "seed-hash")
    if by not in BY:
        raise InvalidOption(f"by={by!r}: pass {', '.join(map(repr, BY))}")
    if (by == "seed-hash") != bool(fractions):
        raise InvalidOption(
            'fractions: {"train": 0.8, "test": 0.2} and the like go with by="seed-hash", and it with them'
        )
    source = opened(trace)
    names, part = _by_hash(source, _checked(fractions), seed) if fractions else _by_value(source, by)
    over = source.episodes["outcome"] != "running"
    for number, name in enumerate(names):
        if not (over & (part == number)).any():
            raise InvalidOption(
                f"part {name!r} would have no episode, of {np.count_nonzero(over)}; nothing was written"
            )
    reports: dict[str, EditReport] = {}
    with new_directory(destination, source.directory) as staged:
        for number, name in enumerate(names):
            taken, running = taken_of(source, part == number)
            report = reports[name] = EditReport(Path(destination) / name, running=running)
            storage = StagedStorage(staged / name)
            storage.make()
            write_groups(storage, groups_of(taken, report), report, on_progress)
            if facts := source.facts:
                write_facts(storage, facts)
    for report in reports.values():
        report.bytes = LocalStorage(report.destination).allocated()
    return reports


def _checked(fractions: Mapping[str, float]) -> Mapping[str, float]:
    if names := [name for name in fractions if not _PLAIN.fullmatch(name)]:
        raise InvalidOption(f"fractions: {names[0]!r} is to be a directory; name it with letters, digits, - and _")
    if len({name.lower() for name in fractions}) < len(fractions):
        raise InvalidOption("fractions: two parts have names that differ in capitals alone")
    if not all(isinstance(share, (int, float)) and 0 < share <= 1 for share in fractions.values()):
        raise InvalidOption("fractions: each is more than 0 and at most 1")
    if not math.isclose(sum(fractions.values()), 1, abs_tol=1e-6):
        raise InvalidOption(f"fractions add up to {sum(fractions.values()):.6g}; they are to add up to 1")
    return fractions


def _by_value(trace: Trace, by: str) -> tuple[list[str], Array]:
    """The names of the parts, and of each episode which part it is in."""
    table = trace.episodes
    if by == "outcome":
        over = table["outcome"] != "running"
        outcomes, part = np.unique(table["outcome"][over], return_inverse=True)
        return outcomes.tolist(), _filled(over, part)
    said = trace.writers if by == "writer" else [reader.split for reader in trace.readers]
    present = np.unique(table["writer"]).tolist()
    values = list(dict.fromkeys(said[number] for number in present))
    if len(values) > _MOST_PARTS:
        raise InvalidOption(f"by={by!r}: there would be {len(values):,} parts; at most {_MOST_PARTS}")
    place = np.array([values.index(value) if value in values else -1 for value in said])
    return _named(values), place[table["writer"]]


def _filled(mask: Array, values: Array) -> Array:
    filled = np.full(len(mask), -1)
    filled[mask] = values
    return filled


def _named(values: list[str]) -> list[str]:
    """Names of directories for what a trace says, which may be anything."""
    names: list[str] = []
    for value in values:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", value)[:100].lstrip(".") or "none"
        taken, name, number = {name.lower() for name in names}, plain, 2
        while name.lower() in taken:
            name, number = f"{plain}-{number}", number + 1
        names.append(name)
    return names


def _by_hash(trace: Trace, fractions: Mapping[str, float], seed: int) -> tuple[list[str], Array]:
    table = trace.episodes
    keys = table["seed"].astype(np.uint64)
    for index in np.flatnonzero(table["seed"] == wire.SEED_ELSEWHERE).tolist():  # too large for the table
        keys[index] = crc32(str(trace[index].seed).encode()) | 1 << 63
    unseeded = table["seed"] == wire.NO_SEED
    writers = np.array([crc32(writer.encode()) for writer in trace.writers], np.uint64)
    ids = table["episode_id"].astype(np.uint64)
    keys[unseeded] = _mixed(ids[unseeded] ^ (writers[table["writer"][unseeded]] << np.uint64(32)))
    try:
        start = np.uint64(seed % (1 << 64))
    except TypeError as error:
        raise InvalidOption(f"seed={shown(seed)}: pass an integer") from error
    places = _mixed(keys ^ _mixed(np.atleast_1d(start))) / 2.0**64
    bounds = np.cumsum(list(fractions.values()))[:-1]
    return list(fractions), np.searchsorted(bounds, places, side="right")


def _mixed(numbers: Any) -> Array:
    """SplitMix64's output function (Steele, Lea, Flood 2014): neighbours far apart, evenly over 64 bits."""
    with np.errstate(over="ignore"):
        z = numbers + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: Array = z ^ (z >> np.uint64(31))
    return mixed
