"""Files and directories that appear atomically: written under another name, synced, and renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.storage.exchange import exchange, sync_file_system
from gym_trace.storage.local import LocalAppender, LocalStorage, lock, open_regular, open_to_others, refuse_url
from gym_trace.storage.protocol import Appender, Storage

PART = ".part"  # suffix of a file that is being written
_LONGEST = 200  # bytes of a name, before the suffix
_NUMBERED = 8  # work directories per target with predictable names, so that later processes find and remove them
# A file in each work directory: its process locks it, and it makes git ignore the directory.
_LOCK, _MARK = ".gitignore", b"# being made by gym-trace, or left by a process that was killed\n*\n"
DESCRIPTORS = "/proc/self/fd"  # on Linux: links to open files
_MOST_BYTES = 1 << 24  # read from a file to find a mark
_MANY_FILES = 100  # with more, syncing the whole file system is faster


class StagedStorage(LocalStorage):
    """A directory that becomes valid with its final name: its files need not be durable before."""

    def create(self, name: str, lock: bool = False) -> LocalAppender:
        return _Staged(self.path(name), lock, shared=lock)

    def sync(self) -> None:
        """Do nothing: see new_directory()."""


class _Staged(LocalAppender):
    def sync(self) -> None:
        """Start writing to the disk, so that the sync at the end is short."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_in(path: Path) -> int:
    """Return the size of a file, or of all files in a directory."""
    return sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())


@contextlib.contextmanager
def staged_file(storage: Storage, name: str, part: str = "") -> Iterator[Appender]:
    """Yield a file to write; at the end it gets its name, atomically and durably, and replaces a file of that name.

    If the block raises, the new file is removed.

    Args:
        part: name of the file until then; default: NAME.part, which replaces that of a killed process.
    """
    part = part or name + PART
    with contextlib.suppress(FileNotFoundError):
        storage.remove(part)
    file = storage.create(part)
    try:
        try:
            yield file
            file.sync()
        finally:
            file.close()
        storage.rename(part, name)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove(part)
        raise
    storage.sync()


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a directory next to target to fill; it becomes target at the end, atomically and durably.

    On an error nothing is left. A killed process leaves ".NAME….part" next to the target; the next process with this
    target removes it.

    Args:
        target: a new or empty directory.
        sources: directories that must not contain target.

    Raises:
        TraceExists: target exists and is not an empty directory.
        InvalidOption: target lies in a source, or is a URL.
    """
    final = _final_path(target, sources)
    if final.exists() and not final.is_dir():
        raise TraceExists(f"{target}: is a file; pass a new directory")
    if final.exists() and os.listdir(final):
        raise TraceExists(f"{target}: not empty; pass a new directory")
    if os.path.ismount(final):
        raise InvalidOption(f"{target}: is a mount point; pass a directory in it")

    def put(staged: Path) -> None:
        try:
            os.rename(staged, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise TraceExists(f"{target}: was created by another process; pass a new directory") from error

    os.makedirs(final.parent, exist_ok=True)
    with _staged(final, put) as staged:
        os.mkdir(staged)
        yield staged
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def new_file(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file next to target to write; it becomes target at the end, atomically and durably.

    Otherwise like new_directory().
    """
    final = _final_path(target, sources)
    if final.exists():
        raise TraceExists(f"{target}: already exists; pass a new file")

    def put(staged: Path) -> None:
        try:
            os.link(staged, final)
        except FileExistsError as error:
            raise TraceExists(f"{target}: was created by another process; pass a new file") from error
        except OSError:  # a file system without links
            os.rename(staged, final)

    os.makedirs(final.parent, exist_ok=True)
    with _staged(final, put) as staged:
        yield staged
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file next to target to write; it replaces target at the end, atomically.

    On an error target stays unchanged; a killed process leaves files as in new_directory(). Missing parent directories
    are created.

    Raises OSError, also if target is neither a file nor a link to one.

    Examples:
        >>> with gym_trace.storage.replaced_file("notes.txt") as path:
        ...     _ = path.write_text("all or nothing")
        >>> path.exists()  # it is notes.txt now
        False
    """
    refuse_url(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "not a regular file; choose another one", os.fspath(target))
    os.makedirs(Path(target).parent, exist_ok=True)
    with _staged(Path(target), lambda staged: os.replace(staged, target)) as staged:
        yield staged


def write_marked(target: str | os.PathLike[str], text: str, mark: str) -> None:
    """Write a text that contains mark to a new file, or atomically replace a file that contains mark.

    Raises TraceExists for a file without mark, OSError for a link or a directory.
    """
    try:
        with open(open_regular(Path(target), os.O_RDONLY), "rb") as file:
            is_marked = mark.encode() in file.read(_MOST_BYTES)
    except FileNotFoundError:
        is_marked = True
    if not is_marked:
        raise TraceExists(f"{os.fspath(target)}: not an unchanged card; choose another file")
    with replaced_file(target) as staged:
        staged.write_text(text, encoding="utf-8", newline="\n")


@contextlib.contextmanager
def replaced_directory(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a directory to create; it replaces target at the end. Otherwise like replaced_file()."""
    final = Path(target)

    def put(staged: Path) -> None:
        try:
            exchange(staged, final)
        except FileNotFoundError:
            os.rename(staged, final)
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            os.rename(final, staged.with_name("before"))
            os.rename(staged, final)

    os.makedirs(final.parent, exist_ok=True)
    with _staged(final, put) as staged:
        yield staged


