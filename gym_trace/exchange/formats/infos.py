"""Infos and annotations in formats with one column per key, for keys that every step has with one type.

All infos, and annotations without a column, are also stored packed: see packed() and PackedInfos.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import zstandard

from gym_trace.data.layout import Path
from gym_trace.data.packing import pack, unpack
from gym_trace.data.trees import joined
from gym_trace.data.values import ABSENT, Array, objects, placeholder
from gym_trace.errors import CorruptTrace, UnreadableRecording
from gym_trace.exchange.formats.columns import Column
from gym_trace.exchange.formats.contract import RESTORED, Loss
from gym_trace.exchange.formats.rows import named
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.format import wire
from gym_trace.playback.row_types import RowType
from gym_trace.playback.step_runs import StepRuns

ANNOTATIONS = "annotations"  # the key of infos that holds annotations, in formats without annotations
_MOST_COLUMNS, _DEEPEST = 500, 8
_MOST_BYTES = wire.MAX_VALUES + (1 << 20)  # per item of packed(), which may be the infos of one step
_MOST_STEPS = 1 << 20  # per item of packed()

Kind = tuple[np.dtype[Any] | None, tuple[int, ...]]  # dtype and shape of a value; None: text
_NUMBERS = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}


class InfoColumn(NamedTuple):
    """A key of infos, or an annotation, that can be a column. path: keys into an info. dtype: None for text."""

    path: tuple[str, ...]
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()

    def column(self, has_reset: bool = False) -> Column:
        """Return the column of a format, below infos. has_reset: with a row for the info of the reset."""
        form = None if self.dtype is None else RowType(self.dtype, self.shape)
        return Column(("infos", *self.path), form, self._with_reset if has_reset else self._rows, has_reset)

    def _rows(self, block: Window | StepRuns) -> Any:
        if self.path[0] == ANNOTATIONS:
            return block.columns.get(self.path, np.empty((0, *self.shape), self.dtype))
        return self._array([_at(info, self.path) for info in block.columns.get(("infos",), ())])

    def _with_reset(self, window: Window) -> Any:
        rows = self._rows(window)
        if not window.opens:
            return rows
        reset = self.of_reset(window.episode.reset_info)
        return joined(placeholder(self.dtype, self.shape) if reset is None else reset, rows)

    def of_reset(self, info: Any) -> Any:
        """Return the value in the info of a reset, (1, *shape) or a list of one; None if it does not fit."""
        if self.path[0] == ANNOTATIONS:
            return None
        value = _at(info, self.path)
        joined_kind = _joined(_kind([value]), (self.dtype, self.shape))
        return self._array([value]) if joined_kind == (self.dtype, self.shape) else None

    def _array(self, values: list[Any]) -> Any:
        return values if self.dtype is None else np.array(values, self.dtype).reshape(len(values), *self.shape)


class InfoColumns(NamedTuple):
    """Result of info_columns().

    found: in the order of their paths. has_infos: True if infos were recorded.
    left_out: names of infos that not every step has, or not with one type. unlike: the same for annotations.
    missing: names of columns that not every reset has.
    """

    found: tuple[InfoColumn, ...] = ()
    has_infos: bool = False
    left_out: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def need_packing(self) -> bool:
        """Return True if packed() has anything to pack: infos, or annotations that cannot be columns."""
        return self.has_infos or bool(self.unlike)

    def losses(self) -> Iterator[Loss]:
        """Yield what the loader of a format with these columns does not return."""
        for what, names in (("infos", self.left_out), ("annotations", self.unlike)):
            if names:
                yield Loss(what, f"{what} missing from some steps, or of varying type: {named(names)}{RESTORED}")


def info_columns(source: ExportSource) -> InfoColumns:
    """Return the infos and annotations that can be columns. Reads all infos once. Raises CorruptTrace."""
    annotations, unlike = _annotations(source.forms)
    if ("infos",) not in source.forms:
        return InfoColumns(tuple(annotations), unlike=tuple(unlike))
    tally: dict[tuple[str, ...], tuple[Kind | None, int]] = {}  # by path: kind, and number of steps that have it
    for window in source.survey("infos"):
        for path, kind, count in _counted(window.columns.get(("infos",), ()), ()):
            before, seen = tally.get(path, (kind, 0))
            tally[path] = _joined(before, kind), seen + count
    fits = {path: kind for path, (kind, count) in tally.items() if kind is not None and count == source.steps}
    chosen = sorted(path for path in fits if path[0] != ANNOTATIONS and all(map(_is_name, path)))[:_MOST_COLUMNS]
    columns = [InfoColumn(path, *fits[path]) for path in chosen]
    missing: set[str] = set()
    for episode in source.trace.scan(columns=()):
        info = episode.reset_info
        missing |= {_name(column.path) for column in columns if column.of_reset(info) is None}
    left_out = sorted({_name(path) for path in tally} - {_name(path) for path in chosen})
    return InfoColumns((*columns, *annotations), True, tuple(left_out), tuple(unlike), tuple(sorted(missing)))


def _annotations(forms: Mapping[Any, RowType | None]) -> tuple[list[InfoColumn], list[str]]:
    """Return the annotations that can be columns, and the names of the others."""
    names = sorted(str(path[1]) for path in forms if path[0] == "annotations")
    columns = {
        name: InfoColumn((ANNOTATIONS, name), form.dtype, form.shape)
        for name in names
        if (form := forms["annotations", name]) is not None
        if not form.mixed and _is_name(name) and form.dtype.kind in "biuf"
    }
    return list(columns.values()), [name for name in names if name not in columns]


def _counted(infos: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Kind | None, int]]:
    """Yield each path in these infos, the kind of its values (None: several), and the number of infos that have it."""
    if set(map(type, infos)) - {dict}:
        yield path, None, len(infos)
        return
    for key in dict.fromkeys(key for info in infos for key in info):
        values = [info[key] for info in infos if key in info]
        if set(map(type, values)) == {dict} and len(path) < _DEEPEST and all(values):
            yield from _counted(values, (*path, key))
        else:
            yield (*path, key), _kind(values), len(values)


def _kind(values: Sequence[Any]) -> Kind | None:
    """Return the kind of all of these values; None if there are several, or it cannot be a column."""
    types = set(map(type, values))
    if types == {str}:
        return (None, ()) if all(map(is_text, values)) else None
    if types == {np.ndarray}:
        kinds = {(value.dtype, value.shape) for value in values}
        dtype, shape = next(iter(kinds))
        return (dtype, shape) if len(kinds) == 1 and dtype.kind in "biuf" and values[0].size else None
    if not types or not all(kind in _NUMBERS or issubclass(kind, np.generic) for kind in types):
        return None
    if int in types and not all(-(1 << 63) <= value < 1 << 63 for value in values if type(value) is int):
        return None
    numbers: list[Kind | None] = [(_NUMBERS.get(kind) or np.dtype(kind), ()) for kind in types]
    return reduce(_joined, numbers)


def _joined(a: Kind | None, b: Kind | None) -> Kind | None:
    """Return the kind that holds values of both kinds; None if they are not equal, nor both scalar numbers."""
    if a is None or b is None or a == b:
        return a if a == b else None
    (a_dtype, a_shape), (b_dtype, b_shape) = a, b
    if a_shape or b_shape or a_dtype is None or b_dtype is None:
        return None
    if not {a_dtype.kind, b_dtype.kind} <= set("iuf"):
        return None
    return np.result_type(a_dtype, b_dtype), ()


def _at(info: Any, path: Iterable[str]) -> Any:
    for key in path:
        info = info.get(key) if isinstance(info, dict) else None
    return info


def _is_name(key: Any) -> bool:
    """Return True for a key that is a valid name in files of all formats."""
    return type(key) is str and key not in ("", ".", "..") and "/" not in key and is_text(key)


def is_text(value: str) -> bool:
    """Return True for a text that files of all formats can hold: no lone surrogates, no NUL."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _name(path: Iterable[Any]) -> str:
    return "/".join(map(str, path))


