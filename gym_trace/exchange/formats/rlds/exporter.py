"""Export to RLDS: a directory of TensorFlow Datasets, whose examples are episodes and have a dataset of steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.json_values import json_text, tagged
from gym_trace.data.layout import Layout, Leaf
from gym_trace.data.layout import Path as LeafPath
from gym_trace.data.showing.pictures import png
from gym_trace.data.values import ABSENT, Array, objects
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import ExportPlan, Target, losses
from gym_trace.exchange.formats.foreign import text_of
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.images import is_image
from gym_trace.exchange.formats.rlds.examples import LARGEST, ExampleWriter, RecordWriter
from gym_trace.exchange.formats.rlds.features import Feature, Features, features_json, name_of, tensor
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window

IMAGES = ("png", "raw")
TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_SHARD_BYTES = 256 << 20  # approximate size of a shard
_BOOL, _FLOAT, _INTEGER = np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.int64)
_MARKS = {name: Feature("tensor", _BOOL) for name in ("is_first", "is_last", "is_terminal")}
_FLAGS = {
    "terminated": Feature("tensor", _BOOL, doc="flag of the environment"),
    "truncated": Feature("tensor", _BOOL, doc="flag of the environment"),
}
_EPISODE: Features = {
    KEY: Feature("text", doc="JSON: metadata from which gym-trace restores the episode"),
    "episode_id": Feature("tensor", _INTEGER),
    "first_step": Feature("tensor", _INTEGER, doc="more than 0 if earlier steps are missing"),
    "lane": Feature("tensor", _INTEGER, doc="index in a vector environment"),
    "outcome": Feature("text", doc="terminated, truncated, cut, closed or lost"),
    "seed": Feature("tensor", _INTEGER, doc="-1: no seed, or one of more than 63 bits, which is in the JSON"),
    "writer": Feature("text"),
}


@dataclass(frozen=True)
class RldsExporter:
    """RLDS, a directory that tensorflow_datasets.builder_from_directory() opens.

    images: "png", or "raw": bytes, which are faster to decode and many times as large.
    """

    name: ClassVar[str] = "rlds"
    makes: ClassVar[str] = "directory"

    images: str = "png"

    def __post_init__(self) -> None:
        if self.images not in IMAGES:
            raise InvalidOption(f"images={self.images!r}: pass one of {', '.join(IMAGES)}")

    def plan(self, source: ExportSource) -> ExportPlan:
        """Plan the export. Only mixed dtypes are lost."""
        columns = _StepColumns(source, self.images)
        longest = int(source.episodes["steps"].max()) + 1
        if (size := columns.row_size * longest) > LARGEST:
            raise InvalidOption(
                f"{source.trace.directory}: an episode of {longest - 1} steps takes {size:,} bytes, more than the "
                f"limit of {LARGEST:,}; choose shorter ones: --where 'steps < …'"
            )
        splits: dict[str, _Split] = {}
        write = partial(_write, source, columns, splits)
        return ExportPlan(list(losses(source, "dtype")), write, partial(_how_to_load, splits))


def _write(source: ExportSource, columns: _StepColumns, splits: dict[str, _Split], target: Target) -> None:
    """Write the records of each split into shards, then the metadata."""
    directory, name = target.staged, _dataset_name(source)
    example = ExampleWriter()
    try:
        for window in source.windows():
            columns.add(example, window)
            if window.closes:
                _add_metadata(example, window, source)
                key = re.sub(r"[^\w-]+", "_", window.episode.split, flags=re.ASCII)[:100].strip("_-") or "train"
                split = splits.setdefault(key, _Split(directory, name, key))
                example.finish(split.shard())
        for split in splits.values():
            split.rename_shards()
    finally:
        for split in splits.values():
            split.close()
    features: Features = {"steps": columns.features, "episode_metadata": _EPISODE}
    (directory / "features.json").write_text(features_json(features, "steps"))
    (directory / "metadata.json").write_text(json.dumps({KEY: source.about}))
    (directory / "dataset_info.json").write_text(_dataset_info(source, name, splits.values()))


def _how_to_load(splits: dict[str, _Split], path: Path) -> str:
    first = next(iter(splits.values()))
    as_dataset = f'import tensorflow_datasets as tfds; data = tfds.builder_from_directory("{path}").as_dataset'
    in_order = ", read_config=tfds.ReadConfig(interleave_cycle_length=1)" if len(first.lengths) > 1 else ""
    return f'{as_dataset}(split="{first.name}"{in_order})'


class _StepColumns:
    """The features of steps; adds the rows of windows to an example.

    RLDS has one observation per step, and one more step than actions. The last step has the final observation; its
    action, reward and discount have no meaning and are 0 here.
    """

    def __init__(self, source: ExportSource, images: str):
        self._source, self._images = source, images
        self.features: Features = {**_MARKS, **_FLAGS}
        self._leaves: dict[LeafPath, tuple[str, Feature]] = {}
        for name, layout in (("observation", source.layouts.observations), ("action", source.layouts.actions)):
            if (tree := self._tree(layout, f"steps/{name}")) is not None:
                self.features[name] = tree
        self.features["reward"] = self._leaf(("rewards",), "steps/reward")
        self.features["discount"] = Feature(
            "tensor", _FLOAT, doc="as annotated, or 0 if the action led to a terminal state"
        )
        if ("infos",) in source.forms:
            self.features["info"] = Feature("text", doc="JSON: the info that the step returned")
        annotations = sorted(str(path[1]) for path in source.forms if path[0] == "annotations")
        if annotations:
            self.features["annotations"] = {
                name_of(name): self._leaf(("annotations", name), f"steps/annotations/{name_of(name)}")
                for name in annotations
            }

    @property
    def row_size(self) -> int:
        """Return the bytes of a step, without columns whose rows differ in size."""
        tensors = (leaf for _, leaf in self._leaves.values() if leaf.kind == "tensor")
        return sum(leaf.numbers * leaf.dtype.itemsize for leaf in tensors)

    def _tree(self, layout: Layout, name: str) -> Features | Feature | None:
        if isinstance(layout, Leaf):
            return self._leaf(layout.path, name)
        parts: Features = {}
        for key, child in layout.parts():
            if name_of(key) in parts:
                raise InvalidOption(f"{name}: several keys are {key} as text; TensorFlow needs distinct keys")
            tree = self._tree(child, f"{name}/{name_of(key)}")
            if tree is not None:
                parts[name_of(key)] = tree
        return parts or None  # TensorFlow Datasets has no empty dicts

    def _leaf(self, path: LeafPath, name: str) -> Feature:
        form, feature = self._source.forms[path], None
        if form is not None:
            feature = tensor(form.dtype, form.shape)
            if self._images == "png" and is_image(form):
                feature = Feature("image", form.dtype, form.shape, "png")
        feature = feature or Feature("text", doc="text, or a zero byte and JSON")
        self._leaves[path] = name, feature
        return feature

    def add(self, example: ExampleWriter, window: Window) -> None:
        """Append the rows of a window."""
        columns, count, closes = window.columns, window.steps, window.closes
        for path in self._leaves:
            rows = columns[path] if path in columns else objects([ABSENT] * count)  # an annotation may be missing
            if path[0] == "observations":
                self._rows(example, path, rows if window.opens else rows[1:], last=False)
            else:
                self._rows(example, path, rows, closes)
        if "info" in self.features:
            infos = columns.get(("infos",), [None] * count)
            texts = (b"" if info is None else json_text(tagged(info)).encode() for info in infos)
            example.bytes_of("steps/info", (*texts, *[b""] * closes))
        self._add_flags(example, window)

    def _add_flags(self, example: ExampleWriter, window: Window) -> None:
        terminations, _ = flags(window)
        is_terminal = bool(terminations.any())
        marks = np.zeros((3, window.steps + window.opens), np.bool_)
        if window.opens:
            marks[0, 0] = window.episode.first_step == 0
        if window.closes:
            marks[1:, -1] = True, is_terminal
        for name, mark in zip(_MARKS, marks):
            example.integers(f"steps/{name}", mark)
        padding = np.zeros(int(window.closes), np.bool_)
        for name, column in zip(_FLAGS, ("terminations", "truncations")):
            example.integers(f"steps/{name}", np.append(window.columns[(column,)], padding))
        discounts = np.ones(window.steps + window.closes, np.float32)
        discounts[window.steps :] = 0
        discounts[window.steps - is_terminal : window.steps] = 0
        for step, annotated in enumerate(window.columns.get(("annotations", "discount"), ())):
            if isinstance(annotated, int | float | np.number):
                discounts[step] = annotated
        example.floats("steps/discount", discounts)

    def _rows(self, example: ExampleWriter, path: LeafPath, rows: Array, last: bool) -> None:
        """Append rows. last: also append a padding row."""
        name, feature = self._leaves[path]
        if feature.kind == "text":
            example.bytes_of(name, (*(text_of(row).encode() for row in rows), *[b""] * last))
            return
        array = np.zeros((len(rows) + last, *feature.sizes), feature.dtype)
        if len(rows):
            array[: len(rows)] = rows if rows.dtype != object else np.array(rows.tolist())
        if feature.kind == "image":
            example.bytes_of(name, (png(row, 1) for row in array))
        elif feature.encoding == "bytes":
            example.raw(name, array)
        elif feature.dtype == _FLOAT:
            example.floats(name, array)
        else:
            example.integers(name, array)


def _add_metadata(example: ExampleWriter, window: Window, source: ExportSource) -> None:
    episode = window.episode
    seed = -1 if episode.seed is None or not episode.seed < 1 << 63 else episode.seed
    numbers = {"episode_id": episode.episode_id, "first_step": episode.first_step, "lane": episode.lane, "seed": seed}
    texts = {KEY: source.identity(episode), "outcome": episode.outcome, "writer": episode.writer}
    for name, number in numbers.items():
        example.integers(f"episode_metadata/{name}", np.array([number]))
    for name, text in texts.items():
        example.bytes_of(f"episode_metadata/{name}", [text.encode()])


class _Split:
    """The shards of a split. Their names have the number of shards, so they get them at the end."""

    def __init__(self, directory: Path, dataset: str, name: str):
        self.name, self.lengths, self.bytes = name, list[int](), 0
        self._directory, self._dataset = directory, dataset
        self._shard: RecordWriter | None = None

    def shard(self) -> RecordWriter:
        if self._shard is not None and self._shard.bytes >= _SHARD_BYTES:
            self.close()
        if self._shard is None:
            self._shard = RecordWriter(self._part(len(self.lengths)))
        return self._shard

    def close(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self.lengths.append(shard.records)
            self.bytes += shard.bytes
            shard.close()

    def rename_shards(self) -> None:
        """Close the last shard, and give all of them their names."""
        self.close()
        count = len(self.lengths)
        for number in range(count):
            name = f"{self._dataset}-{self.name}.tfrecord-{number:05}-of-{count:05}"
            self._part(number).rename(self._directory / name)

    def _part(self, number: int) -> Path:
        return self._directory / f"{self.name}.{number}.part"


def _dataset_info(source: ExportSource, name: str, splits: Iterable[_Split]) -> str:
    info: dict[str, Any] = {
        "name": name,
        "version": "1.0.0",
        "fileFormat": "tfrecord",
        "moduleName": "",
        "splits": [
            {
                "name": split.name,
                "numBytes": str(split.bytes),
                "shardLengths": list(map(str, split.lengths)),
                "filepathTemplate": TEMPLATE,
            }
            for split in splits
        ],
    }
    info |= {key: source.facts[key] for key in ("description", "citation") if isinstance(source.facts.get(key), str)}
    return json.dumps(info, indent=2)


def _dataset_name(source: ExportSource) -> str:
    """Return the id of the environment in letters, digits and underscores."""
    name = re.sub(r"\W+", "_", str(source.environment.get("id") or ""), flags=re.ASCII).strip("_").lower()
    return name if re.match("[a-z]", name) else "gym_trace"
