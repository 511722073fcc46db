"""The sources of an edit: the episodes selected from each writer, and the groups that are written as one writer."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.origins import of_origins
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.origins import OriginReader
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.protocol import Storage
from gym_trace.tools.editing.writer_copy import EditReport, Progress, WriterCopy, are_alike, copy_videos, schema_of

_OF_THE_RESET = ("seed", "options", "rng_state", "reset_info", "pending_action")
_OF_THE_STEPS = ("observations", "actions", "rewards", "terminations", "truncations", "annotations", "states")
TraceOrPath = Trace | str | os.PathLike[str]


class Taken(NamedTuple):
    """Selection from one writer of one trace.

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
    """Open a trace. Raises TraceNotFound, and CorruptTrace if it is known to be damaged or incomplete."""
    found = as_trace(trace)
    for reader in found.readers:
        for damage in reader.damage:
            raise damage.error()
    return found


def taken_of(trace: Trace, chosen: Array | None = None) -> tuple[list[Taken], int]:
    """Return the selection of a trace or view by writer, and the count of running episodes that are skipped.

    chosen: (len(trace),) bool, which episodes; None: all that it has, and writers that have none.
    """
    writers, rows_of = trace.content["writer"], trace.rows
    over = outcome_codes(trace.content) != Outcome.RUNNING
    mine = over if chosen is None else over & chosen
    taken = []
    for number, reader in enumerate(trace.readers):
        here = np.flatnonzero(writers == number)
        rows = np.zeros(len(reader.parts), np.bool_)
        places = np.full(len(rows), -1)
        rows[rows_of[here]] = mine[here]
        places[rows_of[here]] = here
        if rows.any() or (chosen is None and not len(rows)):
            taken.append(Taken(trace, reader, rows, places))
    return taken, int(np.count_nonzero(~over if chosen is None else ~over & chosen))


class Group(NamedTuple):
    """Sources of the files of one writer.

    Attributes:
        parts: the consecutive parts to read.
        shares: of files that several writers share, what is taken of each of these; of others what parts are.
    """

    parts: list[Taken]
    shares: list[Taken]


def groups_of(taken: list[Taken], report: EditReport) -> list[Group]:
    """Group selections by the files to write, each episode once. Origins that share files stay together if possible.

    Raises TraceError for an episode, or a writer, that differs between two traces.
    """
    writers: dict[str, list[Taken]] = {}
    for one in taken:
        writers.setdefault(one.reader.writer, []).append(one)
    for several in writers.values():
        report.duplicates += _reconciled(several)
    files: dict[int, tuple[Taken, list[Taken]]] = {}
    for several in writers.values():
        for one in several:
            if isinstance(one.reader, OriginReader):
                stored, rows = one.reader.stored, np.zeros(len(one.reader.stored.parts), np.bool_)
                whole, shares = files.setdefault(id(stored), (Taken(one.trace, stored, rows, rows), []))
                whole.rows[one.reader.first_row :][: len(one.rows)] = one.rows
                shares.append(one)
    names, together, groups = set(writers), set(), []
    for whole, shares in files.values():
        origins = [reader for reader in whole.trace.whole.readers if isinstance(reader, OriginReader)]
        theirs = {reader.writer for reader in origins if reader.stored is whole.reader}
        alone = all(len(writers.get(writer, [])) < 2 for writer in theirs)
        if alone and len(shares) > 1 and whole.reader.writer not in names:
            names.add(whole.reader.writer)
            together |= theirs
            groups.append(Group([whole], shares))
    return groups + [Group(several, several) for writer, several in writers.items() if writer not in together]


def write_groups(
    storage: Storage, groups: list[Group], report: EditReport, on_progress: Progress | None = None
) -> None:
    """Write the selections. Raises InvalidOption without one, and OSError."""
    if not groups:
        raise InvalidOption(f"{report.destination}: no episodes selected; nothing written")
    done, total = 0, sum(one.reader.size for group in groups for one in group.parts)

    def advance(size: int, _: int) -> None:
        nonlocal done
        done += size
        if on_progress is not None:
            on_progress(min(done, total), total)

    for parts, shares in groups:
        schema = schema_of(parts[0].reader)
        if shares is not parts:
            numbers = {one.reader.number for one in shares if isinstance(one.reader, OriginReader)}
            schema = of_origins(schema, numbers)
        with WriterCopy(storage, schema, report, advance) as copy:
            for one in parts:
                copy.add(one.reader, one.rows)
            copy.close()
        for share in shares:
            episodes = set(share.reader.parts.column("episode_id", share.rows).tolist())
            copy_videos([share.reader], storage, episodes)
        report.writers += dict.fromkeys(share.reader.writer for share in shares)


