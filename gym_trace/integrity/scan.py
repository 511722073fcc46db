"""Every byte of a trace read, writer by writer: the chunks that check, and what is damaged or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.batch_reader import PART, BatchReader, Chunk, Damage
from gym_trace.format.column_decoder import decode
from gym_trace.format.directory import WriterFiles, batch_name, find_writers
from gym_trace.integrity.batch_scan import BatchInspector
from gym_trace.integrity.manifest_check import MISSING, ManifestCheck, is_there
from gym_trace.integrity.salvage import STARTS_COLUMN, salvaged
from gym_trace.model.origins import Origin, origins_of, split_id
from gym_trace.model.schema import Layouts, WriterSchema
from gym_trace.model.values import Array
from gym_trace.reading.episode_table import step_offsets
from gym_trace.reading.origins import origin_numbers, origin_problem
from gym_trace.reading.ring_tail import RingTail, tail_of
from gym_trace.ring.pending import Pending, pending_in
from gym_trace.ring.recovered import read_ring
from gym_trace.storage.protocol import ReadStorage

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_MOST_TOLD = 8  # of the actions that were never answered, one a lane
STEP_COLUMNS = ("actions", "rewards", "infos", "annotations")  # columns with one row per step


class LostSteps(NamedTuple):
    """Steps of one episode that are not there any more."""

    writer: str
    episode_id: int
    first_step: int
    steps: int


class Loss(NamedTuple):
    """Cost of damage.

    exact: whether steps lists all of it. Otherwise it lists what the steps around the damage reveal.
    """

    damage: Damage
    steps: list[LostSteps]
    exact: bool


class SalvagedSteps(NamedTuple):
    """Steps that are kept without some of their columns.

    columns: those that are lost, such as "observations/position": NaN stands for floats, ABSENT for other values.
    """

    damage: Damage
    columns: list[str]
    steps: list[LostSteps]


@dataclass
class CheckReport:
    """Result of check_trace.

    Attributes:
        files, bytes: batches, and their bytes.
        chunks, episodes, steps: what can be read.
        damages: ranges of bytes that do not check, each with its file and the problem.
        remarks: what is worth knowing and no damage, such as the torn end that a killed writer leaves.
    """

    files: int = 0
    bytes: int = 0
    chunks: int = 0
    episodes: int = 0
    steps: int = 0
    damages: list[Damage] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def examinations(
    storage: ReadStorage, report: CheckReport, on_progress: Progress | None, salvage: bool = False
) -> Iterator[Examination]:
    """salvage: see Examination."""
    writers = find_writers(storage)
    if not writers:
        raise TraceNotFound(
            f"{storage.root}: no trace here; it has no *.manifest.jsonl and no *.gtb files", directory=storage.root
        )
    total = sum(_size(storage, name) for files in writers for name in files.batches.values())

    def advance(done: int) -> None:
        if on_progress is not None:
            on_progress(min(report.bytes + done, total), total)

    for files in writers:
        yield Examination(files, report, advance, salvage)


def _size(storage: ReadStorage, name: str) -> int:
    try:
        return storage.size(name)
    except FileNotFoundError:  # sealed under its other name since we saw it
        return 0


class Examination:
    """Goes through the files of one writer once, and keeps what it finds out in a report."""

    def __init__(self, files: WriterFiles, report: CheckReport, advance: Callable[[int], None], salvage: bool = False):
        """salvage: whether chunks() gives damaged chunks, too, with what is intact of them."""
        self.files = files
        self._storage = files.storage
        self.losses: list[Loss] = []
        self.salvaged: list[SalvagedSteps] = []
        self._salvage = salvage
        self.last_inexact: Loss | None = None  # the last of them of which steps does not name all
        self._report = report
        self._advance = advance
        self._alive = files.is_alive()
        self._journal = ManifestCheck(files)
        self._episodes: list[Array] = []
        self._tail = RingTail()
        self._last_origin = 0
        self.origins: list[Origin | None] = []  # of what its files hold, known once chunks() was begun
        self.pending: list[Pending] = []  # actions that were never answered

    def schema(self) -> dict[str, Any] | None:
        """Return the schema of the writer from the first place where it is readable."""
        for name in self.files.batches.values():
            try:
                schema = BatchReader(self._storage, name).schema
            except (CorruptTrace, FileNotFoundError):
                continue
            if schema is not None:
                return {key: value for key, value in schema.items() if key not in ("batch", "type")}
        first = next(self.files.entries(), {})
        return {key: value for key, value in first.items() if key != "type"} if first.get("type") == "writer" else None

    def chunks(self) -> Iterator[tuple[Array, Chunk]]:
        """The chunks that can be read whole, in order, each with its fragments."""
        schema = self.schema()
        self._journal.schema = schema
        try:
            layouts = None if schema is None else WriterSchema.of(schema).layouts
            self.origins = origins_of(schema or {}, self.files.writer)
            problem = "the schema is lost, and with it what the columns mean"
        except CorruptTrace as error:
            layouts, problem = None, error.problem
        self._read_ring()
        expected = 0
        for number, name in sorted(self.files.batches.items()):
            if number > expected:
                self._missing(range(expected, number))
            expected = number + 1
            if layouts is None:
                self._unreadable(name, problem)
            else:
                yield from self._batch(number, name, layouts)
        if layouts is not None:
            yield from self._ring(layouts)
        elif self._tail.slabs:
            self._lost(Damage(self._storage.path(self.files.ring), 0, 0, problem), [], exact=False)

    def finish(self) -> None:
        """Report the rest when all chunks were read."""
        report, journal = self._report, self._journal
        if self._alive:
            report.remarks.append(f"{self.files.where}: the writer is still recording")
        journal.compare(self._alive)
        report.damages += journal.damages
        report.remarks += journal.remarks
        for damage in journal.lost:
            self._lost(damage, [], exact=False)
        if self._episodes:
            report.episodes += len(np.unique(np.concatenate(self._episodes)))

    def _read_ring(self) -> None:
        """The ring, before the batches: what is in them by then is not in it any more."""
        if not self.files.has_ring:
            return
        try:
            image = read_ring(self._storage, self.files.writer, self._alive)
            last: dict[int, BatchReader] = {}  # those that tell what of the ring is in them
            for number, name in sorted(self.files.batches.items(), reverse=True):
                with suppress(CorruptTrace, FileNotFoundError):
                    last[number] = BatchReader(self._storage, name)
                    if last[number].slabs.complete:
                        break
            self._tail = tail_of(self.files, image, last)
        except CorruptTrace as error:
            path = self._storage.path(self.files.ring)
            self._lost(Damage(path, 0, _size(self._storage, self.files.ring), error.problem), [], exact=False)

    def _ring(self, layouts: Layouts) -> Iterator[tuple[Array, Chunk]]:
        batch, first = self._tail.batch, 0
        for number, count in enumerate(batch.chunks["fragments"].tolist() if batch is not None else ()):
            assert batch is not None
            fragments = batch.fragments[first : first + count]
            first += count
            try:
                chunk = batch.read_chunk(number, lambda path: True)
                _verify(chunk, fragments, layouts)
                self._verify_origins(fragments)
            except CorruptTrace as error:
                damage = Damage(batch.path, 0, _size(self._storage, self.files.ring), error.problem)
                self._lost(damage, self._steps(fragments), True)
            else:
                self._count(fragments)
                yield fragments, chunk
        if self._alive:
            return
        self.pending = self._tail.actions or self.pending
        steps = 0 if batch is None else int(batch.fragments["steps"].sum())
        if steps or self._tail.actions:
            self._report.remarks.append(
                f"{self.files.where}: the writer did not close; {steps:,} steps are in its ring"
            )
        for action in self._tail.actions[:_MOST_TOLD]:
            told = action.told(layouts.actions)
            self._report.remarks.append(f"{self.files.where}: the action that was being executed {told}")

    def _batch(self, which: int, name: str, layouts: Layouts) -> Iterator[tuple[Array, Chunk]]:
        try:
            batch = BatchInspector(self._storage, name)
        except FileNotFoundError:
            return  # sealed under its other name since we saw it, or removed
        except CorruptTrace as error:
            self._unreadable(name, error.problem)
            return
        for damage in _merged(batch.damage):
            self._walk_damage(batch, damage)
        if batch.torn:
            where = f"{batch.path}: its last {batch.torn} bytes are not a whole record"
            self._report.remarks.append(f"{where}; the writer died, or is still at it")
        elif not batch.has_end_name and not self._alive:
            self._report.remarks.append(f"{batch.path}: not sealed; the writer died")
        steps = ended = first = 0
        clean = not batch.damage
        for number, (offset, length, count, _) in enumerate(batch.chunks.tolist()):
            fragments = batch.fragments[first : first + count]
            first += count
            steps += int(fragments["steps"].sum())
            ended += int(np.count_nonzero(fragments["flags"] & wire.ENDS))
            if number >= self._tail.counts.get(which, len(batch.chunks)):
                continue  # of a slab that is in the ring
            self.pending = pending_in(batch.slabs.pending)
            try:
                chunk = batch.read_chunk(number, lambda path: True)
                _verify(chunk, fragments, layouts)
                self._verify_origins(fragments)
            except CorruptTrace as error:
                clean = False
                damage = Damage(batch.path, offset, offset + length, error.problem)
                if (kept := self._salvaged(batch, number, fragments, layouts, damage)) is not None:
                    self._count(fragments)
                    yield kept
                else:
                    self._lost(damage, self._steps(fragments), True)
            else:
                self._count(fragments)
                yield fragments, chunk
            self._advance(offset + length)
        self._journal.saw(batch, clean, ended, steps)
        self._report.files += 1
        self._report.bytes += batch.size
        self._advance(0)

    def _salvaged(
        self, batch: BatchReader, number: int, fragments: Array, layouts: Layouts, damage: Damage
    ) -> tuple[Array, Chunk] | None:
        """A damaged chunk with what is intact of it, if that is wanted and there is anything."""
        if not self._salvage:
            return None
        try:
            kept = salvaged(batch, number)
            if STARTS_COLUMN in kept.lost:  # how its episodes began is unknown
                fragments = fragments.copy()
                fragments["flags"] &= ~np.uint32(wire.STARTS)
            _verify(kept.chunk, fragments, layouts)
            self._verify_origins(fragments)
        except CorruptTrace:
            return None
        self._report.damages.append(damage)
        self.salvaged.append(
            SalvagedSteps(damage, ["/".join(map(str, path)) for path in kept.lost], self._steps(fragments))
        )
        return fragments, kept.chunk

    def _verify_origins(self, fragments: Array) -> None:
        """Raises CorruptTrace for fragments without a known writer."""
        if self.origins and len(fragments):
            if problem := origin_problem(fragments, self.origins, self._last_origin):
                raise CorruptTrace(problem)
            self._last_origin = int(origin_numbers(fragments)[-1])

    def _walk_damage(self, batch: BatchInspector, damage: Damage) -> None:
        """Damage outside of the columns: it may have cost chunks, or nothing but an index or padding."""
        fragments = batch.lost_fragments(damage)
        if batch.is_harmless(damage) or (fragments is not None and not len(fragments)):
            self._report.damages.append(damage)
        else:
            steps = [] if fragments is None else self._steps(fragments)
            self._lost(damage, steps, exact=fragments is not None)

    def _count(self, fragments: Array) -> None:
        carries = (fragments["steps"] > 0) | (fragments["flags"] & wire.LEADS > 0)
        self._episodes.append(np.unique(fragments["episode"][carries]))
        self._report.chunks += 1
        self._report.steps += int(fragments["steps"].sum())

    def _unreadable(self, name: str, problem: str) -> None:
        size, path = _size(self._storage, name), self._storage.path(name)
        self._report.files += 1
        self._report.bytes += size
        self._advance(0)
        if name.endswith(PART) and size < wire.HEADER_SIZE:
            self._report.remarks.append(f"{path}: nothing recorded; the writer died, or has just begun")
        else:
            self._lost(Damage(path, 0, size, problem), [], exact=False)

    def _missing(self, numbers: range) -> None:
        name = batch_name(self.files.writer, numbers[0])
        if not is_there(self._storage, name):
            more = f", and {len(numbers) - 1} after it" if len(numbers) > 1 else ""
            self._journal.missing.append(numbers)
            self._lost(Damage(self._storage.path(name), 0, 0, MISSING + more), [], exact=False)

    def _lost(self, damage: Damage, steps: list[LostSteps], exact: bool) -> None:
        self._report.damages.append(damage)
        self.losses.append(Loss(damage, steps, exact))
        if not exact:
            self.last_inexact = self.losses[-1]

    def _steps(self, fragments: Array) -> list[LostSteps]:
        some = fragments[fragments["steps"] > 0]
        return [self.lost_steps(*facts) for facts in some[["episode", "first_step", "steps"]].tolist()]

    def lost_steps(self, episode: int, first: int, steps: int) -> LostSteps:
        """Steps of an episode, by its id in the fragment table."""
        if not self.origins:
            return LostSteps(self.files.writer, episode, first, steps)
        number, own = split_id(episode)
        origin = self.origins[number] if number < len(self.origins) else None
        return LostSteps(self.files.writer if origin is None else origin.writer, own, first, steps)


def _merged(damages: list[Damage]) -> list[Damage]:
    """damages with those that overlap made one."""
    merged: list[Damage] = []
    for damage in sorted(damages, key=lambda d: (d.start, -d.end)):
        if merged and damage.start < merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(damage.end, merged[-1].end))
        else:
            merged.append(damage)
    return merged


def _verify(chunk: Chunk, fragments: Array, layouts: Layouts) -> None:
    """Decodes every column of a chunk. Raises CorruptTrace if one does not decode, is missing, or has too many rows."""
    observation_rows, steps = (int(offsets[-1]) for offsets in step_offsets(fragments))
    rows = {**dict.fromkeys(STEP_COLUMNS, steps), "observations": observation_rows}
    rows["starts"] = int(np.count_nonzero(fragments["flags"] & wire.STARTS))
    needed = [leaf.path for leaf in layouts.observations.leaves()] if observation_rows else []
    needed += [*(leaf.path for leaf in layouts.actions.leaves()), ("rewards",)] if steps else []
    for path in needed:
        if path not in chunk:
            raise CorruptTrace(f"a chunk lacks the column {'/'.join(map(str, path))}")
    for path, column in chunk.columns.items():
        if column.rows != rows.get(str(path[0]), column.rows):
            raise CorruptTrace(f"column {'/'.join(map(str, path))} has the wrong number of rows")
        decode(*chunk.encoded(path))
