"""Check and repair: read every byte of a trace, report damage, and copy readable data to a clean trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.origins import ID_BITS
from gym_trace.data.values import Array
from gym_trace.errors import CorruptTrace, RecordingError, TraceError
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles, RowsOrEncoded
from gym_trace.format.batch_reader import Chunk, Damage
from gym_trace.format.columns import MSGPACK, STEP_COLUMNS, Buffer, ColumnDescriptor, decode, packed_values
from gym_trace.format.columns import Path as ColumnPath
from gym_trace.format.directory import WriterFiles
from gym_trace.format.facts import Facts, read_facts, write_facts
from gym_trace.format.rewrite import LEVEL, SourceChunk, rewrite
from gym_trace.playback.episode_table import step_offsets
from gym_trace.playback.trace import TraceLike, storage_of
from gym_trace.storage.protocol import ReadStorage, Storage
from gym_trace.storage.staging import StagedStorage, new_directory
from gym_trace.tools.integrity.scan import (
    CheckReport,
    Examination,
    LostChunk,
    LostSteps,
    Progress,
    SalvagedSteps,
    examinations,
)

_MOST_SALVAGED_RUNS = 1000
_SALVAGED = "values of these columns are lost in these steps: NaN stands for floats, ABSENT for all else"
_LAST_STEP = (1 << 64) - 1  # largest step number of a fragment; only malicious ones are near

__all__ = ["CheckReport", "LostChunk", "LostSteps", "RepairReport", "SalvagedSteps", "check_trace", "repair_trace"]


@dataclass
class RepairReport:
    """Result of repair_trace: kept and lost data.

    Attributes:
        destination: the repaired trace; not there if writers is empty.
        found: what was found in the damaged trace. All that is readable of it was kept, except `orphans`.
        losses: damage that cost steps, or may have. Other damage in `found` cost nothing.
        salvaged: steps that were kept without some of their columns, with salvage=True.
        orphans: readable steps that were skipped, because the observation before them is lost.
        writers: ids of the writers that were kept; none if no episode was.
    """

    destination: Path
    found: CheckReport
    losses: list[LostChunk] = field(default_factory=list)
    orphans: list[LostSteps] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    salvaged: list[SalvagedSteps] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Number of steps kept."""
        return self.found.steps - sum(lost.steps for lost in self.orphans)


def check_trace(directory: TraceLike, on_progress: Progress | None = None) -> CheckReport:
    """Read every byte of a trace and compare all checksums. Never changes anything.

    Args:
        directory: of the trace, its storage, or the trace; of a view, all of it is read. It may still be written to.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        TraceNotFound: there is no trace in directory.
        UnsupportedTrace: it needs a newer gym-trace.
    """
    report, storage = CheckReport(), storage_of(directory)
    for examination in examinations(storage, report, on_progress):
        for _ in examination.chunks():
            pass
        examination.finish()
    _facts(storage, report)
    return report


def repair_trace(
    directory: TraceLike,
    destination: str | os.PathLike[str],
    on_progress: Progress | None = None,
    *,
    salvage: bool = False,
) -> RepairReport:
    """Write a clean copy of a trace, with all readable data. Never changes the original.

    Every writer keeps its id and its episodes keep theirs. What a dead writer left open is sealed; its open episodes
    keep the outcome "lost". Memory does not grow with the trace's steps.

    Args:
        directory: of the trace, its storage, or the trace; of a view, all of it is copied. Its writers must have ended.
        destination: a new or empty directory. It is there when it is complete, and not at all if no episode can be
            read.
        on_progress: called now and then with the bytes done and the bytes there are.
        salvage: keep the steps of a damaged chunk with the columns that are intact. In the others every value is NaN
            where they are floats, and ABSENT (of gym_trace.data.values) where not, in arrays of objects; there are no
            such annotations. Where it is lost how episodes began, they have neither seed nor start. The fact "salvaged"
            of the new trace names the columns, episodes and steps.

    Raises:
        TraceNotFound: there is no trace in directory.
        TraceExists: destination is not empty.
        InvalidOption: destination lies in directory.
        TraceError: a writer is still recording.
        UnsupportedTrace: it needs a newer gym-trace.
        RecordingError: the copy could not be written.
    """
    source, target = storage_of(directory), Path(destination)
    found = CheckReport()
    writers = list(examinations(source, found, on_progress, salvage))
    for examination in writers:
        if examination.files.is_alive():
            raise TraceError(f"{examination.files.where}: this writer is still recording; repair when it has ended")
    report = RepairReport(target, found)
    try:
        with suppress(_NothingKept), new_directory(target, source.root) as staged:
            storage = StagedStorage(staged)
            for examination in writers:
                _copy(examination, storage, report)
            if facts := _facts(source, found) | _salvage_facts(report.salvaged):
                write_facts(storage, facts)
            if not found.episodes:
                report.writers.clear()
                raise _NothingKept
    except TraceError:
        raise
    except OSError as error:
        raise RecordingError(f"{target}: the repaired trace could not be written: {error}") from error
    return report


