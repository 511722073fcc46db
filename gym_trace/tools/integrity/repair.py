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
_LAST_STEP = (1 << 64) - 1  # largest step number of a fragment; malicious files reach it

__all__ = ["CheckReport", "LostChunk", "LostSteps", "RepairReport", "SalvagedSteps", "check_trace", "repair_trace"]


@dataclass
class RepairReport:
    """Result of repair_trace: kept and lost data.

    Attributes:
        destination: the repaired trace; it does not exist if `writers` is empty.
        found: report on the damaged trace. All readable data was kept, except `orphans`.
        losses: damage that cost steps, or may have. Other damage in `found` cost nothing.
        salvaged: steps that were kept without some of their columns, with salvage=True.
        orphans: readable steps that were skipped, because the observation before them is lost.
        writers: ids of the writers in the repaired trace; empty if no episode was readable.

    Examples:
        >>> report = gym_trace.repair_trace("traces/cartpole", "traces/copy")
        >>> report.found.damages, report.steps
        ([], 461)
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
        directory: a trace, its directory, or its storage; for a view, its whole trace is read. Writers may still be
            recording.
        on_progress: called periodically with the bytes done and the total.

    Raises:
        TraceNotFound: no trace in directory.
        UnsupportedTrace: the trace needs a newer gym-trace.

    Examples:
        >>> report = gym_trace.check_trace("traces/cartpole")
        >>> report.episodes, report.damages
        (20, [])
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

    Writers and episodes keep their ids. Batches of dead writers are sealed; their open episodes keep the outcome
    "lost". Memory does not grow with the trace's steps.

    Args:
        directory: a trace, its directory, or its storage; for a view, its whole trace is copied. Its writers must have
            ended.
        destination: a new or empty directory. It appears when it is complete, and never if no episode is readable.
        on_progress: called periodically with the bytes done and the total.
        salvage: keep the steps of damaged chunks, with their intact columns. Lost columns are filled with NaN for
            floats, and with ABSENT of gym_trace.data.values for other values, as arrays of objects; lost annotations
            are omitted. Episodes whose reset records are lost have neither seed nor start. The fact "salvaged" of the
            new trace names the columns, episodes and steps.

    Raises:
        TraceNotFound: no trace in directory.
        TraceExists: destination is not empty.
        InvalidOption: destination lies in directory.
        TraceError: a writer is still recording.
        UnsupportedTrace: the trace needs a newer gym-trace.
        RecordingError: the copy could not be written.

    Examples:
        >>> report = gym_trace.repair_trace("traces/cartpole", "traces/repaired")
        >>> report.steps, report.losses
        (461, [])
    """
    source, target = storage_of(directory), Path(destination)
    found = CheckReport()
    writers = list(examinations(source, found, on_progress, salvage))
    for examination in writers:
        if examination.files.is_alive():
            raise TraceError(f"{examination.files.where}: this writer is still recording; repair when it has ended")
    report = RepairReport(target, found)
    try:
        with suppress(_NoEpisodes), new_directory(target, source.root) as staged:
            storage = StagedStorage(staged)
            for examination in writers:
                _copy_writer(examination, storage, report)
            if facts := _facts(source, found) | _salvage_facts(report.salvaged):
                write_facts(storage, facts)
            if not found.episodes:
                report.writers.clear()
                raise _NoEpisodes
    except TraceError:
        raise
    except OSError as error:
        raise RecordingError(f"{target}: the repaired trace could not be written: {error}") from error
    return report


def _salvage_facts(salvaged: list[SalvagedSteps]) -> Facts:
    """Return the facts of the new trace about lost values."""
    runs = [{"columns": chunk.columns, **steps._asdict()} for chunk in salvaged for steps in chunk.steps]
    if not runs:
        return {}
    more = {"more": len(runs) - _MOST_SALVAGED_RUNS} if len(runs) > _MOST_SALVAGED_RUNS else {}
    return {"salvaged": {"note": _SALVAGED, "steps": runs[:_MOST_SALVAGED_RUNS], **more}}


class _NoEpisodes(Exception):
    """No episode is readable, so no trace is written."""


def _facts(storage: ReadStorage, found: CheckReport) -> Facts:
    try:
        return read_facts(storage)
    except CorruptTrace as error:
        found.damages.append(Damage(str(error.path), 0, 0, error.problem))
        return {}


# ---------------------------------------------------------------------------------------------------------------------
# Writing the copy


