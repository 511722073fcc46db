"""Stores of decoded rows: in memory, in memory that grows with a trace, or in mapped files that are reused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.playback.episode_table import Columns
from gym_trace.playback.row_types import RowType
from gym_trace.playback.sampling.rows import DecodedRows, DecodePlan, in_memory
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.storage.local import lock
from gym_trace.storage.staging import replaced_file

_VERSION = 2
_INDEX = "index.npz"
_CACHE_NAME = re.compile("[0-9a-f]{32}")
_BLOCK_BYTES = 1 << 22  # bytes read at a time for a checksum
_NAMES = ("writer", "episode_id", "first_step", "steps")
CACHE_KEY = np.dtype([(name, "<i8") for name in (*_NAMES, "at", "seen")])
_ADDED = np.dtype([("begin", "<i8"), ("end", "<i8"), ("crc", "<i8")])


def decoded(plan: DecodePlan) -> DecodedRows:
    """Return the rows of all episodes, decoded into ordinary memory. Raises CorruptTrace."""
    indices, again = plan.distinct()
    rows = plan.decode([plan.episodes(indices)], in_memory)
    return plan.rows(rows.columns, plan.episodes(), rows.steps[again], rows.seen[again])


@dataclass(frozen=True)
class Disk:
    """Raw columns in files, in one directory below root per trace, extended when the trace has grown.

    limit: bytes of all directories; the least recently used ones are removed.
    """

    root: FilePath
    limit: int

    def rows(self, plan: DecodePlan) -> DecodedRows:
        """Return the rows of all episodes, mapped into memory. Raises CorruptTrace, OSError."""
        row_types = [[list(path), it.dtype.str, list(it.shape)] for path, it in plan.row_types.items() if it]
        described = json.dumps([_VERSION, str(plan.directory), row_types])
        directory = self.root / hashlib.sha256(described.encode()).hexdigest()[:32]
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o700)  # another user who can open it could hold its lock
        with _locked(directory):
            stored, episodes = (
                _CacheDirectory(directory, plan),
                identified(plan.table, plan.readers, np.diff(plan.first)),
            )
            indices, _ = plan.distinct()
            missing = indices[stored.known.positions(episodes[indices]) < 0]
            if len(missing):
                self._evict(directory, plan.size)
                stored.add(plan, episodes, missing)
            os.utime(directory)
            return stored.rows(plan, episodes)

    def check(self, plan: DecodePlan) -> None:
        """Raise InvalidOption for columns without a dtype."""
        for path, row_type in plan.row_types.items():
            if row_type is None:
                column = "/".join(map(str, path))
                raise InvalidOption(f'{column}: object values need cache="memory"; omit the column or pass it')

    def _evict(self, mine: FilePath, needed: int) -> None:
        caches = (path for path in self.root.iterdir() if _CACHE_NAME.fullmatch(path.name))
        others = sorted((*_used_and_size(path), path) for path in caches if path != mine)
        used = sum(size for _, size, _ in others)
        for _, size, path in others:
            if used + needed <= self.limit:
                break
            shutil.rmtree(path, ignore_errors=True)  # processes that have mapped its files can still read them
            used -= size


@contextmanager
def _locked(directory: FilePath) -> Iterator[None]:
    """Wait for the lock of a directory, to reuse what another process is decoding."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        while not lock(fd):
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _used_and_size(directory: FilePath) -> tuple[float, int]:
    """Return the time of last use and the bytes of a cache; zeros if another process removes it."""
    with suppress(OSError), os.scandir(directory) as entries:
        return directory.stat().st_mtime, sum(entry.stat().st_size for entry in entries)
    return 0.0, 0


def identified(table: Columns, readers: Sequence[WriterReader], steps: Array) -> Array:
    """Return the cache key of each episode. Its "writer" is a hash that is the same in all processes.

    steps: (episodes,) number of decoded steps.
    """
    writer = table["writer"]
    found = np.zeros(len(table), CACHE_KEY)
    for number, reader in enumerate(readers):
        name = f"{reader.key} {reader.about_or_empty.created}"
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        found["writer"][writer == number] = int.from_bytes(digest[:7], "little")
    for name in ("episode_id", "first_step"):
        found[name] = table[name]
    found["steps"] = steps
    return found