def _salvage_facts(salvaged: list[SalvagedSteps]) -> Facts:
    """Return the facts of the new trace about lost values."""
    runs = [{"columns": one.columns, **steps._asdict()} for one in salvaged for steps in one.steps]
    if not runs:
        return {}
    more = {"more": len(runs) - _MOST_SALVAGED_RUNS} if len(runs) > _MOST_SALVAGED_RUNS else {}
    return {"salvaged": {"note": _SALVAGED, "steps": runs[:_MOST_SALVAGED_RUNS], **more}}


class _NothingKept(Exception):
    """No episode is readable, so no trace is written."""


def _facts(storage: ReadStorage, found: CheckReport) -> Facts:
    try:
        return read_facts(storage)
    except CorruptTrace as error:
        found.damages.append(Damage(str(error.path), 0, 0, error.problem))
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# Writing the copy


def _copy(examination: Examination, storage: Storage, report: RepairReport) -> None:
    schema = examination.schema
    writer = None
    if schema is not None:
        schema["writer"] = examination.files.writer  # file names decide about the id
        writer = BatchFiles(storage, schema, LEVEL, fsync=False)
    try:
        mender = _Mender(examination)
        mended = (mender.mended(fragments, chunk) for fragments, chunk in examination.chunks())
        if writer is not None:
            rewrite(mended, writer)
        else:
            assert not list(mended)  # without a schema, no chunk is readable
        examination.finish()
        if writer is not None:
            stops, pending = mender.stops(), [action.described() for action in examination.pending]
            if len(stops) or pending:
                writer.write(stops, {}, pending=pending)
            writer.close(_closing_fields(examination.files))
            report.writers += [origin.writer for origin in examination.origins if origin] or [writer.writer]
    finally:
        if writer is not None:
            writer.detach()
    report.losses += examination.losses
    report.orphans += mender.orphans
    report.salvaged += examination.salvaged


def _closing_fields(files: WriterFiles) -> dict[str, Any]:
    """Return the data of the last line of the manifest, such as counts of reward classes."""
    last: dict[str, Any] = {}
    for entry in files.entries():
        last = entry if entry.get("type") == "closed" else last
    return {key: value for key, value in last.items() if key not in ("type", "episodes", "steps")}


class _Run(NamedTuple):
    """Open run of steps of an episode: the index of its next step, and whether it continues."""

    next_step: int
    lane: int
    continues: bool


