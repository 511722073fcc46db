"""Destinations of edits: a new directory, or the directory of the trace, which is replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gym_trace.errors import InvalidOption, RecordingError, TraceError, TraceNotFound
from gym_trace.format.batch_reader import PART
from gym_trace.format.directory import find_writers
from gym_trace.format.facts import agreed, write_facts
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace, writable_storage_of
from gym_trace.storage.exchange import exchange
from gym_trace.storage.local import LocalStorage, alone, open_regular, open_to_others
from gym_trace.storage.staging import DESCRIPTORS, StagedStorage, new_directory, replaced_file, sync_files, take
from gym_trace.tools.editing.rewrite import EditReport

# During an edit, the work directory .NAME.gym-trace-edit/ is next to the trace called NAME, with
#   trace     the new trace; after the exchange, the old one
#   journal   inode and files of the old trace: files that are added to it later are moved to the new one
_WORK, _TRACE, _JOURNAL = ".{}.gym-trace-edit", "trace", "journal"
_INSTEAD = "write to a new directory instead"
_Files = dict[str, list[int]]  # by path in the trace: inode, time of change, size


def report_for(source: Trace, destination: str | os.PathLike[str] | None, in_place: bool) -> EditReport:
    """Return an empty report of an edit. Raises InvalidOption unless it has exactly one destination."""
    if in_place != (destination is None):
        raise InvalidOption("pass either a new directory or in_place=True")
    return EditReport(source.directory if destination is None else Path(destination))


@contextmanager
def edited(report: EditReport, sources: Sequence[Trace], in_place: bool = False) -> Iterator[StagedStorage]:
    """Yield the storage to write an edit into; at the end of the block it becomes the destination, with its facts.

    in_place: replace the only source.

    Raises:
        TraceError: in place: the trace has changed since it was opened.
        RecordingError: the block raised an OSError.
        All errors of replaced() and new_directory().
    """
    if in_place:
        (source,) = sources
        with replaced(source.directory) as fresh, writing(report):
            if not index_of(Trace(source.directory)).has_rows_of(index_of(whole_of(source))):
                raise TraceError(f"{source.directory}: changed since it was opened; nothing was written, try again")
            yield StagedStorage(fresh)
    else:
        with new_directory(report.destination, *(trace.directory for trace in sources)) as fresh, writing(report):
            yield (storage := StagedStorage(fresh))
            if facts := agreed(trace.facts for trace in sources):
                write_facts(storage, facts)
    report.bytes = LocalStorage(report.destination).allocated()


@contextmanager
def writing(report: EditReport) -> Iterator[None]:
    """Turn an OSError of the block into a RecordingError."""
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        problem = error.strerror or error
        raise RecordingError(f"{report.destination}: the new trace could not be written: {problem}") from error


@contextmanager
def replaced(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty directory next to a trace; it replaces the trace atomically when the block ends.

    If the process is killed, the directory holds the complete old trace or the complete new one, and the next edit
    cleans up. Other files (videos, notes, logs, directories) are kept, unless the block wrote files of these names.
    If the block raises, nothing changes. The yielded path contains a descriptor of the directory above the trace.

    Raises:
        TraceNotFound: no trace in directory.
        InvalidOption: the directories cannot be exchanged: this system cannot, the trace is a mount point or the
            current directory, or other users may write to its directories.
        TraceError: a writer records into the trace or began to do so, or another process edits it.
        OSError
    """
    real = Path(os.path.realpath(writable_storage_of(directory).root))
    if not find_writers(LocalStorage(real)):
        raise TraceNotFound(f"{directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files")
    _check_replaceable(real)
    try:
        with _stable_path(real) as stable, _work_directory(stable, real) as work:
            _try_exchange(work)
            before = _files_of_writers(LocalStorage(real))
            fresh = work / _TRACE
            fresh.mkdir()
            yield fresh
            sync_files(fresh)
            with alone(stable, is_needed=True):  # facts that are added later go into the new trace
                all_files = _files_in(stable)
                now = _files_of_writers(LocalStorage(real))
                if now != before or any(all_files.get(name) != _status(stable / name) for name in now):
                    raise TraceError(f"{real}: a recording was added during the edit; nothing was changed, try again")
                _copy_other_files(stable, fresh, now)
                LocalStorage(fresh).sync()
                with replaced_file(work / _JOURNAL) as journal:
                    journal.write_text(json.dumps({"inode": stable.stat().st_ino, "seen": all_files}), encoding="utf-8")
                LocalStorage(work).sync()
                exchange(fresh, stable)
            LocalStorage(stable.parent).sync()
            _tidy(work, stable)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise InvalidOption(f"{real}: cannot be edited in place: {error.strerror}; {_INSTEAD}") from error


def _check_replaceable(directory: Path) -> None:
    if os.path.ismount(directory):
        raise InvalidOption(f"{directory}: is a mount point, which cannot be edited in place; {_INSTEAD}")
    with contextlib.suppress(FileNotFoundError):
        if Path.cwd().is_relative_to(directory):
            raise InvalidOption(f"{directory}: is the current directory, which the edit replaces; leave it first")


