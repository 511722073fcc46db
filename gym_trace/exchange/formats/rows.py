"""Helpers of importers: rows in portions, and spaces for values of any type."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gym_trace.data.layout import PlainSpace
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.trees import cut, joined, leaves_of
from gym_trace.data.values import ABSENT, Array
from gym_trace.errors import CorruptTrace
from gym_trace.exchange.formats.identity import malformed, read_about
from gym_trace.exchange.formats.imported import NewSteps
from gym_trace.printable import printable

_LONGEST_TEXT = 1 << 16
_MOST_ROWS, _MOST_BYTES = 8192, 4 << 20  # read at a time
NEXT_DIFFER = "some next observations differ from the following observations; skipped"
ANY_TEXT: PlainSpace = {"type": "Text", "min_length": 0, "max_length": _LONGEST_TEXT, "characters": string.printable}


def after_steps(parts: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Turn observations before steps into those after steps, as NewSteps has them.

    parts: observations before some steps of an episode, and anything that goes along; at the end the final
    observation, one row, and None. The first yielded rows have the observation before the first step in front.
    """
    begin = 0
    for (rows, extra), (next_rows, _) in pairwise(parts):
        yield joined(cut(rows, begin) if begin else rows, cut(next_rows, 0, 1)), extra
        begin = 1


def step_ranges(steps: int, row_size: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of the steps to read at a time; (0, 0) for no steps."""
    count = max(1, min(_MOST_ROWS, _MOST_BYTES // max(1, row_size)))
    for begin in range(0, max(1, steps), count):
        yield begin, min(steps, begin + count)


class RowQueue:
    """Queue of blocks of rows, from which any number of rows is taken in order. blocks: (number of rows, tree)."""

    def __init__(self, blocks: Iterator[tuple[int, Any]]):
        self._blocks = blocks
        self._block: Any = None
        self._at = self._count = 0

    def is_over(self) -> bool:
        """Return True if no row is left."""
        while self._at >= self._count:
            if (block := next(self._blocks, None)) is None:
                return True
            self._at, (self._count, self._block) = 0, block
        return False

    def take(self, most: int) -> tuple[int, Any]:
        """Remove and return the next rows: their number, 1 to `most`, and a tree. is_over() must be False."""
        begin, self._at = self._at, min(self._count, self._at + most)
        return self._at - begin, cut(self._block, begin, self._at)


def steps_of(
    queue: RowQueue,
    steps: int,
    final: Any,
    warnings: list[str] | None = None,
    fields: Callable[[Any], dict[str, Any]] = lambda rows: rows,
) -> Iterator[NewSteps]:
    """Take the steps of the next episode from a table with one row per step.

    Args:
        queue: the rows of all episodes.
        final: the final observation of a table without next_observations, one row.
        warnings: gets one if next_observations are not the following observations, as a trace stores these only.
        fields: returns rows by the fields of NewSteps: observations before the steps, and next_observations, if there
            are any, after them. Raises UnreadableRecording for rows of another episode.
    """
    if not steps:
        yield NewSteps(final, None, np.empty(0))

    def parts() -> Iterator[tuple[Any, Any]]:
        left, rows = steps, dict[str, Any]()
        while left and not queue.is_over():
            count, taken = queue.take(left)
            rows, left = fields(taken), left - count
            yield rows["observations"], rows
        yield (cut(rows["next_observations"], -1) if "next_observations" in rows else final), None

    for observations, rows in after_steps(parts()):
        if warnings is not None and "next_observations" in rows and NEXT_DIFFER not in warnings:
            pairs = zip(leaves_of(observations), leaves_of(rows["next_observations"]))
            warnings += [] if all(_ends_with(before, after) for before, after in pairs) else [NEXT_DIFFER]
        columns = {name: rows[name] for name in NewSteps._fields[1:] if name in rows}
        if not has_values(columns.get("infos")):
            columns["infos"] = None
        yield NewSteps(observations, **columns)


def has_values(rows: Any) -> bool:
    """Return True for an array, or a list with a value that is not missing (None or ABSENT)."""
    return rows is not None and (isinstance(rows, np.ndarray) or not all(row is None or row is ABSENT for row in rows))


def _ends_with(rows: Any, last: Any) -> bool:
    rows = rows[len(rows) - len(last) :]
    if isinstance(rows, np.ndarray) and rows.dtype == last.dtype:
        return bool(rows.tobytes() == last.tobytes())
    return np.array_equal(rows, last)


def lengths_between(is_end: Iterable[Array]) -> list[int]:
    """Return the numbers of steps of consecutive episodes. is_end: True for the last steps, in portions, bool."""
    flags = np.concatenate([*is_end])
    ends = np.flatnonzero(flags) + 1
    if len(flags) > (ends[-1] if len(ends) else 0):
        ends = np.append(ends, len(flags))
    return [int(length) for length in np.diff(ends, prepend=0)]


def named(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text, and the number of the others."""
    return printable(", ".join(names[:most]))[:1000] + (f" and {len(names) - most:,} more" if len(names) > most else "")


def custom(description: str) -> PlainSpace:
    """Return a space for arbitrary values, with a description."""
    return {"type": "custom", "class": "", "repr": description}


def first_writer(about: str) -> tuple[dict[str, Any], Layouts]:
    """Return schema and layouts of the first writer. about: text of ExportSource. Raises UnreadableRecording."""
    for schema in read_about(about)["writers"].values():
        try:
            return schema, WriterSchema.of(schema).layouts
        except CorruptTrace as error:
            raise malformed("a space") from error
    raise malformed("the trace")
