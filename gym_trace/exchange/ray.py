"""Traces as datasets of Ray Data: read_trace(traces)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.storage.protocol import ReadStorage

try:
    import pyarrow as pa
    import ray.data
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask

    from gym_trace.exchange.formats.parquet.tables import row_size
    from gym_trace.playback.tables.dataset import STEPS, Share, TraceDataset
except ImportError as missing:
    raise MissingExtra(f"read_trace needs Ray Data ({missing}): pip install 'ray[data]'") from missing

__all__ = ["read_trace"]

_SAMPLED_TRACES = 8  # opened to estimate the size of all traces
_BLOCK_BYTES = 32 << 20  # per Arrow table
_TASK_BYTES, _TASK_TRACES = 128 << 20, 16  # per task: Ray's CPU time for one could read 50,000 steps or open ten traces
_LEAST_TASK_BYTES = 1 << 20  # per task, where processors would be idle otherwise
_TASKS_PER_CPU = 2


def read_trace(
    traces: TraceLike | Sequence[TraceLike],
    columns: Sequence[str] | None = None,
    where: Any = None,
    *,
    table: str = STEPS,
    **options: Any,
) -> ray.data.Dataset:
    """Return the steps or episodes of traces as a ray.data.Dataset. All nodes need to see their directories.

    Blocks of steps are read in parallel. Ray hands down the columns that a later select_columns() names and the
    expression of a later filter(), so that only these columns are decoded. Vectors and images are tensors:
    map_batches() gets arrays of shape (rows, *shape). Rows are in the order of the trace only with
    ``ray.data.DataContext.get_current().execution_options.preserve_order = True``.

    Args:
        traces: a trace, a view, a directory, or a sequence of these. A sequence adds a column "trace". Only some of
            its traces are opened here. The dataset has the columns of the first trace; additional columns of others
            are left out.
        columns, where, table: see Trace.to_arrow.
        options: of ray.data.read_datasource, such as concurrency or override_num_blocks (default: one per 128 MiB or
            16 traces, and more for a table that would leave processors of the cluster idle).

    Raises:
        InvalidOption, TraceNotFound. While the dataset is read: InvalidOption if the type of a column differs between
        traces, CorruptTrace.

    Examples:
        >>> steps = read_trace("traces/cartpole").filter(expr=ray.data.expressions.col("action") == 1)
        >>> steps.mean("reward")
        1.0
    """
    source: _Source
    if isinstance(traces, (str, os.PathLike, Trace, ReadStorage)):
        source = _OneTrace(as_trace(traces), table)
    else:
        source = _Traces(list(traces), table)
    source = source.limited(columns, where)
    return ray.data.read_datasource(source, **{"override_num_blocks": source.tasks(), **options})


class _Source(Datasource):
    """Datasource of one table. Ray tells it which columns and rows are used, by its projection and predicate."""

    def __init__(self, table: str, dataset: TraceDataset, steps: int, episodes: int, traces: int | None = None):
        """dataset: gives the schema. steps, episodes: their number, perhaps estimated. traces: number of traces that
        tasks read whole; None: tasks read parts of one."""
        super().__init__()
        self._projection_map: dict[str, str] | None = None
        self._table, self._schema, self._where = table, _as_tensors(dataset.schema), None
        self._rows, self._whole_traces = steps if table == STEPS else episodes, traces

    def limited(self, columns: Sequence[str] | None, where: Any) -> _Source:
        """Read only these columns, and rows where a condition holds. Raises InvalidOption."""
        if columns is not None:
            if unknown := sorted(set(columns) - set(self._schema.names)):
                raise InvalidOption(f"no column {unknown[0]!r}; choose from {', '.join(self._schema.names)}")
            self._projection_map = {name: name for name in columns}
        self._where = where
        return self

    def get_name(self) -> str:
        return "Trace"

    def supports_projection_pushdown(self) -> bool:
        return True

    def supports_predicate_pushdown(self) -> bool:
        return True

    @property
    def _column_names(self) -> list[str]:
        projection = self.get_projection_map()
        if projection is None:
            return list(self._schema.names)
        return list(projection) or ["episode"]  # count() selects no column, but counts the rows of one

    @property
    def _row_bytes(self) -> int:
        return sum(row_size(self._schema.field(name).type) for name in self._column_names) or 1

    def estimate_inmemory_data_size(self) -> int:
        return self._rows * self._row_bytes

    def tasks(self) -> int:
        """Return a number of read tasks. Ray's default is one per MiB, up to 200."""
        size, traces = self.estimate_inmemory_data_size(), self._whole_traces
        most = size // _LEAST_TASK_BYTES if traces is None else traces
        for_processors = _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1))
        return max(1, (traces or 0) // _TASK_TRACES, min(for_processors, most), size // _TASK_BYTES)

    def _task(self, dataset: Callable[[], TraceDataset], rows: int, files: list[str]) -> ReadTask:
        predicate = self.get_current_predicate()
        expression = None if predicate is None else predicate.to_pyarrow()
        is_whole = self._where is None and predicate is None
        schema = pa.schema([self._schema.field(name) for name in self._column_names])
        metadata = BlockMetadata(
            num_rows=rows if is_whole else None,
            size_bytes=rows * self._row_bytes,
            exec_stats=None,
            input_files=tuple(files),
        )
        return ReadTask(partial(_blocks, dataset, schema, self._where, expression, self._row_bytes), metadata, schema)


class _OneTrace(_Source):
    """One trace: each task reads a partition."""

    def __init__(self, trace: Trace, table: str):
        self._trace = trace
        super().__init__(table, trace.to_dataset(table), int(index_of(trace)["steps"].sum()), len(trace))

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        return [
            self._task(
                partial(TraceDataset, self._table, [part.share]),
                part.steps if self._table == STEPS else part.episodes,
                [part.directory],
            )
            for part in self._trace.partitions(parallelism)
        ]


class _Traces(_Source):
    """Many traces: each task opens some of them, by their paths."""

    def __init__(self, traces: list[TraceLike], table: str):
        if not traces:
            raise InvalidOption("no traces; pass at least one")
        self._traces = traces
        sampled = [traces[i] for i in np.unique(np.linspace(0, len(traces) - 1, _SAMPLED_TRACES).astype(int))]
        opened = [as_trace(trace) for trace in sampled]
        steps, episodes = (sum(counts) for counts in zip(*((int(index_of(t)["steps"].sum()), len(t)) for t in opened)))
        factor = len(traces) / len(opened)
        dataset = _dataset_of(table, traces[:1])
        super().__init__(table, dataset, round(steps * factor), round(episodes * factor), len(traces))

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        count = min(len(self._traces), parallelism)
        bounds = np.linspace(0, len(self._traces), count + 1).astype(int).tolist()
        groups = (self._traces[begin:end] for begin, end in pairwise(bounds))
        return [
            self._task(
                partial(_dataset_of, self._table, group),
                round(self._rows * len(group) / len(self._traces)),
                [_name_of(trace) for trace in group],
            )
            for group in groups
        ]


def _dataset_of(table: str, traces: list[TraceLike]) -> TraceDataset:
    return TraceDataset(table, [Share(_name_of(trace), partial(as_trace, trace)) for trace in traces], names=True)


def _name_of(trace: TraceLike) -> str:
    if isinstance(trace, Trace):
        return str(trace.directory)
    return str(trace.root) if isinstance(trace, ReadStorage) else str(trace)


def _blocks(
    dataset: Callable[[], TraceDataset], schema: pa.Schema, where: Any, expression: Any, row_bytes: int
) -> Iterator[pa.Table]:
    """Yield tables of about _BLOCK_BYTES with this schema. Raises InvalidOption, CorruptTrace."""
    table, batches, rows = dataset(), [], 0
    if isinstance(where, str):
        table = table.where(where)
    elif where is not None:
        table = table.filter(where)
    for batch in _as_schema(table, schema, expression):
        batches.append(batch)
        rows += len(batch)
        if rows * row_bytes >= _BLOCK_BYTES:
            yield pa.Table.from_batches(batches, schema)
            batches, rows = [], 0
    if batches:
        yield pa.Table.from_batches(batches, schema)


def _as_schema(table: TraceDataset, schema: pa.Schema, expression: Any) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a table with the columns of a schema; missing columns are null. Raises InvalidOption."""
    if table.is_empty:
        return
    present = [name for name in schema.names if name in table.schema.names]
    for name in present:
        kind, expected = _tensor_type(table.schema.field(name).type), schema.field(name).type
        if kind != expected:
            raise InvalidOption(
                f"{table.name}: {name} is {kind}, and {expected} in the first trace; read them separately"
            )
    for batch in table.scanner(present, expression).to_batches():
        missing = (field for field in schema if field.name not in present)
        columns = {field.name: pa.nulls(len(batch), field.type) for field in missing}
        columns |= {name: _as_tensor(batch.column(name)) for name in present}
        yield pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _as_tensors(schema: pa.Schema) -> pa.Schema:
    """Return a schema with tensors in place of vectors: Ray makes one array of a batch of them, not one of each row."""
    return pa.schema([field.with_type(_tensor_type(field.type)) for field in schema])


def _tensor_type(kind: pa.DataType) -> pa.DataType:
    return pa.fixed_shape_tensor(kind.value_type, [kind.list_size]) if pa.types.is_fixed_size_list(kind) else kind


def _as_tensor(column: pa.Array) -> pa.Array:
    kind = _tensor_type(column.type)
    if kind == column.type:
        return column
    storage = pa.FixedSizeListArray.from_arrays(column.flatten(), type=kind.storage_type)
    return pa.ExtensionArray.from_storage(kind, storage)
