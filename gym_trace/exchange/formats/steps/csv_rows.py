"""Steps as CSV: one line per step, one column per number, all else as JSON in one cell."""

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

MOST_COLUMNS = 64  # per array; a larger array is JSON in one cell
_INDEX_COLUMNS = ("episode", "step")
_INSPECTED_WINDOWS = 64  # at most, before the heading is written
_FORMULA_STARTS = tuple("=+-@＝＋－＠")  # in spreadsheets


class _Cells(NamedTuple):
    """The CSV columns of a leaf. spreadsheet: see csv_lines()."""

    names: tuple[str, ...]
    shape: tuple[int, ...] | None  # rows with one column per number; None: one column of JSON
    spreadsheet: bool

    @property
    def blank(self) -> list[str]:
        return [""] * len(self.names)

    def filled(self, rows: Array) -> list[list[str]]:
        if _are_numbers(rows) and rows.shape[1:] == self.shape:
            return [list(map(_number, row)) for row in rows.reshape(len(rows), len(self.names)).tolist()]
        if rows.dtype != object:
            return [self._in_one_cell(row) for row in rows_of(rows, Form(rows.dtype, rows.shape[1:]))]
        return [self._cells_of(row) for row in rows]

    def _cells_of(self, row: Any) -> list[str]:
        array = np.asarray(row) if isinstance(row, (np.ndarray, np.generic)) else None
        if array is not None and _are_numbers(array) and array.shape == self.shape:
            return list(map(_number, array.ravel().tolist()))
        return self._in_one_cell(tagged(row))

    def _in_one_cell(self, value: Any) -> list[str]:
        """Return cells with a JSON value as text in the first one, safe for terminals; the others are empty."""
        if isinstance(value, str):
            text = printable(value)
            text = f"'{text}" if self.spreadsheet and text.startswith(_FORMULA_STARTS) else text
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
    """Yield the heading, then blocks of lines. windows: of the selected columns of this trace.

    A line has a step and the observation after it. Before the first step of an episode, an additional line has
    the initial observation alone, numbered as the step before: -1 for the reset.

    spreadsheet: put ' in front of texts that a spreadsheet would take for formulas.

    Raises InvalidOption if an episode has a column that the heading lacks.
    """
    inspected: list[Window] = []
    for window in islice(windows, _INSPECTED_WINDOWS):
        inspected.append(window)
        if window.steps:
            break
    cells = _heading(trace, selection, inspected, spreadsheet)
    yield _text([[*_INDEX_COLUMNS, *(name for leaf in cells.values() for name in leaf.names)]])
    for window in chain(inspected, windows):
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
    for name in names_in(trace) if windows else ():  # annotations may be missing in the first steps
        path = tuple(name.split("/", 1))
        if path[0] == "annotations" and len(path) > 1 and selection.takes(path):
            shapes.setdefault(path, None)
    return {path: _cells(path, shape, spreadsheet) for path, shape in shapes.items()}


def _cells(path: Path, shape: tuple[int, ...] | None, spreadsheet: bool) -> _Cells:
    name = printable(name_of(path))
    if not shape or not 0 < math.prod(shape) <= MOST_COLUMNS:
        return _Cells((name,), () if shape == () else None, spreadsheet)
    names = (f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(shape))
    return _Cells(tuple(names), shape, spreadsheet)


def _rows(window: Window, selection: ColumnSelection, cells: dict[Path, _Cells]) -> Iterator[list[str]]:
    filled: dict[Path, list[list[str]]] = {}
    for path, rows in window.columns.items():
        # Rows without the structure of their space go to the first column of that space.
        leaf_path = path if path in cells else next((known for known in cells if known[: len(path)] == path), None)
        if leaf_path is None:
            raise InvalidOption(
                f"episode {window.episode.index}: column {name_of(path)} is missing in the episodes before, and "
                "CSV has one heading; choose others with --episodes or --columns, or write JSON lines"
            )
        filled[leaf_path] = cells[leaf_path].filled(rows)
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
    for i, row in enumerate(zip(*columns)):
        if i or (window.opens and "observations" in selection.roots):
            yield [index, str(before + i), *chain.from_iterable(row)]


def _text(rows: Iterable[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
