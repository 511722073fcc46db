"""Check and repair: every byte of a trace read, damage named, and what can be read copied to a clean trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.assembly import Layouts
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TraceError, TraceExists, TraceNotFound
from gym_trace.format import wire
from gym_trace.format.batch import PART, BatchReader, Chunk, Damage
from gym_trace.format.codec import MSGPACK, Column, decode, packed_values
from gym_trace.format.directory import WriterFiles, batch_name, find_writers
from gym_trace.format.inspection import BatchInspector
from gym_trace.format.journal import ManifestCheck
from gym_trace.format.manifest import read_manifest
from gym_trace.format.writer import Rows, TraceWriter
from gym_trace.table import step_offsets
from gym_trace.values import Array

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass
class RepairReport:
    """What repair_trace has kept and what is lost.

    Attributes:
        destination: the repaired trace.
        found: what was found in the damaged one; what of it can be read is what was kept, but for `orphans`.
        losses: damage that has cost steps, or may have. Damage in `found` that is not here cost nothing.
        orphans: steps that could be read and were left out, because the observation before them is lost.
        writers: ids of the writers that were kept.
    """

    destination: Path
    found: CheckReport
    losses: list[Loss] = field(default_factory=list)
    orphans: list[LostSteps] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many steps were kept."""
        return self.found.steps - sum(lost.steps for lost in self.orphans)


def check_trace(directory: str | os.PathLike[str], on_progress: Progress | None = None) -> CheckReport:
    """Reads every byte of a trace and compares all checksums. Never changes anything.

    Args:
        directory: of the trace. It may still be written to.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        TraceNotFound: there is no trace in directory.
        UnsupportedTrace: it needs a newer gym-trace.
    """
    report = CheckReport()
    for examination in examinations(Path(directory), report, on_progress):
        for _ in examination.chunks():
            pass
        examination.finish()
    return report


def repair_trace(
    directory: str | os.PathLike[str], destination: str | os.PathLike[str], on_progress: Progress | None = None
) -> RepairReport:
    """Writes a clean copy of a trace, with all that can be read. Never changes the original.

    Every writer keeps its id and its episodes keep theirs. What a dead writer left open is sealed; its open episodes
    keep the outcome "lost". Memory does not grow with the trace's steps.

    Args:
        directory: of the trace. Its writers must have ended.
        destination: a new or empty directory.
        on_progress: called now and then with the bytes done and the bytes there are.

    Raises:
        TraceNotFound: there is no trace in directory.
        TraceExists: destination is not empty.
        InvalidOption: destination lies in directory.
        TraceError: a writer is still at it.
        UnsupportedTrace: it needs a newer gym-trace.
        RecordingError: the copy could not be written.
    """
    source, target = Path(directory), Path(destination)
    found = CheckReport()
    examinations = list(examinations(source, found, on_progress))
    for examination in examinations:
        if examination.files.is_alive():
            raise TraceError(f"{examination.files.manifest}: this writer is still recording; repair when it has ended")
    _make_empty(source, target)
    report = RepairReport(target, found)
    try:
        for examination in examinations:
            _copy(examination, report)
    except OSError as error:
        raise RecordingError(f"{target}: the repaired trace could not be written: {error}") from error
    return report


