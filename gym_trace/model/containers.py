"""How many lists and maps come of bytes that are not trusted."""

from __future__ import annotations

from typing import Any

from gym_trace.errors import CorruptTrace

MAX_CONTAINERS = 8 << 20  # lists, maps and entries of maps in the values of a column, or the metadata of a record


class Containers:
    """How many lists, maps and entries of maps may still come of what is unpacked: each takes some 100 bytes of memory.

    There cannot be more of them than bytes, so that only what has more bytes than that needs be counted.
    """

    def __init__(self) -> None:
        self._left = MAX_CONTAINERS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise CorruptTrace(f"more than {MAX_CONTAINERS} lists and maps in one place")

    def list_hook(self, items: list[Any]) -> list[Any]:
        self.take(1)
        return items

    def object_hook(self, items: dict[Any, Any]) -> dict[Any, Any]:
        self.take(1 + len(items))
        return items
