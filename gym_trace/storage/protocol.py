"""What a trace asks of the place where it lies: a few files with names of their own, appended to and read in ranges.

tests/storage_contract.py has the tests that every implementation passes.
"""

from __future__ import annotations

import errno
from types import TracebackType
from typing import Literal, Protocol

Holder = Literal["this process", "another process"]
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)  # of an OSError: there are no file descriptors left, for now


class Reader(Protocol):
    """A file that is open for reading; what others append or rename meanwhile does not matter. Not thread-safe.

    Attributes:
        size: its bytes, when it was opened.
    """

    size: int

    def read(self, offset: int, length: int) -> bytes:
        """Up to length bytes from offset on; fewer only at the end of the file, none before or beyond it."""

    def read_into(self, offset: int, out: memoryview) -> int:
        """As read(), into out, as many bytes as it has; returns how many there were."""

    def __enter__(self) -> Reader: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


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
        """Lets go of the file, and of its lock. May be called again."""


class Mapping(Protocol):
    """A file in memory: what is put there stays when the process is killed.

    Attributes:
        memory: all of its bytes, to be read and written.
    """

    memory: memoryview

    def close(self) -> None:
        """Lets go of the file. Its memory stays for as long as anybody refers to it. May be called again."""


class Storage(Protocol):
    """The files of one trace. Keys are their names, which have no directories in them.

    It can be pickled and copied; those of the same place are equal. Any number of threads may use it. What is under a
    name may have been put there by anybody: only what can be read to its end is a file, links are none.

    Attributes:
        root: how messages name the place.
    """

    root: str

    def __hash__(self) -> int: ...

    def path(self, name: str) -> str:
        """How messages name a file."""

    def make(self) -> None:
        """Makes the place, if it is not there yet. Raises OSError."""

    def names(self) -> list[str]:
        """The names of the files, in any order. Raises TraceNotFound if there is no such place, OSError."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises FileNotFoundError, OSError."""

    def allocated(self) -> int:
        """Bytes that the place takes with all that is in it, as du counts them. Raises OSError."""

    def open(self, name: str, holes: int = 0) -> Reader:
        """A file for reading. Raises FileNotFoundError, CorruptTrace if it is none that can be read, OSError.

        holes: bytes more of it than usual that may be nowhere on the disk, where a file is mostly empty.
        """

    def create(self, name: str, lock: bool = False) -> Appender:
        """A new file. Raises FileExistsError, OSError.

        lock: holds its lock until it is closed or this process ends, where the place has locks.
        """

    def reopen(self, name: str, locked: bool = False) -> Appender | None:
        """A file that is there, to append to it; None if its lock is wanted and cannot be had at once.

        Raises FileNotFoundError, OSError.
        """

    def map(self, name: str, content: bytes, size: int) -> Mapping | None:
        """A file of that size, which begins with content, in place of one of this name; there at once, and whole.

        None where a process that is killed would lose what it puts into memory, or where there could turn out to be no
        room for it later. Raises OSError.
        """

    def append(self, name: str, data: bytes) -> None:
        """Appends data at once to a file that somebody else may be appending to. Raises FileNotFoundError, OSError."""

    def holder(self, name: str) -> Holder | None:
        """Who holds the lock of a file, if anybody does and this can be told. Raises OSError: NO_DESCRIPTORS."""

    def rename(self, name: str, new: str) -> None:
        """Gives a file another name, at once; who is reading it goes on. Raises FileNotFoundError, OSError."""

    def remove(self, name: str) -> None:
        """Raises FileNotFoundError, OSError."""

    def sync(self) -> None:
        """Returns when all names would survive a loss of power. Raises OSError."""
