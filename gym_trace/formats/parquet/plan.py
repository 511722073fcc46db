"""Which columns the tables of a trace have: what its values really are decides, not what the spaces say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gym_trace.formats.parquet.columns import JSON, NUMBER, TEXT, Column
from gym_trace.formats.source import Source
from gym_trace.formats.steps.plain import NUMBERS
from gym_trace.formats.steps.windows import Choice, name_of, step_blocks
from gym_trace.model.layout import Path
from gym_trace.model.values import Array
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.reading.forms import Form

_Kind = type | tuple[np.dtype[Any], tuple[int, ...]] | str
_ODD_TEXT = "text that is not UTF-8"
_NO_DIMENSION = "arrays without a dimension, which would come back as numbers"
_OF_PYTHON: dict[_Kind, np.dtype[Any]] = {
    float: np.dtype(np.float64),
    int: np.dtype(np.int64),
    bool: np.dtype(np.bool_),
}


def columns_of(source: Source) -> dict[Path, Column]:
    """The column of each leaf; of a space with values of another structure one for all of it. Raises CorruptTrace."""
    columns: dict[Path, Column] = {}
    unclear: list[Path] = []
    for path, form in source.forms.items():
        if path == ("infos",):
            columns[path] = Column(path, JSON)
        elif form is None:
            unclear.append(path)
        else:
            columns[path] = _of_form(path, form)
    if unclear:
        kinds = _kinds_in(source, unclear)
        for path in unclear:
            columns[path] = _of_kinds(path, kinds[path])
        for root in {path[0] for path in unclear}:
            if (root,) in kinds and (root,) not in unclear:  # values without the structure of their space
                columns = {path: column for path, column in columns.items() if path[0] != root}
                columns[(root,)] = Column((root,), JSON)
    return columns


def _of_form(path: Path, form: Form) -> Column:
    if form.dtype.str[1:] not in NUMBERS:
        return Column(path, JSON)
    return Column(path, NUMBER, form.dtype, form.shape)


def _kinds_in(source: Source, paths: list[Path]) -> dict[Path, set[_Kind]]:
    """Return the kinds of rows of some leaves; type(None) if some are missing. Reads all of them."""
    roots = tuple(root for root in COLUMNS if any(path[0] == root for path in paths))
    choice = Choice(roots, frozenset(map(name_of, paths)))
    found: dict[Path, set[_Kind]] = {path: set() for path in paths}
    for block in step_blocks(source.trace, choice):
        for path, rows in block.columns.items():
            if path in found or path == path[:1]:
                found.setdefault(path, set()).update(_kinds_of(rows))
        for path in paths:
            if path[0] == "annotations" and path not in block.columns and block.size:
                found[path].add(type(None))
    return found


def _kinds_of(rows: Array) -> Iterable[_Kind]:
    if rows.dtype != object:
        return [(rows.dtype, rows.shape[1:])] if len(rows) else []
    values = rows.tolist()
    kinds: set[_Kind] = set(map(type, values))
    if str in kinds and not _is_utf8(value for value in values if type(value) is str):
        kinds.add(_ODD_TEXT)
    if int in kinds and any(type(value) is int and not -(1 << 63) <= value < 1 << 63 for value in values):
        kinds.add("integers of more than 64 bits")
    arrays = {kind for kind in kinds if isinstance(kind, type) and issubclass(kind, (np.ndarray, np.generic))}
    if arrays <= {np.ma.MaskedArray} and arrays:
        return kinds
    kinds |= {_of_array(value) for value in values if type(value) in arrays}
    scalars = {kind for kind in arrays if issubclass(kind, np.generic)}
    return kinds - scalars - {np.ndarray} | ({np.generic} if scalars else set())


def _of_array(value: Any) -> _Kind:
    is_number = isinstance(value, np.generic) or value.ndim > 0
    return (value.dtype, value.shape) if is_number else _NO_DIMENSION


def _is_utf8(texts: Iterable[str]) -> bool:
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_kinds(path: Path, kinds: set[_Kind]) -> Column:
    optional = type(None) in kinds
    kinds = kinds - {type(None)}
    if optional and path[0] != "annotations":
        return Column(path, JSON)
    if kinds == {str}:
        return Column(path, TEXT, optional=optional)
    of_python = {kind for kind in kinds if kind in _OF_PYTHON}
    arrays = [kind for kind in kinds if isinstance(kind, tuple)]
    if of_python and optional and len(of_python) == 1:  # rows of which some are missing are not arrays
        dtype = _OF_PYTHON[of_python.pop()]
        if len(kinds) == 1 or (len(kinds) == 2 and arrays == [(dtype, ())]):
            return Column(path, NUMBER, dtype, (), optional, is_python=True)
    elif len(kinds - {np.generic}) == 1 and arrays and arrays[0][0].str[1:] in NUMBERS:
        return Column(path, NUMBER, *arrays[0], optional=optional)
    return Column(path, JSON)
