"""Columns of a trace as channels (MCAP) and entities (Rerun), one per leaf of a space."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array, objects
from gym_trace.exchange.formats.images import is_image
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

_ROOTS = {"observations": "observation", "actions": "action", "rewards": "reward", "infos": "info"}


class ViewColumn(NamedTuple):
    """A column. name: such as "observation/position". form: None: arbitrary values. is_image: rows become PNG."""

    name: str
    path: Path
    form: RowType | None
    is_image: bool

    @property
    def comes_before(self) -> bool:
        """Return True if a row is known before the step."""
        return self.path[0] in ("observations", "actions", "annotations")


FLAGS = tuple(
    ViewColumn(name, (path,), RowType(np.dtype(np.bool_), ()), is_image=False)
    for name, path in (("terminated", "terminations"), ("truncated", "truncations"))
)


def columns_in(source: ExportSource) -> list[ViewColumn]:
    """Return all columns of a trace but FLAGS."""
    layouts, forms = source.layouts, source.forms
    leaves = [leaf.path for layout in (layouts.observations, layouts.actions) for leaf in layout.leaves()]
    others = [path for path in forms if path[0] in ("annotations", "infos")]
    return [
        ViewColumn(name_of(path), path, form := forms[path], form is not None and is_image(form))
        for path in (*leaves, ("rewards",), *sorted(others, key=str))
    ]


def name_of(path: Path) -> str:
    """Return a path as text, joined by slashes; a slash in a key becomes %2F, and an empty key %."""
    parts = [str(part).replace("%", "%25").replace("/", "%2F") or "%" for part in path[1:]]
    return "/".join((_ROOTS.get(str(path[0]), str(path[0])), *parts))


def rows_of(columns: list[ViewColumn], window: Window) -> dict[str, Array]:
    """Return the rows of a window by column name: typed if the column has a form, otherwise objects.

    Only an opening window has the row of observations before its first step.
    """
    missing = objects([None] * window.steps)
    found = {}
    for column in columns:
        rows = window.columns.get(column.path, missing)
        if column.path[0] == "observations" and not window.opens:
            rows = rows[1:]
        if (form := column.form) is None:
            found[column.name] = rows if rows.dtype == object else objects(list(rows))
        else:
            array = rows if rows.dtype != object else np.array(rows.tolist(), form.dtype)
            found[column.name] = array.astype(form.dtype, copy=False).reshape(len(rows), *form.shape)
    return found
