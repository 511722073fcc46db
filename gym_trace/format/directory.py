"""A trace directory: which writers it holds, which batches, and what to do when there is one already."""

from __future__ import annotations

import multiprocessing
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from multiprocessing import current_process
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceExists
from gym_trace.format import manifest, wire
from gym_trace.format.batch_reader import PART
from gym_trace.format.facts import remove_facts
from gym_trace.storage.protocol import Storage

RING = ".ring"  # the end of the name of a ring (docs/FORMAT.md, section 8)
_WRITER = r"(?P<writer>[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119})"
_MANIFEST = re.compile(_WRITER + re.escape(manifest.SUFFIX))
_BATCH = re.compile(_WRITER + r"\.(?P<number>\d{6}|[1-9]\d{6,8})\.gtb(?P<part>\.part)?")

_RING = re.compile(_WRITER + re.escape(RING))
_VIDEO = re.compile(_WRITER + r"\.video\.(?P<episode>\d{6}|[1-9]\d{6,18})\.mp4(?P<part>\.part)?")


class WriterFiles:
    """The files of one writer: its manifest and ring, if there are any, and its batches in order, by number."""

    def __init__(self, storage: Storage, writer: str):
        self.storage = storage
        self.writer = writer
        self.manifest: str | None = None
        self.batches: dict[int, str] = {}
        self.ring, self.has_ring = writer + RING, False

    @property
    def where(self) -> str:
        """How messages name it: the path of its manifest, or its id."""
        return self.writer if self.manifest is None else self.storage.path(self.manifest)

    def is_there(self, name: str) -> bool:
        """Whether there is a file of this name by now."""
        try:
            self.storage.size(name)
        except FileNotFoundError:
            return False
        return True

    def listed_again(self) -> WriterFiles:
        """The same writer with the files that it has by now."""
        found = [files for files in find_writers(self.storage) if files.writer == self.writer]
        return found[0] if found else self

    def is_alive(self) -> bool:
        return self.manifest is not None and self.storage.holder(self.manifest) is not None

    def entries(self) -> Iterator[dict[str, Any]]:
        """Those of the manifest, as read_manifest gives them; none if there is no manifest."""
        return iter(()) if self.manifest is None else manifest.read_manifest(self.storage, self.manifest)