def _reconciled(several: list[Taken]) -> int:
    """Deselect repeated episodes of a writer; return their number. Raises TraceError where they differ."""
    first = several[0]
    known: dict[tuple[int, int], list[tuple[Taken, int]]] = {}  # runs of one episode may begin with the same step
    places, told, lengths = _Places(), dict[int, list[bytes]](), dict[int, Array]()
    duplicates = 0
    for number, one in enumerate(several):
        if number and not are_alike(schema_of(one.reader), schema_of(first.reader)):
            raise TraceError(
                f"writer {first.reader.writer} is in {first.trace.directory} and in {one.trace.directory}, with "
                "different metadata: not parts of one recording; cannot merge"
            )
        if len(several) == 1:
            break
        rows, table = np.flatnonzero(one.rows).tolist(), one.reader.parts.table()
        told[id(one)], lengths[id(one)] = _rows_told(table), table["steps"].copy()
        for row, episode, step in zip(rows, table["episode_id"][rows].tolist(), table["first_step"][rows].tolist()):
            there = known.setdefault((episode, step), [])
            if not there or there[0][0] is one:
                there.append((one, row))
            else:
                steps = table["steps"][row]
                alike = [pair for pair in there if lengths[id(pair[0])][pair[1]] == steps]
                other, place = (alike or there)[0]
                same = told[id(other)][place] == told[id(one)][row]
                if not (same and places.are_same(other.reader, place, one.reader, row)):
                    _compare(other, place, one, row)
                one.rows[row] = False
                duplicates += 1
    return duplicates


class _Places:
    """Finds chunks of several traces that are copies of each other: these need not be decoded to be compared."""

    def __init__(self) -> None:
        self._chunks: dict[Any, int] = {}
        self._of: dict[int, Array] = {}
        self._checked: set[int] = set()

    def are_same(self, one: WriterReader, row: int, other: WriterReader, other_row: int) -> bool:
        """Return True if two episodes lie in the same chunks; reads those of the first to be sure.

        Raises CorruptTrace.
        """
        mine, theirs = self._place(one, row), self._place(other, other_row)
        if mine is None or theirs is None or mine.tobytes() != theirs.tobytes():
            return False
        for number in np.unique(mine >> 32).tolist():
            if number not in self._checked:
                at = int(np.flatnonzero(self._fragments(one) >> 32 == number)[0])
                one.read_chunk(int(np.searchsorted(one.chunk_bounds, at, side="right")) - 1)
                self._checked.add(number)
        return True

    def _place(self, reader: WriterReader, row: int) -> Array | None:
        """Return the chunk and index of all fragments of an episode, and of the one with its start."""
        parts = reader.parts
        if not reader.has_own_files or parts.starts[row] < 0:
            return None
        own = parts.fragments[parts.first[row] : parts.first[row + 1]]
        place: Array = self._fragments(reader)[np.append(own, parts.starts[row])]
        return place

    def _fragments(self, reader: WriterReader) -> Array:
        if id(reader) not in self._of:
            bounds = reader.chunk_bounds
            numbers = [
                self._chunks.setdefault((batch.header.file_id, *batch.chunks[i].tolist()), len(self._chunks))
                for batch, i in reader.chunk_places
            ]
            each = np.diff(bounds)
            within = np.arange(len(reader.fragments)) - np.repeat(bounds[:-1], each)
            self._of[id(reader)] = np.repeat(np.array(numbers, np.int64), each) << 32 | within
        return self._of[id(reader)]


def _compare(one: Taken, row: int, other: Taken, other_row: int) -> None:
    """Raise TraceError unless an episode is the same in both traces, to the bit."""
    (a,), (b,) = one.reader.parts.table(slice(row, row + 1)), other.reader.parts.table(slice(other_row, other_row + 1))
    names = [
        name for name in a.dtype.names if name not in ("index", "writer") and a[name].tobytes() != b[name].tobytes()
    ]
    if not names:
        pair = one.trace[int(one.places[row])], other.trace[int(other.places[other_row])]
        names = [name for name in (*_OF_THE_RESET, *_OF_THE_STEPS) if not _same(pair, name)]
        names += [] if pack_lenient(infos_of(pair[0]))[0] == pack_lenient(infos_of(pair[1]))[0] else ["infos"]
    if names:
        raise TraceError(
            f"episode {a['episode_id']} of {one.reader.writer} is in {one.trace.directory} and in "
            f"{other.trace.directory}, with different {', '.join(names)}; remove it from one of them with 'edit filter'"
        )


def _rows_told(table: Array) -> list[bytes]:
    """Return each episode's row without its position: another chunk may hold its end."""
    told = table.copy()
    told["index"] = told["writer"] = 0
    rows: list[bytes] = told.view(f"V{told.itemsize}").tolist()
    return rows


def _same(pair: tuple[Episode, Episode], name: str) -> bool:
    one, other = (pack_lenient(getattr(episode, name))[0] for episode in pair)
    return one == other
