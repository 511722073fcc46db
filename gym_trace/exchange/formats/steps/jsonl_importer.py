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

_LONGEST = 256 << 20  # bytes of a line
_MOST_ROWS, _MOST_BYTES = 1024, 4 << 20  # steps that are read at a time, and bytes of their lines
_MOST_ELEMENTS = 1 << 25  # of an inferred space
_FLAGS = ("terminations", "truncations")
_TYPES = ("trace", "columns", "episode")  # types of a first line
_MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


class JsonLinesImporter:
    """JSON lines, as gym-trace export and gym-trace cat write them"""

    name: ClassVar[str] = "jsonl"

    def recognises(self, path: Path) -> bool:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            begins = file.read(64)
        return any(begins.startswith(b'{"type": "%s"' % kind.encode()) for kind in _TYPES)

    def read(self, path: Path) -> Imported:
        about, forms = _looked_at(path)
        notes = []
        if about is None:
            schema = new_schema("JSON lines", _space(forms.get("observations")), _space(forms.get("actions")))
            notes = ["printed, not exported: no spaces, writers, times or generator states"]
        else:
            schema, _ = first_writer(about)
        return imported("JSON lines", _Lines(path).episodes(), schema, about, notes=notes)


def _looked_at(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the header of the trace, and the declarations of columns before the first step."""
    about: str | None = None
    forms: dict[str, Any] = {}
    for line in _Lines(path).all():
        if line["type"] == "trace":
            about = line.get(KEY)
            if not isinstance(about, str):
                raise UnreadableRecording(f"{path}: malformed description of the trace")
            break
        if line["type"] == "columns":
            forms |= line
        elif line["type"] == "step":
            break
    return about, forms


class _Lines:
    """The lines of a file, read one after the other."""

    def __init__(self, path: Path):
        self._path, self._number = path, 0
        self._size = path.stat().st_size
        self._forms: dict[str, Any] = {}
        self._last: Any = None  # observation

    def all(self) -> Iterator[dict[str, Any]]:
        """All lines; each has a type. Raises UnreadableRecording."""
        with open(self._path, "rb") as file:
            while text := file.readline(_LONGEST):
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
            elif line["type"] != "trace" and not self._declares(line):
                raise self._malformed(f"a {line['type']!r:.40} outside of an episode")

    def _episode(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> NewEpisode:
        steps, known = line.get("steps"), line.get(KEY)
        if type(steps) is not int or not 0 <= steps <= self._size or not isinstance(known, str | None):
            raise self._malformed("episode without a number of steps")
        seed, options = (untagged(line.get(name)) for name in ("seed", "options"))
        outcome = line.get("outcome") if line.get("outcome") not in ("lost", "running") else "cut"
        start = next((one for one in lines if not self._declares(one) and one["type"] == "start"), None)
        if start is None or "observations" not in start:
            raise self._malformed("episode without its first observation")
        reset = untagged(start["infos"]) if "infos" in start else None
        parts = self._parts(start, steps, lines)
        has_final = line.get("has_final_observation", True) is not False
        return NewEpisode(steps, parts, outcome, seed, options, reset, known, has_final)

    def _declares(self, line: dict[str, Any]) -> bool:
        """Return True for a declaration of columns, and apply it from now on."""
        is_one = bool(line["type"] == "columns")
        if is_one:
            self._forms |= line
        return is_one

    def _parts(self, start: dict[str, Any], steps: int, lines: Iterator[dict[str, Any]]) -> Iterator[NewSteps]:
        first: list[Any] = [start["observations"]]
        held: list[dict[str, Any]] = []
        size = 0
        if not steps:
            yield self._part(first, [])
        while steps and (line := next(lines, None)) is not None:
            declares = line["type"] == "columns"
            if line["type"] == "step":
                held.append(line)
                size += line["bytes"]
                steps -= 1
            elif not declares:
                raise self._malformed(f"{steps} more steps of an episode were to come, not a {line['type']!r:.40}")
            if held and (declares or not steps or len(held) >= _MOST_ROWS or size >= _MOST_BYTES):
                yield self._part(first, held)
                first, held, size = [], [], 0
            self._declares(line)

    def _part(self, first: list[Any], lines: list[dict[str, Any]]) -> NewSteps:
        if lines and lines[-1].get("observations", ...) is None:  # unknown: repeat the one before
            before = [*first, *(line.get("observations") for line in lines[:-1])]
            lines[-1]["observations"] = before[-1] if before else self._last
        if lines:
            self._last = lines[-1].get("observations")
        try:
            observations = _rows_of(self._forms["observations"], [*first, *(line["observations"] for line in lines)])
            if not lines:
                return NewSteps(observations, np.empty(0), np.empty(0))
            columns: dict[str, Any] = {
                name: _rows_of(self._forms[name], [line[name] for line in lines])
                for name in ("actions", "rewards", "infos")
                if name != "infos" or all("infos" in line for line in lines)
            }
            columns |= {name: np.array([line[name] for line in lines], np.bool_) for name in _FLAGS}
            if all("annotations" in line for line in lines):
                form = {"dict": self._forms["annotations"]}
                columns["annotations"] = _rows_of(form, [line["annotations"] for line in lines])
            return NewSteps(observations, **columns)
        except _MALFORMED as error:
            raise self._malformed(f"malformed value in the steps before ({error!r:.100})") from error


def _rows_of(form: Any, rows: list[Any]) -> Any:
    """The rows of a column that was declared like this: an array, a list, or dicts and tuples of them."""
    if any(isinstance(row, dict) and len(row) == 1 and "$value" in row for row in rows):
        return [_value_of(form, row) for row in rows]
    if "dict" in form:
        pairs = [_pairs(row) for row in rows]
        return {key: _rows_of(part, [row[key] for row in pairs]) for key, part in _pairs(form["dict"]).items()}
    if "tuple" in form:
        if any(len(row) != len(form["tuple"]) for row in rows):
            raise ValueError("tuple of a length other than declared")
        return tuple(_rows_of(part, [row[place] for row in rows]) for place, part in enumerate(form["tuple"]))
    if form["dtype"] is None:
        return list(map(untagged, rows))
    if form.get("base64"):
        return np.stack([array_from(row, form["dtype"], form["shape"]) for row in rows]) if rows else np.empty(0)
    return array_from(rows, form["dtype"], [len(rows), *form["shape"]])


def _value_of(form: Any, row: Any) -> Any:
    return untagged(row["$value"]) if isinstance(row, dict) and "$value" in row else row_of(_rows_of(form, [row]), 0)


def _pairs(plain: Any) -> dict[Any, Any]:
    """A map, whatever its keys are."""
    if len(plain) == 1 and "$map" in plain:
        return map_of((untagged(key), value) for key, value in plain["$map"])
    return dict(plain)


def _space(form: Any) -> PlainSpace:
    """Return the widest space that rows with this declaration can be of."""
    if not isinstance(form, dict):
        return describe(StandIn("nothing"))
    try:
        if "dict" in form:
            return {"type": "Dict", "spaces": [[key, _space(part)] for key, part in _pairs(form["dict"]).items()]}
        if "tuple" in form:
            return {"type": "Tuple", "spaces": list(map(_space, form["tuple"]))}
        if form["dtype"] is None:
            return describe(StandIn("arbitrary values"))
        dtype = array_from([], form["dtype"], [0, *form["shape"]]).dtype
        if dtype.kind not in "biuf" or math.prod(form["shape"]) > _MOST_ELEMENTS:
            raise ValueError("invalid dtype or shape of a Box")
        return widest(dtype, tuple(form["shape"]))
    except _MALFORMED as error:
        raise UnreadableRecording(f"malformed declaration of columns ({error!r:.100})") from error
