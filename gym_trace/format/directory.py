"""The files of a trace directory: writers, batches, rings and videos; the option on_exist."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption, TraceError, TraceExists, UnsupportedTrace
from gym_trace.format import listed_manifests, manifest, wire
from gym_trace.format.batch_reader import PART
from gym_trace.format.facts import NAME as FACTS
from gym_trace.format.facts import remove_facts
from gym_trace.format.listed_index import ListedIndex, listed_index
from gym_trace.printable import printable
from gym_trace.storage.protocol import ReadStorage, Span, Storage

RING = ".ring"  # suffix of a ring file (docs/FORMAT.md, section 8)
_TAIL = 1 << 10  # bytes at the end of a batch that are fetched together with its beginning
_MOST_REASON = 300  # characters of the reason why a writer stopped
_WRITER = r"(?P<writer>[A-Za-z0-9_-][A-Za-z0-9_.-]{0,119})"
_MANIFEST = re.compile(_WRITER + re.escape(manifest.SUFFIX))
_BATCH = re.compile(_WRITER + r"\.(?P<number>\d{6}|[1-9]\d{6,8})\.gtb(?P<part>\.part)?")
_RING = re.compile(_WRITER + re.escape(RING))
_VIDEO = re.compile(_WRITER + r"\.video\.(?P<episode>\d{6}|[1-9]\d{6,18})\.mp4(?P<part>\.part)?")
_KINDS = {"batch": _BATCH, "manifest": _MANIFEST, "ring": _RING, "video": _VIDEO}


class WriterFiles:
    """The files of one writer: its manifest and ring, if any, and its batches by number, in order.

    Attributes:
        has_ring, has_new_ring: True if the ring exists; True if it has a successor that was never begun.
        indexes: indexes in the manifest, by the names of the batches; set by expect_indexes(), otherwise empty.
        manifests: storage that its manifest is read from.
    """

    def __init__(self, storage: ReadStorage, writer: str):
        self.storage = storage
        self.writer = writer
        self.manifest: str | None = None
        self.batches: dict[int, str] = {}
        self.ring, self.has_ring = writer + RING, False
        self.new_ring, self.has_new_ring = self.ring + PART, False
        self.indexes: dict[str, ListedIndex] = {}
        self.manifests = storage
        self._entries: list[dict[str, Any]] | None = None

    def of_origin(self, writer: str, entries: list[dict[str, Any]]) -> WriterFiles:
        """Return the files of an origin: only manifest entries, as its episodes are in batches of this writer."""
        files = WriterFiles(self.storage, writer)
        files.manifest, files._entries = self.manifest, entries
        return files

    @property
    def where(self) -> str:
        """Name of the writer for messages: the path of its manifest, or its id."""
        return self.writer if self.manifest is None else self.storage.path(self.manifest)

    def is_there(self, name: str) -> bool:
        """Return True if the file exists now."""
        try:
            self.storage.size(name)
        except FileNotFoundError:
            return False
        return True

    def listed_again(self) -> WriterFiles:
        """Return the same writer with its current files."""
        found = [files for files in find_writers(self.storage) if files.writer == self.writer]
        return found[0] if found else self

    def is_alive(self) -> bool:
        return self._entries is None and self.manifest is not None and self.storage.holder(self.manifest) is not None

    def entries(self) -> Iterator[dict[str, Any]]:
        """Iterate over the entries of the manifest; none without a manifest."""
        if self._entries is not None:
            return iter(self._entries)
        return iter(()) if self.manifest is None else manifest.read_manifest(self.manifests, self.manifest)

    def listed(self) -> tuple[dict[str, dict[str, Any]], set[int]]:
        """Return the manifest lines of sealed batches, by name, and the numbers of dropped batches.

        A dropped batch may exist: unchanged, if the writer died, or with only some of its episodes.
        """
        found: dict[str, dict[str, Any]] = {}
        dropped = set()
        for entry in self.entries():
            name = entry.get("file")
            number = batch_number(self.writer, name) if isinstance(name, str) else None
            if isinstance(name, str) and number is not None:
                if entry.get("type") == "batch":
                    found[name] = entry
                elif entry.get("type") == manifest.DROPPED:
                    found.pop(name, None)
                    dropped.add(number)
        return found, dropped

    def schema(self) -> tuple[dict[str, Any], bool] | None:
        """Return the schema in the manifest, and True if it is the recorded one, bit for bit; None without one."""
        return manifest.schema_in(next(self.entries(), {}))

    def listed_indexes(self) -> dict[str, ListedIndex]:
        """Return the indexes in the manifest, by the names of the batches of these sizes."""
        sizes = {name: self.storage.size(name) for name in self.batches.values() if not name.endswith(PART)}
        entries = ((name, entry) for name, entry in self.listed()[0].items() if name in sizes)
        found = {
            name: index for name, entry in entries if (index := listed_index(name, sizes[name], entry)) is not None
        }
        first = next(iter(self.batches.values()), None)
        if first in found and not (self.schema() or ({}, False))[1]:
            found[first] = found[first]._replace(reads_schema=True)
        return found

    def missing(self) -> list[range]:
        """Return the numbers of batches that are missing and were not dropped."""
        listed, dropped = self.listed()
        counted = {batch_number(self.writer, name) or 0 for name in listed}
        end = 1 + max([-1, *self.batches, *counted])
        removed = {number for number in dropped - counted if number < end}
        present = sorted({-1, end, *self.batches} | removed)
        return [range(before + 1, after) for before, after in pairwise(present) if before + 1 < after]

    def foreign(self, schemas: Mapping[int, dict[str, Any] | None]) -> set[int]:
        """Return the numbers of batches that another writer with the same id has recorded.

        The writer's own batches have the creation time of the manifest, or of the majority if no batch has that.

        schemas: schemas of the batches, by number; None: unknown.
        """
        created = {number: _created(schema) for number, schema in schemas.items() if schema is not None}
        if len(set(created.values())) < 2:
            return set()
        own = _created(next(self.entries(), {}))
        if own not in created.values():
            own = Counter(created.values()).most_common(1)[0][0]
        return {number for number, when in created.items() if when != own}

    def failure(self) -> str | None:
        """Return the reason why the writer stopped early, as printable text; None without one."""
        found = (entry for entry in self.entries() if entry.get("type") == manifest.FAILED)
        return next((printable(entry.get("problem"))[:_MOST_REASON] for entry in found), None)

    def waited(self) -> float:
        """Return the seconds that steps waited for encoding and writing; 0 if unknown."""
        found = [entry.get("waited") for entry in self.entries() if entry.get("type") == "closed"]
        return next((float(seconds) for seconds in found if type(seconds) is float and 0 < seconds < 1e9), 0.0)


def _created(schema: Mapping[str, Any]) -> int | None:
    created = schema.get("created")
    return created if type(created) is int else None


def new_writer_id() -> str:
    """Return a unique id made of UTC time, process id and random digits."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{os.urandom(4).hex()}"


