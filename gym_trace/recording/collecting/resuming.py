"""Resume a run of collect(): its settings, its writers, and the episodes on disk."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.schema import as_map
from gym_trace.data.vocabulary import Outcome
from gym_trace.envs.seeding import EPISODES, episode_of
from gym_trace.errors import CorruptTrace, InvalidOption, TraceNotFound
from gym_trace.format.directory import find_writers, prepare
from gym_trace.format.manifest import SUFFIX, json_of
from gym_trace.playback.episode_table import outcome_codes
from gym_trace.playback.origins import readers_by_origin
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.recording.processes.run_log import EVENTS
from gym_trace.recording.publishing.spool import publish, recorded, recording_path, refuse_existing, set_aside, spool_of
from gym_trace.storage.local import LocalStorage, open_regular, size_on_disk

_SETTINGS = {"run", "seed", "policy", "environment", "recording", "shards"}
_MAX_SEED = 1 << 128
_MAX_LOG_BYTES = 1 << 32
_MAX_LINE_BYTES = 16 << 20
_START = b'"start"'  # cheap test before a line is parsed
_ORPHAN_SECONDS = 15  # workers end within this time after their parent
_SHARD_EVENTS = re.compile(r"events\.[0-9]+-of-[0-9]+\.jsonl")


class Shard(NamedTuple):
    """Share of the episodes of a run: those with k % of == number."""

    number: int = 0
    of: int = 1

    def below(self, limit: int) -> range:
        return range(self.number, max(limit, self.number), self.of)


def shard_mark(shard: Shard | None) -> str:
    """Return the part of a shard's writer ids before the number of the worker."""
    return "" if shard is None else f"-s{shard.number}"


def own_writers(shard: Shard | None) -> str:
    """Return a regular expression for the ids of a shard's writers."""
    return ".*" if shard is None else f".*{shard_mark(shard)}-w[0-9]+"


def events_name(shard: Shard | None) -> str:
    """Return the name of the event log of a run, or of a shard of it."""
    return EVENTS if shard is None else EVENTS.replace(".", f".{shard.number}-of-{shard.of}.")


def run_settings(directory: str | os.PathLike[str], name: str = EVENTS) -> dict[str, Any] | None:
    """Return the settings of the last run in a directory, or of this machine to a URL; None without a run.

    name: of the event log, which is untrusted input.

    Raises:
        CorruptTrace: the file cannot be read, or its settings are invalid

    Examples:
        >>> print(gym_trace.recording.run_settings("traces/cartpole"))  # no workers recorded it
        None
    """
    path = recording_path(directory) / name
    try:
        fd = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CorruptTrace(f"cannot resume: {error.strerror}", path) from error
    settings = None
    with open(fd, "rb") as file:
        if size_on_disk(fd, path) > _MAX_LOG_BYTES:
            raise CorruptTrace(f"larger than {_MAX_LOG_BYTES} bytes; cannot resume", path)
        while line := file.readline(_MAX_LINE_BYTES):
            if _START in line and (entry := _entry(line)).get("event") == "start":
                settings = entry.get("settings")
    if settings is not None and not _is_settings(settings):
        raise CorruptTrace("invalid run settings; cannot resume", path)
    return settings


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = json_of(line)
    except (ValueError, RecursionError):  # the run was killed while it wrote this line
        return {}
    return entry if isinstance(entry, dict) else {}


def _is_settings(settings: Any) -> bool:
    """Return True if these are settings as collect() writes them."""
    if not isinstance(settings, dict) or set(settings) - _SETTINGS:
        return False
    run, seed = settings.get("run"), settings.get("seed")
    return (
        isinstance(run, str)
        and re.fullmatch("[0-9a-f]{1,32}", run) is not None
        and type(seed) is int
        and 0 <= seed < _MAX_SEED
        and isinstance(settings.get("policy"), str)
        and isinstance(settings.get("environment"), (dict, type(None)))
        and isinstance(settings.get("recording"), dict)
        and isinstance(settings.get("shards"), (int, type(None)))
    )


