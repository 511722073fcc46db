"""Runs of steps as columns, the blocks of a Scan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.format import wire
from gym_trace.format.batch_reader import Damage
from gym_trace.format.kernels import copy_runs
from gym_trace.playback.writer_reader import WriterReader

OnDamage = Callable[[Damage], None]

# Policies for an unknown last observation of an episode (Episode.has_final_observation is False).
KEPT = "kept"  # return the stored placeholder
OMITTED = "omitted"  # return one observation less
REPEATED = "repeated"  # repeat the observation before it
LEFT_OUT = "left out"  # skip the step that led to it; if that is terminated, as with REPEATED

STARTS = ("starts",)
FLAGS = {("terminations",): wire.TERMINATED, ("truncations",): wire.TRUNCATED}


_PER_RUN = ["row", "episode", "first_step", "has_initial", "opens", "closes", "final_known", "terminated", "truncated"]


@dataclass
class StepRuns:
    """n runs of steps, each of one episode, column by column. A longer episode continues in a later block.

    Attributes:
        reader: reader of the writer of all runs. writer: its index in content.readers.
        row: (n,) int64, row of the episode in reader.parts.
        episode: (n,) int64, index of the episode in the scanned content.
        first_step: (n,) int64, index in the whole episode of the first step of a run.
        has_initial: (n,) bool, True if the first observation of a run is the one before its first step. False: that one
            was the last of a run in an earlier block. With overlap=True, it is True for all.
        opens: (n,) bool, True for the first run of an episode, and for the first one after damage.
        closes: (n,) bool, True for the last run of an episode.
        final_known: (n,) bool, False if a run ends with the unknown final observation of its episode.
        terminated, truncated: (n,) bool, flags of the last step of a run.
        step_offsets, observation_offsets: (n + 1,) int64, where the rows of each run begin in columns; the last element
            is the number of rows.
        columns: (rows, ...) arrays by path: ("observations", ...), ("actions", ...), ("rewards",), ("infos",),
            ("annotations", name), ("terminations",), ("truncations",). Values of any type are objects; an annotation
            that a row lacks is ABSENT. Columns without rows are left out. Read-only: they are shared with the chunk.
        starts: packed reset records of the episodes that begin here, by row of reader.parts.
        branch_prefix: number of skipped steps that the episodes repeat of the episode they branched from.

    Examples:
        >>> def add(self, block):  # of a Rule
        ...     self.total += block.columns["rewards",].sum()
    """

    reader: WriterReader
    writer: int
    row: Array
    episode: Array
    first_step: Array
    has_initial: Array
    opens: Array
    closes: Array
    final_known: Array
    terminated: Array
    truncated: Array
    step_offsets: Array
    observation_offsets: Array
    columns: dict[Path, Array]
    starts: dict[int, bytes]
    branch_prefix: int

    def __len__(self) -> int:
        return len(self.row)

    @property
    def size(self) -> int:
        """Number of steps."""
        return int(self.step_offsets[-1])

    @property
    def lengths(self) -> Array:
        """(n,) int64, number of steps of each run."""
        return np.diff(self.step_offsets)

    @property
    def starts_at(self) -> Array:
        """(n,) int64, index of the first step of a run among the scanned steps of its episode."""
        first: Array = self.reader.parts.column("first_step", self.row)
        return self.first_step - np.maximum(first, self.branch_prefix)

    @cached_property
    def run_of_step(self) -> Array:
        """(steps,) int64, the run of each step."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def step(self) -> Array:
        """(steps,) int64, index of each step in its whole episode."""
        step: Array = np.repeat(self.first_step - self.step_offsets[:-1], self.lengths) + np.arange(self.size)
        return step

    @cached_property
    def rows_after(self) -> Array:
        """(steps,) int64, the row of the observation after each step. The row before it has the observation before the
        step, if overlap=True."""
        shift = self.observation_offsets[:-1] + self.has_initial - self.step_offsets[:-1]
        after: Array = np.repeat(shift, self.lengths) + np.arange(self.size)
        return after

    def offsets(self, path: Path) -> Array:
        """Return the offsets of the rows of each run in a column, (n + 1,) int64."""
        return self.observation_offsets if path[0] == "observations" else self.step_offsets

    def each(self) -> Iterator[StepRuns]:
        """Yield the runs one by one."""
        for i in range(len(self)):
            of_run, bounds = slice(i, i + 1), slice(i, i + 2)
            mine = {path: slice(*self.offsets(path)[bounds].tolist()) for path in self.columns}
            row = int(self.row[i])
            yield replace(
                self,
                **{name: getattr(self, name)[of_run] for name in _PER_RUN},
                step_offsets=self.step_offsets[bounds] - self.step_offsets[i],
                observation_offsets=self.observation_offsets[bounds] - self.observation_offsets[i],
                columns={path: rows[mine[path]] for path, rows in self.columns.items()},
                starts={row: self.starts[row]} if row in self.starts else {},
            )

    def place(self, path: Path, row: int) -> tuple[int, int]:
        """Return the episode and the step of a row of a column; the observation before the first step is step -1."""
        offsets = self.offsets(path)
        run = int(np.searchsorted(offsets, row, side="right")) - 1
        step = int(self.first_step[run]) + row - int(offsets[run])
        return int(self.episode[run]), step - (path[0] == "observations" and bool(self.has_initial[run]))


def beside_steps(runs: StepRuns, rows: Array, is_after: bool) -> Array:
    """Return the observation after each step, or the one before it, of a column of observations with overlap."""
    begins = runs.observation_offsets[:-1] + is_after
    if len(runs) == 1:
        return rows[int(begins[0]) :][: runs.size]
    found = np.empty((runs.size, *rows.shape[1:]), rows.dtype)
    copy_runs(rows, found, begins, runs.step_offsets[:-1], runs.lengths)
    return found


def raise_or_report(reader: WriterReader, on_damage: OnDamage | None) -> None:
    """Report the missing and unreadable files of a writer. Without on_damage, raise CorruptTrace for the first."""
    for damage in reader.damage:
        if on_damage is None:
            raise damage.error()
        on_damage(damage)


def damage_at(reader: WriterReader, number: int, problem: str) -> Damage:
    batch, i = reader.chunk_positions[number]
    start, length = (int(batch.chunks[name][i]) for name in ("offset", "length"))
    return Damage(str(batch.path), start, start + length, problem)
