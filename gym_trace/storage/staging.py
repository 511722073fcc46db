"""Files and directories that appear atomically: written under another name, synced, and renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.storage.exchange import sync_file_system
from gym_trace.storage.interrupts import raised_once
from gym_trace.storage.local import LocalAppender, LocalStorage, refuse_url

_LONGEST = 200  # characters of a name, before the suffix
_MANY = 100  # files: above this, syncing the whole file system is faster


class StagedStorage(LocalStorage):
    """A directory that counts once it has its final name: its files need not be durable before."""

    def create(self, name: str, lock: bool = False) -> LocalAppender:
        return _Staged(self.path(name), lock, shared=lock)

    def sync(self) -> None:
        """Do nothing: see new_directory()."""


class _Staged(LocalAppender):
    def sync(self) -> None:
        """Start writing to the disk, so that the sync at the end is short."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a directory next to target to fill; it becomes target at the end, atomically and durably.

    On an error nothing is left; a killed process leaves ".NAME….part" next to the target.

    Args:
        target: a new or empty directory.
        sources: directories that must not contain it.

    Raises:
        TraceExists: target exists and is not an empty directory.
        InvalidOption: target lies in a source, or is a URL.
    """
    final = _place(target, sources)
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

    with _staged(final, put) as staged:
        os.makedirs(staged)
        yield staged
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def new_file(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file next to target to write; it becomes target at the end, atomically and durably.

    Otherwise like new_directory().
    """
    final = _place(target, sources)
    if final.exists():
        raise TraceExists(f"{target}: already exists; pass a new file")

    def put(staged: Path) -> None:
        try:
            os.link(staged, final)
        except FileExistsError as error:
            raise TraceExists(f"{target}: was created by another process; pass a new file") from error
        except OSError:  # a file system without links
            os.rename(staged, final)
        else:
            os.unlink(staged)

    os.makedirs(final.parent, exist_ok=True)
    with _staged(final, put) as staged:
        yield staged
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a file next to target to write; it replaces target at the end, atomically.

    The name is random, so a file or link planted beside target is never opened. On an error target stays as it was; a
    killed process leaves ".NAME….part" next to it. Missing directories above target are made.

    Raises OSError, also if target is neither a file nor a link to one.
    """
    refuse_url(target)
    if os.path.exists(target) and not os.path.isfile(target):
        raise OSError(errno.EINVAL, "not a regular file; choose another one", os.fspath(target))
    os.makedirs(Path(target).parent, exist_ok=True)
    with _staged(Path(target), lambda staged: os.replace(staged, target)) as staged:
        yield staged


@contextlib.contextmanager
def _staged(final: Path, put: Callable[[Path], None]) -> Iterator[Path]:
    """Yield a path next to final; sync what is there at the end and put() it in place, or remove it on an error."""
    with raised_once():
        staged = beside(final)
        try:
            yield staged
            sync_files(staged)
            put(staged)
        except BaseException:
            if staged.is_dir():
                shutil.rmtree(staged, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(staged)
            raise


def _place(target: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> Path:
    """Return the resolved path. Raises InvalidOption for a URL or a path in a source, TraceExists for a broken link."""
    refuse_url(target)
    if os.path.islink(target) and not os.path.exists(target):
        raise TraceExists(f"{target}: is a link to {os.readlink(target)!r}, a broken link; pass another name")
    final = Path(target).resolve()
    for source in sources:
        if final.is_relative_to(Path(source).resolve()):
            raise InvalidOption(f"{target}: is or lies in the source {source}; pass another path")
    return final


def beside(directory: Path) -> Path:
    """Return an unused name in the same directory, for a file or directory that will get this name."""
    return directory.with_name(f".{directory.name[:_LONGEST]}.{secrets.token_hex(4)}.part")


def sync_files(path: str | os.PathLike[str]) -> None:
    """Return when a file, or everything in and below a directory, would survive a power loss."""
    files, folders = [] if os.path.isdir(path) else [path], []
    for folder, _, names in os.walk(path):
        files += [os.path.join(folder, name) for name in names]
        folders.append(folder)
    if len(files) + len(folders) > _MANY and sync_file_system(path):
        return
    for file in files:
        _sync_file(file)
    for folder in folders:
        LocalStorage(folder).sync()


def _sync_file(path: str | os.PathLike[str]) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
