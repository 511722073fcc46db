"""A storage that touches no file system, with locks and mappings; places are found by their names."""

from __future__ import annotations

import os

from gym_trace.errors import TraceNotFound
from gym_trace.storage import memory
from gym_trace.storage.protocol import Holder

_places: dict[str, dict[str, bytearray]] = {}
_held: set[tuple[str, str]] = set()


class MemoryStorage(memory.MemoryStorage):
    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryStorage) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    @property
    def _files(self) -> dict[str, bytearray]:
        if self.root not in _places:
            raise TraceNotFound(f"{self.root}: no such place")
        return _places[self.root]

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def make(self) -> None:
        _places.setdefault(self.root, {})

    def create(self, name: str, lock: bool = False) -> LockedAppender:
        super().create(name)
        return LockedAppender(self._files[name], (self.root, name) if lock else None)

    def reopen(self, name: str, locked: bool = False) -> LockedAppender | None:
        self.size(name)
        key = (self.root, name)
        return None if locked and key in _held else LockedAppender(self._files[name], key if locked else None)

    def map(self, name: str, content: bytes, size: int, end: bytes = b"") -> MemoryMapping:
        self._files[name] = bytearray(content.ljust(size - len(end), b"\0") + end)
        return MemoryMapping(self._files[name])

    def holder(self, name: str) -> Holder | None:
        return "this process" if (self.root, name) in _held else None


class MemoryMapping:
    def __init__(self, data: bytearray):
        self.memory = memoryview(data)

    def close(self) -> None:
        self.memory = memoryview(b"")


class LockedAppender(memory.MemoryAppender):
    def __init__(self, data: bytearray, held: tuple[str, str] | None):
        super().__init__(data)
        self._held = held
        if held is not None:
            _held.add(held)

    def close(self) -> None:
        if self._held is not None:
            _held.discard(self._held)