def is_writer_id(writer: str) -> bool:
    return bool(re.fullmatch(_WRITER, writer)) and not _BATCH.search(writer) and manifest.SUFFIX not in writer


def check_writer_id(writer: str) -> str:
    if not is_writer_id(writer):
        raise InvalidOption(f"uid={writer!r}: invalid writer id; use 1 to 120 of A-Z a-z 0-9 _ - . and no leading dot")
    return writer


def batch_name(writer: str, number: int) -> str:
    return f"{writer}.{number:06d}.gtb"


def batch_number(writer: str, name: str) -> int | None:
    """Return the number of a sealed batch of this writer; None if name is not one."""
    found = _BATCH.fullmatch(name)
    return int(found["number"]) if found is not None and found["writer"] == writer and not found["part"] else None


def video_name(writer: str, episode: int) -> str:
    return f"{writer}.video.{episode:06d}.mp4"


def kind_of(name: str) -> str | None:
    """Return the kind of a file of a trace: "batch", "manifest", "ring", "video" or "facts"; None for other files."""
    if name == FACTS:
        return "facts"
    return next((kind for kind, pattern in _KINDS.items() if pattern.fullmatch(name)), None)


def writer_of(name: str) -> str | None:
    """Return the writer of a file; None for facts and for files outside the trace."""
    return next((found["writer"] for pattern in _KINDS.values() if (found := pattern.fullmatch(name))), None)


