"""Compare the manifest of a writer with its batches."""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any, NamedTuple

from gym_trace.data.packing import pack_lenient
from gym_trace.errors import CorruptTrace
from gym_trace.format.batch_reader import MISSING, Damage
from gym_trace.format.directory import WriterFiles, batch_number
from gym_trace.format.kernels import crc32
from gym_trace.format.manifest import Line, as_json, read_lines


class SealedBatch(NamedTuple):
    """A sealed batch that was read.

    Attributes:
        crc: CRC of the file; None if it is damaged.
        episodes: number of episodes that end in it.
        index_text: its index for the manifest.
    """

    bytes: int
    crc: int | None
    episodes: int
    steps: int
    index_text: str


class ManifestCheck:
    """Compares the manifest of a writer with its batches, after these were read.

    Attributes:
        schema: the schema of the batches, without "batch"; None: they have none that is readable.
        missing: numbers of batches that are already known to be missing.
        sealed: the sealed batches that were read, by name; damaged chunks count.
        damages: lines of the manifest that are damaged or wrong.
        lost: missing batches that the manifest lists, and missing ends of such batches.
        notes: (path, note) of what is not damage.
        is_open: True if the writer is dead and did not close; False if the manifest is damaged.
    """

    def __init__(self, files: WriterFiles):
        self.schema: dict[str, Any] | None = None
        self.missing: list[range] = []
        self.damages: list[Damage] = []
        self.lost: list[Damage] = []
        self.notes: list[tuple[str, str]] = []
        self.is_open = False
        self._files = files
        self.sealed: dict[str, SealedBatch] = {}
        self._listed: set[str] = set()
        self._last: dict[str, dict[str, Any]] = {}  # last valid entry of each batch
        self._dropped: set[int] = set()  # numbers of batches
        self._closed = False

    def compare(self, alive: bool) -> None:
        storage, name = self._files.storage, self._files.manifest
        if name is None:
            self.notes.append((self._files.writer, "no manifest; the batches have the same data"))
            return
        path = storage.path(name)
        self._last, self._dropped = self._files.listed()
        try:
            for number, line in enumerate(read_lines(storage, name)):
                if not line.whole:
                    self.notes.append((path, "its last line is torn; the writer died, or is still recording"))
                elif problem := self._problem(line, number):
                    self._damaged(Damage(path, line.start, line.end, problem))
        except CorruptTrace as error:
            self.damages.append(Damage(path, 0, 0, error.problem))
        except FileNotFoundError:
            return  # deleted since it was listed
        self.is_open = not (self._closed or alive or self.damages)

    def _damaged(self, damage: Damage) -> None:
        """Add damage. Consecutive lines with the same fault are one damage."""
        if self.damages and self.damages[-1][2:] == (damage.start, damage.problem):
            damage = damage._replace(start=self.damages.pop().start)
        self.damages.append(damage)

    def _problem(self, line: Line, number: int) -> str | None:
        """Return the problem of a line, or None. Lines of unknown types are valid."""
        kind = None if line.entry is None else line.entry.get("type")
        if line.entry is None or not isinstance(kind, str):
            return "not a line of a manifest"
        if number == 0:
            return self._problem_of_first(line.entry)
        if kind == "batch":
            return self._problem_of_batch(line.entry)
        if kind == "closed":
            if self._closed:
                return "a second line of type closed"
            self._closed = True
            return self._problem_of_closed(line.entry)
        return None

    def _problem_of_first(self, entry: dict[str, Any]) -> str | None:
        if entry.get("type") != "writer" or entry.get("writer") != self._files.writer:
            return "the first line does not name this writer"
        if self.schema is None:
            return None
        try:  # the manifest has the schema as JSON, which is less exact, and may have further keys
            schema = json.loads(as_json(self.schema))
        except (RecursionError, TypeError, ValueError):
            return None
        if any(key not in entry or _canonical(entry[key]) != _canonical(value) for key, value in schema.items()):
            return "the first line differs from the schema of the batches"
        if self._is_wrong(entry, "crc32", crc32(pack_lenient(self.schema)[0])):
            return "the first line has a wrong checksum of the schema of the batches"
        return None

    def _is_wrong(self, entry: dict[str, Any], key: str, value: object) -> bool:
        """Return True if a line has another value, or none though lines have it since format 1.3."""
        match (self.schema or {}).get("format"):
            case [1, int(minor)] if minor >= 3:
                return bool(entry.get(key) != value)
        return bool(entry.get(key, value) != value)

    def _problem_of_batch(self, entry: dict[str, Any]) -> str | None:
        name, size = entry.get("file"), entry.get("bytes")
        number = batch_number(self._files.writer, name) if isinstance(name, str) else None
        if not isinstance(name, str) or number is None:
            return "names a file of another writer"
        if number in self._dropped and entry != self._last.get(name):
            return None
        if name in self._listed:
            return f"lists {name} again"
        self._listed.add(name)
        size = size if isinstance(size, int) else 0
        storage, batch = self._files.storage, self.sealed.get(name)
        if batch is None:
            # The batch is unreadable, or was sealed after it was read: not an error of this line.
            after = bisect_right(self.missing, number, key=lambda numbers: numbers.start)
            known = number in self._files.batches or (after > 0 and number in self.missing[after - 1])
            if not known and not self._files.is_there(name):
                self.lost.append(Damage(storage.path(name), 0, size, MISSING))
            return None
        if batch.crc is None:
            if batch.bytes < size:
                self.lost.append(Damage(storage.path(name), batch.bytes, size, "the end of the file is missing"))
            return None
        expected = {"bytes": batch.bytes, "crc32": batch.crc, "episodes": batch.episodes, "steps": batch.steps}
        wrong = [key for key, value in expected.items() if entry.get(key) != value]
        wrong += ["index"] if self._is_wrong(entry, "index", batch.index_text) else []
        return f"wrong {' and '.join(wrong)} for {name}" if wrong else None

    def _problem_of_closed(self, entry: dict[str, Any]) -> str | None:
        unlisted = next((name for name in self.sealed if name not in self._listed), None)
        if unlisted is not None:
            return f"closed, but {unlisted} is not listed"
        complete = not self._dropped and self._listed == set(self.sealed)
        complete = complete and all(batch.crc is not None for batch in self.sealed.values())
        sums = {key: sum(getattr(batch, key) for batch in self.sealed.values()) for key in ("episodes", "steps")}
        if complete and any(entry.get(key) != value for key, value in sums.items()):
            return "wrong number of episodes or steps in the line of type closed"
        return None


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
