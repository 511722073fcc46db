"""Caches of decoded rows: in memory, or in files that are mapped into memory and reused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Protocol

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import Path
from gym_trace.model.values import Array
from gym_trace.reading.forms import Form
from gym_trace.reading.recorded import Recorded
from gym_trace.sampling.rows import Plan, Rows, in_memory
from gym_trace.storage.local import lock
from gym_trace.storage.staging import replaced_file

_VERSION = 2
_INDEX = "index.npz"
_AT_ONCE = 1 << 22  # bytes that a checksum is made of at a time
_NAMES = ("writer", "episode_id", "first_step", "steps")
KEPT = np.dtype([(name, "<i8") for name in (*_NAMES, "at", "seen")])
_ADDED = np.dtype([("begin", "<i8"), ("end", "<i8"), ("crc", "<i8")])


class Store(Protocol):
    """Keeps decoded rows."""

    def rows(self, trace: Recorded, plan: Plan) -> Rows:
        """Return the rows of all episodes of a trace. Raises CorruptTrace."""

    def check(self, plan: Plan) -> None:
        """Raises InvalidOption if its rows are none that can be kept here."""


@dataclass(frozen=True)
class Memory:
    """Ordinary memory."""

    def rows(self, trace: Recorded, plan: Plan) -> Rows:
        places, again = plan.distinct()
        rows = plan.decode([plan.episodes(places)], in_memory)
        return plan.rows(rows.columns, plan.episodes(), rows.steps[again], rows.seen[again])

    def check(self, plan: Plan) -> None:
        """Everything can be kept."""


def default_root() -> FilePath:
    """Return the cache directory: $GYM_TRACE_CACHE, or the user's."""
    if given := os.environ.get("GYM_TRACE_CACHE"):
        return FilePath(given)
    return FilePath(os.environ.get("XDG_CACHE_HOME") or FilePath.home() / ".cache") / "gym-trace"


@dataclass(frozen=True)
class Disk:
    """Below root a directory a trace, of raw columns. What a trace has gained since is added to them.

    limit: bytes that all directories may take; those that were used longest ago are removed.
    """

    root: FilePath
    limit: int

    def rows(self, trace: Recorded, plan: Plan) -> Rows:
        """Raises InvalidOption for values of any kind; CorruptTrace, OSError."""
        self.check(plan)
        forms = [[list(path), form.dtype.str, list(form.shape)] for path, form in plan.forms.items() if form]
        said = json.dumps([_VERSION, str(trace.directory), forms])
        directory = self.root / hashlib.sha256(said.encode()).hexdigest()[:32]
        os.makedirs(directory, exist_ok=True)
        with _locked(directory):
            kept, episodes = _Kept(directory, plan), identified(plan)
            places, _ = plan.distinct()
            missing = places[kept.known.places(episodes[places]) < 0]
            if len(missing):
                self._make_room(directory, plan.size)
                kept.add(plan, episodes, missing)
            os.utime(directory)
            return kept.rows(plan, episodes)

    def check(self, plan: Plan) -> None:
        for path, form in plan.forms.items():
            if form is None:
                told = f"{'/'.join(map(str, path))}: values of any kind are not kept on disk"
                raise InvalidOption(f'{told}; choose other columns=, or cache="memory"')

    def _make_room(self, mine: FilePath, needed: int) -> None:
        others = sorted((path for path in self.root.iterdir() if path != mine), key=_used)
        sizes = {path: _size(path) for path in others}
        for path in others:
            if sum(sizes.values()) + needed <= self.limit:
                break
            shutil.rmtree(path, ignore_errors=True)  # processes that have mapped it keep it
            del sizes[path]


