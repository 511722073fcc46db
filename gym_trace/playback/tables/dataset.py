"""The tables of traces as pyarrow datasets, which DuckDB, Polars and pandas query.

A dataset decodes only the columns of a query: first the columns of its condition, then the others, for episodes with
matching rows. DuckDB and Polars pass their conditions to it as pyarrow expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from gym_trace.data.layout import Path
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.playback.episode_columns import episodes_where
from gym_trace.playback.episode_index import RecordedEpisodes, index_of
from gym_trace.playback.scan import EPISODE, Scan
from gym_trace.playback.tables.columns import JSON, ArrowColumn, columns_of
from gym_trace.playback.tables.rows import TableColumn, Tables

STEPS, EPISODES = "steps", "episodes"
TRACE = "trace"  # the column with the name of the trace, if there are several
_GROUP_STEPS = 1 << 16  # steps of the episodes whose condition is evaluated together
_PAGE = 1 << 14  # rows of a batch of episodes
_ROW = "row"  # name of a temporary column; columns of a condition have other names


class Share(NamedTuple):
    """Episodes to read.

    Attributes:
        name: name of their trace.
        open: returns the episodes as a trace; picklable if the dataset is.
        first: number of the first of them in the table.
        columns: columns of the leaves, the same in each share of a trace. None: columns of these episodes only.
    """

    name: str
    open: Callable[[], RecordedEpisodes]
    first: int = 0
    columns: Mapping[Path, ArrowColumn] | None = None


class _View(NamedTuple):
    """Finished episodes with the same spaces: their trace, columns, and numbers in the table."""

    name: str
    trace: RecordedEpisodes
    columns: Mapping[Path, ArrowColumn]
    numbers: Array


def share_of(trace: RecordedEpisodes) -> Share:
    """Return all episodes of a trace or view."""
    return Share(str(trace.directory), partial(_itself, trace))


def _itself(trace: RecordedEpisodes) -> RecordedEpisodes:
    return trace


class TraceDataset(ds.Dataset):
    """A table of one or several traces: "steps" or "episodes". Running episodes are skipped.

    It has the methods of pyarrow.dataset.Dataset, except for fragments, joins and sorting: scanner, to_table,
    to_batches, head, count_rows, take, filter and schema. Picklable if its shares are.

    where: a condition in the language of Trace.find_steps, or of Trace.select for episodes; None: all rows.
    expression: a pyarrow expression; None: all rows.

    Attributes:
        failure: the last error while reading; DuckDB and Polars pass on only its text.
        left_out: names of the columns whose types differ between traces.
    """

    failure: TraceError | OSError | None = None
    left_out: Sequence[str] = ()

    def __init__(
        self,
        table: str,
        shares: Sequence[Share],
        where: str | None = None,
        expression: Any = None,
        names: bool | None = None,
    ):
        """names: True: add a column "trace"; None: add it if there are several shares. Raises InvalidOption."""
        if table not in (STEPS, EPISODES):
            raise InvalidOption(f'table={table!r}: pass "steps" or "episodes"')
        self._table, self._shares, self._where, self._expression = table, tuple(shares), where, expression
        self._has_names = len(self._shares) > 1 if names is None else names

    def __reduce__(self) -> Any:
        return TraceDataset, (self._table, self._shares, self._where, self._expression, self._has_names)

    def _with(self, where: str | None, expression: Any) -> TraceDataset:
        return TraceDataset(self._table, self._shares, where, expression, self._has_names)

    @property
    def name(self) -> str:
        """The names of the traces."""
        return ", ".join(share.name for share in self._shares)

    @property
    def is_empty(self) -> bool:
        """Return True if no trace has a finished episode, so that the columns are unknown."""
        return not self._readers

    @cached_property
    def _views(self) -> list[_View]:
        """The finished episodes of the shares; those of a view have the same spaces."""
        found = []
        for share in self._shares:
            trace = share.open()
            for damage in chain.from_iterable(reader.damage for reader in index_of(trace).readers):
                raise damage.error()
            for indices in _alike(trace):
                view = trace if len(indices) == len(trace) else trace[indices]
                columns = columns_of(view) if share.columns is None else share.columns
                found.append(_View(share.name, view, columns, indices + share.first))
        return found

    @cached_property
    def _readers(self) -> list[_Reader]:
        """The readers of the views, all with the same columns."""
        readers = [
            _Reader(self._table, view.name if self._has_names else None, view.trace, columns, view.numbers)
            for view, columns in zip(self._views, _agreed([view.columns for view in self._views]))
        ]
        schema, self.left_out = _joined([reader.schema for reader in readers])
        for reader in readers:
            reader.complete(schema)
        return readers

    def of_same(self, table: str) -> TraceDataset:
        """Return all rows of a table of the same traces, which are not examined again."""
        other = TraceDataset(table, self._shares, names=self._has_names)
        other._views = self._views
        return other

    @property
    def schema(self) -> pa.Schema:
        if self.is_empty:
            raise InvalidOption(f"{self.name}: no finished episodes")
        return self._readers[0].schema

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> Any:
        """Return a scanner of these columns (None: all) of the rows where filter holds. options: ignored."""
        names = self.schema.names if columns is None else list(columns)
        if unknown := sorted(set(names) - set(self.schema.names)):
            why = self.why_missing(unknown[0])
            raise InvalidOption(f"no column {unknown[0]!r}{why}; choose from {', '.join(self.schema.names)}")
        expression = _both(self._expression, filter)
        schema = pa.schema([self.schema.field(name) for name in names])
        return _Scanner(schema, lambda: self._batches(names, expression))

    def _batches(self, names: list[str], expression: Any) -> Iterator[pa.RecordBatch]:
        try:
            for reader in self._readers:
                yield from reader.batches(names, self._where, expression)
        except (TraceError, OSError) as error:
            self.failure = error
            raise

    def why_missing(self, text: str) -> str:
        """Return why a column that a text names is missing; "" if unknown."""
        named = [name for name in self.left_out if re.search(rf"\b{name}\b", text)]
        return f", as the traces have different types of {named[0]}" if named else ""

    def where(self, condition: str) -> TraceDataset:
        """Return the rows where a condition holds, in the language of Trace.find_steps, or of Trace.select."""
        return self._with(condition, self._expression)

    def filter(self, expression: Any) -> TraceDataset:
        return self._with(self._where, _both(self._expression, expression))

    def _cannot(self, *_: Any, **__: Any) -> Any:
        raise InvalidOption(f"{self.name}: a trace cannot do this; call to_table() and use the table")

    get_fragments = replace_schema = sort_by = join = join_asof = _cannot
    partition_expression = property(_cannot)


class _Scanner:
    """Scanner that reads in the caller's thread; pyarrow's reads ahead in threads, even while Python exits."""

    def __init__(self, schema: pa.Schema, to_batches: Callable[[], Iterator[pa.RecordBatch]]):
        self.projected_schema = self.dataset_schema = schema
        self.to_batches = to_batches

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.to_batches())

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()

    def head(self, num_rows: int) -> pa.Table:
        found: list[pa.RecordBatch] = []
        for batch in self.to_batches():
            found.append(batch.slice(0, num_rows - sum(map(len, found))))
            if sum(map(len, found)) == num_rows:
                break
        return pa.Table.from_batches(found, self.projected_schema)

    def take(self, indices: Any) -> pa.Table:
        return self.to_table().take(indices)

    def count_rows(self) -> int:
        return sum(len(batch) for batch in self.to_batches())


class _Reader:
    """A table of one trace, or of episodes with the same spaces.

    Args:
        name: value of the column "trace". None: there is no such column.
        numbers: (episodes,) number of each episode.
    """

    def __init__(
        self, table: str, name: str | None, trace: RecordedEpisodes, columns: Mapping[Path, ArrowColumn], numbers: Array
    ):
        self._trace, self._is_steps = trace, table == STEPS
        tables = Tables(trace, columns, numbers=numbers, has_next=True)
        made = tables.steps if self._is_steps else tables.episodes
        self._columns = {column.field.name: column for column in made}
        if name is not None:
            field = pa.field(TRACE, pa.string(), nullable=False)
            self._columns = {TRACE: self._constant(field, partial(pa.repeat, name))} | self._columns

    def _constant(self, field: pa.Field, repeated: Callable[[int], pa.Array]) -> TableColumn:
        """Return a column with one value. repeated: returns this number of rows."""
        if self._is_steps:
            return TableColumn(field, (), lambda runs: repeated(runs.size))
        return TableColumn(field, (), lambda indices, _: repeated(len(indices)))

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([column.field for column in self._columns.values()])

    def complete(self, schema: pa.Schema) -> None:
        """Use the columns of this schema; columns that this trace lacks are null."""
        own = self._columns
        self._columns = {
            field.name: own[field.name]._replace(field=field)
            if field.name in own
            else self._constant(field, partial(pa.nulls, type=field.type))
            for field in schema
        }

    def batches(self, names: list[str], where: str | None, expression: Any) -> Iterator[pa.RecordBatch]:
        """Yield these columns of the rows where both conditions hold. Raises InvalidOption, CorruptTrace."""
        indices = np.arange(len(self._trace))
        if where is not None and not self._is_steps:
            indices, where = np.sort(episodes_where(self._trace, where)), None
        if where is None and expression is None:
            yield from self._rows(names, indices)
            return
        named = [] if expression is None else _named_in(expression, self.schema)
        for group in self._groups(indices):
            mask = np.ones(self._count(group), np.bool_)
            if expression is not None:
                mask &= self._holds(group, named, expression)
            if where is not None:
                mask &= self._found(group, where)
            yield from self._selected(names, group, mask)

    def _count(self, indices: Array) -> int:
        """Return how many rows these episodes have."""
        return int(self._steps(indices).sum()) if self._is_steps else len(indices)

    def _steps(self, indices: Array) -> Array:
        steps: Array = index_of(self._trace)["steps"][indices]
        return steps

    def _groups(self, indices: Array) -> Iterator[Array]:
        """Yield these indices in groups."""
        if not self._is_steps:
            yield from (indices[begin : begin + _PAGE] for begin in range(0, len(indices), _PAGE))
            return
        number = np.cumsum(self._steps(indices)) // _GROUP_STEPS
        yield from np.split(indices, np.flatnonzero(np.diff(number)) + 1) if len(indices) else ()

    def _holds(self, indices: Array, named: list[str], expression: Any) -> Array:
        """Return True for each row of these episodes where an expression holds."""
        table = pa.Table.from_batches(list(self._rows(named, indices)), pa.schema(map(self.schema.field, named)))
        count = self._count(indices)
        rows = pa.table({_ROW: np.arange(count), **{f"{name}": table[name] for name in named}})
        holds = np.zeros(count, np.bool_)
        holds[rows.filter(expression)[_ROW].to_numpy()] = True
        return holds

    def _found(self, indices: Array, where: str) -> Array:
        """Return True for each step of these episodes where a condition of find_steps holds."""
        view, steps = self._trace[indices], self._steps(indices)
        found = view.find_steps(where)
        step = found[:, 1] - index_of(view)["first_step"][found[:, 0]]
        holds = np.zeros(int(steps.sum()), np.bool_)
        holds[(np.cumsum(steps) - steps)[found[:, 0]] + step] = True
        return holds

    def _selected(self, names: list[str], indices: Array, mask: Array) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these episodes under a mask; read only episodes with such rows."""
        counts = self._steps(indices) if self._is_steps else np.ones(len(indices), np.int64)
        ends = np.concatenate(([0], np.cumsum(mask)))[np.concatenate(([0], np.cumsum(counts)))]
        has_some = np.diff(ends) > 0
        left, done = mask[np.repeat(has_some, counts)], 0
        for batch in self._rows(names, indices[has_some]) if has_some.any() else ():
            of_batch = left[done : done + len(batch)]
            done += len(batch)
            if of_batch.any():
                yield batch if of_batch.all() else batch.filter(pa.array(of_batch))

    def _rows(self, names: list[str], indices: Array) -> Iterator[pa.RecordBatch]:
        """Yield these columns of all rows of some episodes."""
        columns = [self._columns[name] for name in names or ["episode"]]  # any column counts rows if none is named
        needs = {root for column in columns for root in column.needs}
        schema = pa.schema([column.field for column in columns])

        def batch(*of: Any) -> pa.RecordBatch:
            made = pa.RecordBatch.from_arrays([column.make(*of) for column in columns], schema=schema)
            return made if names else made.select([])

        if not self._is_steps and not needs:
            yield from (batch(page, None) for page in self._groups(indices))
            return
        for runs in Scan(index_of(self._trace), needs, indices, order=EPISODE):
            if not self._is_steps:
                ended = runs.episode[runs.closes]
                if len(ended):
                    yield batch(ended, runs)
            elif runs.size:
                yield batch(runs)


