"""Import of steps as JSON lines (docs/reference/steps.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.json_values import array_from, map_of, untagged
from gym_trace.data.layout import PlainSpace
from gym_trace.data.values import row_of
from gym_trace.envs.spaces import StandIn, describe
from gym_trace.errors import UnreadableRecording
from gym_trace.exchange.formats.foreign import widest
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.imported import Imported, NewEpisode, NewSteps, imported, new_schema
from gym_trace.exchange.formats.rows import first_writer
from gym_trace.format.manifest import json_of

_LONGEST_LINE = 256 << 20  # bytes
_MOST_ROWS, _MOST_BYTES = 1024, 4 << 20  # steps per part, and bytes of their lines
_MOST_ELEMENTS = 1 << 25  # per row of an inferred space
_FLAGS = ("terminations", "truncations")
_FIRST_TYPES = ("trace", "columns", "episode")  # accepted in the first line
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


class JsonLinesImporter:
    """JSON lines, as gym-trace export and gym-trace cat write them"""

    name: ClassVar[str] = "jsonl"

    def recognises(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            head = file.read(64)
        return any(head.startswith(b'{"type": "%s"' % kind.encode()) for kind in _FIRST_TYPES)

    def read(self, path: Path) -> Imported:
        about, declared = _header(path)
        warnings = []
        if about is None:
            schema = new_schema("JSON lines", _space(declared.get("observations")), _space(declared.get("actions")))
            warnings = ["printed, not exported: no spaces, writers, times or generator states"]
        else:
            schema, _ = first_writer(about)
        return imported("JSON lines", _Lines(path).episodes(), schema, about, warnings=warnings)


def _header(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the text of ExportSource.about, or None and the columns that are declared before the first step."""
    about: str | None = None
    declared: dict[str, Any] = {}
    for line in _Lines(path).all():
        if line["type"] == "trace":
            about = line.get(KEY)
            if not isinstance(about, str):
                raise UnreadableRecording(f"{path}: malformed description of the trace")
            break
        if line["type"] == "columns":
            declared |= line
        elif line["type"] == "step":
            break
    return about, declared


