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
from gym_trace.playback.episode_index import index_of, whole_of
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
    for reader in index_of(found).readers:
        for damage in reader.damage:
            raise damage.error()
    return found


def selections_of(trace: Trace, chosen: Array | None = None) -> tuple[list[Selection], int]:
    """Return the selection of a trace or view by writer, and the count of running episodes that are skipped.

    chosen: (len(trace),) bool, the wanted episodes; None: all, and the writers without episodes.
    """
    ended = outcome_codes(index_of(trace)) != Outcome.RUNNING
    wanted = ended if chosen is None else ended & chosen
    selections = []
    for number, reader in enumerate(index_of(trace).readers):
        own = np.flatnonzero(index_of(trace)["writer"] == number)
        rows = np.zeros(len(reader.parts), np.bool_)
        indices = np.full(len(rows), -1)
        rows[index_of(trace).rows[own]] = wanted[own]
        indices[index_of(trace).rows[own]] = own
        if rows.any() or (chosen is None and not len(rows)):
            selections.append(Selection(trace, reader, rows, indices))
    return selections, int(np.count_nonzero(~ended if chosen is None else ~ended & chosen))


def outputs_of(selections: list[Selection], report: EditReport) -> list[Output]:
    """Return the files to write for these selections, with each episode once. Origins stay in one file if possible.

    Raises TraceError for an episode, or a writer, that differs between two traces.
    """
    by_writer: dict[str, list[Selection]] = {}
    for selection in selections:
        by_writer.setdefault(selection.reader.writer, []).append(selection)
    for group in by_writer.values():
        report.duplicates += _deselect_duplicates(group)
    by_files: dict[int, list[Selection]] = {}  # selected origins, by the reader of their files
    for selection in (selection for group in by_writer.values() for selection in group):
        if selection.reader.share is not None:
            by_files.setdefault(id(selection.reader.share.stored), []).append(selection)
    names, joined, outputs = set(by_writer), set[str](), []
    for origins in by_files.values():
        source, readers = _joined_origins(origins), index_of(whole_of(origins[0].trace)).readers
        stored = source.reader
        writers = {reader.writer for reader in readers if reader.share is not None and reader.share.stored is stored}
        are_only_here = all(len(by_writer.get(writer, [])) < 2 for writer in writers)
        if are_only_here and len(origins) > 1 and stored.writer not in names:
            names.add(stored.writer)
            joined |= writers
            outputs.append(_output_of_origins(source, origins))
    return outputs + [_output_of_writer(group) for writer, group in by_writer.items() if writer not in joined]


def _joined_origins(origins: list[Selection]) -> Source:
    """Return the episodes of several origins of the same files."""
    sources = [source_of(selection) for selection in origins]
    return sources[0]._replace(
        rows=np.logical_or.reduce([source.rows for source in sources]),
        indices=np.maximum.reduce([source.indices for source in sources]),
        numbers=None,
    )


def _output_of_origins(source: Source, origins: list[Selection]) -> Output:
    """Return an output with several origins of the same files; they keep their numbers."""
    shares = [selection.reader.share for selection in origins]
    numbers = {share.number for share in shares if share is not None}
    schema = changed_schema(schema_of(source.reader), numbers=numbers)
    return Output(schema, [source], _closing_entries([(source.reader, None)]), origins)


def _output_of_writer(group: list[Selection]) -> Output:
    """Return an output for one writer. group: its episodes, perhaps from several traces."""
    readers = [(reader, set(reader.parts.column("episode_id", rows).tolist())) for _, reader, rows, _ in group]
    return Output(schema_of(group[0].reader), list(map(source_of, group)), _closing_entries(readers), group)


def _closing_entries(readers: Iterable[tuple[WriterReader, Collection[int] | None]]) -> Entries:
    """Return the last lines of a manifest. readers: with the ids of episodes whose videos are listed; None: all.

    If a writer is dead, there is no "closed" line, so that it still counts as dead.
    """
    closing: Entries = []
    has_died = False
    for reader, ids in readers:
        entries = entries_of(reader)
        closing += [
            entry for entry in entries if ids is None or entry.get("type") != "video" or entry.get("episode") in ids
        ]
        has_died |= not reader.alive and all(entry.get("type") != "closed" for entry in entries)
    if has_died:
        return [entry for entry in closing if entry.get("type") != "closed"]
    return [*closing, {"type": "closed"}]


