"""RLDS as a trace: directories of TensorFlow Datasets whose examples are episodes with a dataset of steps."""

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
_INSTEAD = {
    "rewards": "they are NaN",
    "is_last": "the last step of each episode is read as the final observation",
    "is_terminal": "no episode is terminated",
}
_MOST_JSON = 64 << 20
_MOST_SHARDS = 1 << 20
_MOST_ROWS, _MOST_PART = 1024, 4 << 20  # rows, and bytes, that are read at a time
_LOOKED_AT = 32  # episodes that decide the meaning of last steps
_LAST_STEPS = ("auto", "observation", "step")


@dataclass(frozen=True)
class RldsImporter:
    """RLDS, a directory with features.json and dataset_info.json as TensorFlow Datasets writes them.

    last_step: meaning of the step with is_last. "observation": the final observation alone, as in RLDS. "step": a
        full step, as in most robot datasets; its next observation is unknown. "auto": "step" if
        most of the first episodes have an action or a reward there that is not 0.
    """

    name: ClassVar[str] = "rlds"

    last_step: str = "auto"

    def __post_init__(self) -> None:
        if self.last_step not in _LAST_STEPS:
            raise InvalidOption(f"last_step={self.last_step!r}: pass one of {', '.join(_LAST_STEPS)}")

    def recognises(self, path: Path) -> bool:
        return (path / "features.json").is_file() and (path / "dataset_info.json").is_file()

    def read(self, path: Path) -> Imported:
        """Raises UnreadableRecording."""
        return _DataSet(path).imported(self.last_step)


class _Split(NamedTuple):
    name: str
    shards: list[Path]
    episodes: int


class _DataSet:
    """The files that describe the records."""

    def __init__(self, path: Path):
        self.path = path
        self.info = read_json(path / "dataset_info.json")
        plain = read_json(path / "features.json")
        with _located(path / "features.json"):
            self.features, unknown = features_of(plain)
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

    def _split(self, plain: Any) -> _Split:
        plain = plain if isinstance(plain, dict) else {}
        name, dataset = str(plain.get("name", "")), str(self.info.get("name", ""))
        lengths = _list(plain.get("shardLengths"))
        file_format = self.info.get("fileFormat", "tfrecord")
        if file_format != "tfrecord":
            advice = "convert it with tfds.core.DatasetBuilder, file_format='tfrecord'"
            raise UnreadableRecording(f"{self.path}: its files are {shown(file_format)}, not TFRecord; {advice}")
        if not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch(r"\w+", dataset):
            raise UnreadableRecording(f"{self.path / 'dataset_info.json'}: {name!r:.60}: invalid name of a split")
        template = plain.get("filepathTemplate") or TEMPLATE
        names = _shard_names(template, dataset, name, len(lengths))
        if names is None:
            raise UnreadableRecording(f"{self.path / 'dataset_info.json'}: unsupported names of shards")
        *_, following = _shard_names(template, dataset, name, len(lengths) + 1) or [""]
        if following and (self.path / following).is_file():
            self.warnings.append(f"{following} skipped: dataset_info.json does not list it; its writer was not closed")
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
        found = together(parts)
        found.warnings = self.warnings
        return found

    def _last_step(self, layouts: Layouts) -> str:
        """Find out what the last steps are, by the first episodes."""
        given = [
            *islice(chain.from_iterable(_EpisodeReader(self, layouts).last_ones(s) for s in self.splits), _LOOKED_AT)
        ]
        if 2 * sum(given) <= len(given):
            return "observation"
        self.warnings.append(
            f"in {sum(given)} of the first {len(given)} episodes the last step has an action or a reward, as in most "
            "robot data: it is read as a step with an unknown final observation. With last_step=observation it is the "
            "final observation alone, as RLDS defines it"
        )
        return "step"


def _shard_names(template: Any, dataset: str, split: str, count: int) -> list[str] | None:
    """Return the file names of a split, as ShardedFileTemplate of TFDS has them; None if they are not plain names."""
    if count > _MOST_SHARDS or not isinstance(template, str):
        return None
    of_all = {"DATASET": dataset, "SPLIT": split, "FILEFORMAT": "tfrecord", "NUM_SHARDS": f"{count:05}"}
    names = []
    for number in range(count):
        known = {**of_all, "SHARD_INDEX": f"{number:05}", "SHARD_X_OF_Y": f"{number:05}-of-{count:05}"}
        parts = re.split(r"\{(\w+)\}", template)  # every second one is a key
        names.append("".join(known.get(part, "/") if place % 2 else part for place, part in enumerate(parts)))
    if len(set(names)) < count or not all(re.fullmatch(r"[\w-][\w.-]*", name) for name in names):
        return None
    return names