@contextlib.contextmanager
def _staged(final: Path, put: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a path to write to; at the end, sync it and call put(), unless the block raises."""
    try:
        work = work_beside(final)
    except OSError as error:
        error.filename = os.fspath(final)  # the name that the caller knows
        raise
    try:
        staged = work.path / final.name
        yield staged
        sync_files(staged)
        put(staged)
    finally:
        work.remove()


class WorkDirectory:
    """A private directory next to a target. Its process locks it for as long as it lives.

    Attributes:
        path: path of the directory, through a file descriptor where other users could rename the directory.
    """

    def __init__(self, name: Path, path: Path, held: int, descriptor: int):
        self._name, self.path, self._held, self._descriptor = name, path, held, descriptor

    def remove(self) -> None:
        """Remove the directory with its files, as far as possible, and release its lock."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._held), os.lstat(self.path / _LOCK)):
                _clear(self.path)
                if os.name != "posix":  # open files cannot be removed there
                    self.release()
                os.unlink(self.path / _LOCK)
        self.release()  # first, because NFS keeps a removed file while it is open
        with contextlib.suppress(OSError):  # another process uses it now
            os.rmdir(self._name)

    def release(self) -> None:
        """Release the lock."""
        opened, self._held, self._descriptor = (self._held, self._descriptor), -1, -1
        for fd in opened:
            if fd >= 0:
                os.close(fd)


def take(path: Path) -> WorkDirectory | None:
    """Create a work directory, or take over the one of a dead process with its files.

    Return None if it belongs to another user, is not a work directory, or may still be in use. Raises OSError.
    """
    while True:
        try:
            path.mkdir(0o700)
            is_new = True
        except FileExistsError:
            is_new = False
        steady, descriptor = path, -1
        try:
            if not is_new and open_to_others(path.lstat()):
                return None
            steady, descriptor = _steady(path)
            held = open_regular(steady / _LOCK, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if isinstance(error, FileNotFoundError):
                continue  # another process has just ended, and removed it
            if not is_new:
                return None
            with contextlib.suppress(OSError):
                os.rmdir(path)
            raise
        work = WorkDirectory(path, steady, held, descriptor)
        try:
            if not _is_free(steady, held, is_new):
                work.release()
                return None
            if os.path.samestat(os.fstat(held), os.lstat(path / _LOCK)):
                return work
            work.release()
        except FileNotFoundError:
            work.release()
        except BaseException:
            (work.remove if is_new else work.release)()
            raise


def _steady(path: Path) -> tuple[Path, int]:
    """Return a path of a work directory that stays valid if others rename it, and its descriptor, or -1.

    A user who may rename it could replace it by a link, so that this process overwrites or removes other files. Raises
    OSError, also if that has happened.
    """
    if not open_to_others(os.stat(path.parent), is_sticky_fine=True) or not os.path.isdir(DESCRIPTORS):
        return path, -1
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if problem := open_to_others(os.fstat(descriptor)):
        os.close(descriptor)
        raise OSError(errno.EPERM, problem, os.fspath(path))
    return Path(f"{DESCRIPTORS}/{descriptor}"), descriptor


def _is_free(path: Path, held: int, is_new: bool) -> bool:
    """Lock and mark a work directory; return False if a process may use it, or if it is not a work directory."""
    try:
        is_locked = lock(held) and (is_new or os.name == "posix")
    except OSError:  # a file system without locks: live and dead processes look the same
        is_locked = is_new
    if not is_locked or os.read(held, len(_MARK) + 1) == _MARK:
        return is_locked
    if os.listdir(path) != [_LOCK]:
        return False
    os.ftruncate(held, 0)
    os.lseek(held, 0, os.SEEK_SET)
    os.write(held, _MARK)
    return True


def remove_left(directory: Path) -> None:
    """Remove the work directories that dead processes left in a directory."""
    for path in directory.glob(".*.part"):
        if work := take(path):
            work.remove()


def work_beside(final: Path) -> WorkDirectory:
    """Return an empty work directory for a target; remove those that dead processes with this target left."""
    name = os.fsdecode(os.fsencode(final.name)[:_LONGEST])
    paths = [final.with_name(f".{name}.{number}.part") for number in range(_NUMBERED)]
    found: WorkDirectory | None = None
    for path in paths:
        if (found is None or os.path.lexists(path)) and (work := take(path)):
            if found is None:
                _clear((found := work).path)
            else:
                work.remove()
    while found is None:
        found = take(final.with_name(f".{name}.{os.urandom(4).hex()}.part"))
    return found


def _clear(work: Path) -> None:
    """Remove all files of a work directory except its lock."""
    for entry in os.scandir(work):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name != _LOCK:
            os.unlink(entry.path)


def _final_path(target: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> Path:
    """Return the resolved path. Raises InvalidOption for a URL or a path in a source, TraceExists for a broken link."""
    refuse_url(target)
    if os.path.islink(target) and not os.path.exists(target):
        raise TraceExists(f"{target}: is a link to {os.readlink(target)!r}, a broken link; pass another name")
    final = Path(target).resolve()
    for source in sources:
        if final.is_relative_to(Path(source).resolve()):
            raise InvalidOption(f"{target}: is or lies in the source {source}; pass another path")
    return final


def sync_files(path: str | os.PathLike[str]) -> None:
    """Return when a file, or everything in and below a directory, would survive a power loss."""
    files, folders = [] if os.path.isdir(path) else [path], []
    for folder, _, names in os.walk(path):
        files += [path for name in names if not os.path.islink(path := os.path.join(folder, name))]
        folders.append(folder)
    if len(files) + len(folders) > _MANY_FILES and sync_file_system(path):
        return
    for file in files:
        _sync_file(file)
    for folder in folders:
        LocalStorage(folder).sync()


def _sync_file(path: str | os.PathLike[str]) -> None:
    fd = open_regular(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