def find_writers(storage: ReadStorage) -> list[WriterFiles]:
    """Return the writers of a trace, ordered by id. Raises TraceNotFound."""
    writers: dict[str, WriterFiles] = {}
    names = storage.names()
    for name in sorted(names):
        if found := _BATCH.fullmatch(name):
            files = writers.setdefault(found["writer"], WriterFiles(storage, found["writer"]))
            number = int(found["number"])
            if not found["part"] or number not in files.batches:
                files.batches[number] = name
        elif found := _MANIFEST.fullmatch(name):
            writers.setdefault(found["writer"], WriterFiles(storage, found["writer"])).manifest = name
    present = set(names)
    for files in writers.values():
        files.has_ring, files.has_new_ring = files.ring in present, files.new_ring in present
        files.batches = dict(sorted(files.batches.items()))
    return list(writers.values())


def expect_indexes(storage: ReadStorage, writers: Sequence[WriterFiles], known: Container[str] = ()) -> None:
    """Prefetch what opening reads: the manifests, and what they lack of the indexes of the batches that are not known.

    Raises OSError.
    """
    manifests = {name: files for files in writers if (name := files.manifest) is not None}
    if len(manifests) >= listed_manifests.LEAST_WRITERS:
        current = listed_manifests.current_manifests(storage, manifests)
        for name in current.names():
            manifests.pop(name).manifests = current
    storage.expect(Span(name, 0, manifest.READ_AHEAD) for name in manifests)
    spans, unlisted = [], []
    for files in writers:
        files.indexes = files.listed_indexes()
        for name in files.batches.values():
            if name in known or name.endswith(PART):
                continue
            listed = files.indexes.get(name)
            if listed is None:
                unlisted.append((name, storage.size(name)))
            elif not listed.record:
                spans.append(Span(name, listed.header.offset, listed.size))
            if listed is None or listed.reads_schema:
                spans.append(Span(name, 0, 2 * wire.HEADER_SIZE))
    storage.expect([*spans, *(Span(name, size - _TAIL, _TAIL) for name, size in unlisted)])
    indexes = []
    for name, size in unlisted:
        with storage.open(name) as file, suppress(CorruptTrace, UnsupportedTrace):
            file_id = wire.unpack_file_header(file.read(0, wire.HEADER_SIZE)).file_id
            footer = wire.unpack_footer(file.read(size - wire.HEADER_SIZE, wire.HEADER_SIZE), size, file_id)
            if footer is not None and footer.index_offset < size:
                end = footer.parity[0] or size
                indexes.append(Span(name, footer.index_offset, max(0, end - footer.index_offset)))
    storage.expect(indexes)


def make_directory(storage: Storage) -> None:
    """Create the directory of a trace if it does not exist. Raises InvalidOption."""
    try:
        storage.make()
    except FileExistsError as error:
        raise InvalidOption(f"{storage.root}: is a file; pass a directory") from error


def prepare(storage: Storage, on_exist: str, joins: Callable[[WriterFiles], bool]) -> None:
    """Handle an existing trace by on_exist: "error", "append" or "replace".

    joins: returns True for a writer of the same run; such writers are ignored.
    """
    if on_exist not in ("error", "append", "replace"):
        raise InvalidOption(f'on_exist={on_exist!r}: invalid; pass "error", "append" or "replace"')
    if on_exist == "append":
        return
    writers = [files for files in find_writers(storage) if not joins(files)]
    if on_exist == "error" and (kept := [files for files in writers if not _closed_without_steps(files)]):
        shown = "".join(f"\n  {files.writer} (batches: {len(files.batches)})" for files in kept[:5])
        more = f"\n  and {len(kept) - 5} more" if len(kept) > 5 else ""
        raise TraceExists(
            f"{storage.root}: already holds a trace:{shown}{more}\n"
            f'pass on_exist="append" to add to it{_of_several()}, on_exist="replace" to delete it, '
            "or another directory"
        )
    if on_exist == "replace":
        for files in writers:
            _refuse_alive(files)
        for files in writers:
            _delete(storage, files)
        if writers:
            remove_facts(storage)


