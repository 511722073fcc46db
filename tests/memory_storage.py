"""A storage that touches no file system."""

from __future__ import annotations

import os

from gym_trace.errors import TraceNotFound
from gym_trace.storage.memory import MemoryAppender, MemoryReader
from gym_trace.storage.protocol import Holder

_places: dict[str, dict[str, bytearray]] = {}
_held: set[tuple[str, str]] = set()


class MemoryStorage:
    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryStorage) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    @property
    def files(self) -> dict[str, bytearray]:
        if self.root not in _places:
            raise TraceNotFound(f"{self.root}: no such place")
        return _places[self.root]

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def make(self) -> None:
        _places.setdefault(self.root, {})

    def names(self) -> list[str]:
        return list(self.files)

    def size(self, name: str) -> int:
        return len(self._file(name))

    def allocated(self) -> int:
        return sum(map(len, self.files.values()))

    def open(self, name: str, holes: int = 0) -> MemoryReader:
        return MemoryReader(bytes(self._file(name)))

    def create(self, name: str, lock: bool = False) -> LockedAppender:
        if name in self.files:
            raise FileExistsError(name)
        self.files[name] = bytearray()
        return LockedAppender(self.files[name], (self.root, name) if lock else None)

    def reopen(self, name: str, locked: bool = False) -> LockedAppender | None:
        file, key = self._file(name), (self.root, name)
        return None if locked and key in _held else LockedAppender(file, key if locked else None)

    def map(self, name: str, content: bytes, size: int) -> MemoryMapping:
        self.files[name] = bytearray(content.ljust(size, b"\0"))
        return MemoryMapping(self.files[name])

    def append(self, name: str, data: bytes) -> None:
        self._file(name).extend(data)

    def holder(self, name: str) -> Holder | None:
        return "this process" if (self.root, name) in _held else None

    def rename(self, name: str, new: str) -> None:
        self.files[new] = self._file(name)
        del self.files[name]

    def remove(self, name: str) -> None:
        self._file(name)
        del self.files[name]

    def sync(self) -> None:
        pass

    def _file(self, name: str) -> bytearray:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]


class MemoryMapping:
    def __init__(self, data: bytearray):
        self.memory = memoryview(data)

    def close(self) -> None:
        self.memory = memoryview(b"")


class LockedAppender(MemoryAppender):
    def __init__(self, data: bytearray, held: tuple[str, str] | None):
        super().__init__(data)
        self._held = held
        if held is not None:
            _held.add(held)

    def close(self) -> None:
        if self._held is not None:
            _held.discard(self._held)
