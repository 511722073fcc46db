"""Steps as CSV: a line each, a column for each number, all else as JSON in one cell."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.json_values import NUMBERS, Form, json_text, rows_of, tagged
from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.column_selection import ColumnSelection, name_of, names_in
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable

MOST_COLUMNS = 64  # numbers of an array that get columns of their own
_FACTS = ("episode", "step")
_LOOKED_AT = 64  # windows that are looked at before the heading
_FORMULA = tuple("=+-@＝＋－＠")  # first characters of formulas in spreadsheets


class _Cells(NamedTuple):
    """The columns that a leaf has in the CSV. spreadsheet: as csv_lines() has it."""

    names: tuple[str, ...]
    shape: tuple[int, ...] | None  # shape of rows with one column per number; None: one column
    spreadsheet: bool

    @property
    def blank(self) -> list[str]:
        return [""] * len(self.names)

    def filled(self, rows: Array) -> list[list[str]]:
        if _are_numbers(rows) and rows.shape[1:] == self.shape:
            return [list(map(_number, row)) for row in rows.reshape(len(rows), len(self.names)).tolist()]
        if rows.dtype != object:
            return [self._alone(row) for row in rows_of(rows, Form(rows.dtype, rows.shape[1:]))]
        return [self._of_value(row) for row in rows]

    def _of_value(self, row: Any) -> list[str]:
        array = np.asarray(row) if isinstance(row, (np.ndarray, np.generic)) else None
        if array is not None and _are_numbers(array) and array.shape == self.shape:
            return list(map(_number, array.ravel().tolist()))
        return self._alone(tagged(row))

    def _alone(self, value: Any) -> list[str]:
        """A JSON value as text in the first column, with control characters escaped for terminals."""
        if isinstance(value, str):
            text = printable(value)
            text = f"'{text}" if self.spreadsheet and text.startswith(_FORMULA) else text
        elif value is None:
            text = ""
        else:
            text = _number(value) if isinstance(value, (bool, int, float)) else json_text(value)
        return [text, *self.blank[1:]]


def _are_numbers(array: Array) -> bool:
    return array.dtype.str[1:] in NUMBERS


def _number(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def csv_lines(
    windows: Iterator[Window], trace: Trace, selection: ColumnSelection, spreadsheet: bool = False
) -> Iterator[str]:
    """Yield blocks of lines with their ends, the heading first. windows: of the chosen columns of this trace.

    A line is a step with the observation that it led to. Before the first step of an episode comes a line that has
    only the observation before, with the number of the step before: -1 where that was the reset.

    spreadsheet: put ' in front of texts that a spreadsheet would take for formulas.

    Raises InvalidOption: the episodes do not have the same columns, so that no heading fits all of them.
    """
    first: list[Window] = []
    for window in islice(windows, _LOOKED_AT):
        first.append(window)
        if window.steps:
            break
    cells = _heading(trace, selection, first, spreadsheet)
    yield _text([[*_FACTS, *(name for leaf in cells.values() for name in leaf.names)]])
    for window in chain(first, windows):
        yield _text(_rows(window, selection, cells))


def _heading(trace: Trace, selection: ColumnSelection, windows: list[Window], spreadsheet: bool) -> dict[Path, _Cells]:
    shapes: dict[Path, tuple[int, ...] | None] = {}
    for window in windows:
        declared = {leaf.path: leaf for layout in window.writer.layouts[:2] for leaf in layout.leaves()}
        for path, rows in window.columns.items():
            leaf = declared.get(path)
            if rows.dtype == object and leaf is not None and leaf.dtype is not None:
                shapes[path] = leaf.shape  # declared shape: some rows differ
            elif len(rows) or path not in shapes:
                shapes[path] = rows.shape[1:] if _are_numbers(rows) else None
    for name in names_in(trace) if windows else ():  # the first steps may have no value for some
        path = tuple(name.split("/", 1))
        if path[0] == "annotations" and len(path) > 1 and selection.takes(path):
            shapes.setdefault(path, None)
    return {path: _cells(path, shape, spreadsheet) for path, shape in shapes.items()}


def _cells(path: Path, shape: tuple[int, ...] | None, spreadsheet: bool) -> _Cells:
    name = printable(name_of(path))
    if not shape or not 0 < math.prod(shape) <= MOST_COLUMNS:
        return _Cells((name,), () if shape == () else None, spreadsheet)
    names = (f"{name}[{','.join(map(str, place))}]" for place in np.ndindex(shape))
    return _Cells(tuple(names), shape, spreadsheet)


def _rows(window: Window, selection: ColumnSelection, cells: dict[Path, _Cells]) -> Iterator[list[str]]:
    filled: dict[Path, list[list[str]]] = {}
    for path, rows in window.columns.items():
        # Rows without the structure of their space go to the first column of that space.
        place = path if path in cells else next((known for known in cells if known[: len(path)] == path), None)
        if place is None:
            raise InvalidOption(
                f"episode {window.episode.index} has a column {name_of(path)}, which those before it do not have, and "
                "CSV has one heading: choose others with --episodes or --columns, or write JSON lines"
            )
        filled[place] = cells[place].filled(rows)
    columns = []
    for path, leaf in cells.items():
        if path not in filled:
            columns.append([leaf.blank] * (window.steps + 1))
        elif path[0] != "observations":
            columns.append([leaf.blank, *filled[path]])
        else:
            unknown = window.has_placeholder and window.steps > 0
            columns.append([*filled[path][:-1], leaf.blank] if unknown else filled[path])
    index, before = str(window.episode.index), window.first_step - 1
    for i, parts in enumerate(zip(*columns)):
        if i or (window.opens and "observations" in selection.roots):
            yield [index, str(before + i), *chain.from_iterable(parts)]


def _text(rows: Iterable[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