def _copy_writer(examination: Examination, storage: Storage, report: RepairReport) -> None:
    schema = examination.schema
    writer = None
    if schema is not None:
        schema["writer"] = examination.files.writer  # file names decide about the id
        writer = BatchFiles(storage, schema, LEVEL, fsync=False)
    try:
        repairer = _ChunkRepairer(examination)
        repaired = (repairer.repaired(fragments, chunk) for fragments, chunk in examination.chunks())
        if writer is not None:
            rewrite(repaired, writer)
        else:
            assert not list(repaired)  # without a schema, no chunk is readable
        examination.finish()
        if writer is not None:
            stops, pending = repairer.stops(), [action.described() for action in examination.pending]
            if len(stops) or pending:
                writer.write(stops, {}, pending=pending)
            writer.close(_closing_fields(examination.files))
            report.writers += [origin.writer for origin in examination.origins if origin] or [writer.writer]
    finally:
        if writer is not None:
            writer.detach()
    report.losses += examination.losses
    report.orphans += repairer.orphans
    report.salvaged += examination.salvaged


def _closing_fields(files: WriterFiles) -> dict[str, Any]:
    """Return the data of the last line of the manifest, such as counts of reward classes."""
    last: dict[str, Any] = {}
    for entry in files.entries():
        last = entry if entry.get("type") == "closed" else last
    return {key: value for key, value in last.items() if key not in ("type", "episodes", "steps")}


class _Run(NamedTuple):
    """Run of steps of an episode that has not ended. continues: False after a fragment with the flag STOPS."""

    next_step: int
    lane: int
    continues: bool


class _ChunkRepairer:
    """Makes the readable chunks consistent with each other.

    If the fragment before a fragment is lost, so is the observation before its first step. Such a fragment is an
    orphan: its first step is skipped, and the observation after this step becomes its initial one.
    """

    def __init__(self, examination: Examination):
        self.orphans: list[LostSteps] = []
        self._examination = examination
        self._runs: dict[int, _Run] = {}  # by episode that has not ended
        self._ended: dict[int, tuple[int, int]] = {}  # by lane: (last episode that has ended, its next step)

    def repaired(self, fragments: Array, chunk: Chunk) -> SourceChunk:
        """Return a chunk to write, consistent with the chunks before it."""
        broken, orphans = self._track_runs(fragments)
        changed: dict[ColumnPath, RowsOrEncoded] = {}
        if orphans:
            bounds = step_offsets(fragments["steps"], fragments["flags"])[1]
            for path in chunk.columns:
                if path[0] in STEP_COLUMNS:
                    changed[path] = _without(*chunk.encoded(path), bounds[orphans])
            sums = _sums_without_first(chunk.array(("rewards",)), bounds, orphans)
            fragments = self._without_first_steps(fragments, orphans, sums)
        if not self._examination.origins:
            return SourceChunk(np.concatenate([_stop_fragments(broken), fragments]), chunk.only, changed=changed)
        numbers = fragments["episode"] >> np.uint64(ID_BITS)
        last = int(numbers.max(initial=0))
        ended = [(episode, run) for episode, run in self._runs.items() if episode >> ID_BITS < last]
        for episode, _ in ended:
            del self._runs[episode]
        ended = [(episode, run) for episode, run in ended if run.continues]
        # Fragments of an origin lie together: its stops come before the fragments of the next one.
        joined = np.concatenate([_stop_fragments(broken), fragments, _stop_fragments(ended)])
        joined = joined[np.argsort(joined["episode"] >> np.uint64(ID_BITS), kind="stable")]
        return SourceChunk(joined, chunk.only, changed=changed)

    def stops(self) -> Array:
        """Return fragments that end the open runs; their episodes have no outcome."""
        return _stop_fragments([(episode, run) for episode, run in self._runs.items() if run.continues])

    def _track_runs(self, fragments: Array) -> tuple[list[tuple[int, _Run]], list[int]]:
        """Return the runs whose next steps are lost, and the indices of orphans."""
        broken, orphans = [], []
        rows = fragments[["episode", "first_step", "steps", "lane", "flags"]].tolist()
        for i, (episode, first, steps, lane, flags) in enumerate(rows):
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
        """Add the missing steps before a fragment to the last loss whose steps are unknown."""
        loss = self._examination.last_inexact
        start = 0 if run is None else run.next_step
        if loss is not None and start < end:
            loss.steps.append(self._examination.lost_steps(episode, start, end - start))

    def _without_first_steps(self, fragments: Array, orphans: list[int], reward_sums: Sequence[float]) -> Array:
        """Return the fragments with the first step of each orphan skipped. reward_sums: new sums of the orphans."""
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


def _stop_fragments(runs: list[tuple[int, _Run]]) -> Array:
    """Return fragments without rows that mark these runs as complete."""
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
