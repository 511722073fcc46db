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
_MOST = 4096  # sets of keys
_ENOUGH = 20  # steps


class InfosRule:
    """Counts the sets of keys. The last steps of episodes do not count, because many environments add infos there."""

    kinds: ClassVar[Sequence[Kind]] = (_MISSING, _RARE)
    columns: ClassVar[Collection[str]] = frozenset(("infos",))
    thresholds: ClassVar[Mapping[str, float]] = {"common_info": 0.9}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._common = thresholds["common_info"]
        self._found: dict[tuple[int, Any], list[Any]] = {}  # by writer and keys: count, first position

    def add(self, block: StepRuns) -> None:
        infos = block.columns.get(_PATH)
        if infos is None:
            return
        counts = ~last_steps(block)
        keys = [tuple(info) if type(info) is dict else () for info in infos[counts].tolist()]
        rows = np.flatnonzero(counts)
        first: dict[Any, int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)
        for key, count in Counter(keys).items():
            mine = block.writer, key
            if mine in self._found or len(self._found) < _MOST:
                found = self._found.setdefault(mine, [0, block.place(_PATH, int(rows[first[key]]))])
                found[0] += count

    def findings(self) -> Iterator[Sighting]:
        totals: dict[int, int] = {}
        for (writer, _), (count, _) in self._found.items():
            totals[writer] = totals.get(writer, 0) + count
        seen: dict[str, Sighting] = {}
        for writer, total in totals.items():
            sets = {frozenset(key): it for (number, key), it in self._found.items() if number == writer}
            for key in sorted({key for keys in sets for key in keys}, key=shown):
                lacking = [it for keys, it in sets.items() if key not in keys]
                missing = sum(count for count, _ in lacking)
                if not missing or total < _ENOUGH:
                    continue
                kind = _MISSING if total - missing >= self._common * total else _RARE
                place = min(place for _, place in lacking)
                name = column_name(("infos", shown(key)))
                message = f"{name} is missing in {missing} of {total} steps"
                seen.setdefault(name, Sighting(kind, message, missing, "step", place[0], place[1], name))
        yield from seen.values()
