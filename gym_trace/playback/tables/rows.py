"""The tables of a trace, column by column: steps and episodes (docs/reference/formats/parquet.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.layout import Layout, Path, put_together
from gym_trace.data.values import Array, objects, row_of
from gym_trace.data.vocabulary import OUTCOMES
from gym_trace.playback.episode_index import RecordedEpisodes, index_of, writer_agreed_on
from gym_trace.playback.episode_table import OUTCOME_CODE, Columns, outcome_codes
from gym_trace.playback.scan import StepRuns
from gym_trace.playback.step_runs import beside_steps
from gym_trace.playback.tables.columns import NUMBER, ArrowColumn, list_of, table_column

TIME = pa.timestamp("us")  # UTC. Spark has no nanoseconds; DuckDB needs another package for time zones


class TableColumn(NamedTuple):
    """A column of one of the tables.

    Attributes:
        field: name and type.
        needs: columns of the trace that it is computed from.
        make: returns rows. Table of steps: make(runs), one row per step. Table of episodes: make(indices, runs), one
            row per episode; runs: the StepRuns that close the episodes if needs is not empty, otherwise None.
    """

    field: pa.Field
    needs: tuple[str, ...]
    make: Callable[..., pa.Array]


class Tables:
    """The columns of both tables of a trace.

    Args:
        trace: finished episodes with the same spaces.
        columns: the column of each leaf.
        episodes: columns of the episodes; their steps may be fewer than recorded. None: those of the trace.
        numbers: (episodes,) number of each episode in the tables. None: its index.
        has_next: True: add next_observation to steps. Files omit it, as the next row has it.
    """

    def __init__(
        self,
        trace: RecordedEpisodes,
        columns: Mapping[Path, ArrowColumn],
        episodes: Columns | None = None,
        numbers: Array | None = None,
        has_next: bool = False,
    ):
        self._trace, self._columns, self._numbers = trace, columns, numbers
        self._episodes: Columns = index_of(trace) if episodes is None else episodes
        self._known: dict[str, Array] = {}  # columns of the episodes
        self._layouts = writer_agreed_on(trace, "observation_space").layouts
        rewards = columns[("rewards",)]
        self._objectives = math.prod(rewards.shape) if rewards.kind == NUMBER and rewards.shape else 0
        self._has_next = has_next

    @cached_property
    def steps(self) -> list[TableColumn]:
        return list(self._step_columns())

    @cached_property
    def episodes(self) -> list[TableColumn]:
        return list(self._episode_columns())

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step_columns(self) -> Iterator[TableColumn]:
        episode = pa.field("episode", pa.int64(), nullable=False)
        yield TableColumn(episode, (), lambda runs: pa.array(np.repeat(self._number(runs.episode), runs.lengths)))
        yield TableColumn(pa.field("step", pa.int64(), nullable=False), (), lambda runs: pa.array(runs.step))
        yield from self._space_columns("observation", "observations", partial(beside_steps, is_after=False))
        yield from self._space_columns("action", "actions", lambda runs, rows: rows)
        rewards = self._columns[("rewards",)]
        if rewards.is_stored:
            yield TableColumn(
                rewards.field("reward"), ("rewards",), lambda runs: rewards.encoded(runs.columns[("rewards",)])
            )
        for name, root in (("terminated", "terminations"), ("truncated", "truncations")):
            yield TableColumn(pa.field(name, pa.bool_(), nullable=False), (root,), partial(_flags, root))
        if self._has_next:
            yield from self._space_columns("next_observation", "observations", partial(beside_steps, is_after=True))
        if (infos := self._columns.get(("infos",))) is not None:
            yield TableColumn(infos.field("info"), ("infos",), lambda runs: infos.encoded(_given(runs, infos.path)))
        annotations = sorted(c for path, c in self._columns.items() if path[0] == "annotations" and c.is_stored)
        if annotations:
            fields = [column.field(str(column.path[1])) for column in annotations]
            field = pa.field("annotations", pa.struct(fields), nullable=False)
            yield TableColumn(field, ("annotations",), partial(_annotations, annotations, fields))

    def _space_columns(self, name: str, root: str, choose: Callable[[StepRuns, Array], Array]) -> Iterator[TableColumn]:
        layout, columns = self._layout(root), self._columns
        made = table_column(name, layout, columns, (root,), None)
        if made is not None:  # arrays without elements are not written
            yield TableColumn(made[0], (root,), lambda runs: self._rows_of_space(name, root, runs, choose))

    def _rows_of_space(
        self, name: str, root: str, runs: StepRuns, choose: Callable[[StepRuns, Array], Array]
    ) -> pa.Array:
        layout = self._layout(root)
        whole: Path = (root,)
        if (
            whole in self._columns and whole not in runs.columns
        ):  # one JSON column; these rows have the structure of the space
            tree = put_together(layout, [runs.columns[leaf.path] for leaf in layout.leaves()])
            indices = range(int(runs.offsets(whole)[-1]))
            rows = {whole: choose(runs, objects([row_of(tree, index) for index in indices]))}
        else:
            rows = {path: choose(runs, rows) for path, rows in runs.columns.items() if path[0] == root}
        made = table_column(name, layout, self._columns, whole, rows)
        assert made is not None
        return made[1]

    def _layout(self, root: str) -> Layout:
        return self._layouts.observations if root == "observations" else self._layouts.actions

    def _number(self, indices: Array) -> Array:
        return indices if self._numbers is None else self._numbers[indices]

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _episode_columns(self) -> Iterator[TableColumn]:
        whole, text = pa.int64(), pa.string()
        readers = index_of(self._trace).readers
        has_large_seeds = bool((index_of(self._trace)["seed"] < -1).any())

        def column(name: str, kind: pa.DataType, make: Callable[[Array], Any], nullable: bool = True) -> TableColumn:
            field = pa.field(name, kind, nullable=nullable)
            return TableColumn(field, (), lambda indices, runs: pa.array(make(indices), kind))

        def choice(name: str, number: str, texts: Sequence[str | None], nullable: bool = True) -> TableColumn:
            chosen, field = pa.array(texts, text), pa.field(name, text, nullable=nullable)
            return TableColumn(field, (), lambda indices, runs: chosen.take(pa.array(self._values(number, indices))))

        yield column("episode", whole, self._number, False)
        yield column("steps", whole, partial(self._values, "steps"), False)
        yield TableColumn(
            pa.field("return", list_of(pa.float64()) if self._objectives else pa.float64()),
            (),
            lambda indices, _: self._returns(indices),
        )
        yield choice("outcome", OUTCOME_CODE, OUTCOMES, False)
        seeds = self._large_seeds if has_large_seeds else self._seeds
        yield column("seed", text if has_large_seeds else whole, seeds)
        yield column("options", text, self._options)
        for made in self._space_columns("final_observation", "observations", _last):
            yield made._replace(make=lambda _, runs, make=made.make: make(runs))
        yield column("has_final_observation", pa.bool_(), partial(self._values, "has_final_observation"), False)
        yield choice("environment", "writer", [reader.about.environment.get("id") for reader in readers])
        yield choice("split", "writer", [reader.split for reader in readers], False)
        metadata = [reader.metadata for reader in readers]
        yield choice("metadata", "writer", [None if it is None else json_text(tagged(it)) for it in metadata])
        yield choice("writer", "writer", [reader.writer for reader in readers], False)
        for name in ("episode_id", "lane", "first_step"):
            yield column(name, whole, partial(self._table_values, name, np.int64), False)
        for name in ("start_time", "end_time"):
            yield column(name, TIME, partial(self._table_values, name, "<M8[us]"))

    def _values(self, name: str, indices: Array) -> Array:
        """Return a column of the table of the episodes, or OUTCOME_CODE."""
        if name not in self._known:
            self._known[name] = outcome_codes(self._episodes) if name == OUTCOME_CODE else self._episodes[name]
        return self._known[name][indices]

    def _table_values(self, name: str, dtype: Any, indices: Array) -> Array:
        return np.asarray(self._values(name, indices), dtype)

    def _returns(self, indices: Array) -> pa.Array:
        if not self._objectives:
            return pa.array(self._values("return", indices), from_pandas=True)  # NULL for NaN
        steps, totals = self._values("steps", indices).tolist(), []
        for count, episode in zip(steps, self._trace.scan(columns=["rewards"], episodes=indices)):
            exported = episode[len(episode) - count :] if count < len(episode) else episode
            totals.append(np.ravel(exported.total_reward))
        known = [total.tolist() if len(total) == self._objectives else None for total in totals]
        return pa.array(known, list_of(pa.float64()))

    def _seeds(self, indices: Array) -> list[int | None]:
        return [None if seed < 0 else seed for seed in self._values("seed", indices).tolist()]

    def _large_seeds(self, indices: Array) -> list[str | None]:
        seeds = self._seeds(indices)
        large = [start.get("seed") for start in index_of(self._trace).starts_of(indices)]
        return [
            str(seed) if seed is not None else str(found) if isinstance(found, int) else None
            for seed, found in zip(seeds, large)
        ]

    def _options(self, indices: Array) -> list[str | None]:
        starts = index_of(self._trace).starts_of(indices).tolist()
        options = [start.get("options") if start else None for start in starts]
        return [None if given is None else json_text(tagged(given)) for given in options]


def _last(runs: StepRuns, rows: Array) -> Array:
    lasts: Array = rows[runs.observation_offsets[1:][runs.closes] - 1]
    return lasts


def _flags(root: str, runs: StepRuns) -> pa.Array:
    return pa.array(runs.columns.get((root,), np.empty(0, np.bool_)))


def _given(runs: StepRuns, path: Path) -> Array:
    return runs.columns[path] if path in runs.columns else objects([None] * runs.size)


def _annotations(annotations: list[ArrowColumn], fields: list[pa.Field], runs: StepRuns) -> pa.Array:
    arrays = [column.encoded(_given(runs, column.path)) for column in annotations]
    return pa.StructArray.from_arrays(arrays, fields=fields)
