"""A trace in a directory. Files are untrusted: only regular, fully allocated files in the directory are read."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceNotFound
from gym_trace.storage.exchange import macos_file_system, unshare
from gym_trace.storage.protocol import NO_DESCRIPTORS, Holder, Reader, Storage
from gym_trace.storage.remote.address import is_url, redacted, url_of

try:
    import fcntl
    import grp
    import pwd
except ImportError:  # not a POSIX system: live and dead writers look the same
    fcntl = None  # type: ignore[assignment]

# O_NONBLOCK: opening a pipe must not block. Some systems lack these flags.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
_NO_COPYING = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM, errno.EIO)
_REFUSED = "a link, or no regular file: it is left alone"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_BINARY", 0)
_HOLES = 16 << 20  # bytes of holes that a file may have, plus three times its bytes on disk
_MOST_EXTENTS = 1 << 16
_BLOCK = 1 << 20
_LOCK_TIMEOUT = 5.0  # seconds
_MOUNTS = "/proc/self/mountinfo"
# File systems whose shared mappings outlive a process, and whose allocated blocks stay writable: others may copy on
# write, compress, or need another machine.
_SAFE_TO_MAP = frozenset(("ext2", "ext3", "ext4", "xfs", "tmpfs", "overlay", "f2fs"))
_SAFE_ON_MACOS = frozenset(("apfs", "hfs"))
_held_here: set[str] = set()  # files whose locks this process holds


class LocalStorage(Storage):
    """A directory of a file system.

    Examples:
        >>> storage = gym_trace.storage.LocalStorage("traces/cartpole")
        >>> sorted(name.rpartition(".")[2] for name in storage.names())
        ['gtb', 'jsonl']
        >>> gym_trace.open_trace(storage)[0].outcome
        'terminated'
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.root = str(Path(directory))
        self._prefix = "" if self.root == "." else os.path.join(self.root, "")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalStorage) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def path(self, name: str) -> str:
        return self._prefix + name

    def make(self) -> None:
        os.makedirs(self.root, exist_ok=True)

    def names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:  # links may point out of the directory, and pipes block
                return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
        except FileNotFoundError as error:
            raise TraceNotFound(f"{self.root}: no such directory") from error
        except NotADirectoryError as error:
            raise TraceNotFound(f"{self.root}: is a file; pass the directory of a trace") from error

    def size(self, name: str) -> int:
        status = os.lstat(self.path(name))
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", self.path(name))
        return status.st_size

    def version(self, name: str) -> str:
        status = os.lstat(self.path(name))
        return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ino}"

    def allocated(self) -> int:
        total = _allocated(os.stat(self.root))
        with os.scandir(self.root) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # renamed or removed since
                    if entry.is_file(follow_symlinks=False):
                        total += _allocated(entry.stat(follow_symlinks=False))
        return total

    def open(self, name: str, holes: int = 0) -> LocalReader:
        path = self.path(name)
        fd = _open_to_read(path)
        try:
            return LocalReader(fd, path, holes)
        except BaseException:
            os.close(fd)
            raise

    def create(self, name: str, lock: bool = False) -> LocalAppender:
        return LocalAppender(self.path(name), lock)

    def reopen(self, name: str, locked: bool = False) -> LocalAppender | None:
        path = self.path(name)
        fd = open_regular(path, os.O_WRONLY | os.O_APPEND)
        try:
            held = not locked or lock(fd)
        except OSError:  # a file system without locks: the writer may be alive
            held = False
        if held:
            return LocalAppender(path, locked, fd=fd)
        os.close(fd)
        return None

    def map(self, name: str, content: bytes, size: int, end: bytes = b"") -> LocalMapping | None:
        if self.why_unmapped() is not None:
            return None
        path, fresh = self.path(name), self.path(name + ".part")
        fd = open_new(fresh)
        try:
            _allocate(fd, size)
            mapping = LocalMapping(mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))
            mapping.memory[: len(content)] = content
            mapping.memory[size - len(end) :] = end
            os.rename(fresh, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
            raise
        finally:
            os.close(fd)
        return mapping

    def why_unmapped(self) -> str | None:
        """Return why map() maps no file in this directory; None if it does. Raises OSError."""
        if sys.platform == "darwin":
            kind, safe = macos_file_system(self.root), _SAFE_ON_MACOS
        elif hasattr(os, "posix_fallocate"):
            kind, safe = _file_system(self.root), _SAFE_TO_MAP
        else:
            return f"{sys.platform} cannot reserve disk space for a file"
        return None if kind in safe else f"no safe memory-mapped files on {kind or 'an unknown file system'}"

    def append(self, name: str, data: bytes) -> None:
        fd = open_regular(self.path(name), os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def holder(self, name: str) -> Holder | None:
        path = self.path(name)
        if fcntl is None:
            return None
        try:
            fd = _open_to_read(path)
        except (CorruptTrace, OSError) as error:
            if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                raise  # unknown: the writer may be alive
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return "this process" if os.path.realpath(path) in _held_here else "another process"
        except OSError:
            pass
        finally:
            os.close(fd)
        return None

    def rename(self, name: str, new: str) -> None:
        os.rename(self.path(name), self.path(new))

    def remove(self, name: str) -> None:
        os.unlink(self.path(name))

    def sync(self) -> None:
        if os.name != "posix":
            return
        fd = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class LocalReader:
    """A regular file, open for unbuffered reading; see gym_trace.storage.protocol.Reader.

    Raises CorruptTrace if most of it is holes: reading them takes time, and they hold no data.
    """

    def __init__(self, fd: int, path: str, holes: int):
        self.size = size_on_disk(fd, path, holes)
        self._file = open(fd, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__

    def read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset < self.size:
            return b""
        self._file.seek(offset)
        data: bytes = self._file.read(length)
        while len(data) < length and (more := self._file.read(length - len(data))):
            data += more
        return data

    def fileno(self) -> int:
        return self._file.fileno()

    def read_into(self, offset: int, out: memoryview) -> int:
        if not 0 <= offset < self.size:
            return 0
        self._file.seek(offset)
        filled = 0
        while filled < len(out) and (count := self._file.readinto(out[filled:])):
            filled += count
        return filled

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()


class LocalAppender:
    """A file that is open for appending; see gym_trace.storage.protocol.Appender."""

    def __init__(self, path: str, lock: bool, shared: bool = True, fd: int | None = None):
        """shared: other processes may append. fd: descriptor of an existing file, already locked if lock is set."""
        self._fd = os.open(path, _NEW if shared else _NEW & ~os.O_APPEND, 0o666) if fd is None else fd
        self._held: str | None = None
        if lock:
            self._held = os.path.realpath(path)
            _held_here.add(self._held)
            if fd is None and not _is_locked(self._fd):
                self.close()
                os.unlink(path)
                raise OSError(errno.EBUSY, "another process, perhaps a reader, holds its lock", path)

    def write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]

    def copy(self, file: Reader, offset: int, length: int) -> None:
        if isinstance(file, LocalReader):
            copied = _copied_by_the_system(file.fileno(), self._fd, offset, length)
            offset, length = offset + copied, length - copied
        while length:
            data = file.read(offset, min(length, _BLOCK))
            if not data:
                raise OSError(errno.EIO, "source file shrank during the copy")
            self.write(data)
            offset, length = offset + len(data), length - len(data)

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        os.lseek(self._fd, size, os.SEEK_SET)

    def sync(self) -> None:
        os.fsync(self._fd)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if self._held is not None:
            _held_here.discard(self._held)
        if fd >= 0:
            os.close(fd)


class LocalMapping:
    """A file in memory; see gym_trace.storage.protocol.Mapping."""

    def __init__(self, mapped: mmap.mmap):
        self._mapped: mmap.mmap | None = mapped
        self._pid = os.getpid()
        self.memory = memoryview(mapped)

    def close(self) -> None:
        self.memory = memoryview(b"")
        if self._mapped is not None:
            mapped, self._mapped = weakref.ref(self._mapped), None
            if self._pid != os.getpid() and (left := mapped()) is not None:  # views are left: the last one unmaps it
                unshare(left)


def _allocated(status: os.stat_result) -> int:
    """Return allocated bytes; the file size where the system reports no block count."""
    return 512 * status.st_blocks if hasattr(status, "st_blocks") else status.st_size


def _allocate(fd: int, size: int) -> None:
    """Give an empty file its blocks: a full disk raises OSError now, instead of a signal later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:
        while size:
            size -= os.write(fd, bytes(min(_BLOCK, size)))  # after a short one, a full disk raises


def _file_system(directory: str) -> str:
    """Return the type of the file system of a directory; empty if unknown. Raises OSError."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:  # id parent device root mount-point options … - type source options
                mount, _, kind = line.partition(" - ")
                if mount.split()[2] == number:
                    return kind.split()[0]
    except (OSError, IndexError) as error:
        if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
            raise
    return ""


def refuse_url(path: str | os.PathLike[str]) -> None:
    """Raise InvalidOption for a URL, which would become a local directory called "s3:"."""
    if is_url(path):
        url = redacted(url_of(path))
        raise InvalidOption(
            f"{url}: is a URL; write to a local path, and copy a trace from there: gym-trace push PATH {url}"
        )


def directories_in(path: str | os.PathLike[str]) -> list[str]:
    """Return the names of the subdirectories, sorted, without links and hidden ones. Raises OSError."""
    with os.scandir(path) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(name for name in found if not name.startswith("."))


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file and return its descriptor. With O_CREAT, a new file gets the permissions of the umask.

    Raises OSError, also for a link and anything but a regular file.
    """
    try:
        fd = os.open(path, flags | _FLAGS, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise OSError(errno.EINVAL, _REFUSED, os.fspath(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, _REFUSED, os.fspath(path))
    return fd


def open_new(path: str | os.PathLike[str]) -> int:
    """Create a file and return its descriptor. Replace a file of a killed process: another user may have it open.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666)


@contextlib.contextmanager
def alone(directory: str | os.PathLike[str], is_needed: bool = False) -> Iterator[bool]:
    """Hold the lock of a directory. Yield False if it has no lock, or if it is not needed and another process keeps it.

    is_needed: raise TraceError if another process keeps the lock for _LOCK_TIMEOUT; otherwise continue without it.
    """
    until, fd, is_held = time.monotonic() + _LOCK_TIMEOUT, -1, False
    try:
        with contextlib.suppress(OSError):  # not a directory, or a system that cannot open one
            while not is_held:
                if fd < 0:
                    fd = os.open(directory, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
                if lock(fd):
                    is_held = os.path.samestat(os.fstat(fd), os.stat(directory))
                    if not is_held:  # an edit in place has replaced it
                        os.close(fd)
                        fd = -1
                elif time.monotonic() < until:
                    time.sleep(0.01)
                elif is_needed:
                    raise TraceError(f"{directory}: another process keeps it locked; try again when that has ended")
                else:
                    break
        yield is_held
    finally:
        if fd >= 0:
            os.close(fd)


def open_to_others(status: os.stat_result, is_sticky_fine: bool = False) -> str:
    """Say why other users may replace files in a directory with this status; return "" if they cannot.

    is_sticky_fine: accept a sticky directory, such as /tmp, where others may only add files.
    """
    if not stat.S_ISDIR(status.st_mode):
        return "not a directory"
    if os.name != "posix":
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {status.st_uid})"
    if is_sticky_fine and status.st_mode & stat.S_ISVTX:
        return ""
    shared = status.st_mode & (stat.S_IWOTH if _is_own_group(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP)
    return "writable by others" if shared else ""


def cache_root() -> Path:
    """Return the cache directory, made if missing: $GYM_TRACE_CACHE, or the user's.

    Raises InvalidOption if other users could replace its files, because these are trusted.
    """
    given = os.environ.get("GYM_TRACE_CACHE")
    root = Path(given or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gym-trace")
    with contextlib.suppress(OSError):  # writing to it will report the error
        os.makedirs(root, mode=0o700, exist_ok=True)
        if why := shared_with_others(root):
            raise InvalidOption(f"{root}: {why}; set GYM_TRACE_CACHE to a directory that only you can write to")
    return root


def shared_with_others(directory: str | os.PathLike[str]) -> str:
    """Say why other users may have put files into a directory, or made this link to one; return "" if they cannot.

    Raises OSError.
    """
    status = os.lstat(directory)
    if stat.S_ISLNK(status.st_mode) and os.name == "posix" and status.st_uid not in (0, os.geteuid()):
        return f"is a link of another user (uid {status.st_uid})"
    return open_to_others(os.stat(directory))


def _is_own_group(group: int) -> bool:
    """Return True for this user's private group: many systems create one, and its umask allows the group to write."""
    try:
        user, about = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return about.gr_name == user and set(about.gr_mem) <= {user}


def shared_lock(fd: int) -> None:
    """Wait for a shared lock of an open file: several processes may hold one. Raises OSError."""
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_SH)


def _is_locked(fd: int) -> bool:
    """Lock a new file; return False if another process keeps its lock. A call of holder() has it only briefly."""
    until = time.monotonic() + _LOCK_TIMEOUT
    try:
        while not lock(fd):
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
    except OSError:  # a file system without locks, as on clusters
        pass
    return True


def lock(fd: int) -> bool:
    """Lock an open file unless another process holds its lock; return True if locked, or without lock support."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _copied_by_the_system(source: int, target: int, offset: int, length: int) -> int:
    """Append a range to the target in the kernel; return the number of copied bytes. The caller copies the rest."""
    done = 0
    if fcntl is None or not hasattr(os, "copy_file_range"):
        return done
    flags = fcntl.fcntl(target, fcntl.F_GETFL)
    try:
        if flags & os.O_APPEND:  # copy_file_range() rejects this flag
            fcntl.fcntl(target, fcntl.F_SETFL, flags & ~os.O_APPEND)
            os.lseek(target, 0, os.SEEK_END)
        while done < length and (count := os.copy_file_range(source, target, length - done, offset + done)):
            done += count
    except OSError as error:
        if error.errno not in _NO_COPYING:
            raise
    finally:
        if flags & os.O_APPEND:
            fcntl.fcntl(target, fcntl.F_SETFL, flags)
    return done


def _open_to_read(path: str) -> int:
    """Return a file descriptor. Raises CorruptTrace if it is not a regular file, FileNotFoundError, OSError."""
    try:
        return open_regular(path, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise CorruptTrace("not a regular file", path) from error
        raise


def size_on_disk(fd: int, path: str | os.PathLike[str], holes: int = 0) -> int:
    """Return the size of an open file. Raises CorruptTrace if most of it is holes: they take time and memory to read.

    holes: bytes of holes allowed in addition to the usual limit.
    """
    status = os.fstat(fd)
    allocated = 512 * getattr(status, "st_blocks", 0) >= status.st_size  # or an empty file
    if not allocated and (there := _on_disk(fd, status.st_size, _HOLES + holes)) is not None:
        raise CorruptTrace(f"declares {status.st_size} bytes, but only {there} are on disk", path)
    return status.st_size


def _on_disk(fd: int, size: int, holes: int) -> int | None:
    """Return the bytes of a file outside holes if there are too many holes; otherwise None."""
    there = at = 0
    if size <= holes or not hasattr(os, "SEEK_HOLE"):
        return None
    try:
        for _ in range(_MOST_EXTENTS):
            end = os.lseek(fd, at, os.SEEK_HOLE)
            there += end - at
            if size - there <= holes + 3 * there:
                return None
            at = os.lseek(fd, end, os.SEEK_DATA)
    except OSError as error:  # ENXIO: no more data; others: no support for holes
        return there if error.errno == errno.ENXIO else None
    finally:
        os.lseek(fd, 0, os.SEEK_SET)
    return there
