"""The traces that an edit is made of: which episodes of which writers are taken; damaged ones are refused."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from gym_trace.format.batch_reader import Damage
from gym_trace.format.directory import batch_name
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.playback.writer_reader import WriterReader

TraceOrPath = Trace | str | os.PathLike[str]


class Taken(NamedTuple):
    """What is taken of one writer of one trace.

    Attributes:
        reader: the writer.
        rows: (episodes of the writer,) bool, which of them are taken.
        places: (episodes of the writer,) int64, where each is in the trace; -1 for those that it does not have.
    """

    trace: Trace
    reader: WriterReader
    rows: Array
    places: Array


def opened(trace: TraceOrPath) -> Trace:
    """The trace. Raises TraceNotFound, and CorruptTrace if something of it is known to be damaged or missing."""
    found = as_trace(trace)
    for reader in found.readers:
        for damage in [*reader.damage, *_missing(reader)]:
            raise damage.error()
    return found


def taken_of(trace: Trace, chosen: Array | None = None) -> tuple[list[Taken], int]:
    """What is taken of a trace, or view, writer by writer, and how many episodes are left out as they are running.

    chosen: (len(trace),) bool, which episodes; None: all that it has, and writers that have none.
    """
    table, rows_of = trace.episodes, trace.rows
    over = table["outcome"] != "running"
    mine = over if chosen is None else over & chosen
    taken = []
    for number, reader in enumerate(trace.readers):
        here = np.flatnonzero(table["writer"] == number)
        rows = np.zeros(len(reader.parts.table), np.bool_)
        places = np.full(len(rows), -1)
        rows[rows_of[here]] = mine[here]
        places[rows_of[here]] = here
        if rows.any() or (chosen is None and not len(rows)):
            taken.append(Taken(trace, reader, rows, places))
    return taken, int(np.count_nonzero(~over if chosen is None else ~over & chosen))


def _missing(reader: WriterReader) -> list[Damage]:
    for expected, number in enumerate(sorted(reader.files.batches)):
        if number != expected:
            path = reader.files.storage.path(batch_name(reader.writer, expected))
            return [Damage(path, 0, 0, "this batch is missing")]
    return []