def new_writer_id() -> str:
    """Unique without asking anyone: UTC time, process, and chance."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{secrets.token_hex(4)}"


def is_writer_id(writer: str) -> bool:
    return bool(re.fullmatch(_WRITER, writer)) and not _BATCH.search(writer) and manifest.SUFFIX not in writer


def check_writer_id(writer: str) -> str:
    if not is_writer_id(writer):
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


def find_writers(storage: Storage) -> list[WriterFiles]:
    """The writers of a trace, in the order of their ids (which begin with the time). Raises TraceNotFound."""
    writers: dict[str, WriterFiles] = {}
    rings = set()
    for name in sorted(storage.names()):
        if found := _BATCH.fullmatch(name):
            files = writers.setdefault(found["writer"], WriterFiles(storage, found["writer"]))
            number = int(found["number"])
            if not found["part"] or number not in files.batches:
                files.batches[number] = name
        elif found := _MANIFEST.fullmatch(name):
            writers.setdefault(found["writer"], WriterFiles(storage, found["writer"])).manifest = name
        elif found := _RING.fullmatch(name):
            rings.add(found["writer"])
    for files in writers.values():
        files.has_ring = files.writer in rings
        files.batches = dict(sorted(files.batches.items()))
    return list(writers.values())


def make_directory(storage: Storage) -> None:
    """Makes the directory of a trace, if it is not there. Raises InvalidOption."""
    try:
        storage.make()
    except FileExistsError as error:
        raise InvalidOption(f"{storage.root}: a trace is a directory, this is a file") from error


def prepare(storage: Storage, on_exist: str, joins: Callable[[WriterFiles], bool]) -> None:
    """Decides about the traces that the directory holds: "error", "append" or "replace".

    joins: whether a new writer belongs with this one, which is recording: it is left alone, and never in the way.
    """
    if on_exist not in ("error", "append", "replace"):
        raise InvalidOption(f'on_exist={on_exist!r}: pass "error", "append" or "replace"')
    if on_exist == "append":
        return
    writers = [files for files in find_writers(storage) if not joins(files)]
    if on_exist == "error" and (kept := [files for files in writers if not _closed_without_steps(files)]):
        shown = "".join(f"\n  {files.writer} (batches: {len(files.batches)})" for files in kept[:5])
        more = f"\n  and {len(kept) - 5} more" if len(kept) > 5 else ""
        raise TraceExists(
            f"{storage.root}: holds a trace already:{shown}{more}\n"
            f'pass on_exist="append" to record beside it{_of_several()}, on_exist="replace" to delete it, '
            "or another directory"
        )
    if on_exist == "replace":
        for files in writers:
            _refuse_alive(files)
        for files in writers:
            _delete(files)
        if writers:
            remove_facts(storage)


def _closed_without_steps(files: WriterFiles) -> bool:
    """Whether there is nothing to lose: AsyncVectorEnv makes an environment for its spaces alone, and closes it."""
    try:
        return any(entry.get("type") == "closed" and entry.get("steps") == 0 for entry in files.entries())
    except (TraceError, OSError):
        return False


def _of_several() -> str:
    """What to say to a process whose like, started from the same function, record into the same directory."""
    if multiprocessing.parent_process() is None:
        return ""
    return f" (as a process must that starts when others have closed theirs; this is {current_process().name})"


def _refuse_alive(files: WriterFiles) -> None:
    holder = None if files.manifest is None else files.storage.holder(files.manifest)
    if holder is None:
        return
    if holder == "this process":
        raise TraceExists(
            f"{files.where}: an environment that this process made earlier is still recording it, perhaps in a "
            "notebook cell that is run again; call .close() on that environment before you replace its trace"
        )
    raise TraceExists(f"{files.where}: another process is recording it; stop that before you replace the trace")


def _delete(files: WriterFiles) -> None:
    """Removes what is proved to be a writer's: a manifest that says so, batches with a valid header."""
    storage, names = files.storage, set(files.storage.names())
    for name in files.batches.values():
        for batch in (name, name + PART):  # one that is sealed may have been begun again
            if batch in names and _is_batch(storage, batch):
                storage.remove(batch)
    for name in (files.ring, files.ring + PART):
        if name in names and _is_ring(storage, name):
            storage.remove(name)
    if files.manifest is not None and _is_manifest(files):
        for name in _videos(files, names):
            storage.remove(name)
        storage.remove(files.manifest)


def _videos(files: WriterFiles, names: set[str]) -> list[str]:
    """The videos that a manifest lists, and what a killed writer left of one: it has no list, but begins as an MP4."""
    listed = {str(entry.get("file")) for entry in files.entries() if entry.get("type") == "video"}
    found = [match for match in map(_VIDEO.fullmatch, names) if match is not None and match["writer"] == files.writer]
    return [it[0] for it in found if it[0] in listed or (it["part"] and _begins_as_video(files.storage, it[0]))]


def _begins_as_video(storage: Storage, name: str) -> bool:
    with storage.open(name) as file:
        start = file.read(0, 8)
    return not start or start[4:] == b"ftyp"


def _is_batch(storage: Storage, name: str) -> bool:
    try:
        with storage.open(name) as file:
            wire.unpack_file_header(file.read(0, wire.HEADER_SIZE))
    except (TraceError, OSError) as error:
        return not isinstance(error, (CorruptTrace, OSError))
    return True


def _is_ring(storage: Storage, name: str) -> bool:
    """Whether a file begins as a ring; one that was never begun may be empty, or all zero."""
    try:
        with storage.open(name) as file:
            start = file.read(0, len(wire.RING_MAGIC))
    except (TraceError, OSError):
        return False
    return start == wire.RING_MAGIC or (name.endswith(PART) and not any(start))


def _is_manifest(files: WriterFiles) -> bool:
    first = next(files.entries(), {})
    return first.get("type") == "writer" and first.get("writer") == files.writer
