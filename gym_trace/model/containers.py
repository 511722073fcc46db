"""A limit on the lists and maps unpacked from untrusted bytes."""

from __future__ import annotations

from typing import Any

from gym_trace.errors import CorruptTrace

MAX_CONTAINERS = 8 << 20  # containers and map entries in a column's values or a record's metadata


class Containers:
    """Remaining container budget while unpacking: lists, maps and map entries, about 100 bytes of memory each.

    Each takes at least one packed byte, so only input longer than MAX_CONTAINERS needs counting.
    """

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise CorruptTrace(f"more than {MAX_CONTAINERS} lists and maps")

    def list_hook(self, items: list[Any]) -> list[Any]:
        self.take(1)
        return items

    def object_hook(self, items: dict[Any, Any]) -> dict[Any, Any]:
        self.take(1 + len(items))
        return items
