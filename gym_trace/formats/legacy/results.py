"""load_results, as OpenAI Gym's Monitor had it."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import TraceNotFound
from gym_trace.format.directory import find_writers
from gym_trace.format.manifest import SUFFIX
from gym_trace.formats.legacy.monitor import MonitorRun, differences, find_runs, is_manifest
from gym_trace.formats.legacy.old_files import OldDirectory
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace, open_trace, storage_of
from gym_trace.reading.episode_columns import complete_rows
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.statistics.summary import by_episode
from gym_trace.storage.local import LocalStorage

_TYPES = {"train": "t", "eval": "e", "": None}
_UNKNOWN = np.iinfo(np.int64).min  # as a time


class _Source(NamedTuple):
    """Results of one process: manifests, environment, first reset, and its episodes."""

    manifests: list[str]
    env_info: Any
    initial_reset: float | None
    videos: list[tuple[str, str]]
    timestamps: list[float]
    lengths: list[int]
    rewards: list[float]
    types: list[str | None]


def load_results(directory: Trace | str | os.PathLike[str]) -> dict[str, Any]:
    """The statistics of all episodes in a directory, as ``gym.wrappers.monitor.load_results`` returned them.

    Args:
        directory: of a trace, recorded or imported, or one that OpenAI Gym's Monitor wrote; or an open trace.

    Returns:
        Lists with one element per episode, in the order of the timestamps: timestamps (of the ends, in seconds; NaN
        if unknown, last), episode_lengths (in steps), episode_rewards (returns), episode_types ("t" for training, "e"
        for evaluation, other splits of a trace by their names, None where unknown; None instead of the list if all
        are), data_sources (the process it is from, a number).

        initial_reset_timestamps (of each process that has episodes), initial_reset_timestamp (the least of them, 0 if
        missing), env_info (env_id and gym_version), manifests and videos (paths, each video with that of its
        description).

        Episodes that did not come to their end, or have no step, are left out, as they were by Monitor; of imported
        recordings, which may not say how they ended, all are there. The return of rewards that are several numbers
        each is NaN.

        Where several environments are in one directory (for which the old function raised) there is a warning, all of
        this is of the first one, and groups is a list of such dicts, one for each.

    Raises:
        TraceNotFound: there is nothing of the kind.
        UnreadableRecording: what Monitor wrote is damaged.
        CorruptTrace: the trace is damaged.
    """
    sources = _of_trace(directory) if isinstance(directory, Trace) else _of_directory(directory)
    if problem := differences([source.env_info for source in sources]):
        warnings.warn(
            f"{storage_of(directory).root}: {problem}; the results are those of the first, groups has all", stacklevel=2
        )
    first, *others = _grouped(sources)
    return {**first, "groups": [first, *others]} if others else first


def _of_directory(directory: str | os.PathLike[str]) -> list[_Source]:
    with OldDirectory(directory) as old:
        if any(map(is_manifest, old.names)):
            return [_of_monitor(old.path, run) for run in find_runs(old)]
        if find_writers(LocalStorage(old.path)):
            return _of_trace(open_trace(old.path))
        raise TraceNotFound(
            f"{old.path}: neither a trace nor statistics of OpenAI Gym's Monitor (openaigym.manifest.*.json) here; "
            "what gym_recording wrote, import first"
        )


def _grouped(sources: list[_Source]) -> list[dict[str, Any]]:
    """The results of each environment."""
    env_infos = [source.env_info for source in sources]
    different = [info for i, info in enumerate(env_infos) if info not in env_infos[:i]]
    return [_merged([source for source in sources if source.env_info == info]) for info in different]


def _merged(sources: list[_Source]) -> dict[str, Any]:
    timestamps = np.array([time for source in sources for time in source.timestamps], np.float64)
    order = np.argsort(timestamps, kind="stable").tolist()

    def in_order(values: Callable[[_Source], list[Any]]) -> list[Any]:
        together = [value for source in sources for value in values(source)]
        return [together[i] for i in order]

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


def _of_monitor(directory: Path, run: MonitorRun) -> _Source:
    videos = [(str(directory / video), str(directory / about)) for video, about in run.videos]
    manifests = [str(directory / run.manifest)]
    return _Source(
        manifests, run.env_info, run.initial_reset, videos, run.timestamps, run.lengths, run.rewards, run.types
    )


def _of_trace(trace: Trace) -> list[_Source]:
    """The processes that recorded a trace. Training and evaluation that were imported from one process are joined."""
    for damage in trace.damage:
        raise damage.error()
    sources: dict[Any, _Source] = {}
    for number, writer in enumerate(trace.readers):
        source = _of_writer(trace, number, writer)
        origin = str(writer.about_or_empty.origin.get("manifest", number))
        before = sources.get(origin)
        if before is None:
            sources[origin] = source
        else:
            sources[origin] = before._replace(
                manifests=before.manifests + source.manifests,
                timestamps=before.timestamps + source.timestamps,
                lengths=before.lengths + source.lengths,
                rewards=before.rewards + source.rewards,
                types=before.types + source.types,
            )
    return list(sources.values())


def _of_writer(trace: Trace, number: int, writer: WriterReader) -> _Source:
    about = writer.about_or_empty
    table = trace.episodes[trace.episodes["writer"] == number]
    order, begin = by_episode(table)
    rows = table[order[begin]]
    lengths, returns = _sums(table["steps"][order], begin), _sums(table["return"][order], begin)
    if about.has_only_statistics:
        lengths = rows["first_step"]
    origin = about.origin
    of_trace = {"env_id": about.environment.get("id"), "gym_version": about.versions.get("gymnasium")}
    whole = complete_rows(rows, trace.readers, np.asarray(lengths)) | bool(origin)
    initial_reset = origin.get("initial_reset_timestamp")
    manifest = f"{writer.writer}{SUFFIX}"
    videos = _pairs(origin.get("videos")) if origin else _live_videos(writer, manifest)
    return _Source(
        manifests=[str(trace.directory / manifest)],
        env_info=origin.get("env_info", of_trace),
        initial_reset=initial_reset if isinstance(initial_reset, float) else _first(table["start_time"]),
        videos=[(str(trace.directory / video), str(trace.directory / about)) for video, about in videos],
        timestamps=[_seconds(end) for end in rows["end_time"][whole].view(np.int64).tolist()],
        lengths=lengths[whole].tolist(),
        rewards=returns[whole].tolist(),
        types=[_TYPES.get(writer.split, writer.split)] * int(whole.sum()),
    )


def _sums(values: Array, begin: Array) -> Array:
    """The sum of each run of values; begin: where runs begin."""
    sums: Array = np.add.reduceat(values, begin) if len(begin) else values
    return sums


def _pairs(value: Any) -> list[tuple[str, str]]:
    """The pairs of file names that a trace holds, which is not trusted."""
    pairs = [tuple(pair) for pair in value if isinstance(pair, list)] if isinstance(value, list) else []
    return [pair for pair in pairs if len(pair) == 2 and all(map(_is_name, pair))]


def _live_videos(writer: WriterReader, manifest: str) -> list[tuple[str, str]]:
    """The videos that a recorder made, with the name of its manifest, which describes them."""
    files = [entry.get("file") for entry in writer.files.entries() if entry.get("type") == "video"]
    return [(str(file), manifest) for file in files if _is_name(file)]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value == os.path.basename(value)


def _first(starts: Array) -> float | None:
    known = starts[~np.isnat(starts)].view(np.int64)
    return _seconds(int(known.min())) if len(known) else None


def _seconds(ns: int) -> float:
    """The float that is nearest: for times that were floats, the same one."""
    return math.nan if ns == _UNKNOWN else ns / 10**9