def check_same(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InvalidOption if a run would continue with other settings."""
    for name in sorted({*before, *now} - {"run"}):
        if before.get(name) != now.get(name):
            raise InvalidOption(
                f"{name}: the run was started with {name}={before.get(name)!r}, not {now.get(name)!r}; pass the same, "
                "or record into another directory"
            )


def join_shards(directory: Path, url: str | None, settings: dict[str, Any], on_exist: str) -> None:
    """Check that all runs in a directory, or of this machine to a URL, are shards of one. Hold the directory's lock.

    url: destination, if the directory is a spool.
    on_exist: "append" also joins a trace that no shard began.

    Raises:
        InvalidOption: the directory has a run with other settings.
        TraceExists, RemoteError
    """
    logs = sorted(path.name for path in directory.iterdir() if _SHARD_EVENTS.fullmatch(path.name))
    for name in logs:
        if (other := run_settings(directory, name)) is not None:
            check_same(other, settings)
    if not logs and url is None:
        prepare(LocalStorage(directory), on_exist, lambda files: False)
    elif not logs and url is not None:  # shards of other machines may have begun
        first = find_writers(recorded(directory))[:1]
        if not any(_belongs(WriterReader(files), settings["run"]) for files in first):
            refuse_existing(url, on_exist)


def await_writers(directory: Path, run: str, shard: Shard | None = None) -> None:
    """Wait until no process of a run, or of a shard of it, writes: workers end soon after their parent.

    Raises InvalidOption.
    """
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while time.monotonic() < deadline:
        found = find_writers(LocalStorage(directory))
        writers = [WriterReader(files) for files in found if re.fullmatch(own_writers(shard), files.writer)]
        if not any(writer.alive and _belongs(writer, run) for writer in writers):
            return
        time.sleep(0.1)
    raise InvalidOption(f"{directory}: processes of this run still write; end them, then resume")


def has_ended(directory: Path, writer: str) -> bool:
    """Return True unless a process holds the lock of this writer."""
    return LocalStorage(directory).holder(writer + SUFFIX) is None


def _belongs(writer: WriterReader, run: str) -> bool:
    return as_map(writer.about_or_empty.metadata).get("run") == run  # a writer killed at its start has no metadata


def finished(path_or_url: str | os.PathLike[str], run: str, root: int, writers: str = ".*") -> dict[int, int]:
    """Return the number of steps of each complete episode of a run, by episode number.

    path_or_url: directory, also with files published from it, or URL.
    writers: pattern of writer ids. Writers whose metadata names another run never count.
    """
    found: dict[int, int] = {}
    for _, episodes in _finished_by_writer(path_or_url, run, root, writers):
        found.update(episodes)
    return found


def _finished_by_writer(
    path_or_url: str | os.PathLike[str], run: str, root: int, writers: str
) -> Iterator[tuple[str, dict[int, int]]]:
    try:
        writer_files = find_writers(recorded(path_or_url))
    except TraceNotFound:
        return
    for files in writer_files:
        if not re.fullmatch(writers, files.writer):
            continue
        for reader in readers_by_origin(WriterReader(files)):
            if not _belongs(reader, run):
                continue
            parts, seeds = reader.parts, reader.parts["seed"]
            is_complete = np.isin(outcome_codes(parts), (Outcome.TERMINATED, Outcome.TRUNCATED))
            is_complete &= (parts["first_step"] == 0) & (seeds >= 0) & (seeds < EPISODES)
            steps = parts.column("steps", is_complete).tolist()
            episodes = map(partial(episode_of, root), seeds[is_complete].tolist())
            yield files.writer, dict(zip(episodes, steps))


def publish_unpublished(url: str, run: str, root: int, shard: Shard | None = None) -> None:
    """Publish files that ended processes of a run, or of a shard of it, left in the spool of this machine.

    A writer whose episodes were also recorded by another one is set aside instead.

    Raises InvalidOption if a process still writes, and the errors of publishing.spool.publish().
    """
    spool = spool_of(url)
    await_writers(spool, run, shard)
    names = [files.writer for files in find_writers(LocalStorage(spool)) if _belongs(WriterReader(files), run)]
    unpublished = [name for name in names if re.fullmatch(own_writers(shard), name)]
    if not unpublished:
        return
    episodes_of: dict[str, set[int]] = {}
    for name, episodes in _finished_by_writer(spool, run, root, ".*"):
        episodes_of.setdefault(name, set()).update(episodes)
    for name in unpublished:
        own = episodes_of.pop(name, set())
        if any(own & others for others in episodes_of.values()):
            set_aside(spool, name)
            continue
        episodes_of[name] = own
        while publish(spool, writer=name) is None:
            time.sleep(0.1)
