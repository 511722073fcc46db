"""A trace as .rrd, which the viewer of Rerun opens: one entity per leaf, along steps and episodes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import rerun as rr
from rerun.chunk import Chunk, LazyChunkStream
from rerun.error_utils import catch_and_log_exceptions

from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.showing.pictures import png
from gym_trace.data.values import Array
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.foreign import text_of
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.exchange.formats.viewing.leaves import FLAGS, Column, columns_in, rows_of
from gym_trace.printable import printable

EXACT = "exact"  # the component for the bytes of rows that float64 scalars cannot hold
_MOST_PLOTTED = 256  # numbers of a row
_MOST_ROWS, _MOST_BYTES = 4096, 8 << 20  # of a column, sent together


@dataclass(frozen=True)
class RerunExporter:
    """Rerun, an .rrd file that its viewer opens: plots of numbers, images and texts, along steps and episodes."""

    name: ClassVar[str] = "rerun"
    makes: ClassVar[str] = "file"

    def plan(self, source: ExportSource) -> ExportPlan:
        """Plan the export. Only mixed dtypes are lost."""
        return ExportPlan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        """Send some thousand rows of all columns at a time."""
        columns = [*columns_in(source), *FLAGS]
        name = str(source.environment.get("id") or KEY)
        raised: list[BaseException] = []
        chunks = _kept(_Sender(source, columns).chunks(), raised)
        try:
            with catch_and_log_exceptions("gym-trace", strict=True):
                LazyChunkStream.from_iter(chunks).write_rrd(target.staged, application_id=name, recording_id=KEY)
        except (ValueError, RuntimeError, OSError) as error:
            if raised:
                raise raised[0] from None
            raise OSError(f"Rerun cannot write it: {error}") from error
        if raised:
            raise raised[0]

    def _how_to_load(self, path: Path) -> str:
        return (
            "from rerun.chunk import RrdReader\n"
            f'for chunk in RrdReader("{path}").stream(): table = chunk.to_record_batch()\n'
            f"# or in a shell: rerun {path}"
        )


def _kept(chunks: Iterator[Chunk], raised: list[BaseException]) -> Iterator[Chunk]:
    """Yield chunks. Keep an exception, because Rerun replaces it by its own."""
    try:
        yield from chunks
    except BaseException as error:
        raised.append(error)
        raise


class _Sender:
    """Gathers the rows of windows.

    Rows are numbered through all episodes, with one more row than steps each. What was there before a step has its
    row, what the action brought has the next one, as the next observation has.
    """

    def __init__(self, source: ExportSource, columns: list[Column]):
        self._source, self._columns = source, columns
        self._episodes: list[tuple[int, int, int, str, str]] = []
        self._clear()
        self._first = 0  # row of the episode

    def _clear(self) -> None:
        self._rows: dict[str, list[Array]] = {column.name: [] for column in self._columns}
        self._times: dict[str, list[Array]] = {column.name: [] for column in self._columns}
        self._count = self._bytes = 0
        self._episodes = []

    def chunks(self) -> Iterator[Chunk]:
        """Yield the metadata of the trace, then all rows."""
        forms = json_text(
            {
                one.name: None if one.form is None else [one.form.dtype.str, list(one.form.shape)]
                for one in self._columns
            }
        )
        said = rr.AnyValues.columns(about=[self._source.about], forms=[forms])
        yield Chunk.from_columns(f"/__properties/{KEY}", [], said)
        for window in self._source.windows():
            self._add(window)
            if self._count >= _MOST_ROWS or self._bytes >= _MOST_BYTES:
                yield from self._taken()
        yield from self._taken()

    def _add(self, window: Window) -> None:
        episode = window.episode
        if window.opens:
            seed = "" if episode.seed is None else f", seed {episode.seed}"
            told = printable(f"episode {episode.index}: {len(episode)} steps, {episode.outcome}{seed}")
            identity = self._source.identity(episode)
            self._episodes.append((self._first, episode.index, len(episode), told, identity))
        rows = rows_of(self._columns, window)
        for column in self._columns:
            mine = rows[column.name]
            step = window.start + (not column.comes_before)
            if column.path[0] == "observations":
                step += not window.opens
            steps = np.arange(step, step + len(mine))
            self._rows[column.name].append(mine)
            self._times[column.name].append(np.stack([self._first + steps, np.full(len(mine), episode.index), steps]))
            self._bytes += mine.nbytes
        self._count += window.steps + 1
        if window.closes:
            self._first += len(episode) + 1

    def _taken(self) -> Iterator[Chunk]:
        if self._episodes:
            begins, indices, steps, told, identities = zip(*self._episodes)
            values = rr.AnyValues.columns(identity=pa.array(identities), steps=pa.array(steps, pa.int64()))
            times = np.array([begins, indices, np.zeros(len(begins), np.int64)])
            yield _chunk("episode", times, [*rr.TextLog.columns(text=told), *values])
        for column in self._columns:
            times = np.concatenate(self._times[column.name], axis=1) if self._times[column.name] else np.empty((3, 0))
            if times.shape[1]:
                rows = np.concatenate(self._rows[column.name])
                yield _chunk(column.name, times, _components(column, rows))
        self._clear()


def _chunk(name: str, times: Array, components: Any) -> Chunk:
    lines = [rr.TimeColumn(line, sequence=told) for line, told in zip(("row", "episode", "step"), times)]
    entity = str(rr.new_entity_path(name.split("/")))  # Rerun escapes some characters
    return Chunk.from_columns(entity, lines, components)


def _components(column: Column, rows: Array) -> list[Any]:
    form, count = column.form, len(rows)
    if form is None:
        is_info = column.path[0] == "infos"
        texts = [json_text(tagged(row)) if is_info else text_of(row) for row in rows]
        return list(rr.TextLog.columns(text=texts))
    if column.is_image:
        frames = [png(row, 1) for row in rows]
        return list(rr.EncodedImage.columns(blob=frames, media_type=["image/png"] * count))
    numbers = math.prod(form.shape)
    found: list[Any] = []
    is_exact = False
    if form.dtype.kind in "biuf" and 0 < numbers <= _MOST_PLOTTED:
        scalars = rows.reshape(-1).astype(np.float64)
        with np.errstate(all="ignore"):
            is_exact = scalars.astype(form.dtype).tobytes() == rows.tobytes()
        found += rr.Scalars.columns(scalars=scalars).partition([numbers] * count)
    if not is_exact:
        width = numbers * form.dtype.itemsize
        raw = np.ascontiguousarray(rows).tobytes()
        values = [raw[start : start + width] for start in range(0, count * width, width)] if width else [b""] * count
        found += rr.AnyValues.columns(**{EXACT: pa.array(values, pa.binary())})
    return found
