"""Directories of OpenAI Gym's Monitor: a manifest and a file of statistics for each process, and videos."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.format import wire
from gym_trace.formats.legacy.columns import NewWriter
from gym_trace.formats.legacy.old_files import OldDirectory, malformed, plain_name
from gym_trace.model.values import Array
from gym_trace.recording.reset_record import NOTHING
from gym_trace.ring.segment import Segment

_PREFIX, _SUFFIX = "openaigym.manifest.", ".json"
_SPLITS = {"t": "train", "e": "eval", None: ""}
_NO_OUTCOME = 0  # that done was said, but not whether it was terminated or truncated
_SEGMENT = 8192  # episodes
_MAX_MANIFEST = 4 << 20  # bytes; every batch of the trace has all of it
_NOTHING_KNOWN = {"type": "Tuple", "spaces": []}  # a space whose values have no columns
_LATEST = 1 << 33  # seconds: what is later cannot be said in ns

NOTE = (
    "imported from OpenAI Gym's Monitor, which kept statistics alone: an episode has no steps, its length is its "
    "first_step, and it is not known whether it was terminated or truncated"
)


def find_runs(directory: OldDirectory) -> list[MonitorRun]:
    """Find the runs of Monitors in a directory."""
    return [MonitorRun(directory, name) for name in directory.names if is_manifest(name)]


def is_manifest(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def differences(env_infos: list[Any]) -> str:
    """Return a warning for statistics of several environments in one directory."""
    different = [info for i, info in enumerate(env_infos) if info not in env_infos[:i]]
    if len(different) < 2:
        return ""
    shown = ", ".join(map(_shown, different[:5])) + (", …" if len(different) > 5 else "")
    return f"statistics of {len(different)} environments in one directory: {shown}"


def _shown(env_info: Any) -> str:
    if not isinstance(env_info, dict):
        return "one that is unknown"
    text = f"{env_info.get('env_id')} ({env_info.get('gym_version')})"
    return text if text.isprintable() else ascii(text)


def _ns(seconds: float) -> int:
    """Seconds of a clock as whole ns, from which the same float can be had again."""
    return round(Fraction(seconds) * 10**9)


class MonitorRun:
    """The files of one Monitor.

    Attributes:
        manifest: name of its manifest.
        env_info: the environment's id and the version of gym, as they were stored; None where they were not.
        initial_reset: timestamp of the first reset, s, or None.
        timestamps, lengths, rewards: of each episode that came to its end; timestamps are those of the ends, s.
        types: "t" or "e" of each, or None. open_type: that of an episode that did not come to its end, or None.
        videos: names of videos and of what describes them.
    """

    kind = "OpenAI Gym Monitor"
    files = 1

    def __init__(self, directory: OldDirectory, manifest: str):
        path = directory.path / manifest
        content = directory.json(manifest, limit=_MAX_MANIFEST)
        self.manifest = manifest
        self.env_info = content.get("env_info")
        self.videos = [_pair(entry, path) for entry in _list(content, "videos", path, [])]
        self.stats = plain_name(content.get("stats"), path)
        self._read_statistics(directory.path / self.stats, directory.json(self.stats))

    def _read_statistics(self, path: Path, content: dict[str, Any]) -> None:
        self.timestamps = [_time(value, path) for value in _list(content, "timestamps", path)]
        self.lengths = [_length(value, path) for value in _list(content, "episode_lengths", path)]
        self.rewards = [_number(value, path) for value in _list(content, "episode_rewards", path)]
        initial = content.get("initial_reset_timestamp")
        self.initial_reset = None if initial is None else _time(initial, path)
        count = len(self.timestamps)
        types = _list(content, "episode_types", path, []) or [None] * count
        if not all(kind in ("t", "e", None) for kind in types):
            raise malformed(path, 'an episode type that is neither "t" nor "e"')
        if not (len(self.lengths) == len(self.rewards) == count <= len(types) <= count + 1):
            raise malformed(
                path,
                f"{count} timestamps, {len(self.lengths)} lengths, {len(self.rewards)} rewards and {len(types)} types; "
                "there should be as many of each",
            )
        self.types: list[str | None] = types[:count]
        self.open_type: str | None = types[count] if len(types) > count else None

    @property
    def env_id(self) -> str | None:
        env_id = self.env_info.get("env_id") if isinstance(self.env_info, dict) else None
        return env_id if isinstance(env_id, str) else None

    def writers(self, on_file: Callable[[], None]) -> Iterator[NewWriter]:
        """The writers of a trace that it becomes, one for training, one for evaluation. on_file: called at the end."""
        name = self.manifest.removesuffix(_SUFFIX).removesuffix(".manifest").replace(".manifest.", ".monitor.", 1)
        kinds = list(dict.fromkeys(self.types)) or [self.open_type]
        for kind in kinds:
            split = _SPLITS[kind]
            places = [i for i, its_kind in enumerate(self.types) if its_kind == kind]
            yield NewWriter(name if len(kinds) == 1 else f"{name}.{split}", self._schema(split), self._segments(places))
        on_file()

    def _schema(self, split: str) -> dict[str, Any]:
        info = self.env_info if isinstance(self.env_info, dict) else {}
        version = info.get("gym_version")
        return {
            "split": split,
            "observation_space": _NOTHING_KNOWN,
            "action_space": _NOTHING_KNOWN,
            "environment": {"id": self.env_id, "note": NOTE},
            "versions": {"gym": version} if isinstance(version, str) else {},
            "recorder": {"statistics_only": True},
            "metadata": {
                "imported_from": self.kind,
                "manifest": self.manifest,
                "stats": self.stats,
                "env_info": self.env_info,
                "initial_reset_timestamp": self.initial_reset,
                "open_episode_type": self.open_type,
                "videos": [list(pair) for pair in self.videos],
            },
        }

    def _segments(self, places: list[int]) -> Iterator[Segment]:
        for begin in range(0, len(places), _SEGMENT):
            table = self._fragments(places[begin : begin + _SEGMENT])
            yield Segment(table, {("starts",): [NOTHING] * len(table)}, table.nbytes + len(table))

    def _fragments(self, places: list[int]) -> Array:
        """An episode without steps is one fragment, which begins where the steps that are not here end."""
        table = np.zeros(len(places), wire.FRAGMENT)
        table["episode"] = places
        table["first_step"] = [self.lengths[i] for i in places]
        table["reward_sum"] = [self.rewards[i] for i in places]
        table["flags"] = wire.STARTS | wire.LEADS | wire.STOPS | wire.ENDS
        table["outcome"] = _NO_OUTCOME
        table["seed"] = wire.NO_SEED
        ends = [_ns(self.timestamps[i]) for i in places]
        starts = [_ns(self._start(i)) for i in places]
        table["start_time"] = starts
        table["duration"] = [end - start for start, end in zip(starts, ends)]
        return table

    def _start(self, place: int) -> float:
        """Return the earliest start of an episode: the first reset, or the end of the episode before it."""
        if place:
            return self.timestamps[place - 1]
        return self.timestamps[0] if self.initial_reset is None else self.initial_reset


_MISSING: Any = object()


def _list(content: dict[str, Any], key: str, path: Path, default: Any = _MISSING) -> list[Any]:
    found = content.get(key, default)
    if found is None and default is not _MISSING:
        return list(default)
    if not isinstance(found, list):
        raise malformed(path, f"no list of {key}")
    return found


def _pair(entry: Any, path: Path) -> tuple[str, str]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise malformed(path, "a video that is not given by two files")
    return plain_name(entry[0], path), plain_name(entry[1], path)


def _number(value: Any, path: Path) -> float:
    if type(value) in (int, float) and (type(value) is float or abs(value) < 1 << 1000):
        return float(value)
    raise malformed(path, f"{value!r:.40} where there should be a number")


def _time(value: Any, path: Path) -> float:
    seconds = _number(value, path)
    if 0 <= seconds < _LATEST:
        return seconds
    raise malformed(path, f"{value!r:.40} where there should be a time")


def _length(value: Any, path: Path) -> int:
    if type(value) is int and 0 <= value < 1 << 62:
        return value
    raise malformed(path, f"{value!r:.40} where there should be a length")