def _closed_without_steps(files: WriterFiles) -> bool:
    """Return True for a writer closed without steps: AsyncVectorEnv makes an environment only for its spaces."""
    try:
        return any(entry.get("type") == "closed" and entry.get("steps") == 0 for entry in files.entries())
    except (TraceError, OSError):
        return False


def _of_several() -> str:
    """Return a hint for a child process, whose siblings may record into the same directory."""
    from multiprocessing import current_process, parent_process  # here, because most reading does not need it

    if parent_process() is None:
        return ""
    return f" (needed if other processes of this run have closed their traces; this is {current_process().name})"


def _refuse_alive(files: WriterFiles) -> None:
    holder = None if files.manifest is None else files.storage.holder(files.manifest)
    if holder is None:
        return
    if holder == "this process":
        raise TraceExists(
            f"{files.where}: still recorded by an earlier environment of this process, perhaps of a notebook cell; "
            "call .close() on that environment before replacing its trace"
        )
    raise TraceExists(f"{files.where}: another process is recording it; stop that process before replacing the trace")


def _delete(storage: Storage, files: WriterFiles) -> None:
    """Remove only files that provably belong to a writer: a valid manifest, batches with a valid header."""
    names = set(storage.names())
    for name in files.batches.values():
        for batch in (name, name + PART):  # a sealed batch may also have a .part file
            if batch in names and _is_batch(storage, batch):
                storage.remove(batch)
    for name in (files.ring, files.new_ring):
        if name in names and _is_ring(storage, name):
            storage.remove(name)
    if files.manifest is not None and _is_manifest(files):
        for name in _videos(files, names):
            storage.remove(name)
        storage.remove(files.manifest)


def _videos(files: WriterFiles, names: set[str]) -> list[str]:
    """Return the videos in the manifest, and unlisted, unfinished ones of a killed writer with an MP4 header."""
    listed = {str(entry.get("file")) for entry in files.entries() if entry.get("type") == "video"}
    found = [match for match in map(_VIDEO.fullmatch, names) if match is not None and match["writer"] == files.writer]
    return [it[0] for it in found if it[0] in listed or (it["part"] and _begins_as_video(files.storage, it[0]))]


def _begins_as_video(storage: ReadStorage, name: str) -> bool:
    with storage.open(name) as file:
        start = file.read(0, 8)
    return not start or start[4:] == b"ftyp"


def _is_batch(storage: ReadStorage, name: str) -> bool:
    try:
        with storage.open(name) as file:
            wire.unpack_file_header(file.read(0, wire.HEADER_SIZE))
    except (TraceError, OSError) as error:
        return not isinstance(error, (CorruptTrace, OSError))
    return True


def _is_ring(storage: ReadStorage, name: str) -> bool:
    """Return True if the file starts like a ring; an unused .part file may be empty or all zeros."""
    try:
        with storage.open(name) as file:
            start = file.read(0, len(wire.RING_MAGIC))
    except (TraceError, OSError):
        return False
    return start == wire.RING_MAGIC or (name.endswith(PART) and not any(start))


def _is_manifest(files: WriterFiles) -> bool:
    first = next(files.entries(), {})
    return first.get("type") == "writer" and first.get("writer") == files.writer


def sizes_of(storage: ReadStorage) -> dict[str, int]:
    """Return the files of a trace and their sizes. A writer may be recording it."""
    found = {}
    for name in storage.names():
        if kind_of(name) is not None:
            with suppress(FileNotFoundError):  # sealed or removed in the meantime
                found[name] = storage.size(name)
    return found
