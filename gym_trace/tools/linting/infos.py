"""Find infos that only some steps have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from gym_trace.playback.scan import StepRuns
from gym_trace.playback.trace import Trace
from gym_trace.printable import shown
from gym_trace.tools.linting.findings import NOTE, WARNING, Kind, Sighting, column_name, last_steps

_MISSING = Kind("T701", WARNING, "infos that a few steps lack")
_RARE = Kind("T702", NOTE, "infos that only some steps have")

_PATH = ("infos",)
_MOST_SETS = 4096  # sets of keys
_MIN_STEPS = 20


class InfosRule:
    """Counts the sets of keys. The last steps of episodes do not count, because many environments add infos there."""

    kinds: ClassVar[Sequence[Kind]] = (_MISSING, _RARE)
    columns: ClassVar[Collection[str]] = frozenset(("infos",))
    thresholds: ClassVar[Mapping[str, float]] = {"common_info": 0.9}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._common = thresholds["common_info"]
        self._found: dict[tuple[int, Any], list[Any]] = {}  # by writer and set of keys: count, first position

    def add(self, block: StepRuns) -> None:
        infos = block.columns.get(_PATH)
        if infos is None:
            return
        rows = np.flatnonzero(~last_steps(block))
        sets = [tuple(info) if type(info) is dict else () for info in infos[rows].tolist()]
        first_row: dict[Any, int] = {}
        for row, keys in zip(rows.tolist(), sets):
            first_row.setdefault(keys, row)
        for keys, count in Counter(sets).items():
            of_writer = block.writer, keys
            if of_writer in self._found or len(self._found) < _MOST_SETS:
                found = self._found.setdefault(of_writer, [0, block.place(_PATH, first_row[keys])])
                found[0] += count

    def findings(self) -> Iterator[Sighting]:
        totals: dict[int, int] = {}
        for (writer, _), (count, _) in self._found.items():
            totals[writer] = totals.get(writer, 0) + count
        sightings: dict[str, Sighting] = {}
        for writer, total in totals.items():
            sets = {frozenset(keys): found for (number, keys), found in self._found.items() if number == writer}
            for key in sorted({key for keys in sets for key in keys}, key=shown):
                lacking = [found for keys, found in sets.items() if key not in keys]
                missing = sum(count for count, _ in lacking)
                if not missing or total < _MIN_STEPS:
                    continue
                kind = _MISSING if total - missing >= self._common * total else _RARE
                episode, step = min(position for _, position in lacking)
                name = column_name(("infos", shown(key)))
                message = f"{name} is missing in {missing} of {total} steps"
                sightings.setdefault(name, Sighting(kind, message, missing, "step", episode, step, name))
        yield from sightings.values()
