"""The tables of a trace, column by column: steps and episodes (docs/reference/formats/parquet.md)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gym_trace.data.json_values import json_text, tagged, untagged
from gym_trace.data.layout import Layout, Path, put_together
from gym_trace.data.values import Array, objects, row_of
from gym_trace.exchange.formats.arrow.columns import NUMBER, Column, list_of, table_column
from gym_trace.exchange.formats.source import Source
from gym_trace.exchange.formats.steps.windows import Block

TIME = pa.timestamp("us")  # UTC. Spark has no nanoseconds, and DuckDB needs a package more for a time zone


class TableColumn(NamedTuple):
    """A column of one of the tables.

    needs: columns of the trace that it is made of.
    make: returns the rows: of the steps of a Block; or of the episodes at some places, with the Block that closes them
    if the column needs observations, else None.
    """

    field: pa.Field
    needs: tuple[str, ...]
    make: Callable[..., pa.Array]


class Tables:
    """The columns of both tables of a trace.

    columns: the form of each leaf. numbers: the number of the episode at each place of the source; None: the place.
    has_next: whether steps have next_observation, which files do without: it is in the next row, or the last one.
    """

    def __init__(
        self, source: Source, columns: Mapping[Path, Column], numbers: Array | None = None, has_next: bool = False
    ):
        self._source, self._columns, self._numbers = source, columns, numbers
        self._identified: tuple[Array, list[str]] | None = None
        rewards = columns[("rewards",)]
        self._objectives = math.prod(rewards.shape) if rewards.kind == NUMBER and rewards.shape else 0
        self.steps = list(self._of_steps(has_next))
        self.episodes = list(self._of_episodes())

    # -- steps --------------------------------------------------------------------------------------------------------

    def _of_steps(self, has_next: bool) -> Iterator[TableColumn]:
        episode = pa.field("episode", pa.int64(), nullable=False)
        yield TableColumn(episode, (), lambda block: pa.array(np.repeat(self._number(block.episodes), block.steps)))
        yield TableColumn(pa.field("step", pa.int64(), nullable=False), (), self._step)
        yield from self._of_space("observation", "observations", _before)
        yield from self._of_space("action", "actions", lambda block: slice(None))
        rewards = self._columns[("rewards",)]
        if rewards.is_there:
            yield TableColumn(
                rewards.field("reward"), ("rewards",), lambda block: rewards.encoded(block.columns[("rewards",)])
            )
        for name, root in (("terminated", "terminations"), ("truncated", "truncations")):
            yield TableColumn(pa.field(name, pa.bool_(), nullable=False), (root,), partial(_flags, root))
        if has_next:
            yield from self._of_space("next_observation", "observations", _after)
        if (infos := self._columns.get(("infos",))) is not None:
            yield TableColumn(infos.field("info"), ("infos",), lambda block: infos.encoded(_given(block, infos.path)))
        notes = sorted(c for path, c in self._columns.items() if path[0] == "annotations" and c.is_there)
        if notes:
            fields = [column.field(str(column.path[1])) for column in notes]
            field = pa.field("annotations", pa.struct(fields), nullable=False)
            yield TableColumn(field, ("annotations",), partial(_notes, notes, fields))

    def _of_space(self, name: str, root: str, which: Callable[[Block], Any]) -> Iterator[TableColumn]:
        layout, columns = self._layout(root), self._columns
        made = table_column(name, layout, columns, (root,), None)
        if made is not None:  # arrays without elements are not written
            yield TableColumn(made[0], (root,), lambda block: self._rows_of_space(name, root, block, which(block)))

    def _rows_of_space(self, name: str, root: str, block: Block, which: Any) -> pa.Array:
        layout = self._layout(root)
        whole: Path = (root,)
        if whole in self._columns and whole not in block.columns:  # JSON of what has the structure of its space
            tree = put_together(layout, [block.columns[leaf.path] for leaf in layout.leaves()])
            places = range(block.size + len(block.steps) * (root == "observations"))
            rows = {whole: objects([row_of(tree, place) for place in places])[which]}
        else:
            rows = {path: rows[which] for path, rows in block.columns.items() if path[0] == root}
        made = table_column(name, layout, self._columns, whole, rows)
        assert made is not None
        return made[1]

    def _layout(self, root: str) -> Layout:
        return self._source.layouts.observations if root == "observations" else self._source.layouts.actions

    def _number(self, places: Array) -> Array:
        return places if self._numbers is None else self._numbers[places]

    def _step(self, block: Block) -> pa.Array:
        places, source = block.episodes, self._source
        first = source.trace.content["first_step"][places] + source.repeated[places] + block.starts
        ends = np.cumsum(block.steps)
        return pa.array(np.repeat(first - (ends - block.steps), block.steps) + np.arange(block.size))

    # -- episodes -----------------------------------------------------------------------------------------------------

    def _of_episodes(self) -> Iterator[TableColumn]:
        whole, text = pa.int64(), pa.string()
        readers = self._source.trace.readers
        has_large_seeds = bool((self._source.trace.content["seed"] < -1).any())

        def column(name: str, kind: pa.DataType, make: Callable[[Array], Any], nullable: bool = True) -> TableColumn:
            field = pa.field(name, kind, nullable=nullable)
            return TableColumn(field, (), lambda places, block: pa.array(make(places), kind))

        def of_writers(name: str, texts: list[str | None], nullable: bool = True) -> TableColumn:
            return column(
                name, text, lambda places: [texts[i] for i in self._table(places)["writer"].tolist()], nullable
            )

        yield column("episode", whole, self._number, False)
        yield column("steps", whole, lambda places: self._table(places)["steps"], False)
        yield TableColumn(
            pa.field("return", list_of(pa.float64()) if self._objectives else pa.float64()),
            (),
            lambda places, _: self._returns(places),
        )
        yield column("outcome", text, lambda places: self._table(places)["outcome"].tolist(), False)
        seeds = self._large_seeds if has_large_seeds else self._seeds
        yield column("seed", text if has_large_seeds else whole, seeds)
        yield column("options", text, self._options)
        for made in self._of_space("final_observation", "observations", _last):
            yield made._replace(make=lambda _, block, make=made.make: make(block))
        yield column("has_final_observation", pa.bool_(), lambda at: self._table(at)["has_final_observation"], False)
        yield of_writers("environment", [reader.about.environment.get("id") for reader in readers])
        yield of_writers("split", [reader.split for reader in readers], False)
        metadata = [reader.metadata for reader in readers]
        yield of_writers("metadata", [None if it is None else json_text(tagged(it)) for it in metadata])
        yield of_writers("writer", [reader.writer for reader in readers], False)
        for name in ("episode_id", "lane", "first_step"):
            yield column(name, whole, partial(self._of_table, name, np.int64), False)
        for name in ("start_time", "end_time"):
            yield column(name, TIME, partial(self._of_table, name, "<M8[us]"))

    def _of_table(self, name: str, dtype: Any, places: Array) -> Array:
        return np.asarray(self._table(places)[name], dtype)

    def _table(self, places: Array) -> Array:
        return self._source.episodes[places]

    def _returns(self, places: Array) -> pa.Array:
        if not self._objectives:
            return pa.array(self._table(places)["return"], from_pandas=True)  # which has NULL for NaN
        scanned = map(self._source.new_steps, self._source.trace.scan(columns=["rewards"], episodes=places))
        totals = [np.ravel(episode.total_reward) for episode in scanned]
        known = [total.tolist() if len(total) == self._objectives else None for total in totals]
        return pa.array(known, list_of(pa.float64()))

    def identities(self, places: Array) -> list[str]:
        """Return the texts of Source.identities(), made once where several columns ask for them."""
        if self._identified is None or self._identified[0] is not places:
            self._identified = places, self._source.identities(places)
        return self._identified[1]

    def _seeds(self, places: Array) -> list[int | None]:
        return [None if seed < 0 else seed for seed in self._table(places)["seed"].tolist()]

    def _large_seeds(self, places: Array) -> list[str | None]:
        given = (untagged(json.loads(text).get("seed")) for text in self.identities(places))
        return [None if seed is None else str(seed) for seed in given]

    def _options(self, places: Array) -> list[str | None]:
        identities = self.identities(places)
        options = (json.loads(text).get("options") if '"options"' in text else None for text in identities)
        return [None if given is None else json_text(given) for given in options]


def _before(block: Block) -> Any:
    return slice(0, -1) if len(block.steps) == 1 else block.before


def _after(block: Block) -> Any:
    return slice(1, None) if len(block.steps) == 1 else block.before + 1


def _last(block: Block) -> Any:
    return block.last_observations[block.closes]


def _flags(root: str, block: Block) -> pa.Array:
    return pa.array(block.columns[(root,)])


def _given(block: Block, path: Path) -> Array:
    return block.columns[path] if path in block.columns else objects([None] * block.size)


def _notes(notes: list[Column], fields: list[pa.Field], block: Block) -> pa.Array:
    arrays = [column.encoded(_given(block, column.path)) for column in notes]
    return pa.StructArray.from_arrays(arrays, fields=fields)
