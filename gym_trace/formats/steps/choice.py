"""Which columns of a trace are asked for, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gym_trace.errors import InvalidOption
from gym_trace.model.layout import Path
from gym_trace.model.vocabulary import COLUMNS
from gym_trace.playback.trace import Trace
from gym_trace.printable import printable

_FLAGS = ("terminations", "truncations")  # which are in no column of their own
_MOST_TOLD = 20


class Choice(NamedTuple):
    """Columns of the first level, in their usual order, and the leaves that are wanted of them; none: all."""

    roots: tuple[str, ...]
    leaves: frozenset[str] = frozenset()

    def takes(self, path: Path) -> bool:
        """Return True if a leaf is chosen, by its own name or by that of a parent."""
        names = [name_of(path[: i + 1]) for i in range(len(path))]
        return path[0] in self.roots and (not self.leaves or not self.leaves.isdisjoint(names))


def name_of(path: Path) -> str:
    """Return the name of a leaf: observations, or observations/position of a Dict."""
    return "/".join(map(str, path))


def names_in(trace: Trace) -> list[str]:
    """The columns that can be chosen of a trace: first those of every trace, then their leaves."""
    paths = {path: None for writer in trace.readers for batch in writer.read_batches for path in batch.totals}
    leaves = [name_of(path) for path in paths if len(path) > 1 and path[0] in COLUMNS]
    return [*COLUMNS, *dict.fromkeys(leaves)]


def choose(trace: Trace, names: Sequence[str] | None) -> Choice:
    """The columns of these names, with slashes or dots before those of leaves: "observations/image".

    None: all but infos and annotations where no writer has any. Raises InvalidOption.
    """
    if names is None:
        roots = {path[0] for writer in trace.readers for batch in writer.read_batches for path in batch.totals}
        optional = ("infos", "annotations")
        return Choice(tuple(root for root in COLUMNS if root not in optional or root in roots))
    known = names_in(trace)
    inner = {name for path in known for name in _within(path)}
    dotted = {name.replace("/", "."): name for name in (*inner, *known)}
    leaves = set()
    for name in names:
        if name not in known and name not in inner and name not in dotted:
            told = ", ".join(map(printable, known[:_MOST_TOLD])) + (", …" if len(known) > _MOST_TOLD else "")
            raise InvalidOption(f"no column {name!r}; there are {told}")
        leaves.add(name if name in known or name in inner else dotted[name])
    roots = {leaf.partition("/")[0] for leaf in leaves}
    return Choice(tuple(root for root in COLUMNS if root in roots), frozenset(leaves))


def _within(name: str) -> list[str]:
    """Return the parents of a leaf: observations/camera of observations/camera/left."""
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]
