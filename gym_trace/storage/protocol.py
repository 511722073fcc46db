"""Storage interface: a few named files, read in ranges and appended to.

tests/helpers/storage_contract.py has the tests that every implementation passes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

Holder = Literal["this process", "another process"]
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # errno values: no free file descriptors, for now


class Span(NamedTuple):
    """A range of bytes of a file."""

    name: str
    offset: int
    length: int


class Reader(Protocol):
    """A file that is open for reading, unaffected by appends and renames. Not thread-safe.

    Attributes:
        size: its bytes, when it was opened.
    """

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Up to length bytes from offset on; fewer only at the end of the file, none before or beyond it."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """As read(), into out, as many bytes as it has; returns how many there were."""
        data = self.read(offset, len(out))
        out[: len(data)] = data
        return len(data)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Appender(Protocol):
    """A file that is open for appending. All of it raises OSError."""

    def write(self, data: bytes | memoryview) -> None:
        """Appends data, for others to read. If it fails, a part of data may have been written."""

    def copy(self, file: Reader, offset: int, length: int) -> None:
        """Appends a range of another file, where the system can without reading it. As write(), also if it is short."""

    def truncate(self, size: int) -> None:
        """Takes back all but the first size bytes."""

    def sync(self) -> None:
        """Returns when all that was written would survive a loss of power."""

    def close(self) -> None:
        """Close the file and release its lock. May be called again."""


class Mapping(Protocol):
    """A file in memory. Its content survives a kill of the process.

    Attributes:
        memory: all of its bytes, to be read and written.
    """

    memory: memoryview

    def close(self) -> None:
        """Close the file. Its memory stays valid while referenced. May be called again."""


@runtime_checkable
class ReadStorage(Protocol):
    """The files of one trace, for reading; open_trace() takes one. Keys are file names, without directories.

    A class that inherits from it has to define only root, names(), size() and open(). Define __eq__ and __hash__, too,
    so that storages of the same place are equal; instances must be picklable, and usable from any number of threads.
    Files are untrusted: links are not followed, and only regular files are read.

    Attributes:
        root: name of the place in messages.
        ahead: bytes that are worth reading before they are asked for; 0 where reading takes no round trip.
    """

    root: str
    ahead: int = 0

    def __hash__(self) -> int: ...

    def path(self, name: str) -> str:
        """Return the name of a file in messages."""
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Return the names of the files, in any order. Raises TraceNotFound if the place does not exist, OSError."""

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises FileNotFoundError, OSError."""

    def version(self, name: str) -> str:
        """Return what changes when another file takes this name. Raises FileNotFoundError, OSError."""
        return str(self.size(name))

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetch what will be read next, all at once, where each read takes a round trip. Raises OSError."""
        return

    def soon(self, call: Callable[[], object]) -> None:
        """Run a call, which reads what will be read soon, in another thread, where that pays."""
        return

    def allocated(self) -> int:
        """Return the bytes that the place takes with everything in it, like du. Raises OSError."""
        return sum(map(self.size, self.names()))

    def open(self, name: str, holes: int = 0) -> Reader:
        """Open a file for reading. Raises FileNotFoundError, OSError, and CorruptTrace if it is not a readable file.

        holes: bytes that may be missing on the disk, in addition to the usual limit, in a file that is mostly empty.
        """

    def holder(self, name: str) -> Holder | None:
        """Return the holder of the lock of a file; None if unlocked or unknown. Raises OSError: NO_DESCRIPTORS."""
        return None


@runtime_checkable
class Storage(ReadStorage, Protocol):
    """The files of one trace, for reading and writing."""

    def make(self) -> None:
        """Create the place unless it exists. Raises OSError."""

    def create(self, name: str, lock: bool = False) -> Appender:
        """Create a file. Raises FileExistsError, OSError.

        lock: hold its lock until it is closed or this process ends, if the place has locks.
        """

    def reopen(self, name: str, locked: bool = False) -> Appender | None:
        """Open an existing file for appending; return None if its lock is wanted and held by another process.

        Raises FileNotFoundError, OSError.
        """

    def map(self, name: str, content: bytes, size: int) -> Mapping | None:
        """Map a new file of that size that starts with content; it replaces a file of this name atomically.

        Return None where a killed process would lose what it put into memory, or where the space could turn out to be
        missing later. Raises OSError.
        """

    def append(self, name: str, data: bytes) -> None:
        """Append data at once to a file that others may append to. Raises FileNotFoundError, OSError."""

    def rename(self, name: str, new: str) -> None:
        """Rename a file atomically; its readers are not disturbed. Raises FileNotFoundError, OSError."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError, OSError."""

    def sync(self) -> None:
        """Return when all names would survive a power loss. Raises OSError."""

    def settle(self) -> None:
        """Return when what is closed is where others look for it. Raises RecordingError."""
        return
