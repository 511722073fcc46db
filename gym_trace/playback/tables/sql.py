"""Query traces in DuckDB: its views are datasets, which get the columns and conditions of a query."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gym_trace.data.values import is_utf8
from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.playback.episode_index import RecordedEpisodes
from gym_trace.storage.interrupts import interruptible
from gym_trace.storage.staging import replaced_file

try:
    import duckdb

    from gym_trace.playback.tables.dataset import EPISODES, STEPS, TraceDataset, share_of
except ImportError as missing:
    raise MissingExtra(f"SQL needs DuckDB and pyarrow ({missing}): pip install 'gym-trace[sql]'") from missing

_ROWS = 1000  # rows fetched at a time
_FORMATS = {".parquet": "FORMAT parquet, COMPRESSION zstd", ".csv": "FORMAT csv"}
_QUERIES = [duckdb.StatementType.SELECT], [duckdb.StatementType.MULTI]  # DuckDB makes several statements of a PIVOT


def connection(traces: Sequence[RecordedEpisodes]) -> Any:
    """Return a duckdb connection with the views steps and episodes of these traces.

    If there are several, both have a column "trace" with the directory of each. Raises InvalidOption, CorruptTrace.
    """
    return _connected(_tables_of(traces))


def query(text: str, traces: Sequence[RecordedEpisodes]) -> tuple[list[str], Iterator[list[Any]]]:
    """Run a query. Return the names of its columns, and its rows as plain values; NaN and infinities are None.

    Raises InvalidOption with DuckDB's error; CorruptTrace.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> names, rows = gym_trace.query("SELECT outcome, count(*) AS n FROM episodes GROUP BY outcome", [trace])
        >>> names, list(rows)
        (['outcome', 'n'], [['terminated', 20]])
    """
    tables = _tables_of(traces)
    connected = _connected(tables, text)
    with _own_errors(tables, text):
        if not connected.extract_statements(text):
            raise InvalidOption("sql: the query is empty; pass a SELECT")
        result = interruptible(lambda: connected.execute(text), connected.interrupt)
        return [column[0] for column in result.description or ()], _rows(result, tables)


def write_query(text: str, traces: Sequence[RecordedEpisodes], path: str | os.PathLike[str]) -> int:
    """Write the rows of a query to a file, and return their number. The file replaces an older one.

    path: ends with .parquet or .csv. Raises InvalidOption, also with DuckDB's error; CorruptTrace; OSError.

    Examples:
        >>> trace = gym_trace.open_trace("traces/cartpole")
        >>> gym_trace.write_query("SELECT episode, return FROM episodes", [trace], "returns.csv")
        20
        >>> with open("returns.csv") as file:
        ...     file.readline()
        'episode,return\\n'
    """
    ending = os.path.splitext(path)[1].lower()
    if ending not in _FORMATS:
        raise InvalidOption(f"{os.fspath(path)}: unknown ending; pass a name that ends with .parquet or .csv")
    tables = _tables_of(traces)
    connected = _connected(tables, text)

    def write(target: str) -> int:
        kinds = [statement.type for statement in connected.extract_statements(text)]
        if kinds not in _QUERIES:
            raise InvalidOption("sql: only the rows of one query are written to a file; pass a SELECT")
        rows = connected.sql(text)  # noqa: F841 - COPY finds it by its name
        return int(connected.execute(f"COPY (FROM rows) TO '{target}' ({_FORMATS[ending]})").fetchone()[0])

    with replaced_file(path) as staged, _own_errors(tables, text, path):
        return interruptible(lambda: write(str(staged).replace("'", "''")), connected.interrupt)


def _tables_of(traces: Sequence[RecordedEpisodes]) -> dict[str, TraceDataset]:
    if not (traces and all(hasattr(trace, "directory") for trace in traces)):
        raise InvalidOption("traces: pass a list of opened traces, such as [open_trace(directory)]")
    steps = TraceDataset(STEPS, [share_of(trace) for trace in traces])
    return {STEPS: steps, EPISODES: steps.of_same(EPISODES)}


def _connected(tables: dict[str, TraceDataset], text: str = "") -> Any:
    """Return a connection with these views. text: the query; most queries of steps save the work for the other view."""
    if not is_utf8(text):
        raise InvalidOption("sql: the query is not valid UTF-8")
    connected = duckdb.connect()
    try:
        is_of_steps = connected.get_table_names(text) == {STEPS}
    except duckdb.Error:  # also of several statements, or of none
        is_of_steps = False
    for name in [STEPS] if is_of_steps else tables:
        tables[name].schema  # noqa: B018 - raises errors of the traces here, because DuckDB would pass on only their text
        connected.register(name, tables[name])
    return connected


def _rows(result: Any, tables: dict[str, TraceDataset]) -> Iterator[list[Any]]:
    while True:
        with _own_errors(tables):
            rows = interruptible(lambda: result.fetchmany(_ROWS), result.interrupt)
        if not rows:
            return
        yield from map(_plain, rows)


@contextmanager
def _own_errors(tables: dict[str, TraceDataset], text: str = "", path: str | os.PathLike[str] = "") -> Iterator[None]:
    """Raise the error of a table that DuckDB read, one of the disk with this path, or InvalidOption with DuckDB's."""
    try:
        yield
    except duckdb.Error as error:
        for table in tables.values():
            if table.failure is not None:
                raise table.failure from None
        if number := re.search(r'"errno":"(\d+)"', str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), os.fspath(path) or None) from error
        text_of_error, _, _ = str(error).partition("\n\nLINE")
        why = next(filter(None, (table.why_missing(text) for table in tables.values())), "")
        raise InvalidOption(f"sql: {' '.join(text_of_error.split())}{why}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
