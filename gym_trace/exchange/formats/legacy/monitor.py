"""Directories of OpenAI Gym's Monitor: a manifest and a file of statistics for each process, and videos.

load_results() is Monitor's function of this name, which reads these directories and traces.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import TraceNotFound, warn
from gym_trace.exchange.formats.imported import Imported, Schema, new_schema
from gym_trace.exchange.formats.legacy.old_files import OldDirectory, malformed, plain_name
from gym_trace.format import wire
from gym_trace.format.directory import find_writers, is_writer_id, new_writer_id
from gym_trace.format.manifest import SUFFIX
from gym_trace.format.ring.segment import Segment
from gym_trace.playback.episode_columns import complete_rows
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace, open_trace, storage_of
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.recording.reset_record import NOTHING
from gym_trace.storage.local import LocalStorage
from gym_trace.tools.statistics.summary import by_episode

_KIND = "OpenAI Gym Monitor"
_PREFIX, _SUFFIX = "openaigym.manifest.", ".json"
_SPLITS = {"t": "train", "e": "eval", None: ""}
_NO_OUTCOME = 0  # done was set, without terminated or truncated
_SEGMENT_EPISODES = 8192
_MAX_MANIFEST = 4 << 20  # bytes; each batch of the trace stores all of it
_EMPTY_SPACE = {"type": "Tuple", "spaces": []}  # has no columns
_LATEST = 1 << 33  # seconds; later times do not fit int64 nanoseconds

NOTE = (
    "imported from OpenAI Gym's Monitor, which stores only statistics: episodes have no steps, first_step is their "
    "length, and their outcome is unknown"
)


def find_runs(directory: OldDirectory) -> list[MonitorRun]:
    return [MonitorRun(directory, name) for name in directory.names if is_manifest(name)]


def is_manifest(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def differences(env_infos: list[Any]) -> str:
    """Return a warning for statistics of several environments in one directory."""
    different = _distinct(env_infos)
    if len(different) < 2:
        return ""
    shown = ", ".join(map(_shown, different[:5])) + (", …" if len(different) > 5 else "")
    return f"statistics of {len(different)} environments in one directory: {shown}"


def _distinct(values: list[Any]) -> list[Any]:
    return [value for i, value in enumerate(values) if value not in values[:i]]


def _shown(env_info: Any) -> str:
    if not isinstance(env_info, dict):
        return "an unknown one"
    text = f"{env_info.get('env_id')} ({env_info.get('gym_version')})"
    return text if text.isprintable() else ascii(text)


def _ns(seconds: float) -> int:
    """Return seconds as included ns; _seconds() returns the same float."""
    return round(Fraction(seconds) * 10**9)


class _Results(NamedTuple):
    """Statistics of one process; the lists have one element per complete episode, except for manifests and videos.

    env_info: id of the environment and version of gym, as stored, or None.
    initial_reset: timestamp of the first reset, s, or None. timestamps: of the ends, s. types: "t", "e" or None.
    videos: (file, file that describes it).
    """

    manifests: list[str]
    env_info: Any
    initial_reset: float | None
    videos: list[tuple[str, str]]
    timestamps: list[float]
    lengths: list[int]
    rewards: list[float]
    types: list[Any]


class MonitorRun:
    """The recording of one Monitor. manifest, stats: names of files. open_type: type of an incomplete last episode."""

    def __init__(self, directory: OldDirectory, manifest: str):
        path = directory.path / manifest
        content = directory.json(manifest, limit=_MAX_MANIFEST)
        self.manifest = manifest
        self.stats = plain_name(content.get("stats"), path)
        videos = [_pair(entry, path) for entry in _list(content, "videos", path, optional=True)]
        stats, path = directory.json(self.stats), directory.path / self.stats
        timestamps = [_checked(value, "a time", path) for value in _list(stats, "timestamps", path)]
        lengths = [_checked(value, "a length", path) for value in _list(stats, "episode_lengths", path)]
        rewards = [_checked(value, "a number", path) for value in _list(stats, "episode_rewards", path)]
        initial = stats.get("initial_reset_timestamp")
        count = len(timestamps)
        types = _list(stats, "episode_types", path, optional=True) or [None] * count
        if not all(kind in ("t", "e", None) for kind in types):
            raise malformed(path, 'an episode type that is neither "t" nor "e"')
        if not (len(lengths) == len(rewards) == count <= len(types) <= count + 1):
            raise malformed(
                path,
                f"{count} timestamps, {len(lengths)} lengths, {len(rewards)} rewards and {len(types)} types; "
                "the counts must be equal",
            )
        initial = None if initial is None else _checked(initial, "a time", path)
        self.results = _Results(
            [manifest], content.get("env_info"), initial, videos, timestamps, lengths, rewards, types[:count]
        )
        self.open_type: str | None = types[count] if len(types) > count else None

    def imported(self) -> Imported:
        """Return the recording as the content of two writers: one for training, one for evaluation."""
        name = self.manifest.removesuffix(_SUFFIX).removesuffix(".manifest").replace(".manifest.", ".monitor.", 1)
        types = list(dict.fromkeys(self.results.types)) or [self.open_type]
        writers, schemas = {}, {}
        for episode_type in types:
            split = _SPLITS[episode_type]
            writer = name if len(types) == 1 else f"{name}.{split}"
            writer = writer if is_writer_id(writer) else new_writer_id()
            writers[writer] = [i for i, other in enumerate(self.results.types) if other == episode_type]
            schemas[writer] = self._schema(split)
        segments = ((writer, segment) for writer, numbers in writers.items() for segment in self._segments(numbers))
        return Imported(_KIND, schemas, segments, 1, lambda: 1, warnings=[NOTE])

    def _schema(self, split: str) -> Schema:
        env_info = self.results.env_info
        env_id, version = (
            value if isinstance(env_info, dict) and isinstance(value := env_info.get(name), str) else None
            for name in ("env_id", "gym_version")
        )
        metadata = {
            "imported_from": _KIND,
            "manifest": self.manifest,
            "stats": self.stats,
            "env_info": env_info,
            "initial_reset_timestamp": self.results.initial_reset,
            "open_episode_type": self.open_type,
            "videos": [list(pair) for pair in self.results.videos],
        }
        schema = new_schema(_KIND, _EMPTY_SPACE, _EMPTY_SPACE, {"id": env_id, "note": NOTE}, metadata, split)
        schema["versions"] = {} if version is None else {"gym": version}
        schema["recorder"]["statistics_only"] = True
        return schema

    def _segments(self, numbers: list[int]) -> Iterator[Segment]:
        for begin in range(0, len(numbers), _SEGMENT_EPISODES):
            table = self._fragments(numbers[begin : begin + _SEGMENT_EPISODES])
            yield Segment(table, {("starts",): [NOTHING] * len(table)}, table.nbytes + len(table))

    def _fragments(self, numbers: list[int]) -> Array:
        """Return one fragment per episode, without steps; first_step is the number of unrecorded steps."""
        results = self.results
        first = results.timestamps[:1] if results.initial_reset is None else [results.initial_reset]
        begins = [*first, *results.timestamps]  # Monitor stored ends: an episode begins where the one before ended
        table = np.zeros(len(numbers), wire.FRAGMENT)
        table["episode"] = numbers
        table["first_step"] = [results.lengths[i] for i in numbers]
        table["reward_sum"] = [results.rewards[i] for i in numbers]
        table["flags"] = wire.STARTS | wire.HAS_INITIAL | wire.STOPS | wire.ENDS
        table["outcome"] = _NO_OUTCOME
        table["seed"] = wire.NO_SEED
        starts = [_ns(begins[i]) for i in numbers]
        table["start_time"] = starts
        table["duration"] = [_ns(results.timestamps[i]) - start for i, start in zip(numbers, starts)]
        return table


def _list(content: dict[str, Any], key: str, path: Path, optional: bool = False) -> list[Any]:
    value = content.get(key)
    if value is None and optional:
        return []
    if not isinstance(value, list):
        raise malformed(path, f"{key}: not a list")
    return value


def _pair(entry: Any, path: Path) -> tuple[str, str]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise malformed(path, "a video needs two files")
    return plain_name(entry[0], path), plain_name(entry[1], path)


def _checked(value: Any, what: str, path: Path) -> Any:
    """Return "a length" as an integer, "a time" or "a number" as a float. Raises UnreadableRecording."""
    is_integer = type(value) is int and abs(value) < 1 << 1000
    if what == "a length" and is_integer and 0 <= value < 1 << 62:
        return value
    if what != "a length" and (is_integer or type(value) is float) and (what == "a number" or 0 <= value < _LATEST):
        return float(value)
    raise malformed(path, f"{value!r:.40} instead of {what}")


# -- load_results ------------------------------------------------------------------------------------------------------

_TYPES = {"train": "t", "eval": "e", "": None}
_UNKNOWN = np.iinfo(np.int64).min  # NaT of NumPy


def load_results(directory: Trace | str | os.PathLike[str]) -> dict[str, Any]:
    """Return the statistics of all episodes in a directory, as ``gym.wrappers.monitor.load_results`` returned them.

    Args:
        directory: of a trace, recorded or imported, or one that OpenAI Gym's Monitor wrote; or an open trace.

    Returns:
        Lists with one element per episode, in the order of the timestamps: timestamps (of the ends, in seconds;
        unknown ones are NaN, at the end), episode_lengths (in steps), episode_rewards (returns), episode_types ("t"
        for training, "e" for evaluation, other splits by their names, None if unknown; None in place of the list if
        all are unknown), data_sources (number of the process).

        initial_reset_timestamps (one per process with episodes), initial_reset_timestamp (the earliest of them, 0 if
        missing), env_info (env_id and gym_version), manifests (paths), videos (path, path of the description).

        Incomplete episodes and those without steps are skipped, as by Monitor. Of imported recordings, whose outcomes
        may be unknown, all are included. Episodes with several rewards per step have the return NaN.

        A directory of several environments causes a warning (the old function raised): the result is that of the
        first, and groups is a list of such dicts, one per environment.

    Raises:
        TraceNotFound: no trace and no recording of Monitor.
        UnreadableRecording: the recording of Monitor is damaged.
        CorruptTrace: the trace is damaged.

    Examples:
        >>> results = gym_trace.load_results("traces/cartpole")
        >>> results["episode_lengths"][:3], results["episode_rewards"][:3]
        ([12, 9, 13], [12.0, 9.0, 13.0])
    """
    sources = _results_of_trace(directory) if isinstance(directory, Trace) else _results_in(directory)
    if problem := differences([source.env_info for source in sources]):
        warn(f"{storage_of(directory).root}: {problem}; the results are those of the first, groups has all")
    env_infos = _distinct([source.env_info for source in sources])
    first, *others = (_merged([source for source in sources if source.env_info == info]) for info in env_infos)
    return {**first, "groups": [first, *others]} if others else first


def _results_in(directory: str | os.PathLike[str]) -> list[_Results]:
    old = OldDirectory(directory)
    if any(map(is_manifest, old.names)):
        return [_with_paths(old.path, run.results) for run in find_runs(old)]
    if find_writers(LocalStorage(old.path)):
        return _results_of_trace(open_trace(old.path))
    raise TraceNotFound(
        f"{old.path}: neither a trace nor statistics of OpenAI Gym's Monitor (openaigym.manifest.*.json) here; "
        "import recordings of gym_recording first"
    )


def _with_paths(directory: Path, results: _Results) -> _Results:
    """Return the results with paths in place of file names."""
    videos = [(str(directory / video), str(directory / about)) for video, about in results.videos]
    return results._replace(manifests=[str(directory / name) for name in results.manifests], videos=videos)


def _merged(sources: list[_Results]) -> dict[str, Any]:
    timestamps = np.array([time for source in sources for time in source.timestamps], np.float64)
    order = np.argsort(timestamps, kind="stable").tolist()

    def in_order(values: Callable[[_Results], list[Any]]) -> list[Any]:
        unordered = [value for source in sources for value in values(source)]
        return [unordered[i] for i in order]

    types = in_order(lambda source: source.types)
    numbers = [number for number, source in enumerate(sources) for _ in source.timestamps]
    resets = [s.initial_reset for s in sources if s.timestamps and s.initial_reset is not None]
    return {
        "manifests": [manifest for source in sources for manifest in source.manifests],
        "env_info": sources[0].env_info,
        "data_sources": [numbers[i] for i in order],
        "timestamps": in_order(lambda source: source.timestamps),
        "episode_lengths": in_order(lambda source: source.lengths),
        "episode_rewards": in_order(lambda source: source.rewards),
        "episode_types": None if all(kind is None for kind in types) else types,
        "initial_reset_timestamps": resets,
        "initial_reset_timestamp": min(resets, default=0),
        "videos": [video for source in sources for video in source.videos],
    }


def _results_of_trace(trace: Trace) -> list[_Results]:
    """Return the results of each process of a trace; join the training and evaluation of an imported process."""
    for damage in trace.damage:
        raise damage.error()
    sources: dict[Any, _Results] = {}
    for number, writer in enumerate(index_of(trace).readers):
        source = _results_of_writer(trace, number, writer)
        process = str(writer.about_or_empty.origin.get("manifest", number))
        before = sources.get(process)
        if before is not None:
            joined = ("manifests", "timestamps", "lengths", "rewards", "types")
            source = before._replace(**{name: getattr(before, name) + getattr(source, name) for name in joined})
        sources[process] = source
    return list(sources.values())


def _results_of_writer(trace: Trace, number: int, writer: WriterReader) -> _Results:
    about = writer.about_or_empty
    table = trace.episodes[trace.episodes["writer"] == number]
    order, begin = by_episode(table)
    rows = table[order[begin]]
    lengths, returns = _sums(table["steps"][order], begin), _sums(table["return"][order], begin)
    if about.has_only_statistics:
        lengths = rows["first_step"]
    origin = about.origin
    recorded = {"env_id": about.environment.get("id"), "gym_version": about.versions.get("gymnasium")}
    included = complete_rows(rows, index_of(trace).readers, lengths=np.asarray(lengths)) | bool(origin)
    initial_reset = origin.get("initial_reset_timestamp")
    manifest = f"{writer.writer}{SUFFIX}"
    results = _Results(
        manifests=[manifest],
        env_info=origin.get("env_info", recorded),
        initial_reset=initial_reset if isinstance(initial_reset, float) else _earliest(table["start_time"]),
        videos=_pairs(origin.get("videos")) if origin else _live_videos(writer, manifest),
        timestamps=[_seconds(end) for end in rows["end_time"][included].view(np.int64).tolist()],
        lengths=lengths[included].tolist(),
        rewards=returns[included].tolist(),
        types=[_TYPES.get(writer.split, writer.split)] * int(included.sum()),
    )
    return _with_paths(trace.directory, results)


def _sums(values: Array, begin: Array) -> Array:
    """Return the sum of each run of values. begin: index of the first value of each run."""
    sums: Array = np.add.reduceat(values, begin) if len(begin) else values
    return sums


def _pairs(value: Any) -> list[tuple[str, str]]:
    """Return the valid pairs of file names in untrusted metadata."""
    pairs = [tuple(pair) for pair in value if isinstance(pair, list)] if isinstance(value, list) else []
    return [pair for pair in pairs if len(pair) == 2 and all(map(_is_name, pair))]


def _live_videos(writer: WriterReader, manifest: str) -> list[tuple[str, str]]:
    """Return the videos of a recorder, each with its manifest, which describes them."""
    files = [entry.get("file") for entry in writer.files.entries() if entry.get("type") == "video"]
    return [(str(file), manifest) for file in files if _is_name(file)]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value == os.path.basename(value)


def _earliest(times: Array) -> float | None:
    known = times[~np.isnat(times)].view(np.int64)
    return _seconds(int(known.min())) if len(known) else None


def _seconds(ns: int) -> float:
    """Return ns as the nearest seconds; inverts _ns()."""
    return math.nan if ns == _UNKNOWN else ns / 10**9
