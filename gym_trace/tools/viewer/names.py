"""Names of the numbers of a column, and of the values of a discrete one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from gym_trace.data.agents import AGENTS
from gym_trace.data.layout import Path
from gym_trace.data.schema import WriterSchema, as_map
from gym_trace.errors import CorruptTrace
from gym_trace.format.facts import known
from gym_trace.printable import printable

MOST_VALUES = 64  # of a discrete column, which is shown as bands
_MOST_CHARACTERS = 200


class Names:
    """Names for the columns of a writer, from the fact "names", its environment, its agents, or a LeRobot dataset."""

    def __init__(self, facts: Mapping[str, Any], about: WriterSchema):
        self._facts, self._about = known(facts).get("names", {}), about

    def plain(self, name: str, path: Path, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return labels, one per number of a row or None, and values: start and names of a discrete column, or None.

        name, path: name and path of the column. shape: shape of a row.
        """
        start = self._start(path)
        count = math.prod(shape) if start is None else start[1]
        found = next((names for names in self._all(name, path) if len(names) == count), None)
        texts = None if found is None else [printable(text)[:_MOST_CHARACTERS] for text in found]
        if start is None:
            return {"labels": texts, "values": None}
        return {"labels": None, "values": {"start": start[0], "count": count, "names": texts}}

    def _all(self, name: str, path: Path) -> Iterator[list[str]]:
        environment = as_map(self._about.environment.get("names"))
        features = as_map(self._about.origin.get("features"))
        feature = as_map(features.get("/".join(map(str, path)))).get("names")
        lists: list[Any] = list(feature.values()) if isinstance(feature, dict) else [feature]
        joined = list(chain(*lists)) if all(isinstance(one, list) for one in lists) else None
        for names in (self._facts.get(name), environment.get(name), joined):
            if isinstance(names, list):
                yield list(map(str, names))
        agents = self._about.agents.get("names")
        if isinstance(agents, list) and len(path) > 1 and str(path[1]).rstrip("_") == AGENTS:
            yield list(map(str, agents))
            yield ["–", *map(str, agents)]  # whose turn it is

    def _start(self, path: Path) -> tuple[int, int] | None:
        """Return the first value and the number of values of a discrete column; None for other columns."""
        try:
            _, space = self._about.leaves.get(path, (None, {}))
            if space.get("type") != "Discrete" or not 0 < (count := int(space["n"])) <= MOST_VALUES:
                return None
            return int(space.get("start", 0)), count
        except (CorruptTrace, LookupError, TypeError, ValueError):
            return None
