"""Linux system calls missing in Python: exchange two directories, sync a whole file system."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> None:
    """Exchange the names of two files or directories atomically.

    Raises OSError, with ENOTSUP if the system or the file system does not support it.
    """
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError) as error:  # not Linux, or a C library without renameat2
        raise OSError(errno.ENOTSUP, "this system cannot swap two directories atomically", os.fspath(one)) from error
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL):
            code = errno.ENOTSUP
        raise OSError(code, os.strerror(code), os.fspath(one))


def sync_file_system(directory: str | os.PathLike[str]) -> bool:
    """Sync the file system of a directory: on return, all data written to it survives a power loss.

    Return False if this system does not support it. Raises OSError if data could not be written.
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
