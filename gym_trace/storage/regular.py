"""Opening files whose names somebody else may have put something under: a link, a pipe, a device."""

from __future__ import annotations

import errno
import os
import stat

# O_NONBLOCK: opening a pipe would wait for somebody at its other end. These are not on every system.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of the regular file of this name, made with the permissions of the umask if flags say so.

    Raises OSError, also where the name is that of a link or of anything else that is no regular file.
    """
    try:
        fd = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _refused(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _refused(path)
    return fd


def _refused(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "a link, or no regular file: it is left alone", os.fspath(path))
