"""Opening the files of a trace, of which none is trusted: regular files of the directory only, and all on the disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from zlib import crc32

from gym_trace.errors import CorruptTrace
from gym_trace.storage.regular import open_regular

_HOLES = 16 << 20  # bytes of a file that may be holes, besides three times what is on the disk
_MOST_EXTENTS = 1 << 16
_BLOCK = 1 << 20


def descriptor_of(path: Path) -> int:
    """A file descriptor for reading a regular file: a link could lead out of the directory, reading a pipe never ends.

    Raises CorruptTrace for anything else, FileNotFoundError, OSError.
    """
    try:
        return open_regular(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CorruptTrace("not a regular file", path) from error
        raise


def opened(path: Path) -> Any:
    """The file for reading, unbuffered, as descriptor_of opens it.

    Raises CorruptTrace, too, where most of it is holes: reading these takes time, and they are nowhere on the disk.
    """
    fd = descriptor_of(path)
    try:
        if (there := _on_disk(fd)) is not None:
            raise CorruptTrace(f"claims {os.fstat(fd).st_size} bytes, of which {there} are on the disk", path)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _on_disk(fd: int) -> int | None:
    """The bytes of a file that are not in holes, where these are too many; None otherwise."""
    size, there, at = os.fstat(fd).st_size, 0, 0
    if size <= _HOLES or not hasattr(os, "SEEK_HOLE"):
        return None
    try:
        for _ in range(_MOST_EXTENTS):
            end = os.lseek(fd, at, os.SEEK_HOLE)
            there += end - at
            if size - there <= _HOLES + 3 * there:
                return None
            at = os.lseek(fd, end, os.SEEK_DATA)
    except OSError as error:  # ENXIO: there is no more data; others: this file system knows of no holes
        return there if error.errno == errno.ENXIO else None
    finally:
        os.lseek(fd, 0, os.SEEK_SET)
    return there


def checksum_of(path: Path) -> int:
    """The CRC of a whole file. Raises CorruptTrace, OSError."""
    crc = 0
    with opened(path) as file:
        while block := file.read(_BLOCK):
            crc = crc32(block, crc)
    return crc
