"""Linux system calls missing in Python: exchange two directories, sync a whole file system."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Exchange the names of two files or directories atomically.

    Raises OSError; with ENOTSUP where the system or the file system cannot do it.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError) as error:  # no Linux, or a C library that does not know it
        raise OSError(errno.ENOTSUP, "this system cannot swap two directories atomically", os.fspath(one)) from error
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL):
            code = errno.ENOTSUP
        raise OSError(code, os.strerror(code), os.fspath(one))


def sync_file_system(directory: str | os.PathLike[str]) -> bool:
    """Returns when all that was written to the file system a directory lies on would survive a loss of power.

    False: this system cannot be asked for that. Raises OSError: something could not be written.
    """
    try:
        sync = ctypes.CDLL(None, use_errno=True).syncfs
    except (AttributeError, OSError, TypeError):
        return False
    fd = os.open(directory, os.O_RDONLY)
    try:
        if sync(fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(directory))
    finally:
        os.close(fd)
    return True
