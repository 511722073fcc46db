"""Export to .rrd, for the viewer of Rerun: one entity per leaf, along steps and episodes."""

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
from gym_trace.exchange.formats.viewing.leaves import FLAGS, ViewColumn, columns_in, rows_of
from gym_trace.printable import printable

EXACT = "exact"  # component with the bytes of rows that float64 scalars cannot hold
_MOST_PLOTTED = 256  # numbers per row; larger rows are stored as EXACT alone
_MOST_ROWS, _MOST_BYTES = 4096, 8 << 20  # limits of the columns that are sent together


@dataclass(frozen=True)
class RerunExporter:
    """Rerun, an .rrd file that its viewer opens: plots of numbers, images and texts, along steps and episodes."""

    name: ClassVar[str] = "rerun"
    makes: ClassVar[str] = "file"

    def plan(self, source: ExportSource) -> ExportPlan:
        """Plan the export. Only mixed dtypes are lost."""
        return ExportPlan(list(losses(source, "dtype")), partial(self._write, source), self._how_to_load)

    def _write(self, source: ExportSource, target: Target) -> None:
        columns = [*columns_in(source), *FLAGS]
        name = str(source.environment.get("id") or KEY)
        raised: list[BaseException] = []
        chunks = _noting_errors(_ChunkBuilder(source, columns).chunks(), raised)
        try:
            with catch_and_log_exceptions("gym-trace", strict=True):
                LazyChunkStream.from_iter(chunks).write_rrd(target.staged, application_id=name, recording_id=KEY)
        except (ValueError, RuntimeError, OSError) as error:
            if raised:
                raise raised[0] from None
            raise OSError(f"Rerun cannot write the file: {error}") from error
        if raised:
            raise raised[0]

    def _how_to_load(self, path: Path) -> str:
        return (
            "from rerun.chunk import RrdReader\n"
            f'for chunk in RrdReader("{path}").stream(): table = chunk.to_record_batch()\n'
            f"# or in a shell: rerun {path}"
        )


def _noting_errors(chunks: Iterator[Chunk], raised: list[BaseException]) -> Iterator[Chunk]:
    """Yield chunks. Append an exception to `raised`, because Rerun replaces it by its own."""
    try:
        yield from chunks
    except BaseException as error:
        raised.append(error)
        raise


class _ChunkBuilder:
    """Builds chunks of Rerun from windows.

    Rows are numbered through all episodes; an episode has one more row than steps. Observation, action and annotations
    are in the row of their step, its results in the next row, with the next observation.
    """

    def __init__(self, source: ExportSource, columns: list[ViewColumn]):
        self._source, self._columns = source, columns
        self._clear()
        self._first_row = 0  # where the episode begins

    def _clear(self) -> None:
        self._rows: dict[str, list[Array]] = {column.name: [] for column in self._columns}
        self._times: dict[str, list[Array]] = {column.name: [] for column in self._columns}
        self._count = self._bytes = 0
        self._episodes: list[tuple[int, int, int, str, str]] = []  # first row, index, steps, text, identity

    def chunks(self) -> Iterator[Chunk]:
        """Yield the metadata of the trace, then all rows."""
        forms = json_text(
            {
                column.name: None if column.form is None else [column.form.dtype.str, list(column.form.shape)]
                for column in self._columns
            }
        )
        metadata = rr.AnyValues.columns(about=[self._source.about], forms=[forms])
        yield Chunk.from_columns(f"/__properties/{KEY}", [], metadata)
        for window in self._source.windows():
            self._add(window)
            if self._count >= _MOST_ROWS or self._bytes >= _MOST_BYTES:
                yield from self._flushed()
        yield from self._flushed()

    def _add(self, window: Window) -> None:
        episode = window.episode
        if window.opens:
            seed = "" if episode.seed is None else f", seed {episode.seed}"
            text = printable(f"episode {episode.index}: {len(episode)} steps, {episode.outcome}{seed}")
            identity = self._source.identity(episode)
            self._episodes.append((self._first_row, episode.index, len(episode), text, identity))
        window_rows = rows_of(self._columns, window)
        for column in self._columns:
            rows = window_rows[column.name]
            step = window.start + (not column.comes_before)
            if column.path[0] == "observations":
                step += not window.opens
            steps = np.arange(step, step + len(rows))
            self._rows[column.name].append(rows)
            self._times[column.name].append(
                np.stack([self._first_row + steps, np.full(len(rows), episode.index), steps])
            )
            self._bytes += rows.nbytes
        self._count += window.steps + 1
        if window.closes:
            self._first_row += len(episode) + 1

    def _flushed(self) -> Iterator[Chunk]:
        if self._episodes:
            begins, indices, steps, texts, identities = zip(*self._episodes)
            values = rr.AnyValues.columns(identity=pa.array(identities), steps=pa.array(steps, pa.int64()))
            times = np.array([begins, indices, np.zeros(len(begins), np.int64)])
            yield _chunk("episode", times, [*rr.TextLog.columns(text=texts), *values])
        for column in self._columns:
            times = np.concatenate(self._times[column.name], axis=1) if self._times[column.name] else np.empty((3, 0))
            if times.shape[1]:
                rows = np.concatenate(self._rows[column.name])
                yield _chunk(column.name, times, _components(column, rows))
        self._clear()


def _chunk(name: str, times: Array, components: Any) -> Chunk:
    timelines = [rr.TimeColumn(line, sequence=sequence) for line, sequence in zip(("row", "episode", "step"), times)]
    entity = str(rr.new_entity_path(name.split("/")))  # Rerun escapes some characters
    return Chunk.from_columns(entity, timelines, components)


def _components(column: ViewColumn, rows: Array) -> list[Any]:
    form, count = column.form, len(rows)
    if form is None:
        is_info = column.path[0] == "infos"
        texts = [json_text(tagged(row)) if is_info else text_of(row) for row in rows]
        return list(rr.TextLog.columns(text=texts))
    if column.is_image:
        frames = [png(row, 1) for row in rows]
        return list(rr.EncodedImage.columns(blob=frames, media_type=["image/png"] * count))
    numbers = math.prod(form.shape)
    components: list[Any] = []
    is_exact = False
    if form.dtype.kind in "biuf" and 0 < numbers <= _MOST_PLOTTED:
        scalars = rows.reshape(-1).astype(np.float64)
        with np.errstate(all="ignore"):
            is_exact = scalars.astype(form.dtype).tobytes() == rows.tobytes()
        components += rr.Scalars.columns(scalars=scalars).partition([numbers] * count)
    if not is_exact:
        width = numbers * form.dtype.itemsize
        raw = np.ascontiguousarray(rows).tobytes()
        values = [raw[start : start + width] for start in range(0, count * width, width)] if width else [b""] * count
        components += rr.AnyValues.columns(**{EXACT: pa.array(values, pa.binary())})
    return components