class _Lines:
    """The lines of a file, read one after the other."""

    def __init__(self, path: Path):
        self._path, self._number = path, 0
        self._size = path.stat().st_size
        self._declared: dict[str, Any] = {}  # declarations of columns, by column
        self._last_observation: Any = None

    def all(self) -> Iterator[dict[str, Any]]:
        """Yield all lines; each has a type. Raises UnreadableRecording."""
        with open(self._path, "rb") as file:
            while text := file.readline(_LONGEST_LINE):
                self._number += 1
                try:
                    line = json_of(text)
                except (ValueError, RecursionError) as error:
                    raise self._malformed(f"not JSON ({error!s:.100})") from error
                if not isinstance(line, dict) or not isinstance(line.get("type"), str):
                    raise self._malformed("not an object with a type")
                line["bytes"] = len(text)
                yield line

    def _malformed(self, problem: str) -> UnreadableRecording:
        return UnreadableRecording(f"{self._path}: line {self._number}: {problem}; see docs/reference/steps.md")

    def episodes(self) -> Iterator[NewEpisode]:
        lines = self.all()
        for line in lines:
            if line["type"] == "episode":
                yield self._episode(line, lines)
            elif line["type"] != "trace" and not self._is_declaration(line):
                raise self._malformed(f"a {line['type']!r:.40} outside of an episode")

    def _episode(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> NewEpisode:
        steps, known = line.get("steps"), line.get(KEY)
        if type(steps) is not int or not 0 <= steps <= self._size or not isinstance(known, str | None):
            raise self._malformed("episode without a number of steps")
        seed, options = (untagged(line.get(name)) for name in ("seed", "options"))
        outcome = line.get("outcome") if line.get("outcome") not in ("lost", "running") else "cut"
        start = next((other for other in lines if not self._is_declaration(other) and other["type"] == "start"), None)
        if start is None or "observations" not in start:
            raise self._malformed("episode without its first observation")
        reset = untagged(start["infos"]) if "infos" in start else None
        parts = self._parts(start, steps, lines)
        has_final = line.get("has_final_observation", True) is not False
        return NewEpisode(steps, parts, outcome, seed, options, reset, known, has_final)

    def _is_declaration(self, line: dict[str, Any]) -> bool:
        """Return True for a line that declares columns, and apply it to the lines that follow."""
        is_declaration = bool(line["type"] == "columns")
        if is_declaration:
            self._declared |= line
        return is_declaration

    def _parts(self, start: dict[str, Any], steps: int, lines: Iterator[dict[str, Any]]) -> Iterator[NewSteps]:
        initial: list[Any] = [start["observations"]]
        part: list[dict[str, Any]] = []
        size = 0
        if not steps:
            yield self._part(initial, [])
        while steps and (line := next(lines, None)) is not None:
            is_declaration = line["type"] == "columns"
            if line["type"] == "step":
                part.append(line)
                size += line["bytes"]
                steps -= 1
            elif not is_declaration:
                raise self._malformed(f"{line['type']!r:.40} in an episode that lacks {steps} more steps")
            if part and (is_declaration or not steps or len(part) >= _MOST_ROWS or size >= _MOST_BYTES):
                yield self._part(initial, part)
                initial, part, size = [], [], 0
            self._is_declaration(line)

    def _part(self, initial: list[Any], lines: list[dict[str, Any]]) -> NewSteps:
        if lines and lines[-1].get("observations", ...) is None:  # unknown: repeat the one before
            before = [*initial, *(line.get("observations") for line in lines[:-1])]
            lines[-1]["observations"] = before[-1] if before else self._last_observation
        if lines:
            self._last_observation = lines[-1].get("observations")
        try:
            observations = [*initial, *(line["observations"] for line in lines)]
            observations = _rows_of(self._declared["observations"], observations)
            if not lines:
                return NewSteps(observations, np.empty(0), np.empty(0))
            columns: dict[str, Any] = {
                name: _rows_of(self._declared[name], [line[name] for line in lines])
                for name in ("actions", "rewards", "infos")
                if name != "infos" or all("infos" in line for line in lines)
            }
            columns |= {name: np.array([line[name] for line in lines], np.bool_) for name in _FLAGS}
            if all("annotations" in line for line in lines):
                declared = {"dict": self._declared["annotations"]}
                columns["annotations"] = _rows_of(declared, [line["annotations"] for line in lines])
            return NewSteps(observations, **columns)
        except _MALFORMED as error:
            raise self._malformed(f"malformed value in the steps before ({error!r:.100})") from error


def _rows_of(declared: Any, rows: list[Any]) -> Any:
    """Decode the rows of a column: an array, a list, or dicts and tuples of them. declared: its declaration."""
    if any(isinstance(row, dict) and len(row) == 1 and "$value" in row for row in rows):
        return [_value_of(declared, row) for row in rows]
    if "dict" in declared:
        maps = [_map(row) for row in rows]
        return {key: _rows_of(part, [row[key] for row in maps]) for key, part in _map(declared["dict"]).items()}
    if "tuple" in declared:
        if any(len(row) != len(declared["tuple"]) for row in rows):
            raise ValueError("tuple of a length other than declared")
        return tuple(_rows_of(part, [row[i] for row in rows]) for i, part in enumerate(declared["tuple"]))
    dtype = declared["dtype"]
    if dtype is None:
        return list(map(untagged, rows))
    if declared.get("base64"):
        return np.stack([array_from(row, dtype, declared["shape"]) for row in rows]) if rows else np.empty(0)
    return array_from(rows, dtype, [len(rows), *declared["shape"]])


def _value_of(declared: Any, row: Any) -> Any:
    if isinstance(row, dict) and "$value" in row:
        return untagged(row["$value"])
    return row_of(_rows_of(declared, [row]), 0)


def _map(plain: Any) -> dict[Any, Any]:
    """Return a dict from a JSON object, or from the "$map" that stands for other keys than texts."""
    if len(plain) == 1 and "$map" in plain:
        return map_of((untagged(key), value) for key, value in plain["$map"])
    return dict(plain)


def _space(declared: Any) -> PlainSpace:
    """Return the widest space of rows with this declaration."""
    if not isinstance(declared, dict):
        return describe(StandIn("nothing"))
    try:
        if "dict" in declared:
            return {"type": "Dict", "spaces": [[key, _space(part)] for key, part in _map(declared["dict"]).items()]}
        if "tuple" in declared:
            return {"type": "Tuple", "spaces": list(map(_space, declared["tuple"]))}
        if declared["dtype"] is None:
            return describe(StandIn("arbitrary values"))
        dtype = array_from([], declared["dtype"], [0, *declared["shape"]]).dtype
        if dtype.kind not in "biuf" or math.prod(declared["shape"]) > _MOST_ELEMENTS:
            raise ValueError("invalid dtype or shape of a Box")
        return widest(dtype, tuple(declared["shape"]))
    except _MALFORMED as error:
        raise UnreadableRecording(f"malformed declaration of columns ({error!r:.100})") from error