class Known:
    """The cached episodes, and where their rows are. table: CACHE_KEY rows."""

    def __init__(self, table: Array):
        self.table = table
        self._found = {name: i for i, name in enumerate(table[[*_NAMES]].tolist())}

    def positions(self, episodes: Array) -> Array:
        """Return the table row of each episode; -1 for missing ones."""
        return np.array([self._found.get(name, -1) for name in episodes[[*_NAMES]].tolist()], np.int64)

    def ends(self) -> tuple[int, int]:
        """Return the number of step rows and observation rows."""
        table = self.table
        ends = [(table[name] + table["steps"]).max(initial=0) for name in ("at", "seen")]
        return int(ends[0]), int(ends[1]) + bool(len(table))

    def following(self, episodes: Array) -> Array:
        """Return these episodes with positions after all existing rows."""
        at, seen = self.ends()
        new = episodes.copy()
        new["at"] = at + np.cumsum(new["steps"]) - new["steps"]
        new["seen"] = seen + np.cumsum(new["steps"] + 1) - new["steps"] - 1
        return new

    def rows(self, plan: DecodePlan, indices: Array, episodes: Array, columns: dict[Path, Array]) -> DecodedRows:
        """Return the stored rows of the episodes at these positions, in these columns."""
        found = self.table[self.positions(episodes[indices])]
        return plan.rows(columns, plan.episodes(indices), found["at"].copy(), found["seen"].copy())


class _CacheDirectory:
    """A cache directory: one file per column, and an index of the episodes.

    Rows after the last episode of the index were written by a killed process.
    """

    def __init__(self, directory: FilePath, plan: DecodePlan):
        self._directory = directory
        self._files = {path: directory / f"{number}.rows" for number, path in enumerate(plan.row_types)}
        self._row_types = {path: row_type for path, row_type in plan.row_types.items() if row_type is not None}
        self.known = Known(np.zeros(0, CACHE_KEY))
        self._added = np.zeros((0, len(self._files)), _ADDED)  # one row per add(), one column per file
        with suppress(OSError, ValueError, KeyError, zipfile.BadZipFile):
            with np.load(directory / _INDEX) as index:
                table, added, stamps = (index[name] for name in ("episodes", "added", "stamps"))
            if table.dtype == CACHE_KEY and added.dtype == _ADDED and self._checks(added, stamps):
                self.known, self._added = Known(table), added

    def _checks(self, added: Array, stamps: Array) -> bool:
        """Return True if no file was changed: its stamp is the same, or all checksums match."""
        for number, file in enumerate(self._files.values()):
            with open(file, "rb") as opened:
                if _stamp(opened) == stamps[number].tolist():
                    continue
                if any(_checksum(opened, begin, end) != crc for begin, end, crc in added[:, number].tolist()):
                    return False
        return True

    def add(self, plan: DecodePlan, episodes: Array, missing: Array) -> None:
        """Decode missing episodes into the files. Raises OSError, CorruptTrace."""
        at, seen = self.known.ends()
        new = self.known.following(episodes[missing])
        mapped: dict[Path, tuple[Array, int]] = {}

        def allocate(path: Path, rows: int, row_type: RowType | None) -> Array:
            assert row_type is not None
            begin = (seen if path[0] == "observations" else at) * row_type.row_size
            with open(self._files[path], "ab") as file:
                file.truncate(begin)  # drop rows of a killed process
                file.truncate(begin + rows * row_type.row_size)
            array = _mapped(self._files[path], row_type, rows, begin, "r+")
            mapped[path] = array, begin
            return array

        plan.decode([plan.episodes(missing)], allocate)
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

    def rows(self, plan: DecodePlan, episodes: Array) -> DecodedRows:
        """Return the rows of these episodes, mapped."""
        at, seen = self.known.ends()
        columns = {
            path: np.asarray(_mapped(self._files[path], row_type, seen if path[0] == "observations" else at, 0, "r"))
            for path, row_type in self._row_types.items()
        }
        return self.known.rows(plan, np.arange(len(episodes)), episodes, columns)


