"""The sources of an edit: the episodes selected from each writer, and the files to write them into."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.origins import changed_schema
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import TraceError
from gym_trace.format.rewrite import are_alike
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.trace import Trace, as_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.tools.editing.rewrite import (
    EditReport,
    Entries,
    Output,
    Selection,
    Source,
    entries_of,
    schema_of,
    source_of,
)

_RESET_FIELDS = ("seed", "options", "rng_state", "reset_info", "pending_action")
_STEP_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "annotations", "states")
TraceOrPath = Trace | str | os.PathLike[str]


def opened(trace: TraceOrPath) -> Trace:
    """Open a trace. Raises TraceNotFound, and CorruptTrace if it is known to be damaged or incomplete."""
    found = as_trace(trace)
    for reader in found.readers:
        for damage in reader.damage:
            raise damage.error()
    return found


def selections_of(trace: Trace, chosen: Array | None = None) -> tuple[list[Selection], int]:
    """Return the selection of a trace or view by writer, and the count of running episodes that are skipped.

    chosen: (len(trace),) bool, the wanted episodes; None: all, and the writers without episodes.
    """
    writers, rows_of = trace.content["writer"], trace.rows
    ended = outcome_codes(trace.content) != Outcome.RUNNING
    mine = ended if chosen is None else ended & chosen
    selections = []
    for number, reader in enumerate(trace.readers):
        here = np.flatnonzero(writers == number)
        rows = np.zeros(len(reader.parts), np.bool_)
        indices = np.full(len(rows), -1)
        rows[rows_of[here]] = mine[here]
        indices[rows_of[here]] = here
        if rows.any() or (chosen is None and not len(rows)):
            selections.append(Selection(trace, reader, rows, indices))
    return selections, int(np.count_nonzero(~ended if chosen is None else ~ended & chosen))


def outputs_of(selections: list[Selection], report: EditReport) -> list[Output]:
    """Return the files to write for these selections, with each episode once. Origins stay in one file if possible.

    Raises TraceError for an episode, or a writer, that differs between two traces.
    """
    writers: dict[str, list[Selection]] = {}
    for one in selections:
        writers.setdefault(one.reader.writer, []).append(one)
    for several in writers.values():
        report.duplicates += _deselect_duplicates(several)
    files: dict[int, list[Selection]] = {}
    for several in writers.values():
        for one in several:
            if one.reader.share is not None:
                files.setdefault(id(one.reader.share.stored), []).append(one)
    names, together, outputs = set(writers), set[str](), []
    for origins in files.values():
        source, everything = _joined_origins(origins), origins[0].trace.whole.readers
        stored = source.reader
        theirs = {one.writer for one in everything if one.share is not None and one.share.stored is stored}
        alone = all(len(writers.get(writer, [])) < 2 for writer in theirs)
        if alone and len(origins) > 1 and stored.writer not in names:
            names.add(stored.writer)
            together |= theirs
            outputs.append(_output_of_origins(source, origins))
    return outputs + [_output_of_writer(several) for writer, several in writers.items() if writer not in together]


def _joined_origins(origins: list[Selection]) -> Source:
    """Return the episodes of several origins of the same files."""
    sources = [source_of(one) for one in origins]
    return sources[0]._replace(
        rows=np.logical_or.reduce([source.rows for source in sources]),
        indices=np.maximum.reduce([source.indices for source in sources]),
        numbers=None,
    )


def _output_of_origins(source: Source, origins: list[Selection]) -> Output:
    """Return the files of several origins, in which they keep their numbers."""
    numbers = {one.reader.share.number for one in origins if one.reader.share is not None}
    schema = changed_schema(schema_of(source.reader), numbers=numbers)
    return Output(schema, [source], _closing_entries([(source.reader, None)]), origins)


def _output_of_writer(parts: list[Selection]) -> Output:
    """Return the files of one writer, of which several traces may have parts."""
    readers = [(one.reader, set(one.reader.parts.column("episode_id", one.rows).tolist())) for one in parts]
    return Output(schema_of(parts[0].reader), list(map(source_of, parts)), _closing_entries(readers), parts)


def _closing_entries(readers: Iterable[tuple[WriterReader, Collection[int] | None]]) -> Entries:
    """Return the last lines of a manifest. readers: with the ids of episodes whose videos are kept; None: all.

    A writer that died stays known to have died: there is no "closed" line.
    """
    kept: Entries = []
    has_died = False
    for reader, ids in readers:
        entries = entries_of(reader)
        kept += [
            entry for entry in entries if ids is None or entry.get("type") != "video" or entry.get("episode") in ids
        ]
        has_died |= not reader.alive and all(entry.get("type") != "closed" for entry in entries)
    if has_died:
        return [entry for entry in kept if entry.get("type") != "closed"]
    return [*kept, {"type": "closed"}]


def _deselect_duplicates(several: list[Selection]) -> int:
    """Deselect repeated episodes of a writer; return their number. Raises TraceError where they differ."""
    first = several[0]
    known: dict[tuple[int, int], list[tuple[Selection, int]]] = {}  # runs of one episode may begin with the same step
    places, packed, lengths = _SharedPlaces(), dict[int, list[bytes]](), dict[int, Array]()
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
        packed[id(one)], lengths[id(one)] = _packed_rows(table), table["steps"].copy()
        for row, episode, step in zip(rows, table["episode_id"][rows].tolist(), table["first_step"][rows].tolist()):
            there = known.setdefault((episode, step), [])
            if not there or there[0][0] is one:
                there.append((one, row))
            else:
                steps = table["steps"][row]
                alike = [pair for pair in there if lengths[id(pair[0])][pair[1]] == steps]
                other, place = (alike or there)[0]
                same = packed[id(other)][place] == packed[id(one)][row]
                if not (same and places.are_same(other.reader, place, one.reader, row)):
                    _compare(other, place, one, row)
                one.rows[row] = False
                duplicates += 1
    return duplicates


class _SharedPlaces:
    """Finds chunks of several traces that are copies of each other, so that they are compared without decoding."""

    def __init__(self) -> None:
        self._chunks: dict[Any, int] = {}
        self._of: dict[int, Array] = {}
        self._checked: set[int] = set()

    def are_same(self, one: WriterReader, row: int, other: WriterReader, other_row: int) -> bool:
        """Return True if two episodes are in the same chunks; reads the chunks of the first to be sure.

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
                for batch, i in reader.chunk_positions
            ]
            each = np.diff(bounds)
            within = np.arange(len(reader.fragments)) - np.repeat(bounds[:-1], each)
            self._of[id(reader)] = np.repeat(np.array(numbers, np.int64), each) << 32 | within
        return self._of[id(reader)]