class _EpisodeReader:
    def __init__(self, data: _DataSet, layouts: Layouts, last_is_step: bool = False):
        """last_is_step: the step with is_last is an ordinary step."""
        self._data, self._layouts, self._last_is_step = data, layouts, last_is_step
        self._ours = data.about is not None
        self._missing: set[str] = set()
        self._unfinished = self._last_actions = self._episodes = self._empty = 0
        known = (*_MARKS, "observation", "action", "reward")
        beside = {
            name: part
            for name, part in data.steps.items()
            if (name == "annotations" if self._ours else name not in known)
        }
        self._notes = {
            key_of(path[1]) if self._ours else ".".join(path): ("steps/" + "/".join(path), leaf)
            for path, leaf in leaves_of(beside)
        }

    def _warnings_at_end(self) -> Iterator[str]:
        """Yield what the source lacks, and what a trace cannot store."""
        if self._ours:
            return
        for name in sorted(self._missing):
            yield f"no {name}: {_INSTEAD[name]}"
        if self._empty:
            yield f"{self._empty} episodes without steps were skipped"
        if self._unfinished:
            yield f"{self._unfinished} episodes lack the observation after their last action"
        if self._last_actions:
            yield (
                f"in {self._last_actions} of {self._episodes} episodes the last step has an action or a reward, "
                "meaningless in RLDS and therefore skipped; last_step=step keeps them"
            )
        if self._notes and not self._last_is_step:
            yield "values of last steps other than observations were skipped; other steps have them as annotations"

    def episodes(self, split: _Split) -> Iterator[NewEpisode]:
        """Raises UnreadableRecording, also while the steps of an episode are read."""
        found = 0
        for shard, lists in self._records(split):
            found += 1
            with _located(shard):
                rows = self._rows_in(lists)
                episode = self._episode(shard, lists, rows) if rows else None
            if episode is None:
                self._empty += 1
            else:
                yield episode
        if found != split.episodes:
            counts = f"{found} episodes, but dataset_info.json declares {split.episodes}"
            raise UnreadableRecording(
                f"{self._data.path}: the split {split.name} has {counts}; a file may be incomplete"
            )
        self._data.warnings += self._warnings_at_end()

    def _records(self, split: _Split) -> Iterator[tuple[Path, dict[str, FeatureList]]]:
        for shard in split.shards:
            with _located(shard), shard.open("rb") as file:
                for record in records_in(file, shard.stat().st_size):
                    yield shard, lists_in(record)

    def last_ones(self, split: _Split) -> Iterator[bool]:
        """Return for each episode whether the step with is_last has an action or a reward."""
        for shard, lists in self._records(split):
            with _located(shard):
                rows = self._rows_in(lists)
                given = self._has_last_step(lists, rows) if rows and self._mark(lists, "is_last", rows) else None
            if given is not None:
                yield given

    def _has_last_step(self, lists: dict[str, FeatureList], rows: int) -> bool:
        actions, rewards = StepColumns(self._layouts, self._data.steps, lists, self._ours), self._rewards(lists)
        for begin in range(0, rows - 1, _MOST_ROWS):
            count = min(_MOST_ROWS, rows - 1 - begin)
            actions.actions(count)
            if rewards is not None:
                rewards(count)
        return _is_something(actions.actions(1)) or (rewards is not None and _is_something(rewards(1)))

    def _rewards(self, lists: dict[str, FeatureList]) -> ReadRows | None:
        """Return a function that reads the rewards; None if they are missing."""
        reward = self._data.steps.get("reward")
        if not isinstance(reward, Feature) or "steps/reward" not in lists:
            return None
        return reader_of(ListReader(lists["steps/reward"]), reward, self._ours)

    def _episode(self, shard: Path, lists: dict[str, FeatureList], rows: int) -> NewEpisode:
        self._episodes += 1
        marks = {name: self._mark(lists, name, rows) for name in _MARKS}
        is_over = marks["is_last"] is None or bool(marks["is_last"])
        has_final = is_over and not self._last_is_step
        self._unfinished += not is_over
        steps = rows - has_final
        known = self._metadata(lists)
        columns = StepColumns(self._layouts, self._data.steps, lists, self._ours)
        outcome = "cut"
        if is_over and steps:
            outcome = "terminated" if marks["is_terminal"] else "truncated"
        parts = self._parts(shard, columns, lists, rows, steps)
        if self._ours:
            identity = known.get("episode_metadata", {}).get(KEY, b"").decode(errors="replace")
            return NewEpisode(steps, parts, outcome, identity=identity)
        return NewEpisode(steps, parts, outcome, reset_info=known or None, has_final_observation=has_final)

    def _rows_in(self, lists: dict[str, FeatureList]) -> int:
        """Return the number of steps of a record."""
        steps = ((path[-1], leaf, lists.get("steps/" + "/".join(path))) for path, leaf in leaves_of(self._data.steps))
        plain = (*_MARKS, "reward", "discount")
        for _, leaf, found in sorted(steps, key=lambda one: one[0] not in plain):
            if found is not None and (leaf.encoding != "none" or leaf.numbers):
                return count_of(found, leaf.numbers if leaf.encoding == "none" else 1)
        raise MalformedExample("no steps")

    def _mark(self, lists: dict[str, FeatureList], name: str, rows: int) -> bool | None:
        """Return the flags of the last step; None if no step has any."""
        found = lists.get(f"steps/{name}")
        if found is None or name not in self._data.steps:
            if name != "is_first":
                self._missing.add(name)
            return None
        reader, last = ListReader(found), False
        for begin in range(0, rows, 1 << 16):
            last = bool(reader.integers(min(1 << 16, rows - begin))[-1])
        return last

    def _metadata(self, lists: dict[str, FeatureList]) -> dict[str, Any]:
        """Return the values of the episode as a whole."""
        known: dict[str, Any] = {}
        for path, feature in leaves_of(self._data.features):
            name = "/".join(path)
            if name in lists:
                place = known
                for key in path[:-1]:
                    place = place.setdefault(key, {})
                values = values_of(ListReader(lists[name]), feature, 1)
                value = next(iter(values), None)
                if isinstance(value, bytes) and not self._ours:
                    value = value.decode(errors="replace")
                place[path[-1]] = value
        return known

    def _parts(
        self, shard: Path, columns: StepColumns, lists: dict[str, FeatureList], rows: int, steps: int
    ) -> Iterator[NewSteps]:
        if (rewards := self._rewards(lists)) is None:
            self._missing.add("rewards")
        infos = ListReader(lists["steps/info"]) if self._ours and "steps/info" in lists else None
        notes = {
            name: reader_of(ListReader(lists[key]), feature, self._ours)
            for name, (key, feature) in self._notes.items()
            if key in lists
        }
        most = max(1, min(_MOST_ROWS, _MOST_PART // columns.row_size))
        with _located(shard):
            lead = columns.observations(1)
            for begin in range(0, max(steps, 1), most):
                count = min(most, steps - begin)
                there = min(count, rows - 1 - begin)  # the observation after the last of them may be unknown
                observations = columns.observations(there)
                if there < count:
                    observations = trees.joined(observations, columns.unknown())
                if lead is not None:
                    observations, lead = trees.joined(lead, observations), None
                given = np.full(count, np.nan) if rewards is None else rewards(count)
                known = all_from_json(infos.values(count)) if infos else None
                annotations = {name: read(count) for name, read in notes.items()}
                if self._ours:
                    marked = ((name, _marked(found)) for name, found in annotations.items())
                    annotations = {name: found for name, found in marked if found is not None}
                actions = columns.actions(count)
                if begin + count == steps < rows and not self._ours:
                    has_reward = rewards is not None and _is_something(rewards(1))
                    self._last_actions += _is_something(columns.actions(1)) or has_reward
                yield NewSteps(
                    observations,
                    actions,
                    given,
                    infos=known if known and known[0] is not None else None,
                    annotations=annotations if count else {},
                )


def _marked(rows: Any) -> Any:
    """Annotations with ABSENT where there was none; None if there was none at all, rather than None at every step."""
    if isinstance(rows, np.ndarray) or (rows and all(row is None for row in rows)):
        return rows
    found = [ABSENT if row is None else row for row in rows]
    return None if all(row is ABSENT for row in found) else found


def _is_something(tree: Any) -> bool:
    """Return True if an action is not all zeros."""
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
