"""What a writer's manifest says, compared with what its batches are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gym_trace.format.batch import Damage
from gym_trace.format.directory import WriterFiles
from gym_trace.format.inspection import BatchInspector
from gym_trace.format.manifest import as_json, read_lines


class _Seen(NamedTuple):
    """A sealed batch that was read; clean: no byte of it was found damaged."""

    batch: BatchInspector
    clean: bool
    episodes: int
    steps: int


class ManifestCheck:
    """Compares one writer's manifest with its batches, once these were read.

    Attributes:
        schema: of the batches, or None.
        missing: names of batches that are known to be missing already.
    """

    def __init__(self, files: WriterFiles):
        self.schema: dict[str, Any] | None = None
        self.missing: set[str] = set()
        self._files = files
        self._seen: dict[str, _Seen] = {}

    def saw(self, batch: BatchInspector, clean: bool, episodes: int, steps: int) -> None:
        """To be told of each batch: the episodes that end in it and its steps, damaged chunks included."""
        self._seen[batch.path.name] = _Seen(batch, clean, episodes, steps)

    def compare(self, alive: bool) -> tuple[list[Damage], list[str], list[Damage]]:
        """Damage of the manifest, remarks on it, and damage of batches that it tells of: bytes that are missing."""
        path = self._files.manifest
        if path is None:
            return [], [f"{self._files.writer}: no manifest; the batches tell what it would"], []
        damages: list[Damage] = []
        lost: list[Damage] = []
        remarks: list[str] = []
        listed: set[str] = set()
        closed = False
        for number, (start, end, entry, whole) in enumerate(read_lines(path)):
            problem: str | None = None
            if not whole:
                remarks.append(f"{path}: its last line is torn; the writer died, or is still at it")
                continue
            kind = None if entry is None else entry.get("type")
            if entry is None:
                problem = "not a line of a manifest"
            elif number == 0:
                problem = self._first_line(entry)
            elif kind == "batch":
                listed.add(str(entry.get("file")))
                problem, loss = self._batch_line(entry, path.parent)
                lost += loss
            elif kind == "closed":
                closed, problem = True, self._closed_line(entry, listed)
            if problem is not None:
                damages.append(Damage(str(path), start, end, problem))
        if not path.stat().st_size:
            remarks.append(f"{path}: empty; the batches tell what it would")
        elif not (closed or alive or damages):
            remarks.append(f"{path}: the writer did not close; it was killed")
        return damages, remarks, lost

    def _first_line(self, entry: dict[str, Any]) -> str | None:
        if entry.get("type") != "writer" or entry.get("writer") != self._files.writer:
            return "the first line does not say who wrote the trace"
        # The batches are exact where JSON is not, so they are compared as JSON. A manifest may say more.
        schema = json.loads(as_json(self.schema or {}))
        if any(_canonical(entry.get(key)) != _canonical(value) for key, value in schema.items()):
            return "the first line is not what the batches say of the writer"
        return None

    def _batch_line(self, entry: dict[str, Any], directory: Path) -> tuple[str | None, list[Damage]]:
        """What is wrong with a line, and what it tells to be missing."""
        name, size = entry.get("file"), entry.get("bytes")
        names = {path.name.removesuffix(".part") for path in self._files.batches.values()}
        seen = self._seen.get(str(name))
        if seen is None:
            if name in names or name in self.missing:
                return None, []  # damaged beyond reading, or not sealed when we looked
            if not self._is_mine(name):
                return "names a file that is none of this writer's", []
            if (directory / str(name)).exists():
                return None, []  # sealed since we looked
            problem = f"this batch is missing; {entry.get('episodes')} episodes ended in it, {entry.get('steps')} steps"
            return None, [Damage(str(directory / str(name)), 0, 0, problem)]
        if isinstance(size, int) and seen.batch.size < size and not seen.clean:
            return None, [Damage(str(seen.batch.path), seen.batch.size, size, "the end of the file is missing")]
        if not seen.clean:
            return None, []  # named already
        facts = {"bytes": seen.batch.size, "crc32": seen.batch.crc(), "episodes": seen.episodes, "steps": seen.steps}
        wrong = [key for key, value in facts.items() if entry.get(key) != value]
        return (f"says other {' and '.join(wrong)} of {name} than it has" if wrong else None), []

    def _closed_line(self, entry: dict[str, Any], listed: set[str]) -> str | None:
        unlisted = [name for name, seen in self._seen.items() if seen.batch.is_sealed and name not in listed]
        if unlisted:
            return f"says closed, but does not list {unlisted[0]}"
        complete = listed == set(self._seen) and all(seen.clean for seen in self._seen.values())
        sums = {key: sum(getattr(seen, key) for seen in self._seen.values()) for key in ("episodes", "steps")}
        if complete and any(entry.get(key) != value for key, value in sums.items()):
            return "says other numbers of episodes or steps than the batches have"
        return None

    def _is_mine(self, name: object) -> bool:
        stem = f"{self._files.writer}."
        return isinstance(name, str) and name.startswith(stem) and name.endswith(".gtb") and "/" not in name


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