@contextmanager
def _locked(directory: FilePath) -> Iterator[None]:
    """Wait for the lock of a directory: what another process is decoding need not be decoded here."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        while not lock(fd):
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _used(directory: FilePath) -> float:
    with suppress(OSError):
        return directory.stat().st_mtime
    return 0.0


def _size(directory: FilePath) -> int:
    with suppress(OSError), os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries)
    return 0


def identified(plan: Plan) -> Array:
    """Return the key of each episode; its writer is a number that is the same in all processes."""
    table = plan.table
    found = np.zeros(len(table), KEPT)
    for number, reader in enumerate(plan.readers):
        name = f"{reader.key} {reader.about_or_empty.created}"
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        found["writer"][table["writer"] == number] = int.from_bytes(digest[:7], "little")
    for name in _NAMES[1:]:
        found[name] = table[name]
    return found


class Known:
    """Which episodes are kept, and where their rows are. table: KEPT rows."""

    def __init__(self, table: Array):
        self.table = table
        self._found = {name: i for i, name in enumerate(table[[*_NAMES]].tolist())}

    def places(self, episodes: Array) -> Array:
        """The row of the table of each; -1: it is not there."""
        return np.array([self._found.get(name, -1) for name in episodes[[*_NAMES]].tolist()], np.int64)

    def ends(self) -> tuple[int, int]:
        """Return the number of step rows and observation rows."""
        table = self.table
        ends = [(table[name] + table["steps"]).max(initial=0) for name in ("at", "seen")]
        return int(ends[0]), int(ends[1]) + bool(len(table))

    def following(self, episodes: Array) -> Array:
        """Return the episodes with rows after those that exist."""
        at, seen = self.ends()
        new = episodes.copy()
        new["at"] = at + np.cumsum(new["steps"]) - new["steps"]
        new["seen"] = seen + np.cumsum(new["steps"] + 1) - new["steps"] - 1
        return new

    def rows(self, plan: Plan, places: Array, episodes: Array, columns: dict[Path, Array]) -> Rows:
        """The rows of the episodes at these places, all of which are here, in these columns."""
        found = self.table[self.places(episodes[places])]
        return plan.rows(columns, plan.episodes(places), found["at"].copy(), found["seen"].copy())


class _Kept:
    """Content of a cache directory: one file per column, and an index of the episodes.

    The index decides: rows after its last episode were being added by a process that was killed.
    """

    def __init__(self, directory: FilePath, plan: Plan):
        self._directory = directory
        self._files = {path: directory / f"{number}.rows" for number, path in enumerate(plan.forms)}
        self._forms = {path: form for path, form in plan.forms.items() if form is not None}
        self.known = Known(np.zeros(0, KEPT))
        self._added = np.zeros((0, len(self._files)), _ADDED)  # what was written at a time, to each of the files
        with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
            with np.load(directory / _INDEX) as index:
                table, added, stamps = (index[name] for name in ("episodes", "added", "stamps"))
            if table.dtype == KEPT and added.dtype == _ADDED and self._checks(added, stamps):
                self.known, self._added = Known(table), added

    def _checks(self, added: Array, stamps: Array) -> bool:
        """Return True if the files are as written: their stamps are unchanged, or all checksums match."""
        for number, file in enumerate(self._files.values()):
            with open(file, "rb") as opened:
                if _stamp(opened) == stamps[number].tolist():
                    continue
                if any(_checksum(opened, begin, end) != crc for begin, end, crc in added[:, number].tolist()):
                    return False
        return True

    def add(self, plan: Plan, episodes: Array, missing: Array) -> None:
        """Decodes these, and keeps them. Raises OSError, CorruptTrace."""
        at, seen = self.known.ends()
        new = self.known.following(episodes[missing])
        mapped: dict[Path, tuple[Array, int]] = {}

        def room(path: Path, rows: int, form: Form | None) -> Array:
            assert form is not None
            begin = (seen if path[0] == "observations" else at) * _row_size(form)
            with open(self._files[path], "ab") as file:
                file.truncate(begin)  # what was added by one that was killed is not to be seen
                file.truncate(begin + rows * _row_size(form))
            array = _mapped(self._files[path], form, rows, begin, "r+")
            mapped[path] = array, begin
            return array

        plan.decode([plan.episodes(missing)], room)
        added, stamps = np.zeros(len(self._files), _ADDED), np.zeros((len(self._files), 3), np.int64)
        for number, (path, file) in enumerate(self._files.items()):
            array, begin = mapped[path]
            if isinstance(array, np.memmap):
                array.flush()
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
                added[number] = begin, begin + array.nbytes, _checksum(opened, begin, begin + array.nbytes)
                stamps[number] = _stamp(opened)
        self.known = Known(np.append(self.known.table, new))
        self._added = np.concatenate([self._added, added[None]])
        with replaced_file(self._directory / _INDEX) as staged, open(staged, "wb") as out:
            np.savez(out, episodes=self.known.table, added=self._added, stamps=stamps)

    def rows(self, plan: Plan, episodes: Array) -> Rows:
        """Return the rows of these episodes, mapped."""
        at, seen = self.known.ends()
        columns = {
            path: np.asarray(_mapped(self._files[path], form, seen if path[0] == "observations" else at, 0, "r"))
            for path, form in self._forms.items()
        }
        return self.known.rows(plan, np.arange(len(episodes)), episodes, columns)


def _row_size(form: Form) -> int:
    return form.dtype.itemsize * int(np.prod(form.shape, dtype=np.int64))


def _mapped(file: FilePath, form: Form, rows: int, begin: int, mode: Any) -> Array:
    shape = rows, *form.shape
    if not rows or not _row_size(form):
        return np.empty(shape, form.dtype)
    return np.memmap(file, form.dtype, mode, begin, shape)


def _stamp(file: Any) -> list[int]:
    """Return values that change when a file is written to or replaced."""
    about = os.fstat(file.fileno())
    return [about.st_ino, about.st_size, about.st_ctime_ns]


def _checksum(file: Any, begin: int, end: int) -> int:
    """Return the checksum of a part of a file; -1 if the file ends before it."""
    crc = 0
    file.seek(begin)
    while begin < end:
        block = file.read(min(_AT_ONCE, end - begin))
        if not block:
            return -1
        crc, begin = zlib.crc32(block, crc), begin + len(block)
    return crc