def _alike(trace: RecordedEpisodes) -> list[Array]:
    """Return the indices of the finished episodes, one array per pair of spaces. Raises InvalidOption."""
    ended, writers = np.flatnonzero(index_of(trace).finished), index_of(trace)["writer"]
    if any(index_of(trace).readers[number].about.has_only_statistics for number in np.unique(writers[ended]).tolist()):
        raise InvalidOption(f"{trace.directory}: only statistics of episodes; no steps to export")
    groups: dict[bytes, list[int]] = {}
    for number, reader in enumerate(index_of(trace).readers):
        spaces = [reader.schema.get(name) for name in ("observation_space", "action_space")]
        groups.setdefault(pack_lenient(spaces)[0], []).append(number)
    found = [ended if len(groups) == 1 else ended[np.isin(writers[ended], numbers)] for numbers in groups.values()]
    return [indices for indices in found if len(indices)]


def _both(first: Any, second: Any) -> Any:
    return second if first is None else first if second is None else first & second


def _named_in(expression: Any, schema: pa.Schema) -> list[str]:
    """Return the columns that an expression needs: it fails without them. Raises InvalidOption."""
    nothing = pa.schema([field.with_type(_without_extensions(field.type)) for field in schema]).empty_table()
    try:
        nothing.filter(expression)
    except pa.ArrowException as error:
        raise InvalidOption(f"filter: {error}") from error
    named = []
    for name in schema.names:
        try:
            nothing.drop_columns([name]).filter(expression)
        except pa.ArrowException:
            named.append(name)
    return named


