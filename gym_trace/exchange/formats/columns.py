"""The map of a format: its columns, and the rows of a trace in each of them. Containers, such as HDF5, write them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from gym_trace.data.layout import Path
from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.source import ExportSource, flags
from gym_trace.exchange.formats.steps.windows import Window
from gym_trace.playback.row_types import RowType

FLAG = RowType(np.dtype(np.bool_), ())


class Column(NamedTuple):
    """A column of a format.

    name: its path in the format. form: RowType of its rows; None: text.
    rows: returns the rows of a Window, or of StepRuns, one per step.
    has_reset: True if it begins with a row for the reset, which `rows` of an opening Window returns, too.
    """

    name: tuple[str, ...]
    form: RowType | None
    rows: Callable[[Any], Any]
    has_reset: bool = False

    def offset(self, block: Any) -> int:
        """Return the number of rows that the column has before those of a block more than it has steps."""
        return int(self.has_reset and not block.opens)


def observation_column(name: tuple[str, ...], form: RowType | None, path: Path) -> Column:
    """Return the column of a leaf of the observations, from the reset to the final one."""
    return Column(name, form, lambda window: window.columns[path][0 if window.opens else 1 :], has_reset=True)


def value_column(name: tuple[str, ...], form: RowType | None, path: Path) -> Column:
    """Return the column of a leaf with one row per step, such as actions or rewards."""
    return Column(name, form, lambda block: block.columns.get(path, ()))


def reward_column(source: ExportSource) -> Column:
    """Return the column "rewards". Raises InvalidOption unless they are numbers of one shape."""
    form = source.form_of_rewards()
    if form is None or form.dtype.kind not in "biuf":
        raise InvalidOption("rewards: not all are numbers of one shape; export to jsonl or parquet")
    return value_column(("rewards",), form, ("rewards",))


def end_flags(*names: str) -> list[Column]:
    """Return the columns terminated and truncated of formats that end episodes with a flag; see source.flags()."""
    return [Column((name,), FLAG, partial(_flag, number)) for number, name in enumerate(names)]


def _flag(number: int, window: Window) -> Array:
    return flags(window)[number]