def _make_empty(source: Path, target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidOption(f"{target} lies in {source}, which is never changed; give a directory elsewhere")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise TraceExists(f"{target} is not empty; give a new directory for the repaired trace")
    except (FileExistsError, NotADirectoryError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceExists(f"{target} is a file; give a new directory for the repaired trace") from error


# ---------------------------------------------------------------------------------------------------------------------
# Writing the copy


def _copy(examination: Examination, report: RepairReport) -> None:
    schema = examination.schema()
    if schema is None:
        for _ in examination.chunks():
            pass
        examination.finish()
        report.losses += examination.losses
        return
    writer = TraceWriter(report.destination, {**schema, "writer": examination.files.writer}, level=3, fsync=False)
    try:
        mender = _Mender(examination, report)
        for fragments, chunk in examination.chunks():
            writer.write(*mender.mended(fragments, chunk))
            writer.seal_if_due()
        open_runs = mender.stops()
        if len(open_runs):
            writer.write(open_runs, {})
        examination.finish()
        report.losses += examination.losses
        report.writers.append(writer.writer)
        writer.close(_closing_words(examination.files))
    except BaseException:
        writer.abandon()
        raise


def _closing_words(files: WriterFiles) -> dict[str, Any]:
    """What the last line of the manifest says beside what the batches say, such as counts of reward classes."""
    if files.manifest is None:
        return {}
    last = next((entry for entry in read_manifest(files.manifest) if entry.get("type") == "closed"), {})
    return {key: value for key, value in last.items() if key not in ("type", "episodes", "steps")}


class _Mender:
    """Makes the chunks that are left consistent with each other.

    A fragment that went on where the fragment before it is lost has no leading observation: its first observation
    becomes the leading one, and its first step is left out.
    """

    def __init__(self, examination: Examination, report: RepairReport):
        self._examination = examination
        self._report = report
        self._open: dict[int, tuple[int, int]] = {}  # episode: the next step of its open run, and its lane

    def mended(self, fragments: Array, chunk: Chunk) -> tuple[Array, dict[Any, Rows]]:
        """A chunk to be written: its fragments, and its columns by path."""
        broken, orphans = self._follow(fragments)
        columns: dict[Any, Rows] = {path: chunk.encoded(path) for path in chunk.columns if path != ("fragments",)}
        if orphans:
            dropped = step_offsets(fragments)[1][orphans]
            for path in columns:
                if path[0] not in ("observations", "starts"):
                    columns[path] = _without(*chunk.encoded(path), dropped)
            fragments = self._adopted(fragments, orphans, columns)
        return np.concatenate([_bare_stops(broken), fragments]), columns

    def stops(self) -> Array:
        """Fragments that end the runs that are still open: what follows them is lost, the episode's outcome is too."""
        return _bare_stops([(episode, *run) for episode, run in self._open.items()])

    def _follow(self, fragments: Array) -> tuple[list[tuple[int, int, int]], list[int]]:
        """The runs that end here because what follows them is lost, and the fragments whose predecessors are lost."""
        broken, orphans = [], []
        for i, (episode, first, steps, lane, flags) in enumerate(
            fragments[["episode", "first_step", "steps", "lane", "flags"]].tolist()
        ):
            run = self._open.get(episode)
            leads = flags & wire.LEADS
            if steps and not leads and (run is None or run[0] != first):
                orphans.append(i)
                self._tell_gap(episode, 0 if run is None else run[0], first)
                if run is not None:
                    broken.append((episode, *run))
            if flags & (wire.STOPS | wire.ENDS):
                self._open.pop(episode, None)
            elif steps or leads:
                self._open[episode] = (first + steps, lane)
        return broken, orphans

    def _tell_gap(self, episode: int, start: int, end: int) -> None:
        """Adds steps that are missing to the last damage of which it is not known what it has cost."""
        loss = next((loss for loss in reversed(self._examination.losses) if not loss.exact), None)
        if loss is not None and end > start:
            loss.steps.append(LostSteps(self._examination.files.writer, episode, start, end - start))

    def _adopted(self, fragments: Array, orphans: list[int], columns: dict[Any, Rows]) -> Array:
        fragments = fragments.copy()
        for i in orphans:
            episode, first = int(fragments["episode"][i]), int(fragments["first_step"][i])
            self._report.orphans.append(LostSteps(self._examination.files.writer, episode, first, 1))
        fragments["flags"][orphans] |= wire.LEADS
        fragments["first_step"][orphans] += 1
        fragments["steps"][orphans] -= 1
        empty = [i for i in orphans if not fragments["steps"][i]]
        fragments["flags"][empty] &= ~np.uint32(wire.TERMINATED | wire.TRUNCATED)  # said at the step that is left out
        rewards = columns["rewards",]
        bounds = step_offsets(fragments)[1]
        for i in orphans:
            typed = isinstance(rewards, np.ndarray) and rewards.dtype.kind in "biuf" and rewards.ndim == 1
            some = rewards[bounds[i] : bounds[i + 1]] if typed else None  # type: ignore[call-overload]
            fragments["reward_sum"][i] = np.nan if some is None else some.sum(dtype=np.float64)
        return fragments


def _bare_stops(runs: list[tuple[int, int, int]]) -> Array:
    rows = [(episode, step, 0, lane, wire.STOPS, 0, 0.0, 0, 0, 0, 0, 0) for episode, step, lane in runs]
    return np.array(rows, wire.FRAGMENT)


def _without(column: Column, blob: bytes, dropped: Array) -> Rows:
    """The rows of a column but for those dropped."""
    if column.dtype != MSGPACK:
        return np.delete(decode(column, blob), dropped, axis=0)
    gone = set(dropped.tolist())
    return [value for i, value in enumerate(packed_values(column, blob)) if i not in gone]