def _without_extensions(kind: pa.DataType) -> pa.DataType:
    """Return a type with the storage of extension types: pyarrow makes no empty struct that has one."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if not pa.types.is_struct(kind):
        return kind
    return pa.struct([field.with_type(_without_extensions(field.type)) for field in kind])


# -- the columns of several traces ------------------------------------------------------------------------------------


def _agreed(forms: Sequence[Mapping[Path, ArrowColumn]]) -> list[dict[Path, ArrowColumn]]:
    """Return the columns of each trace, with the same annotations and infos in all of them where they agree."""
    joined: dict[Path, ArrowColumn] = {}
    disputed: set[Path] = set()
    for path in dict.fromkeys(path for columns in forms for path in columns):
        found = [columns[path] for columns in forms if path in columns]
        lacks = len(found) < len(forms)
        optional = lacks or any(column.optional for column in found)
        kinds = {column._replace(optional=False, is_python=False) for column in found}
        if len(kinds) > 1 or (lacks and path[0] not in ("annotations", "infos")):
            disputed.add(path)
        elif found[0].kind == JSON or not optional:
            joined[path] = found[0]
        else:
            joined[path] = found[0]._replace(optional=True)
    return [{path: column for path, column in columns.items() if path in disputed} | joined for columns in forms]


def _joined(schemas: Sequence[pa.Schema]) -> tuple[pa.Schema, list[str]]:
    """Return the columns that have one type in all schemas, and the names of the others."""
    found: dict[str, list[pa.Field]] = {}
    for field in chain.from_iterable(schemas):
        found.setdefault(field.name, []).append(field)
    fields, others = [], []
    for name, alike in found.items():
        if any(field.type != alike[0].type for field in alike):
            others.append(name)
        else:
            is_nullable = len(alike) < len(schemas) or any(field.nullable for field in alike)
            fields.append(alike[0].with_nullable(is_nullable))
    return pa.schema(fields), others
