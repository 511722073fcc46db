"""What the values of columns are like, read chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gym_trace.model.layout import Leaf, Path, PlainSpace
from gym_trace.model.values import Array
from gym_trace.playback.episode_table import step_offsets
from gym_trace.playback.trace import Trace
from gym_trace.playback.writer_reader import StoredWriter
from gym_trace.statistics.accumulators import LeafValues, Rewards

_VALUES = frozenset(("observations", "actions", "rewards"))


class ColumnValues:
    """What the rewards, actions and observations of one group of episodes are like."""

    def __init__(self) -> None:
        self._rewards = Rewards()
        self._leaves: dict[Any, LeafValues] = {}

    def add(self, leaves: list[tuple[Leaf, PlainSpace]], columns: dict[Path, Array]) -> None:
        for leaf, space in leaves:
            if leaf.path in columns:
                self._of(LeafValues(leaf, space)).add(columns[leaf.path])
        if ("rewards",) in columns:
            self._rewards.add(columns["rewards",])

    def merge(self, other: ColumnValues) -> None:
        self._rewards.merge(other._rewards)
        for values in other._leaves.values():
            self._of(LeafValues(values.leaf, values.space)).merge(values)

    def _of(self, empty: LeafValues) -> LeafValues:
        """Those of this leaf so far. Writers of other environments may have a leaf of this name and another kind."""
        return self._leaves.setdefault(empty.key, empty)

    def result(self) -> dict[str, Any]:
        described: dict[str, Any] = {"rewards": self._rewards.result(), "actions": [], "observations": []}
        for values in self._leaves.values():
            described[str(values.leaf.path[0])].append(values.result())
        return described


def describe_columns(
    trace: Trace, groups: int, group_of_part: Array, on_progress: Callable[[int, int], None] | None
) -> list[ColumnValues]:
    """What the values of each group are like. Raises CorruptTrace.

    Goes through the chunks, not the episodes: an episode of images may be larger than the memory.

    Args:
        group_of_part: to which of the groups each row of trace.episodes belongs.
        on_progress: called with the steps done and all there are.
    """
    described = [ColumnValues() for _ in range(groups)]
    total = sum(int(writer.fragments["steps"].sum()) for writer in trace.stored)
    done = 0
    for number, writer in enumerate(trace.stored):
        if writer.damage:
            raise writer.damage[0].error()
        mine = np.flatnonzero(trace.episodes["writer"] == number)
        own = np.full(len(writer.parts.table), -1)
        own[trace.rows[mine]] = group_of_part[mine]
        leaves = _leaves_of(writer) if writer.chunk_count else []
        for group, columns, steps in _grouped_chunks(writer, own):
            described[group].add(leaves, columns)
            done += steps
            if on_progress is not None:
                on_progress(done, total)
    return described


def _leaves_of(writer: StoredWriter) -> list[tuple[Leaf, PlainSpace]]:
    spaces = (leaf for name in ("action_space", "observation_space") for leaf in _leaf_spaces(writer.schema[name]))
    return list(zip([*writer.layouts.actions.leaves(), *writer.layouts.observations.leaves()], spaces))


def _leaf_spaces(space: PlainSpace) -> Iterator[PlainSpace]:
    if space["type"] == "Dict":
        for _, child in space["spaces"]:
            yield from _leaf_spaces(child)
    elif space["type"] == "Tuple":
        for child in space["spaces"]:
            yield from _leaf_spaces(child)
    else:
        yield space


def _grouped_chunks(writer: StoredWriter, group_of_part: Array) -> Iterator[tuple[int, dict[Path, Array], int]]:
    """(group, columns, steps) of each chunk, once for each group that it has rows of."""
    parts = writer.parts
    # Of a step whose leading observation is lost nothing is known for sure: as in Episode, it is left out.
    trimmed = np.zeros(len(writer.fragments), bool)
    trimmed[parts.fragments[parts.first[:-1][parts.trimmed]]] = True
    for number in range(writer.chunk_count):
        begin, end = writer.chunk_bounds[number : number + 2].tolist()
        rows = parts.of_fragment[begin:end]
        groups = np.where(rows >= 0, group_of_part[rows], -1) if len(group_of_part) else np.full(len(rows), -1)
        if not (groups >= 0).any():  # of episodes that are not in the view, or nothing but marks
            continue
        chunk = writer.chunk(number, _VALUES)
        observations, steps = step_offsets(writer.fragments[begin:end])
        of_observation, of_step = np.repeat(groups, np.diff(observations)), np.repeat(groups, np.diff(steps))
        of_step[steps[:-1][trimmed[begin:end]]] = -1
        for group in np.unique(groups[groups >= 0]).tolist():
            chosen = {True: of_observation == group, False: of_step == group}
            columns = {}
            for path in chunk.columns:
                mask = chosen[path[0] == "observations"]
                array = chunk.array(path)
                columns[path] = array if mask.all() else array[mask]
            yield group, columns, int(np.count_nonzero(chosen[False]))