# -- packed -----------------------------------------------------------------------------------------------------------


def packed(columns: Mapping[Path, Array], start: int, steps: int, infos: InfoColumns) -> Iterator[tuple[int, bytes]]:
    """Pack the infos of consecutive steps, and the annotations without a column.

    columns: of all infos and annotations. start: index of the first step in the episode. Yield (index of the first
    step, data for PackedInfos), several for large infos.
    """
    all_infos = columns.get(("infos",))
    loose = {name: list(rows) for name in infos.unlike if (rows := columns.get((ANNOTATIONS, name))) is not None}
    runs = [range(steps)]
    while runs:
        run = runs.pop()
        part = slice(run.start, run.stop)
        part_infos = None if all_infos is None else list(all_infos[part])
        data = pack([len(run), part_infos, {name: rows[part] for name, rows in loose.items()}])
        if len(data) > _MOST_BYTES // 8 and len(run) > 1:
            half = len(run) // 2
            runs += [run[half:], run[:half]]
        elif run:
            yield start + run.start, zstandard.ZstdCompressor(level=3).compress(data)


class PackedInfos:
    """Unpacks infos, any number of steps at a time. Raises UnreadableRecording for data that packed() cannot write."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, dict[str, Any]]] = []  # per step: infos, and annotations by name
        self.end = 0  # number of added steps

    def add(self, first: int, data: bytes) -> None:
        """Add the next data. first: index of the first packed step in the episode."""
        try:
            if not 0 <= zstandard.frame_content_size(data) <= _MOST_BYTES:
                raise ValueError
            steps, infos, annotations = unpack(zstandard.ZstdDecompressor().decompress(data, _MOST_BYTES))
            columns = [*annotations.values(), *([] if infos is None else [infos])]
            if any(type(rows) is not list or len(rows) != steps for rows in columns):
                raise ValueError
            if first != self.end or not 0 < steps <= _MOST_STEPS:
                raise ValueError
            for i in range(steps):
                values = {str(name): rows[i] for name, rows in annotations.items()}
                self._rows.append((None if infos is None else infos[i], values))
            self.end += steps
        except (AttributeError, CorruptTrace, TypeError, ValueError, zstandard.ZstdError) as error:
            raise UnreadableRecording("the infos stored by gym-trace are malformed") from error

    def take(self, steps: int) -> tuple[list[Any] | None, dict[str, Array]]:
        """Remove and return the infos of the next steps (None if they have none), and their annotations by name."""
        rows, self._rows = self._rows[:steps], self._rows[steps:]
        if len(rows) != steps:
            raise UnreadableRecording("the infos stored by gym-trace have fewer steps")
        infos = [info for info, _ in rows]
        names = dict.fromkeys(name for _, values in rows for name in values)
        # A row without a value is ABSENT.
        columns = {name: [ABSENT if (v := values.get(name)) is None else v for _, values in rows] for name in names}
        has_infos = bool(infos) and all(info is not None for info in infos)
        return infos if has_infos else None, {name: objects(column) for name, column in columns.items()}


def infos_of(columns: Mapping[tuple[str, ...], Any], count: int) -> list[dict[str, Any]]:
    """Return the infos of some steps. columns: one row per step, by path."""
    infos: list[dict[str, Any]] = [{} for _ in range(count)]
    for (*outer, last), values in columns.items():
        for info, value in zip(infos, values):
            for key in outer:
                info = info.setdefault(key, {})
                if not isinstance(info, dict):
                    raise UnreadableRecording(f"duplicate key in infos: {key!r:.60}")
            info[last] = value
    return infos
