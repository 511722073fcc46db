"""Parse the untrusted row layout of a ring file (docs/FORMAT.md, section 8)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from gym_trace.errors import CorruptTrace
from gym_trace.format import wire
from gym_trace.format.columns import is_path
from gym_trace.model.layout import Path
from gym_trace.model.values import dtype_from
from gym_trace.ring.memory import MOST_SLAB_BYTES

_MARK = 8  # bytes of a mark, and of a reward


class Column(NamedTuple):
    """A leaf of the observation or action. dtype and offset are None if its values are in the log."""

    path: Path
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]
    offset: int | None

    @property
    def row_size(self) -> int:
        """Bytes of a value; 0 if the size varies."""
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)


class RowForm(NamedTuple):
    """Offsets of the parts of a row. See row_layout.RowLayout."""

    size: int
    asked: int
    reward: int
    done: int
    observations: int
    columns: list[Column]

    @classmethod
    def of(cls, layout: dict[str, Any]) -> RowForm:
        """Parse a layout. Raises CorruptTrace if it is malformed."""
        try:
            numbers = {name: _number(layout[name]) for name in ("asked", "reward", "done", "observations")}
            form = cls(_number(layout["row"]), **numbers, columns=[_column(*column) for column in layout["columns"]])
        except (LookupError, TypeError, ValueError) as error:
            raise CorruptTrace(f"invalid ring layout: {error!r:.100}") from error
        roots = ["observations" if i < form.observations else "actions" for i in range(len(form.columns))]
        if [column.path[0] for column in form.columns] != roots:
            raise CorruptTrace("invalid ring layout: a column belongs to neither observations nor actions")
        fixed = [(column.offset, column.row_size) for column in form.columns if column.offset is not None]
        ends = [form.asked + _MARK, form.reward + _MARK, form.done + _MARK, *map(sum, fixed)]
        if max(ends) > form.size or sum(size for _, size in fixed) + 3 * _MARK > form.size:
            raise CorruptTrace("invalid ring layout: columns exceed the row")
        return form


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SLAB_BYTES:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _column(path: Any, dtype: Any, shape: Any, offset: Any) -> Column:
    found = Column(tuple(path), None if dtype is None else dtype_from(dtype), tuple(map(_number, shape)), offset)
    if offset is not None:
        _number(offset)
    if not is_path(found.path):
        raise ValueError("invalid path")
    if math.prod(found.shape) > MOST_SLAB_BYTES or len(found.shape) > wire.MAX_DIMENSIONS:
        raise ValueError("invalid shape")
    return found