def _compare(one: Selection, row: int, other: Selection, other_row: int) -> None:
    """Raise TraceError unless an episode is the same in both traces, bit for bit."""
    (a,), (b,) = one.reader.parts.table(slice(row, row + 1)), other.reader.parts.table(slice(other_row, other_row + 1))
    names = [
        name for name in a.dtype.names if name not in ("index", "writer") and a[name].tobytes() != b[name].tobytes()
    ]
    if not names:
        pair = one.trace[int(one.indices[row])], other.trace[int(other.indices[other_row])]
        names = [name for name in (*_RESET_FIELDS, *_STEP_COLUMNS) if not _same(pair, name)]
        names += [] if pack_lenient(infos_of(pair[0]))[0] == pack_lenient(infos_of(pair[1]))[0] else ["infos"]
    if names:
        raise TraceError(
            f"episode {a['episode_id']} of {one.reader.writer} is in {one.trace.directory} and in "
            f"{other.trace.directory}, with different {', '.join(names)}; remove it from one of them with 'edit filter'"
        )


def _packed_rows(table: Array) -> list[bytes]:
    """Return each episode's row without its index, which depends on the chunk with its end."""
    without = table.copy()
    without["index"] = without["writer"] = 0
    rows: list[bytes] = without.view(f"V{without.itemsize}").tolist()
    return rows


def _same(pair: tuple[Episode, Episode], name: str) -> bool:
    one, other = (pack_lenient(getattr(episode, name))[0] for episode in pair)
    return one == other