def _mapped(file: FilePath, row_type: RowType, rows: int, begin: int, mode: Any) -> Array:
    shape = rows, *row_type.shape
    if not rows or not row_type.row_size:
        return np.empty(shape, row_type.dtype)
    return np.memmap(file, row_type.dtype, mode, begin, shape)


def _stamp(file: Any) -> list[int]:
    """Return values that change when a file is written to or replaced."""
    about = os.fstat(file.fileno())
    return [about.st_ino, about.st_size, about.st_ctime_ns]


def _checksum(file: Any, begin: int, end: int) -> int:
    """Return the checksum of a part of a file; -1 if the file ends before it."""
    crc = 0
    file.seek(begin)
    while begin < end:
        block = file.read(min(_BLOCK_BYTES, end - begin))
        if not block:
            return -1
        crc, begin = zlib.crc32(block, crc), begin + len(block)
    return crc


class Growing:
    """Rows of a live trace in memory: new episodes are added, old ones dropped, and each is decoded once.

    most_steps: keep the episodes that started last, up to this number of steps; at least one. None: all.
    """

    def __init__(self, most_steps: int | None):
        self._most_steps = most_steps
        self._columns: dict[Path, Array] = {}  # arrays with spare rows at the end
        self._row_types: dict[Path, RowType | None] = {}
        self._known = Known(np.zeros(0, CACHE_KEY))

    def rows(self, plan: DecodePlan) -> DecodedRows:
        """Return the rows of the newest episodes; new episodes are decoded. Raises CorruptTrace."""
        episodes, indices = identified(plan.table, plan.readers, np.diff(plan.first)), np.arange(len(plan.table))
        if self._most_steps is not None:
            order = np.argsort(plan.table["start_time"].astype(np.int64), kind="stable")[::-1]
            count = int(np.cumsum(np.diff(plan.first)[order]).searchsorted(self._most_steps, side="right"))
            indices = np.sort(order[: max(1, count)])
        if plan.row_types != self._row_types:
            self._columns, self._row_types, self._known = {}, plan.row_types, Known(np.zeros(0, CACHE_KEY))
        missing = indices[self._known.positions(episodes[indices]) < 0]
        if len(missing):
            self._add(plan, episodes, indices, missing)
        return self._known.rows(plan, indices, episodes, self._columns)

    def _add(self, plan: DecodePlan, episodes: Array, indices: Array, missing: Array) -> None:
        at, seen = self._known.ends()
        more = int(episodes["steps"][missing].sum()) + len(missing)
        ends = {path: seen if path[0] == "observations" else at for path in self._columns}
        if not ends or any(len(self._columns[path]) - end < more for path, end in ends.items()):
            self._move(plan, episodes[indices], more)
        new = self._known.following(episodes[missing])
        at, seen = self._known.ends()

        def allocate(path: Path, rows: int, row_type: RowType | None) -> Array:
            begin = seen if path[0] == "observations" else at
            part: Array = self._columns[path][begin : begin + rows]
            part[...] = in_memory(path, 1, row_type)[0] if row_type is None or part.dtype == np.bool_ else part
            return part

        plan.decode([plan.episodes(missing)], allocate)
        self._known = Known(np.append(self._known.table, new))

    def _move(self, plan: DecodePlan, wanted: Array, more: int) -> None:
        """Copy the wanted episodes to arrays of twice the size that they and `more` rows need."""
        here = self._known.positions(wanted)
        staying = self._known.table[here[here >= 0]]
        moved = Known(np.zeros(0, CACHE_KEY)).following(staying)
        rows = 2 * (int(staying["steps"].sum()) + len(staying) + more)
        columns = {path: in_memory(path, rows, row_type) for path, row_type in plan.row_types.items()}
        for path, array in columns.items():
            name, extra = ("seen", 1) if path[0] == "observations" else ("at", 0)
            counts = (staying["steps"] + extra).tolist()
            for before, after, count in zip(staying[name].tolist(), moved[name].tolist(), counts):
                array[after : after + count] = self._columns[path][before : before + count]
        self._columns, self._known = columns, Known(moved)
