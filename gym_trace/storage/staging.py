"""Directories that are there whole, or not at all: filled under another name, and renamed when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from gym_trace.errors import InvalidOption, TraceExists
from gym_trace.storage.exchange import sync_file_system
from gym_trace.storage.interrupts import raised_once
from gym_trace.storage.local import LocalAppender, LocalStorage, open_regular, refuse_url

_LONGEST = 200  # characters of a name, to which others are added
_MANY = 100  # files: to wait for each takes longer than to wait for all that the file system has to write


class StagedStorage(LocalStorage):
    """A directory that is being filled, and counts once it has its name: its files need not be durable before."""

    def create(self, name: str, lock: bool = False) -> LocalAppender:
        return _Staged(self.path(name), lock, shared=lock)

    def sync(self) -> None:
        """Nothing: see new_directory()."""


class _Staged(LocalAppender):
    def sync(self) -> None:
        """Has the system begin to write to the disk, so that there is less to wait for in the end."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory beside target to be filled, which gets its name at the end, at once and durable.

    Where that is not reached nothing is left; a process that is killed leaves ".NAME….part" beside the target.

    Args:
        target: a new or empty directory.
        sources: directories that it must not lie in.

    Raises:
        TraceExists: there is something already.
        InvalidOption: target lies in a source, or is a URL.
    """
    final = _place(target)
    for source in sources:
        if final.is_relative_to(Path(source).resolve()):
            raise InvalidOption(f"{target}: is or lies in {source}, which is never changed; give a directory elsewhere")
    if final.exists() and not final.is_dir():
        raise TraceExists(f"{target}: is a file; give a new directory")
    if final.exists() and os.listdir(final):
        raise TraceExists(f"{target}: is not empty; give a new directory")
    if os.path.ismount(final):
        raise InvalidOption(f"{target}: is where a file system is mounted; give a directory in it")
    with raised_once():
        staged = beside(final)
        os.makedirs(staged)
        try:
            yield staged
            sync_files(staged)
            try:
                os.rename(staged, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                raise TraceExists(f"{target}: something has been put there meanwhile; give a new directory") from error
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def new_file(target: str | os.PathLike[str], *sources: str | os.PathLike[str]) -> Iterator[Path]:
    """The name of a file beside target to be written, which gets its own name at the end, at once and durable.

    Otherwise as new_directory().
    """
    final = _place(target)
    for source in sources:
        if final.is_relative_to(Path(source).resolve()):
            raise InvalidOption(f"{target}: is or lies in {source}, which is never changed; give a file elsewhere")
    if final.exists():
        raise TraceExists(f"{target}: is there already; give a new file")
    os.makedirs(final.parent, exist_ok=True)
    with raised_once():
        staged = beside(final)
        try:
            yield staged
            _sync_file(staged)
            try:
                os.link(staged, final)
            except FileExistsError as error:
                raise TraceExists(f"{target}: something has been put there meanwhile; give a new file") from error
            except OSError:  # a file system without links
                os.rename(staged, final)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)
    LocalStorage(final.parent).sync()


@contextlib.contextmanager
def replaced_file(target: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file that takes the place of target when the block ends, at once and durable. If it raises, target stays.

    The file is new and has a random name until then: a file or link that somebody put beside target is never opened.

    Raises OSError, also where target is neither a file nor a link.
    """
    refuse_url(target)
    final = Path(target)
    if final.exists() and not final.is_file():
        raise OSError(errno.EINVAL, "not a regular file: it is left alone", os.fspath(target))
    staged = beside(final)
    fd = open_regular(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with open(fd, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(fd)
        os.replace(staged, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(staged)
        raise


def _place(target: str | os.PathLike[str]) -> Path:
    """Where it really is. Raises InvalidOption for a URL, and TraceExists for a link to what is not there."""
    refuse_url(target)
    if os.path.islink(target) and not os.path.exists(target):
        raise TraceExists(f"{target}: is a link to {os.readlink(target)!r}, which is not there; give another name")
    return Path(target).resolve()


def beside(directory: Path) -> Path:
    """A name for a directory that is to take the place of this one: in the same parent, and nobody's yet."""
    return directory.with_name(f".{directory.name[:_LONGEST]}.{secrets.token_hex(4)}.part")


def sync_files(directory: str | os.PathLike[str]) -> None:
    """Returns when all that is in a directory, and in those below it, would survive a loss of power."""
    files, folders = [], []
    for folder, _, names in os.walk(directory):
        files += [os.path.join(folder, name) for name in names]
        folders.append(folder)
    if len(files) + len(folders) > _MANY and sync_file_system(directory):
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
