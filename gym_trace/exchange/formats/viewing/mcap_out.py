"""Export to MCAP, for Foxglove: one channel per leaf, with JSON messages or compressed images."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from mcap.writer import Writer

from gym_trace import __version__
from gym_trace.data.json_values import Form as PlainForm
from gym_trace.data.json_values import json_text
from gym_trace.data.json_values import rows_of as plain_rows
from gym_trace.data.showing.pictures import png
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.exchange.formats.viewing.leaves import FLAGS, ViewColumn, columns_in, rows_of

EPISODE = f"{KEY}.episode"  # name of the metadata records of episodes
_IMAGE = "foxglove.CompressedImage"
_SECOND = 1_000_000_000  # ns
_LATEST = 1 << 62  # ns
_TYPES = {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}
_COUNTS = {"episode": {"type": "integer"}, "step": {"type": "integer"}}
_TIME = {
    "type": "object",
    "title": "time",
    "properties": {"sec": {"type": "integer", "minimum": 0}, "nsec": {"type": "integer", "minimum": 0}},
}


@dataclass(frozen=True)
class McapExporter:
    """MCAP, which Foxglove opens: one channel of JSON or PNG images per part of observations and actions.

    fps: steps per second of the timeline. Episodes follow one another, a second apart, from the start time of the
    first.
    """

    name: ClassVar[str] = "mcap"
    makes: ClassVar[str] = "file"

    fps: float = 30.0

    def __post_init__(self) -> None:
        if isinstance(self.fps, bool) or not isinstance(self.fps, (int, float)) or not 1e-3 <= self.fps <= 1e6:
            raise InvalidOption(f"fps={self.fps!r}: pass steps per second, such as 30")

    def plan(self, source: ExportSource) -> ExportPlan:
        """Plan the export. Only mixed dtypes are lost."""
        write = partial(self._write, source, _begin(source, self._spacing))
        return ExportPlan(list(losses(source, "dtype")), write, self._how_to_load)

    def _write(self, source: ExportSource, begin: int, target: Target) -> None:
        """Write the metadata of each episode, then its messages in the order of their times."""
        columns = [*columns_in(source), *FLAGS]
        with target.staged.open("xb") as file:
            writer = Writer(file)
            writer.start(library=f"gym-trace {__version__}")
            names = json.dumps([column.name for column in columns if column not in FLAGS])
            writer.add_metadata(KEY, {"about": source.about, "columns": names})
            channels = {column.name: _channel(writer, column) for column in columns}
            for window in source.windows():
                if window.opens:
                    writer.add_metadata(EPISODE, _episode(source, window, begin, self._spacing))
                _add(writer, channels, columns, window, begin, self._spacing)
                if window.closes:
                    begin += len(window.episode) * self._spacing + _SECOND
            writer.finish()

    def _how_to_load(self, path: Path) -> str:
        return (
            "from mcap.reader import make_reader\n"
            f'for schema, channel, message in make_reader(open("{path}", "rb")).iter_messages(): ...\n'
            "# or open it in Foxglove"
        )

    @property
    def _spacing(self) -> int:
        """Return the nanoseconds from a step to the next."""
        return round(_SECOND / self.fps)


def _begin(source: ExportSource, spacing: int) -> int:
    """Return the start of the timeline, ns. Raises InvalidOption if the timeline is too long."""
    first = source.trace[0].start_time
    begin = 0 if first is None else max(0, first)
    if begin + source.steps * spacing + len(source.trace) * _SECOND >= _LATEST:
        raise InvalidOption("timeline too long for MCAP; raise fps")
    return begin


def _channel(writer: Writer, column: ViewColumn) -> int:
    metadata = {} if column.form is None else {"dtype": column.form.dtype.str, "shape": str(list(column.form.shape))}
    name, schema = (_IMAGE, _image_schema()) if column.is_image else (f"{KEY}.{column.name}", _schema(column))
    schema_id = writer.register_schema(name, "jsonschema", json.dumps(schema).encode())
    return int(writer.register_channel(f"/{column.name}", "json", schema_id, metadata))


def _image_schema() -> dict[str, Any]:
    image = {"type": "string", "contentEncoding": "base64"}
    fields = {"timestamp": _TIME, "frame_id": {"type": "string"}, "data": image, "format": {"type": "string"}}
    return {"title": _IMAGE, "type": "object", "properties": {**fields, **_COUNTS}}


def _schema(column: ViewColumn) -> dict[str, Any]:
    """Return the JSON schema of messages; arrays are flat lists, because Foxglove has no nested lists."""
    fields: dict[str, Any] = dict(_COUNTS)
    if column.form is not None:
        if PlainForm(column.form.dtype, column.form.shape).is_base64:
            fields["value"] = {"type": "string", "contentEncoding": "base64"}
        else:
            item = {"type": _TYPES[column.form.dtype.kind]}
            fields["value"] = {"type": "array", "items": item} if column.form.shape else item
    return {"title": f"{KEY}.{column.name}", "type": "object", "properties": fields}


def _episode(source: ExportSource, window: Window, begin: int, spacing: int) -> dict[str, str]:
    episode = window.episode
    metadata = {
        "episode": episode.index,
        "steps": len(episode),
        "begin": begin,
        "end": begin + len(episode) * spacing,
        "seed": "" if episode.seed is None else episode.seed,
        "outcome": episode.outcome,
        "writer": episode.writer,
        "episode_id": episode.episode_id,
        "identity": source.identity(episode),
    }
    return {name: str(value) for name, value in metadata.items()}


def _add(
    writer: Writer, channels: dict[str, int], columns: list[ViewColumn], window: Window, begin: int, spacing: int
) -> None:
    """Add the messages of a window: observation, action and annotations at the time of a step, results at the next."""
    rows = rows_of(columns, window)
    texts = {column.name: _texts(column, rows[column.name]) for column in columns if not column.is_image}
    episode, has_initial = window.episode.index, int(window.opens)

    def add(column: ViewColumn, step: int, row: int) -> None:
        time = begin + (step + (not column.comes_before)) * spacing
        content = _image(column, rows, row, time) if column.is_image else f'"value": {texts[column.name][row]}'
        data = f'{{"episode": {episode}, "step": {step}, {content}}}'.encode()
        writer.add_message(channels[column.name], time, data, time, step & 0xFFFFFFFF)

    observed = [column for column in columns if column.path[0] == "observations"]
    acted = [column for column in columns if column.path[0] in ("actions", "annotations")]
    results = [column for column in columns if not column.comes_before]
    for column in observed if has_initial else ():
        add(column, 0, 0)
    for row in range(window.steps):
        step = window.start + row
        for column in (*acted, *results):
            add(column, step, row)
        for column in observed:
            add(column, step + 1, row + has_initial)


def _texts(column: ViewColumn, rows: Array) -> list[str]:
    """Return the rows of a column as JSON; arrays as flat lists."""
    form = column.form
    plain = None if form is None else PlainForm(form.dtype, form.shape)
    if plain is not None and not plain.is_base64 and plain.shape:
        rows = rows.reshape(len(rows), math.prod(plain.shape))
        plain = PlainForm(plain.dtype, rows.shape[1:])
    return list(map(json_text, plain_rows(rows, plain)))


def _image(column: ViewColumn, rows: dict[str, Array], row: int, time: int) -> str:
    data = base64.b64encode(png(rows[column.name][row], 1)).decode()
    seconds, rest = divmod(time, _SECOND)
    header = f'"timestamp": {{"sec": {seconds}, "nsec": {rest}}}, "frame_id": {json_text(column.name)}'
    return f'{header}, "format": "png", "data": "{data}"'
