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
from gym_trace.playback.trace import Trace, writable_storage_of
from gym_trace.storage.exchange import exchange
from gym_trace.storage.local import LocalStorage, alone, open_regular, open_to_others
from gym_trace.storage.staging import DESCRIPTORS, StagedStorage, new_directory, replaced_file, sync_files, take
from gym_trace.tools.editing.rewrite import EditReport

# During an edit, the work directory .NAME.gym-trace-edit/ is next to the trace called NAME, with
#   trace     the new trace; after the exchange, the old one
#   journal   inode and files of the old one: files that were added to it later are kept
_WORK, _TRACE, _JOURNAL = ".{}.gym-trace-edit", "trace", "journal"
_ELSEWHERE = "write to a new directory instead"
_Seen = dict[str, list[int]]


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
        TraceError: in place, and more was recorded since the trace was opened.
        RecordingError: the block raised an OSError. And the errors of replaced() and new_directory().
    """
    if in_place:
        (source,) = sources
        with replaced(source.directory) as fresh, writing(report):
            if Trace(source.directory).episodes.tobytes() != source.whole.episodes.tobytes():
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
        InvalidOption: the two cannot be exchanged: another system, a mount point, the current directory, or
            directories that other users may write to.
        TraceError: a writer records into it, or began to, or another process edits it.
        OSError
    """
    real = Path(os.path.realpath(writable_storage_of(directory).root))
    if not find_writers(LocalStorage(real)):
        raise TraceNotFound(f"{directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files")
    _check_place(real)
    try:
        with _steady(real) as place, _work_directory(place, real) as work:
            _try_exchange(work)
            before = _files_of_writers(LocalStorage(real))
            fresh = work / _TRACE
            fresh.mkdir()
            yield fresh
            sync_files(fresh)
            with alone(place, is_needed=True):  # facts that are added later go into the new trace
                seen = _tree(place)
                now = _files_of_writers(LocalStorage(real))
                if now != before or any(seen.get(name) != _status(place / name) for name in now):
                    raise TraceError(f"{real}: a recording was added during the edit; nothing was changed, try again")
                _carry(place, fresh, now)
                LocalStorage(fresh).sync()
                with replaced_file(work / _JOURNAL) as journal:
                    journal.write_text(json.dumps({"inode": place.stat().st_ino, "seen": seen}), encoding="utf-8")
                LocalStorage(work).sync()
                exchange(fresh, place)
            LocalStorage(place.parent).sync()
            _tidy(work, place)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        raise InvalidOption(f"{real}: cannot be edited in place: {error.strerror}; {_ELSEWHERE}") from error


def _check_place(place: Path) -> None:
    if os.path.ismount(place):
        raise InvalidOption(f"{place}: is a mount point, which cannot be edited in place; {_ELSEWHERE}")
    with contextlib.suppress(FileNotFoundError):
        if Path.cwd().is_relative_to(place):
            raise InvalidOption(f"{place}: is the current directory, which the edit replaces; leave it first")


@contextmanager
def _steady(place: Path) -> Iterator[Path]:
    """Yield a path of the trace that stays valid when others rename directories above it.

    Raises InvalidOption, OSError.

    Only this user may write to the directories of the trace and to the one above: other users could create links there
    that lead out of the trace.
    """
    if not os.path.isdir(DESCRIPTORS):
        raise OSError(errno.ENOTSUP, f"this system has no {DESCRIPTORS}", os.fspath(place))
    parent = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        steady = Path(f"{DESCRIPTORS}/{parent}/{place.name}")
        _refuse_others(place.parent, open_to_others(os.fstat(parent), is_sticky_fine=True))
        _refuse_others(place, open_to_others(steady.lstat()))
        for folder, *_ in os.walk(steady):
            _refuse_others(place / os.path.relpath(folder, steady), open_to_others(os.lstat(folder)))
        yield steady
    finally:
        os.close(parent)


def _refuse_others(directory: Path, problem: str) -> None:
    if problem:
        raise InvalidOption(f"{directory}: {problem}, so what is in it cannot be edited in place; {_ELSEWHERE}")


@contextmanager
def _work_directory(place: Path, real: Path) -> Iterator[Path]:
    """Yield the work directory of a trace, tidied. Raises TraceError if another process holds it, or it is not ours."""
    path = place.parent / _WORK.format(place.name)
    work = take(path)
    if work is None:
        shown = real.parent / path.name
        if problem := open_to_others(path.lstat()):
            raise TraceError(f"{shown}: {problem}; remove it, it is in the way of editing {real}")
        raise TraceError(f"{real}: another process edits it in place; wait for it, or, if none does, remove {shown}")
    try:
        _tidy(path, place)
        yield path
    finally:
        with contextlib.suppress(OSError):  # the next edit removes the rest
            _tidy(path, place)
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


def _files_of_writers(storage: LocalStorage) -> dict[str, list[int]]:
    """Return the files of the writers, which the new trace replaces. Raises TraceError if a writer is alive."""
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


def _tree(place: Path) -> _Seen:
    """Return the files of a directory by relative path, without directories."""
    seen: _Seen = {}
    for folder, _, _ in os.walk(place):
        for entry in os.scandir(folder):
            if not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    seen[os.path.relpath(entry.path, place)] = _status(Path(entry.path))
    return seen


def _carry(place: Path, fresh: Path, left: Collection[str]) -> None:
    """Copy all files except those of writers from place to fresh: as hard links where possible."""
    for folder, _, _ in os.walk(place):
        to = fresh / os.path.relpath(folder, place)
        to.mkdir(exist_ok=True)
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) or (Path(folder) == place and entry.name in left):
                continue
            if not os.path.lexists(to / entry.name):
                try:
                    os.link(entry.path, to / entry.name, follow_symlinks=False)
                except OSError:
                    shutil.copy2(entry.path, to / entry.name, follow_symlinks=False)
        status = os.stat(folder)
        with contextlib.suppress(OSError):
            os.chown(to, status.st_uid, status.st_gid)
        shutil.copystat(folder, to)


def _tidy(work: Path, place: Path) -> None:
    """Remove an unfinished trace or, after the exchange, the old one; keep files that were added to the old one."""
    old, journal = work / _TRACE, work / _JOURNAL
    if old.is_symlink():  # not ours: its target is left alone
        old.unlink()
    if old.is_dir():
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            with open(open_regular(journal, os.O_RDONLY), encoding="utf-8") as file:
                known = json.load(file)
            inode, seen = known["inode"], dict(known["seen"])
            if old.stat().st_ino == inode:
                _keep_later_files(old, place, seen)
        shutil.rmtree(old)
    journal.unlink(missing_ok=True)


def _keep_later_files(old: Path, place: Path, seen: _Seen) -> None:
    for name, status in _tree(old).items():
        new = place / name
        with contextlib.suppress(FileNotFoundError):
            if status[0] == new.lstat().st_ino:  # the same file under both names
                continue
        if status != seen.get(name):
            new.parent.mkdir(parents=True, exist_ok=True)
            os.replace(old / name, new)
