"""A trace directory: which writers it holds, which batches, and what to do when there is one already."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import time
from multiprocessing import current_process
from pathlib import Path

from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceExists, TraceNotFound
from gym_trace.format import manifest, wire
from gym_trace.format.batch_reader import PART
from gym_trace.storage.local import opened
from gym_trace.storage.regular import is_regular

_WRITER = r"(?P<writer>[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119})"
_MANIFEST = re.compile(_WRITER + re.escape(manifest.SUFFIX))
_BATCH = re.compile(_WRITER + r"\.(?P<number>\d{6}|[1-9]\d{6,8})\.gtb(?P<part>\.part)?")

_VIDEO = re.compile(_WRITER + r"\.video\.(?P<episode>\d{6}|[1-9]\d{6,18})\.mp4(?P<part>\.part)?")


class WriterFiles:
    """The files of one writer: its manifest if there is one, and its batches in order."""

    def __init__(self, writer: str):
        self.writer = writer
        self.manifest: Path | None = None
        self.batches: dict[int, Path] = {}

    def is_alive(self) -> bool:
        return self.manifest is not None and manifest.is_alive(self.manifest)


def new_writer_id() -> str:
    """Unique without asking anyone: UTC time, process, and chance."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}"


def check_writer_id(writer: str) -> str:
    if not re.fullmatch(_WRITER, writer) or _BATCH.search(writer) or manifest.SUFFIX in writer:
        raise InvalidOption(f"uid={writer!r}: a writer id has 1 to 120 of A-Z a-z 0-9 _ - . and no dot in front")
    return writer


def batch_name(writer: str, number: int) -> str:
    return f"{writer}.{number:06d}.gtb"


def batch_number(writer: str, name: str) -> int | None:
    """The number of a sealed batch of this writer, by its name; None if name is not that of one."""
    found = _BATCH.fullmatch(name)
    return int(found["number"]) if found is not None and found["writer"] == writer and not found["part"] else None


def video_name(writer: str, episode: int) -> str:
    return f"{writer}.video.{episode:06d}.mp4"


def find_writers(directory: Path) -> list[WriterFiles]:
    """The writers of a trace, in the order of their ids (which begin with the time). Raises TraceNotFound."""
    try:
        with os.scandir(directory) as entries:  # a link could lead out of the directory, reading a pipe never ends
            names = sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError as error:
        raise TraceNotFound(f"{directory}: no such directory") from error
    except NotADirectoryError as error:
        raise TraceNotFound(f"{directory}: a trace is a directory, this is a file") from error
    writers: dict[str, WriterFiles] = {}
    for name in names:
        if found := _BATCH.fullmatch(name):
            files = writers.setdefault(found["writer"], WriterFiles(found["writer"]))
            number = int(found["number"])
            if not found["part"] or number not in files.batches:
                files.batches[number] = directory / name
        elif found := _MANIFEST.fullmatch(name):
            writers.setdefault(found["writer"], WriterFiles(found["writer"])).manifest = directory / name
    for files in writers.values():
        files.batches = dict(sorted(files.batches.items()))
    return list(writers.values())


def prepare(directory: Path, on_exist: str) -> None:
    """Makes the directory, and decides about traces that it holds: "error", "append" or "replace"."""
    if on_exist not in ("error", "append", "replace"):
        raise InvalidOption(f'on_exist={on_exist!r}: pass "error", "append" or "replace"')
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InvalidOption(f"{directory}: a trace is a directory, this is a file") from error
    writers = find_writers(directory)
    if on_exist == "error" and writers:
        shown = "".join(f"\n  {files.writer} (batches: {len(files.batches)})" for files in writers[:5])
        more = f"\n  and {len(writers) - 5} more" if len(writers) > 5 else ""
        raise TraceExists(
            f"{directory} holds recorded traces already:{shown}{more}\n"
            f'pass on_exist="append" to record beside them{_of_several()}, on_exist="replace" to delete them, '
            "or another directory"
        )
    if on_exist == "replace":
        for files in writers:
            _refuse_alive(files)
        for files in writers:
            _delete(files)


def _of_several() -> str:
    """What to say to a process whose like, started from the same function, record into the same directory."""
    if multiprocessing.parent_process() is None:
        return ""
    return f" (as each process must of several that record into one directory; this is {current_process().name})"


def _refuse_alive(files: WriterFiles) -> None:
    if files.manifest is None or not files.is_alive():
        return
    if manifest.is_written_here(files.manifest):
        raise TraceExists(
            f"{files.manifest}: an environment that this process made earlier is still recording it, perhaps in a "
            "notebook cell that is run again; call .close() on that environment before you replace its trace"
        )
    raise TraceExists(f"{files.manifest}: another process is recording it; stop that before you replace the trace")


def prepare_copy(source: Path, target: Path) -> None:
    """Makes target, for a copy of what is in source: a directory that is new or empty, and does not lie in source."""
    if target.resolve().is_relative_to(source.resolve()):
        raise InvalidOption(f"{target} lies in {source}, which is never changed; give a directory elsewhere")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise TraceExists(f"{target} is not empty; give a new directory")
    except (FileExistsError, NotADirectoryError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceExists(f"{target} is a file; give a new directory") from error


def _delete(files: WriterFiles) -> None:
    """Removes what is proved to be a writer's: a manifest that says so, batches with a valid header."""
    for path in files.batches.values():
        if _is_batch(path):
            path.unlink()
        part = path.with_name(path.name + PART)
        if part.name != path.name and is_regular(part) and _is_batch(part):
            part.unlink()
    if files.manifest is not None and _is_manifest(files.manifest, files.writer):
        for path in _videos(files.manifest, files.writer):
            path.unlink()
        files.manifest.unlink()


def _videos(path: Path, writer: str) -> list[Path]:
    """The videos that a manifest lists, and what a killed writer left of one: it has no list, but begins as an MP4."""
    listed = {str(entry.get("file")) for entry in manifest.read_manifest(path) if entry.get("type") == "video"}
    with os.scandir(path.parent) as entries:
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    videos = []
    for name in names:
        found = _VIDEO.fullmatch(name)
        if found is not None and found["writer"] == writer:
            video = path.parent / name
            if name in listed or (found["part"] and _begins_as_video(video)):
                videos.append(video)
    return videos


def _begins_as_video(path: Path) -> bool:
    with opened(path) as file:
        start = file.read(8)
    return not start or start[4:] == b"ftyp"


def _is_batch(path: Path) -> bool:
    try:
        with opened(path) as file:
            wire.unpack_file_header(file.read(wire.HEADER_SIZE))
    except (TraceError, OSError) as error:
        return not isinstance(error, (CorruptTrace, OSError))
    return True


def _is_manifest(path: Path, writer: str) -> bool:
    first = next(manifest.read_manifest(path), {})
    return first.get("type") == "writer" and first.get("writer") == writer