def _deselect_duplicates(group: list[Selection]) -> int:
    """Deselect repeated episodes of a writer; return their number. Raises TraceError where they differ."""
    if len(group) == 1:
        return 0
    first = group[0]
    # by id and first step: the rows of the first selection that has them; runs of an episode may share a first step
    known: dict[tuple[int, int], list[tuple[Selection, int]]] = {}
    shared, packed, lengths = _SharedChunks(), dict[int, list[bytes]](), dict[int, Array]()
    duplicates = 0
    for selection in group:
        if selection is not first and not are_alike(schema_of(selection.reader), schema_of(first.reader)):
            raise TraceError(
                f"writer {first.reader.writer} is in {first.trace.directory} and in {selection.trace.directory}, with "
                "different metadata: not parts of one recording; cannot merge"
            )
        rows, table = np.flatnonzero(selection.rows).tolist(), selection.reader.parts.table()
        packed[id(selection)], lengths[id(selection)] = _packed_rows(table), table["steps"].copy()
        for row, episode, step in zip(rows, table["episode_id"][rows].tolist(), table["first_step"][rows].tolist()):
            candidates = known.setdefault((episode, step), [])
            if not candidates or candidates[0][0] is selection:
                candidates.append((selection, row))
                continue
            steps = table["steps"][row]
            as_long = [pair for pair in candidates if lengths[id(pair[0])][pair[1]] == steps]
            other, other_row = (as_long or candidates)[0]
            is_same = packed[id(other)][other_row] == packed[id(selection)][row]
            if not (is_same and shared.are_same(other.reader, other_row, selection.reader, row)):
                _compare(other, other_row, selection, row)
            selection.rows[row] = False
            duplicates += 1
    return duplicates


class _SharedChunks:
    """Finds chunks of several traces that are copies of each other, so that they are compared without decoding."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # by file id and index entry: number of a chunk; copies have the same number
        self._fragments: dict[int, Array] = {}  # by reader: number of the chunk of each fragment << 32 | index in it
        self._checked: set[int] = set()  # numbers of chunks

    def are_same(self, one: WriterReader, row: int, other: WriterReader, other_row: int) -> bool:
        """Return True if two episodes are in the same chunks; reads the chunks of the first to be sure.

        Raises CorruptTrace.
        """
        fragments = self._fragments_of_episode(one, row)
        other_fragments = self._fragments_of_episode(other, other_row)
        if fragments is None or other_fragments is None or fragments.tobytes() != other_fragments.tobytes():
            return False
        for number in np.unique(fragments >> 32).tolist():
            if number not in self._checked:
                fragment = int(np.flatnonzero(self._fragments_of(one) >> 32 == number)[0])
                one.read_chunk(int(np.searchsorted(one.chunk_bounds, fragment, side="right")) - 1)
                self._checked.add(number)
        return True

    def _fragments_of_episode(self, reader: WriterReader, row: int) -> Array | None:
        """Return the fragments of an episode and the one with its start; None if the episode cannot be shared."""
        parts = reader.parts
        if not reader.has_own_files or parts.starts[row] < 0:
            return None
        own = parts.fragments[parts.first[row] : parts.first[row + 1]]
        fragments: Array = self._fragments_of(reader)[np.append(own, parts.starts[row])]
        return fragments

    def _fragments_of(self, reader: WriterReader) -> Array:
        if id(reader) not in self._fragments:
            bounds = reader.chunk_bounds
            numbers = [
                self._numbers.setdefault((batch.header.file_id, *batch.chunks[i].tolist()), len(self._numbers))
                for batch, i in reader.chunk_positions
            ]
            counts = np.diff(bounds)
            indices = np.arange(len(reader.fragments)) - np.repeat(bounds[:-1], counts)
            self._fragments[id(reader)] = np.repeat(np.array(numbers, np.int64), counts) << 32 | indices
        return self._fragments[id(reader)]


def _compare(one: Selection, row: int, other: Selection, other_row: int) -> None:
    """Raise TraceError unless an episode is the same in both traces, bit for bit."""
    (a,), (b,) = one.reader.parts.table(slice(row, row + 1)), other.reader.parts.table(slice(other_row, other_row + 1))
    compared = [name for name in a.dtype.names if name not in ("index", "writer")]
    names = [name for name in compared if a[name].tobytes() != b[name].tobytes()]
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
    """Return the row of each episode as bytes. Its index and writer number are 0, as they differ between traces."""
    comparable = table.copy()
    comparable["index"] = comparable["writer"] = 0
    rows: list[bytes] = comparable.view(f"V{comparable.itemsize}").tolist()
    return rows


def _same(pair: tuple[Episode, Episode], name: str) -> bool:
    one, other = (pack_lenient(getattr(episode, name))[0] for episode in pair)
    return one == other
