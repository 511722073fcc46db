"""Storage interface: a few named files, read in ranges and appended to.

tests/helpers/storage_contract.py has the tests that every implementation passes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from gym_trace.errors import RemoteError

Holder = Literal["this process", "another process"]
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # errno values: no free file descriptors, for now


class Span(NamedTuple):
    """A range of bytes of a file.

    Examples:
        >>> gym_trace.storage.Span("w.000000.gtb", offset=64, length=1024)
        Span(name='w.000000.gtb', offset=64, length=1024)
    """

    name: str
    offset: int
    length: int


class Overwritten(RemoteError):
    """A file at a URL no longer has the version that was listed."""


class Gone(RemoteError, FileNotFoundError):
    """A file at a URL that was listed is no longer there."""


class Reader(Protocol):
    """A file that is open for reading, unaffected by appends and renames. Not thread-safe.

    Attributes:
        size: bytes of the file when it was opened.

    Examples:
        >>> storage = gym_trace.storage.LocalStorage("traces/cartpole")
        >>> (batch,) = (name for name in storage.names() if name.endswith(".gtb"))
        >>> with storage.open(batch) as reader:
        ...     magic = reader.read(0, 4)
        >>> len(magic)
        4
    """

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Return up to length bytes from offset on: fewer at the end of the file, none outside it."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """Read len(out) bytes into out, like read(); return the number of bytes read."""
        data = self.read(offset, len(out))
        out[: len(data)] = data
        return len(data)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        return


class Appender(Protocol):
    """A file that is open for appending. All methods raise OSError.

    Examples:
        >>> storage = gym_trace.storage.LocalStorage("appended")
        >>> storage.make()
        >>> appender = storage.create("notes")
        >>> appender.write(b"one line")
        >>> appender.close()
        >>> storage.size("notes")
        8
    """

    def write(self, data: bytes | memoryview) -> None:
        """Append data; readers see it at once. On an error, a part of data may have been written."""

    def copy(self, file: Reader, offset: int, length: int) -> None:
        """Append a range of another file, in the kernel if possible. Raises OSError, also if that file is too short."""

    def truncate(self, size: int) -> None:
        """Truncate the file to its first size bytes."""

    def sync(self) -> None:
        """Sync to disk: on return, all written data survives a power loss."""

    def close(self) -> None:
        """Close the file and release its lock. May be called again."""


class Mapping(Protocol):
    """A file in memory. Its content survives a kill of the process.

    Attributes:
        memory: all bytes of the file, writable.

    Examples:
        >>> storage = gym_trace.storage.LocalStorage("mapped")
        >>> storage.make()
        >>> mapping = storage.map("ring", b"ring", 4096)
        >>> if mapping is not None:  # some file systems have no mappings
        ...     mapping.close()
    """

    memory: memoryview

    def close(self) -> None:
        """Close the file. Its memory stays valid while referenced; in a forked child, it is then a private copy.

        May be called again.
        """


@runtime_checkable
class ReadStorage(Protocol):
    """The files of one trace, for reading; pass one to open_trace(). File names have no directories.

    A subclass must define only root, names(), size() and open(). Also define __eq__ and __hash__, so that storages of
    the same location are equal. Instances must be picklable and thread-safe.
    Files are untrusted: links are not followed, and only regular files are read.

    Attributes:
        root: name of the location in messages.
        ahead: bytes that are worth prefetching; 0 where reading takes no round trip.

    Examples:
        >>> isinstance(gym_trace.storage.LocalStorage("traces/cartpole"), gym_trace.storage.ReadStorage)
        True
    """

    root: str
    ahead: int = 0

    def __hash__(self) -> int: ...

    def path(self, name: str) -> str:
        """Return the name of a file in messages."""
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Return the names of the files, in any order. Raises TraceNotFound if the location does not exist, OSError."""

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises FileNotFoundError, OSError."""

    def version(self, name: str) -> str:
        """Return a text that changes when another file gets this name. Raises FileNotFoundError, OSError."""
        return str(self.size(name))

    def expect(self, spans: Iterable[Span], gaps: bool = True) -> None:
        """Prefetch spans that will be read next, where each read takes a round trip. Raises OSError.

        gaps: large gaps between spans may be fetched with them, to save time; what lies there is probably read soon.
        """
        return

    def soon(self, call: Callable[[], object]) -> None:
        """Run a call that prefetches data in another thread, where that pays."""
        return

    def allocated(self) -> int:
        """Return the disk space of the location and all its files, like du. Raises OSError."""
        return sum(map(self.size, self.names()))

    def open(self, name: str, holes: int = 0) -> Reader:
        """Open a file for reading. Raises FileNotFoundError, OSError, and CorruptTrace if it is not a readable file.

        holes: bytes of holes allowed in addition to the usual limit, for a file that is mostly empty.
        """

    def holder(self, name: str) -> Holder | None:
        """Return the holder of the lock of a file; None if unlocked or unknown. Raises OSError: NO_DESCRIPTORS."""
        return None


@runtime_checkable
class Storage(ReadStorage, Protocol):
    """The files of one trace, for reading and writing.

    Examples:
        >>> isinstance(gym_trace.storage.LocalStorage("traces/cartpole"), gym_trace.storage.Storage)
        True
    """

    def make(self) -> None:
        """Create the location unless it exists. Raises OSError."""

    def create(self, name: str, lock: bool = False) -> Appender:
        """Create a file. Raises FileExistsError, OSError.

        lock: hold its lock until it is closed or this process ends, where locks are supported.
        """

    def reopen(self, name: str, locked: bool = False) -> Appender | None:
        """Open an existing file for appending; return None if locked is True and another process holds its lock.

        Raises FileNotFoundError, OSError.
        """

    def map(self, name: str, content: bytes, size: int, end: bytes = b"") -> Mapping | None:
        """Map a new file of that size that starts with content; it replaces a file of this name atomically.

        end: the last bytes of the file.

        Return None where a killed process would lose data in the mapping, or where disk space cannot be reserved.
        Raises OSError.
        """

    def append(self, name: str, data: bytes) -> None:
        """Append data in one write to a file that others may append to. Raises FileNotFoundError, OSError."""

    def rename(self, name: str, new: str) -> None:
        """Rename a file atomically; its readers are not disturbed. Raises FileNotFoundError, OSError."""

    def remove(self, name: str) -> None:
        """Remove a file. Raises FileNotFoundError, OSError."""

    def sync(self) -> None:
        """Return when all names would survive a power loss. Raises OSError."""

    def settle(self) -> None:
        """Wait until closed files are published where readers look for them. Raises RecordingError."""
        return
