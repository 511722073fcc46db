"""A storage in memory."""

from __future__ import annotations

import errno

from gym_trace.storage.protocol import Mapping, Reader, Storage


class MemoryStorage(Storage):
    """The files of a trace in memory. root: name of the storage in messages."""

    def __init__(self, root: str, files: dict[str, bytes] | None = None):
        self.root = root
        self._files = {name: bytearray(content) for name, content in (files or {}).items()}

    def __hash__(self) -> int:
        return id(self)

    def content(self, name: str) -> bytes:
        """Return the bytes of a file. Raises FileNotFoundError."""
        if name not in self._files:
            raise FileNotFoundError(name)
        return bytes(self._files[name])

    def path(self, name: str) -> str:
        return self.root

    def make(self) -> None:
        pass

    def names(self) -> list[str]:
        return list(self._files)

    def size(self, name: str) -> int:
        return len(self.content(name))

    def open(self, name: str, holes: int = 0) -> MemoryReader:
        return MemoryReader(self.content(name))

    def create(self, name: str, lock: bool = False) -> MemoryAppender:
        if name in self._files:
            raise FileExistsError(name)
        self._files[name] = bytearray()
        return MemoryAppender(self._files[name])

    def reopen(self, name: str, locked: bool = False) -> MemoryAppender | None:
        self.content(name)
        return MemoryAppender(self._files[name])

    def map(self, name: str, content: bytes, size: int, end: bytes = b"") -> Mapping | None:
        return None

    def append(self, name: str, data: bytes) -> None:
        self.content(name)
        self._files[name].extend(data)

    def rename(self, name: str, new: str) -> None:
        self._files[new] = bytearray(self.content(name))
        del self._files[name]

    def remove(self, name: str) -> None:
        self.content(name)
        del self._files[name]

    def sync(self) -> None:
        pass


class MemoryReader(Reader):
    """A file that is open for reading; see gym_trace.storage.protocol.Reader."""

    def __init__(self, data: bytes | memoryview):
        self._data, self.size = data, len(data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length]) if 0 <= offset < self.size else b""


class MemoryAppender:
    """A file that is open for appending; see gym_trace.storage.protocol.Appender."""

    def __init__(self, data: bytearray):
        self._data = data

    def write(self, data: bytes | memoryview) -> None:
        self._data += data

    def copy(self, file: Reader, offset: int, length: int) -> None:
        data = file.read(offset, length)
        self._data += data
        if len(data) < length:
            raise OSError(errno.EIO, "source file shrank during the copy")

    def truncate(self, size: int) -> None:
        del self._data[size:]

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass
