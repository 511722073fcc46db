"""Import of RLDS: directories of TensorFlow Datasets, whose examples are episodes with a dataset of steps."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gym_trace.data import trees
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.values import ABSENT
from gym_trace.errors import InvalidOption, TraceError, UnreadableRecording
from gym_trace.exchange.formats.foreign import all_from_json, read_json
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema, together
from gym_trace.exchange.formats.rlds.examples import (
    FeatureList,
    ListReader,
    MalformedExample,
    count_of,
    lists_in,
    records_in,
)
from gym_trace.exchange.formats.rlds.exporter import TEMPLATE
from gym_trace.exchange.formats.rlds.features import (
    Feature,
    Features,
    ReadRows,
    StepColumns,
    features_of,
    key_of,
    leaves_of,
    reader_of,
    space_of,
    values_of,
)
from gym_trace.exchange.formats.rows import first_writer
from gym_trace.printable import shown

_KIND = "RLDS"
_MARKS = ("is_first", "is_last", "is_terminal")
_IF_MISSING = {
    "rewards": "they are NaN",
    "is_last": "the last step of each episode is read as the final observation",
    "is_terminal": "no episode is terminated",
}
_MOST_SHARDS = 1 << 20
_MOST_ROWS, _MOST_BYTES = 1024, 4 << 20  # limits of the steps that are read at a time
_INSPECTED_EPISODES = 32  # by last_step="auto"
_LAST_STEPS = ("auto", "observation", "step")


@dataclass(frozen=True)
class RldsImporter:
    """RLDS, a directory of TensorFlow Datasets with features.json and dataset_info.json.

    last_step: meaning of the step with is_last. "observation": the final observation alone, as in RLDS. "step": a
        full step, as in most robot datasets; its next observation is unknown. "auto": "step" if most of the first
        episodes have an action or a reward there that is not 0.
    """

    name: ClassVar[str] = "rlds"

    last_step: str = "auto"

    def __post_init__(self) -> None:
        if self.last_step not in _LAST_STEPS:
            raise InvalidOption(f"last_step={self.last_step!r}: pass one of {', '.join(_LAST_STEPS)}")

    def recognises(self, path: Path) -> bool:
        return (path / "features.json").is_file() and (path / "dataset_info.json").is_file()

    def read(self, path: Path) -> Imported:
        """Read the dataset. Raises UnreadableRecording."""
        return _RldsDirectory(path).imported(self.last_step)


class _Split(NamedTuple):
    name: str
    shards: list[Path]
    episodes: int


class _RldsDirectory:
    """A dataset. info, features: dataset_info.json, and features.json without the steps. about: see ExportSource."""

    def __init__(self, path: Path):
        self.path = path
        self.info = read_json(path / "dataset_info.json")
        declared = read_json(path / "features.json")
        with _located(path / "features.json"):
            self.features, unknown = features_of(declared)
        steps = self.features.pop("steps", None)
        if not isinstance(steps, dict):
            raise UnreadableRecording(f"{path / 'features.json'}: not RLDS: its examples have no steps")
        self.steps: Features = steps
        metadata = read_json(path / "metadata.json") if (path / "metadata.json").is_file() else {}
        about = metadata.get(KEY)
        self.about = about if isinstance(about, str) else None
        self.warnings = [f"{name} skipped: unknown feature type {kind}" for name, kind in unknown.items()]
        self.splits = [self._split(split) for split in _list(self.info.get("splits"))]
        shards = [shard for split in self.splits for shard in split.shards]
        if len(set(shards)) < len(shards):
            raise UnreadableRecording(f"{path / 'dataset_info.json'}: several splits have the same shards")

    def _split(self, declared: Any) -> _Split:
        declared = declared if isinstance(declared, dict) else {}
        name, dataset = str(declared.get("name", "")), str(self.info.get("name", ""))
        lengths = _list(declared.get("shardLengths"))
        file_format = self.info.get("fileFormat", "tfrecord")
        if file_format != "tfrecord":
            advice = "convert it with tfds.core.DatasetBuilder, file_format='tfrecord'"
            raise UnreadableRecording(f"{self.path}: its files are {shown(file_format)}, not TFRecord; {advice}")
        if not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch(r"\w+", dataset):
            raise UnreadableRecording(f"{self.path / 'dataset_info.json'}: {name!r:.60}: invalid name of a split")
        template = declared.get("filepathTemplate") or TEMPLATE
        names = _shard_names(template, dataset, name, len(lengths))
        if names is None:
            raise UnreadableRecording(f"{self.path / 'dataset_info.json'}: unsupported names of shards")
        *_, unlisted = _shard_names(template, dataset, name, len(lengths) + 1) or [""]
        if unlisted and (self.path / unlisted).is_file():
            self.warnings.append(f"{unlisted} skipped: dataset_info.json does not list it; its writer was not closed")
        counts = [int(text) for length in lengths if (text := str(length)).isdecimal() and len(text) < 16]
        return _Split(name, [self.path / name for name in names], sum(counts))

    def imported(self, last_step: str) -> Imported:
        if self.about is not None:
            schema, layouts = first_writer(self.about)
            episodes = chain.from_iterable(map(_EpisodeReader(self, layouts).episodes, self.splits))
            return imported(_KIND, episodes, schema, self.about)
        spaces = space_of(self.steps.get("observation", {})), space_of(self.steps.get("action", {}))
        layouts = WriterSchema.of(new_schema(_KIND, *spaces)).layouts
        facts = {key: self.info[key] for key in ("description", "citation") if isinstance(self.info.get(key), str)}
        parts = []
        if last_step == "auto":
            last_step = self._last_step(layouts)
        version = f"{self.info.get('name')} {self.info.get('configName', '')} {self.info.get('version')}"[:300]
        for split in self.splits:
            schema = new_schema(_KIND, *spaces, {}, {"data_set": version}, split.name)
            reader = _EpisodeReader(self, layouts, last_step == "step")
            parts.append(imported(_KIND, reader.episodes(split), schema, facts=facts))
        content = together(parts)
        content.warnings = self.warnings
        return content

    def _last_step(self, layouts: Layouts) -> str:
        """Return the meaning of last steps, by the first episodes: "observation" or "step"."""
        by_split = (_EpisodeReader(self, layouts).have_full_last_steps(split) for split in self.splits)
        are_full = list(islice(chain.from_iterable(by_split), _INSPECTED_EPISODES))
        if 2 * sum(are_full) <= len(are_full):
            return "observation"
        self.warnings.append(
            f"in {sum(are_full)} of the first {len(are_full)} episodes the last step has an action or a reward, as in "
            "most robot data: it is read as a step with an unknown final observation. With last_step=observation it "
            "is the final observation alone, as RLDS defines it"
        )
        return "step"


def _shard_names(template: Any, dataset: str, split: str, count: int) -> list[str] | None:
    """Return the file names of a split, as from ShardedFileTemplate of TFDS; None if they are not plain names."""
    if count > _MOST_SHARDS or not isinstance(template, str):
        return None
    common = {"DATASET": dataset, "SPLIT": split, "FILEFORMAT": "tfrecord", "NUM_SHARDS": f"{count:05}"}
    names = []
    for number in range(count):
        fields = {**common, "SHARD_INDEX": f"{number:05}", "SHARD_X_OF_Y": f"{number:05}-of-{count:05}"}
        parts = re.split(r"\{(\w+)\}", template)  # text and field names in turns
        names.append("".join(fields.get(part, "/") if i % 2 else part for i, part in enumerate(parts)))
    if len(set(names)) < count or not all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names):
        return None
    return names


class _EpisodeReader:
    def __init__(self, data: _RldsDirectory, layouts: Layouts, last_is_step: bool = False):
        """last_is_step: the step with is_last is a full step."""
        self._data, self._layouts, self._last_is_step = data, layouts, last_is_step
        self._ours = data.about is not None
        self._missing: set[str] = set()
        self._unfinished = self._full_last_steps = self._episodes = self._empty = 0
        columns = (*_MARKS, "observation", "action", "reward")
        others = {
            name: part
            for name, part in data.steps.items()
            if (name == "annotations" if self._ours else name not in columns)
        }
        self._annotations = {
            key_of(path[1]) if self._ours else ".".join(path): ("steps/" + "/".join(path), leaf)
            for path, leaf in leaves_of(others)
        }

    def _final_warnings(self) -> Iterator[str]:
        """Yield what the dataset lacks, and what a trace cannot store."""
        if self._ours:
            return
        for name in sorted(self._missing):
            yield f"no {name}: {_IF_MISSING[name]}"
        if self._empty:
            yield f"{self._empty} episodes without steps were skipped"
        if self._unfinished:
            yield f"{self._unfinished} episodes lack the observation after their last action"
        if self._full_last_steps:
            yield (
                f"in {self._full_last_steps} of {self._episodes} episodes the last step has an action or a reward, "
                "meaningless in RLDS and therefore skipped; last_step=step imports them"
            )
        if self._annotations and not self._last_is_step:
            yield "values of last steps other than observations were skipped; other steps have them as annotations"

    def episodes(self, split: _Split) -> Iterator[NewEpisode]:
        """Yield the episodes. Raises UnreadableRecording, also while the steps of an episode are read."""
        records = 0
        for shard, lists in self._records(split):
            records += 1
            with _located(shard):
                rows = self._rows_in(lists)
                episode = self._episode(shard, lists, rows) if rows else None
            if episode is None:
                self._empty += 1
            else:
                yield episode
        if records != split.episodes:
            raise UnreadableRecording(
                f"{self._data.path}: the split {split.name} has {records} episodes, but dataset_info.json declares "
                f"{split.episodes}; a file may be incomplete"
            )
        self._data.warnings += self._final_warnings()

    def _records(self, split: _Split) -> Iterator[tuple[Path, dict[str, FeatureList]]]:
        for shard in split.shards:
            with _located(shard), shard.open("rb") as file:
                for record in records_in(file, shard.stat().st_size):
                    yield shard, lists_in(record)

    def have_full_last_steps(self, split: _Split) -> Iterator[bool]:
        """Yield True for each episode whose step with is_last has an action or a reward; skip those without is_last."""
        for shard, lists in self._records(split):
            with _located(shard):
                rows = self._rows_in(lists)
                is_full = self._has_full_last_step(lists, rows) if rows and self._mark(lists, "is_last", rows) else None
            if is_full is not None:
                yield is_full

    def _has_full_last_step(self, lists: dict[str, FeatureList], rows: int) -> bool:
        columns, rewards = StepColumns(self._layouts, self._data.steps, lists, self._ours), self._rewards(lists)
        for begin in range(0, rows - 1, _MOST_ROWS):
            count = min(_MOST_ROWS, rows - 1 - begin)
            columns.actions(count)
            if rewards is not None:
                rewards(count)
        return _is_nonzero(columns.actions(1)) or (rewards is not None and _is_nonzero(rewards(1)))

    def _rewards(self, lists: dict[str, FeatureList]) -> ReadRows | None:
        """Return a function that reads the rewards; None if they are missing."""
        reward = self._data.steps.get("reward")
        if not isinstance(reward, Feature) or "steps/reward" not in lists:
            return None
        return reader_of(ListReader(lists["steps/reward"]), reward, self._ours)

    def _episode(self, shard: Path, lists: dict[str, FeatureList], rows: int) -> NewEpisode:
        self._episodes += 1
        marks = {name: self._mark(lists, name, rows) for name in _MARKS}
        has_ended = marks["is_last"] is None or bool(marks["is_last"])
        has_final = has_ended and not self._last_is_step
        self._unfinished += not has_ended
        steps = rows - has_final
        metadata = self._metadata(lists)
        columns = StepColumns(self._layouts, self._data.steps, lists, self._ours)
        outcome = "cut"
        if has_ended and steps:
            outcome = "terminated" if marks["is_terminal"] else "truncated"
        parts = self._parts(shard, columns, lists, rows, steps)
        if self._ours:
            identity = metadata.get("episode_metadata", {}).get(KEY, b"").decode(errors="replace")
            return NewEpisode(steps, parts, outcome, identity=identity)
        return NewEpisode(steps, parts, outcome, reset_info=metadata or None, has_final_observation=has_final)

    def _rows_in(self, lists: dict[str, FeatureList]) -> int:
        """Return the number of steps of a record, by a list of scalars if there is one."""
        features = (
            (path[-1], leaf, lists.get("steps/" + "/".join(path))) for path, leaf in leaves_of(self._data.steps)
        )
        scalars = (*_MARKS, "reward", "discount")
        for _, leaf, values in sorted(features, key=lambda feature: feature[0] not in scalars):
            if values is not None and (leaf.encoding != "none" or leaf.numbers):
                return count_of(values, leaf.numbers if leaf.encoding == "none" else 1)
        raise MalformedExample("no steps")

    def _mark(self, lists: dict[str, FeatureList], name: str, rows: int) -> bool | None:
        """Return a flag of the last step; None if steps lack it."""
        flags = lists.get(f"steps/{name}")
        if flags is None or name not in self._data.steps:
            if name != "is_first":
                self._missing.add(name)
            return None
        reader, last = ListReader(flags), False
        for begin in range(0, rows, 1 << 16):
            last = bool(reader.integers(min(1 << 16, rows - begin))[-1])
        return last

    def _metadata(self, lists: dict[str, FeatureList]) -> dict[str, Any]:
        """Return the values of the episode as a whole, nested as its features."""
        metadata: dict[str, Any] = {}
        for path, feature in leaves_of(self._data.features):
            name = "/".join(path)
            if name in lists:
                nested = metadata
                for key in path[:-1]:
                    nested = nested.setdefault(key, {})
                values = values_of(ListReader(lists[name]), feature, 1)
                value = next(iter(values), None)
                if isinstance(value, bytes) and not self._ours:
                    value = value.decode(errors="replace")
                nested[path[-1]] = value
        return metadata

    def _parts(
        self, shard: Path, columns: StepColumns, lists: dict[str, FeatureList], rows: int, steps: int
    ) -> Iterator[NewSteps]:
        if (rewards := self._rewards(lists)) is None:
            self._missing.add("rewards")
        info_texts = ListReader(lists["steps/info"]) if self._ours and "steps/info" in lists else None
        annotation_readers = {
            name: reader_of(ListReader(lists[key]), feature, self._ours)
            for name, (key, feature) in self._annotations.items()
            if key in lists
        }
        part_rows = max(1, min(_MOST_ROWS, _MOST_BYTES // columns.row_size))
        with _located(shard):
            initial = columns.observations(1)
            for begin in range(0, max(steps, 1), part_rows):
                count = min(part_rows, steps - begin)
                known = min(count, rows - 1 - begin)  # all but the final one, if the last step is a full step
                observations = columns.observations(known)
                if known < count:
                    observations = trees.joined(observations, columns.placeholder())
                if initial is not None:
                    observations, initial = trees.joined(initial, observations), None
                reward_rows = np.full(count, np.nan) if rewards is None else rewards(count)
                infos = all_from_json(info_texts.values(count)) if info_texts else None
                annotations = {name: read(count) for name, read in annotation_readers.items()}
                if self._ours:
                    with_absent = ((name, _with_absent(values)) for name, values in annotations.items())
                    annotations = {name: values for name, values in with_absent if values is not None}
                actions = columns.actions(count)
                if begin + count == steps < rows and not self._ours:
                    has_reward = rewards is not None and _is_nonzero(rewards(1))
                    self._full_last_steps += _is_nonzero(columns.actions(1)) or has_reward
                yield NewSteps(
                    observations,
                    actions,
                    reward_rows,
                    infos=infos if infos and infos[0] is not None else None,
                    annotations=annotations if count else {},
                )


def _with_absent(rows: Any) -> Any:
    """Return the rows of an annotation with ABSENT in place of None, unless all are None; None without rows."""
    if isinstance(rows, np.ndarray) or (rows and all(row is None for row in rows)):
        return rows
    values = [ABSENT if row is None else row for row in rows]
    return None if all(row is ABSENT for row in values) else values


def _is_nonzero(tree: Any) -> bool:
    """Return True if an action or a reward is not all zeros."""
    return any(bool(np.any(rows)) if isinstance(rows, np.ndarray) else any(rows) for rows in trees.leaves_of(tree))


@contextlib.contextmanager
def _located(path: Path) -> Iterator[None]:
    """Name the file in errors. Raises UnreadableRecording."""
    try:
        yield
    except MalformedExample as error:
        raise UnreadableRecording(f"{path}: {error}") from error
    except OSError as error:
        if isinstance(error, TraceError):
            raise
        raise UnreadableRecording(f"{path}: cannot be read: {error}") from error


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
