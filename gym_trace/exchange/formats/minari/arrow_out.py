"""Episodes of a Minari dataset as arrow or parquet: one directory per episode, with one file of one batch in it.

An episode is one batch, because Minari takes each batch for an episode; long ones are put together in a file, so that
they do not have to fit into memory. Actions, rewards and flags have a row more at the end, which says nothing. Beside
what Minari reads there are gym_trace in metadata.json, which is the identity of the episode, and where infos were
recorded a column gym_trace, in which they are whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.data.episode import Episode
from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.schema import Layouts
from gym_trace.data.values import Array
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.infos import packed
from gym_trace.exchange.formats.minari.plan import FILE, MinariPlan, are_options
from gym_trace.exchange.formats.source import flags
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

_IN_MEMORY = 32 << 20  # bytes of a column of an episode; longer ones are put together in a file
_FLAG = RowType(np.dtype(np.bool_), ())


class ArrowEpisodes:
    """Writer of one directory per episode. count: episodes so far. Episodes without steps, which
    Minari cannot read, are skipped.
    """

    def __init__(self, data: FilePath, plan: MinariPlan, layouts: Layouts, kind: str):
        self.count = 0
        self._data, self._plan, self._layouts, self._kind = data, plan, layouts, kind
        self._scratch: list[FilePath] = []

    def __enter__(self) -> ArrowEpisodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    def begin(self, episode: Episode, identity: str) -> None:
        """Write the metadata of an episode, before its steps."""
        self._steps = len(episode)
        if not self._steps:
            return
        self._directory = self._data / str(self.count)
        self._directory.mkdir()
        said: dict[str, Any] = {"id": self.count, "total_steps": self._steps, KEY: identity}
        if episode.seed is not None:
            said["seed"] = episode.seed
        if episode.options is not None and are_options(episode.options, is_hdf5=False):
            said["options"] = episode.options
        (self._directory / FILE).write_text(json.dumps(said))
        rows, plan = self._steps + 1, self._plan
        self._columns = {path: self._column(rows, form) for path, form in plan.forms.items()}
        self._rewards = self._column(rows, plan.rewards)
        self._flags = [self._column(rows, _FLAG), self._column(rows, _FLAG)]
        forms = (None if one.dtype is None else RowType(one.dtype, one.shape) for one in plan.infos.columns)
        self._infos = [self._column(rows, form) for form in forms]
        self._kept: list[bytes | None] = [None] * rows if plan.infos.are_kept_whole else []
        for column, data in zip(plan.infos.columns, self._infos):
            first = column.of_reset(episode.reset_info)
            data[:1] = column.blank if first is None else first

    def _column(self, rows: int, form: RowType | None) -> Any:
        """Room for the rows of an episode, the last of them zero, or None for text."""
        if form is None:
            return [None] * rows
        if rows * math.prod(form.shape) * form.dtype.itemsize <= _IN_MEMORY:
            data: Array = np.empty((rows, *form.shape), form.dtype)
        else:
            self._scratch.append(self._data / f".{len(self._scratch)}.scratch")
            data = np.memmap(self._scratch[-1], form.dtype, "w+", shape=(rows, *form.shape))
        data[-1] = 0
        return data

    def add(self, window: Window) -> None:
        """Steps of the episode that was begun; after the last of them it is written."""
        if not self._steps:
            return
        columns, start, end = window.columns, window.start, window.start + window.steps
        lead = 0 if window.opens else 1
        for path, data in self._columns.items():
            if path[0] == "observations":
                data[start + lead : end + 1] = columns[path][lead:]
            else:
                data[start:end] = columns[path]
        for data, rows in zip((self._rewards, *self._flags), (columns[("rewards",)], *flags(window)), strict=True):
            data[start:end] = rows
        for column, data in zip(self._plan.infos.columns, self._infos):
            data[start + 1 : end + 1] = column.rows(window)
        if self._kept:
            for place, kept in packed(window, self._plan.infos):
                self._kept[place] = kept
        if window.closes:
            self._write()

    def _write(self) -> None:
        batch = pa.RecordBatch.from_pydict(dict(self._arrays()))
        path = str(self._directory / f"part-0.{self._kind}")
        if self._kind == "arrow":
            with pa.ipc.new_file(path, batch.schema) as file:
                file.write_batch(batch)
        else:
            with pq.ParquetWriter(path, batch.schema, use_dictionary=False, compression="zstd") as file:
                file.write_batch(batch, batch.num_rows)
        self._clear()
        self.count += 1

    def _clear(self) -> None:
        while self._scratch:
            self._scratch.pop().unlink(missing_ok=True)

    def _arrays(self) -> Iterator[tuple[str, pa.Array]]:
        columns = iter(self._columns.values())
        yield "observations", _tree(self._layouts.observations, columns)
        yield "actions", _tree(self._layouts.actions, columns)
        for name, data in zip(("rewards", "terminations", "truncations"), (self._rewards, *self._flags), strict=True):
            yield name, pa.array(data)
        if self._infos:
            paths = [column.path for column in self._plan.infos.columns]
            yield "infos", _struct(list(zip(paths, self._infos)))
        if self._kept:
            yield KEY, pa.array(self._kept, pa.binary())


def _tree(layout: Layout, columns: Iterator[Any]) -> pa.Array:
    if isinstance(layout, Leaf):
        return _array(next(columns))
    parts = {str(key): _tree(child, columns) for key, child in layout.parts()}
    return pa.StructArray.from_arrays(list(parts.values()), names=list(parts))


def _array(data: Any) -> pa.Array:
    if isinstance(data, list):
        return pa.array(data, pa.string())
    if data.ndim == 1:
        return pa.array(data)
    return pa.FixedSizeListArray.from_arrays(pa.array(data.reshape(-1)), math.prod(data.shape[1:]))


def _struct(columns: list[tuple[tuple[str, ...], Any]]) -> pa.Array:
    """Infos as Minari reads them: numbers and text as they are, arrays as lists that say their shape. Those in maps get
    names such as "goal/x", because of maps Minari makes Python's own values.
    """
    arrays, fields = [], []
    for path, data in columns:
        arrays.append(_array(data))
        is_array = isinstance(data, np.ndarray) and data.ndim > 1
        shape = {"shape": ",".join(map(str, data.shape[1:]))} if is_array else None
        fields.append(pa.field("/".join(path), arrays[-1].type, metadata=shape))
    return pa.StructArray.from_arrays(arrays, fields=fields)
