"""Columns of a trace by their names: "rewards", "observations/image"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gym_trace.data.layout import Path
from gym_trace.data.vocabulary import COLUMNS
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_index import RecordedEpisodes, index_of
from gym_trace.printable import printable

_MOST_NAMED = 20  # columns that an error names
_OPTIONAL = ("infos", "annotations")


class ColumnSelection(NamedTuple):
    """Selected columns.

    Attributes:
        roots: columns of the first level that have a selected part, in their usual order.
        columns: names of whole columns and paths of single leaves, as for Scan.
    """

    roots: tuple[str, ...]
    columns: frozenset[str | Path]

    def takes(self, path: Path) -> bool:
        """Return True if a leaf is selected."""
        return path[0] in self.columns or path in self.columns


def select_columns(trace: RecordedEpisodes, names: Sequence[str] | None) -> ColumnSelection:
    """Return the columns of these names, with slashes or dots before leaves: "observations/image".

    names: None: all, except infos and annotations that no writer has. Raises InvalidOption.
    """
    paths = dict.fromkeys(_paths_in(trace))
    if names is None:
        stored_roots = {path[0] for path in paths}
        roots = [root for root in COLUMNS if root not in _OPTIONAL or root in stored_roots]
        return ColumnSelection(tuple(roots), frozenset(roots))
    prefixes = dict.fromkeys(path[:length] for path in paths for length in range(1, len(path) + 1))
    known = {name_of(prefix): prefix for prefix in prefixes}
    known |= {root: (root,) for root in COLUMNS}
    known = {name.replace("/", "."): prefix for name, prefix in known.items()} | known
    columns: set[str | Path] = set()
    for name in names:
        if name not in known:
            usual = names_in(trace)
            choices = ", ".join(map(printable, usual[:_MOST_NAMED])) + (", …" if len(usual) > _MOST_NAMED else "")
            raise InvalidOption(f"no column {name!r}; choose from {choices}")
        prefix = known[name]
        if len(prefix) == 1:
            columns.add(str(prefix[0]))
        else:
            columns |= {path for path in paths if path[: len(prefix)] == prefix}
    selected = {column if isinstance(column, str) else column[0] for column in columns}
    return ColumnSelection(tuple(root for root in COLUMNS if root in selected), frozenset(columns))


def names_in(trace: RecordedEpisodes) -> list[str]:
    """Return the names of the columns of a trace: first COLUMNS, then the leaves."""
    leaves = [name_of(path) for path in _paths_in(trace) if len(path) > 1]
    return [*COLUMNS, *dict.fromkeys(leaves)]


def name_of(path: Path) -> str:
    """Return the name of a leaf: "observations", or "observations/position" in a Dict."""
    return "/".join(map(str, path))


def _paths_in(trace: RecordedEpisodes) -> Iterator[Path]:
    """Yield the paths of stored columns and of the leaves of spaces."""
    for reader in index_of(trace).readers:
        for batch in reader.read_batches:
            yield from (path for path in batch.totals if path[0] in COLUMNS)
        try:
            layouts = reader.layouts
        except CorruptTrace:
            continue
        for layout in layouts[:2]:
            yield from (leaf.path for leaf in layout.leaves())