class _Mender:
    """Makes the readable chunks consistent with each other.

    A fragment whose predecessor is lost has no observation before its first step: its first observation becomes that
    one, and its first step is skipped.
    """

    def __init__(self, examination: Examination):
        self.orphans: list[LostSteps] = []
        self._examination = examination
        self._runs: dict[int, _Run] = {}  # by episode that has not ended
        self._ended: dict[int, tuple[int, int]] = {}  # by lane: (last episode that has ended, its next step)

    def mended(self, fragments: Array, chunk: Chunk) -> SourceChunk:
        """Return a chunk to write, consistent with those before it."""
        broken, orphans = self._follow(fragments)
        changed: dict[ColumnPath, RowsOrEncoded] = {}
        if orphans:
            bounds = step_offsets(fragments)[1]
            for path in chunk.columns:
                if path[0] in STEP_COLUMNS:
                    changed[path] = _without(*chunk.encoded(path), bounds[orphans])
            sums = _sums_without_first(chunk.array(("rewards",)), bounds, orphans)
            fragments = self._adopted(fragments, orphans, sums)
        if not self._examination.origins:
            return _whole(np.concatenate([_bare_stops(broken), fragments]), chunk, changed)
        numbers = fragments["episode"] >> np.uint64(ID_BITS)
        last = int(numbers.max(initial=0))
        ended = [(episode, run) for episode, run in self._runs.items() if episode >> ID_BITS < last]
        for episode, _ in ended:
            del self._runs[episode]
        ended = [(episode, run) for episode, run in ended if run.continues]
        # Fragments of an origin lie together: its stops come before the fragments of the next one.
        joined = np.concatenate([_bare_stops(broken), fragments, _bare_stops(ended)])
        return _whole(joined[np.argsort(joined["episode"] >> np.uint64(ID_BITS), kind="stable")], chunk, changed)

    def stops(self) -> Array:
        """Return fragments that end the open runs; their episodes have no outcome."""
        return _bare_stops([(episode, run) for episode, run in self._runs.items() if run.continues])

    def _follow(self, fragments: Array) -> tuple[list[tuple[int, _Run]], list[int]]:
        """Return the runs whose next steps are lost, and the fragments whose previous steps are lost."""
        broken, orphans = [], []
        facts = fragments[["episode", "first_step", "steps", "lane", "flags"]].tolist()
        for i, (episode, first, steps, lane, flags) in enumerate(facts):
            run = self._runs.get(episode)
            continues = run is not None and run.continues
            follows = run.next_step == first if run is not None else self._ended.get(lane) == (episode, first)
            if steps and not flags & wire.HAS_INITIAL and not follows and not self._examination.start_dropped(episode):
                orphans.append(i)
                self._report_gap(episode, run, first)
            if run is not None and continues and (flags & wire.HAS_INITIAL or i in orphans[-1:]):
                broken.append((episode, run))
            if flags & wire.ENDS:
                self._runs.pop(episode, None)
                self._ended[lane] = episode, first + steps
            elif steps or flags & wire.HAS_INITIAL:
                self._runs[episode] = _Run(first + steps, lane, not flags & wire.STOPS)
            elif run is not None and flags & wire.STOPS:
                self._runs[episode] = run._replace(continues=False)
        return broken, orphans

    def _report_gap(self, episode: int, run: _Run | None, end: int) -> None:
        """Add missing steps to the last damage with an unknown cost."""
        loss = self._examination.last_inexact
        start = 0 if run is None else run.next_step
        if loss is not None and start < end:
            loss.steps.append(self._examination.lost_steps(episode, start, end - start))

    def _adopted(self, fragments: Array, orphans: list[int], reward_sums: Sequence[float]) -> Array:
        fragments = fragments.copy()
        ids, steps = fragments["episode"][orphans].tolist(), fragments["first_step"][orphans].tolist()
        self.orphans += [self._examination.lost_steps(episode, first, 1) for episode, first in zip(ids, steps)]
        fragments["flags"][orphans] |= wire.HAS_INITIAL
        fragments["first_step"][orphans] += 1
        fragments["steps"][orphans] -= 1
        fragments["reward_sum"][orphans] = reward_sums
        empty = [i for i in orphans if not fragments["steps"][i]]
        fragments["flags"][empty] &= ~np.uint32(wire.TERMINATED | wire.TRUNCATED)  # flags of the step that is skipped
        return fragments


def _whole(table: Array, chunk: Chunk, changed: dict[ColumnPath, RowsOrEncoded]) -> SourceChunk:
    """Return a chunk that was read, to be rewritten with another table."""
    return SourceChunk(table, chunk.only, changed=changed)


def _bare_stops(runs: list[tuple[int, _Run]]) -> Array:
    """Return fragments without rows that mark runs of steps as complete."""
    stops = np.zeros(len(runs), wire.FRAGMENT)
    stops["flags"] = wire.STOPS
    for i, (episode, run) in enumerate(runs):
        stops["episode"][i], stops["lane"][i] = episode, run.lane
        stops["first_step"][i] = min(run.next_step, _LAST_STEP)
    return stops


def _without(column: ColumnDescriptor, blob: Buffer, dropped: Array) -> RowsOrEncoded:
    """Return the rows of a column without the dropped ones."""
    if column.dtype != MSGPACK:
        return np.delete(decode(column, blob), dropped, axis=0)
    is_dropped = set(dropped.tolist())
    return [value for i, value in enumerate(packed_values(column, blob)) if i not in is_dropped]


def _sums_without_first(rewards: Array, bounds: Array, fragments: list[int]) -> list[float]:
    """Return the sum of the rewards of each fragment without its first step; NaN if they are not numbers."""
    if rewards.ndim != 1 or rewards.dtype.kind not in "biuf":
        return [np.nan] * len(fragments)
    return [float(rewards[bounds[i] + 1 : bounds[i + 1]].sum(dtype=np.float64)) for i in fragments]
