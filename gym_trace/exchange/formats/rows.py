"""Helpers of importers: rows in portions, infos from columns, and spaces for values of any type."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gym_trace.data.layout import PlainSpace
from gym_trace.data.schema import Layouts, WriterSchema
from gym_trace.data.trees import cut, joined
from gym_trace.errors import CorruptTrace
from gym_trace.exchange.formats.identity import malformed, read_about
from gym_trace.exchange.formats.infos import info_of
from gym_trace.printable import printable

_LONGEST_TEXT = 1 << 16
ANY_TEXT: PlainSpace = {"type": "Text", "min_length": 0, "max_length": _LONGEST_TEXT, "characters": string.printable}


def after_steps(parts: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Turn observations before steps into those after steps, as NewSteps has them.

    parts: observations before some steps of an episode, and anything that goes along; at the end the final
    observation, one row, and None. The first yielded rows have the observation before the first step in front.
    """
    begin = 0
    for (rows, extra), (next_rows, _) in pairwise(parts):
        yield joined(cut(rows, begin), cut(next_rows, 0, 1)), extra
        begin = 1


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


def named(names: Sequence[str], most: int = 10) -> str:
    """Return the first names as text, and the number of the others."""
    return printable(", ".join(names[:most]))[:1000] + (f" and {len(names) - most:,} more" if len(names) > most else "")


def custom(description: str) -> PlainSpace:
    """Return a space for arbitrary values, with a description."""
    return {"type": "custom", "class": "", "repr": description}


def infos_of(columns: Mapping[tuple[str, ...], Any], count: int) -> list[dict[str, Any]]:
    """Return the infos of some steps. columns: one row per step, by path."""
    rows = {path: list(values) for path, values in columns.items()}
    return [info_of({path: values[i] for path, values in rows.items()}) for i in range(count)]


def first_writer(about: str) -> tuple[dict[str, Any], Layouts]:
    """Return schema and layouts of the first writer. about: text of ExportSource. Raises UnreadableRecording."""
    for schema in read_about(about)["writers"].values():
        try:
            return schema, WriterSchema.of(schema).layouts
        except CorruptTrace as error:
            raise malformed("a space") from error
    raise malformed("the trace")