@contextmanager
def _stable_path(directory: Path) -> Iterator[Path]:
    """Yield a path of the trace that stays valid when another process renames directories above it.

    Only this user may write to the directories of the trace and to the one above: other users could create links there
    that lead out of the trace. Raises InvalidOption, OSError.
    """
    if not os.path.isdir(DESCRIPTORS):
        raise OSError(errno.ENOTSUP, f"this system has no {DESCRIPTORS}", os.fspath(directory))
    parent = os.open(directory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        stable = Path(f"{DESCRIPTORS}/{parent}/{directory.name}")
        _raise_if_unsafe(directory.parent, open_to_others(os.fstat(parent), is_sticky_fine=True))
        _raise_if_unsafe(directory, open_to_others(stable.lstat()))
        for folder, *_ in os.walk(stable):
            _raise_if_unsafe(directory / os.path.relpath(folder, stable), open_to_others(os.lstat(folder)))
        yield stable
    finally:
        os.close(parent)


def _raise_if_unsafe(directory: Path, problem: str) -> None:
    if problem:
        raise InvalidOption(f"{directory}: {problem}, so this trace cannot be edited in place; {_INSTEAD}")


@contextmanager
def _work_directory(stable: Path, real: Path) -> Iterator[Path]:
    """Yield the work directory of a trace, cleaned up. Raises TraceError if another process or user has it."""
    path = stable.parent / _WORK.format(stable.name)
    work = take(path)
    if work is None:
        shown = real.parent / path.name
        if problem := open_to_others(path.lstat()):
            raise TraceError(f"{shown}: {problem}; remove it before editing {real} in place")
        raise TraceError(f"{real}: another process edits it in place; wait for it, or, if none does, remove {shown}")
    try:
        _tidy(path, stable)
        yield path
    finally:
        with contextlib.suppress(OSError):  # the next edit removes the rest
            _tidy(path, stable)
            work.remove()
        work.release()


def _try_exchange(work: Path) -> None:
    """Test whether directories can be exchanged, before the edit."""
    one, other = work / "one", work / "other"
    for path in (one, other):
        path.mkdir(exist_ok=True)
    exchange(one, other)
    for path in (one, other):
        path.rmdir()


def _files_of_writers(storage: LocalStorage) -> _Files:
    """Return the files of the writers, which the new trace replaces. Raises TraceError if a writer is recording."""
    writers = find_writers(storage)
    for files in writers:
        if files.is_alive():
            raise TraceError(f"{files.where}: this writer is still recording; edit in place after it has ended")
    names: set[str] = set()
    for files in writers:
        whole = [files.ring, *(name.removesuffix(PART) for name in files.batches.values())]
        names |= {files.manifest or files.ring, *whole, *(name + PART for name in whole)}
    return {name: _status(Path(storage.path(name))) for name in sorted(names & set(storage.names()))}


def _status(path: Path) -> list[int]:
    status = path.lstat()
    return [status.st_ino, status.st_mtime_ns, status.st_size]


def _files_in(directory: Path) -> _Files:
    """Return all files below a directory."""
    files: _Files = {}
    for folder, _, _ in os.walk(directory):
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    files[os.path.relpath(entry.path, directory)] = _status(Path(entry.path))
    return files


def _copy_other_files(old: Path, new: Path, skipped: Collection[str]) -> None:
    """Copy all files from one trace to another, except skipped and existing ones; as hard links where possible."""
    for folder, _, _ in os.walk(old):
        copy = new / os.path.relpath(folder, old)
        copy.mkdir(exist_ok=True)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) or (Path(folder) == old and entry.name in skipped):
                continue
            if not os.path.lexists(copy / entry.name):
                try:
                    os.link(entry.path, copy / entry.name, follow_symlinks=False)
                except OSError:
                    shutil.copy2(entry.path, copy / entry.name, follow_symlinks=False)
        status = os.stat(folder)
        with contextlib.suppress(OSError):
            os.chown(copy, status.st_uid, status.st_gid)
        shutil.copystat(folder, copy)


def _tidy(work: Path, stable: Path) -> None:
    """Remove an unfinished trace or, after the exchange, the old one; keep files that were added to the old one."""
    old, journal = work / _TRACE, work / _JOURNAL
    if old.is_symlink():  # not ours: its target is left alone
        old.unlink()
    if old.is_dir():
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            with open(open_regular(journal, os.O_RDONLY), encoding="utf-8") as file:
                entries = json.load(file)
            inode, copied = entries["inode"], dict(entries["seen"])
            if old.stat().st_ino == inode:
                _move_later_files(old, stable, copied)
        shutil.rmtree(old)
    journal.unlink(missing_ok=True)


def _move_later_files(old: Path, new: Path, copied: _Files) -> None:
    """Move files that were added to the old trace after the others were copied."""
    for name, status in _files_in(old).items():
        path = new / name
        with contextlib.suppress(FileNotFoundError):
            if status[0] == path.lstat().st_ino:  # the same file under both names
                continue
        if status != copied.get(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old / name, path)
