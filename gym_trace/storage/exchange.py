"""System calls that Python lacks: Linux exchanges two directories, syncs a whole file system, unshares memory.

macOS names the type of a file system, and the running boot.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

_AT_FDCWD, _RENAME_EXCHANGE, _MAP_FIXED = -100, 2, 0x10
_NUMBERS, _NAME, _REST = 72, 16, 2080  # bytes of macOS's struct statfs before f_fstypename, of it, and after it
_UUID = 37  # letters, with the zero at the end


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


def unshare(mapped: mmap.mmap) -> None:
    """Put a private copy of a shared mapping at its address, so that all views of it are views of the copy.

    Raises OSError.
    """
    content, size = mapped[:], len(mapped)
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    if call(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != address:
        raise OSError(ctypes.get_errno(), "cannot copy the memory of a ring in a forked process")
    mapped[:] = content


def macos_file_system(directory: str | os.PathLike[str]) -> str:
    """Return the type of the file system of a directory on macOS, such as apfs. Raises OSError."""
    found = ctypes.create_string_buffer(_NUMBERS + _NAME + _REST)
    library = _libsystem()
    # On Intel the plain name is that of an older structure.
    call = getattr(library, "statfs$INODE64", None) or library.statfs
    if call(os.fsencode(directory), found):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fspath(directory))
    return found.raw[_NUMBERS : _NUMBERS + _NAME].partition(b"\0")[0].decode("ascii", "replace")


def macos_boot_id() -> bytes:
    """Return 16 bytes that differ from those of every other boot of macOS. Raises OSError."""
    found, size = ctypes.create_string_buffer(_UUID), ctypes.c_size_t(_UUID)
    if _libsystem().sysctlbyname(b"kern.bootsessionuuid", found, ctypes.byref(size), None, ctypes.c_size_t(0)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return bytes.fromhex(found.value.decode("ascii").replace("-", ""))


def _libsystem() -> Any:
    return ctypes.CDLL(None, use_errno=True)
