"""Import: write recordings of other packages as a trace."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.data.schema import WriterSchema
from gym_trace.errors import InvalidOption, RecordingError, TraceError, UnreadableRecording, UnstorableValue
from gym_trace.exchange.formats.contract import Importer, ImportReport
from gym_trace.exchange.formats.foreign import check_files, check_links, most_episodes
from gym_trace.exchange.formats.imported import Imported, first_episodes
from gym_trace.exchange.formats.registry import importer_for, importer_named
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.facts import Facts, checked, write_facts
from gym_trace.format.ring.chunk_builder import LARGE_CHUNK, SMALL_CHUNK, ChunkWriter
from gym_trace.format.ring.segment import Segment
from gym_trace.printable import printable, shown
from gym_trace.storage.remote.address import is_url
from gym_trace.storage.staging import StagedStorage, bytes_in, new_directory

Progress = Callable[[int, int], None]  # (amount done, total; 0: unknown)
_ZSTD_LEVEL = 3
_MOST_OPEN_WRITERS = 256
# Errors that Python and other packages raise for malformed files, where an importer has no check of its own.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError, TypeError, ValueError)


def import_trace(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    format: str | Importer | None = None,
    *,
    limit: int | None = None,
    on_progress: Progress | None = None,
    **options: Any,
) -> ImportReport:
    """Import a recording of another package as a trace.

    The original is not changed, and nothing in it is executed or unpickled. Arrays keep their dtype, shape and
    bits. Missing values stay unknown: seeds are None, episodes with an unknown end are "cut". Files of export() get
    back their writers, ids, spaces, seeds and times, if the format stores them. Memory does not grow with the
    number of steps.

    Args:
        path: a directory or a file.
        destination: a new or empty directory. The trace appears when complete.
        format: a name such as "minari", or an importer; None: detected.
        limit: number of episodes to import, from the first; the rest is not read. None: all.
        on_progress: called periodically with the amount done and the total; 0: unknown.
        options: those of the format, such as map={"observations": "state"}, which names the columns of a "table".

    Raises:
        TraceNotFound: nothing to import at path.
        UnreadableRecording: the recording is damaged, or not safe to read.
        TraceExists: destination is not empty.
        InvalidOption: unknown format or option; limit below 1; destination lies in path.
        MissingExtra: a package that reads this format is not installed.
        RecordingError: the trace could not be written.

    Examples:
        >>> _ = gym_trace.export("traces/cartpole", "cartpole.jsonl")
        >>> report = gym_trace.import_trace("cartpole.jsonl", "traces/imported")
        >>> report.format, report.episodes
        ('jsonl', 20)
    """
    began, source = time.perf_counter(), Path(path)
    if is_url(path):
        raise InvalidOption("path: is a URL; copy it to a local path, and import that")
    if limit is not None and limit < 1:
        raise InvalidOption(f"limit={limit}: must be at least 1")
    max_episodes = most_episodes(check_files(source))
    if options and not isinstance(format, str | None):
        raise InvalidOption("options: need a format name; configure the importer itself")
    if format is None:
        importer = importer_for(source, options)
    else:
        importer = importer_named(format, options) if isinstance(format, str) else format
    if not getattr(importer, "skips_links", False):
        check_links(source)
    report = ImportReport(importer.name, source, Path(destination))
    with new_directory(destination, source) as staged:
        try:
            _Import(StagedStorage(staged), report, importer.read(source), max_episodes, limit).write(on_progress)
        except UnreadableRecording as error:
            if printable(source) in str(error):
                raise
            raise UnreadableRecording(f"{source}: {error}") from error
        except _MALFORMED as error:
            if isinstance(error, TraceError) and not isinstance(error, UnstorableValue):
                raise
            raise UnreadableRecording(f"{source}: cannot be read ({shown(error)})") from error
        if not report.writers:
            raise UnreadableRecording(f"{source}: has no episodes")
        report.bytes = bytes_in(staged)
    report.seconds = time.perf_counter() - began
    return report


class _Import:
    """Writes what an importer has read."""

    def __init__(
        self, storage: StagedStorage, report: ImportReport, imported: Imported, max_episodes: int, limit: int | None
    ):
        self._storage, self._report, self._imported = storage, report, imported
        self._max_episodes, self._limit = max_episodes, limit
        self._created = time.time_ns()
        self._open: dict[str, tuple[BatchFiles, ChunkWriter]] = {}

    def write(self, on_progress: Progress | None) -> None:
        imported, limit = self._imported, self._limit
        total = imported.total if limit is None else 0
        try:
            for name, segment in imported.segments if limit is None else first_episodes(imported.segments, limit):
                with self._writing():
                    if segment is None:  # the writer has no more segments
                        self._close(name)
                    else:
                        self._add(name, segment)
                if on_progress is not None:
                    on_progress(imported.done(), total)
            with self._writing():
                for name, end in imported.ends():
                    self._add(name, end)
                self._end()
        finally:
            for writer, _ in self._open.values():
                writer.detach()
            if isinstance(imported.segments, Generator):
                imported.segments.close()  # closes the files that it reads

    def _add(self, name: str, segment: Segment) -> None:
        self._chunks(name).add(segment)
        self._open[name][0].seal_if_due()
        has_initial = segment.fragments["flags"] & wire.HAS_INITIAL > 0  # once per episode, also of incomplete ones
        self._report.episodes += int(np.count_nonzero(has_initial))
        if self._report.episodes > self._max_episodes:
            raise UnreadableRecording(
                f"{self._report.path}: more than {self._max_episodes:,} episodes, too many for its size"
            )

    def _close(self, name: str) -> None:
        self._chunks(name).write()
        writer, _ = self._open.pop(name)
        writer.close({})
        self._report.steps += writer.steps

    def _end(self) -> None:
        report, imported = self._report, self._imported
        is_whole = self._limit is None or report.episodes < self._limit
        for name in imported.schemas:
            if name in self._open or (is_whole and name not in report.writers):
                self._close(name)
        report.kinds, report.warnings = [imported.kind], list(dict.fromkeys(imported.warnings))
        facts: Facts = {}
        for key, value in imported.facts.items():
            try:
                facts = checked({**facts, key: value})
            except InvalidOption as error:
                report.warnings.append(f"skipped metadata: {error}")
        if facts:
            write_facts(self._storage, facts)
        for file in imported.beside:
            shutil.copyfile(file, Path(self._storage.root) / file.name, follow_symlinks=False)
            report.videos.append(file.name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn write errors into RecordingError; reading raises its own errors."""
        try:
            yield
        except OSError as error:
            if isinstance(error, TraceError):
                raise
            destination = self._report.destination
            raise RecordingError(f"{destination}: the imported trace could not be written: {error}") from error

    def _chunks(self, name: str) -> ChunkWriter:
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN_WRITERS:
                raise UnreadableRecording(f"{self._report.path}: more than {_MOST_OPEN_WRITERS} writers")
            pid = re.search(r"\.\d+\.(\d{1,9})(\.|$)", name)  # in the writer ids of gym_recording and Monitor
            schema = {
                "created": self._created + len(self._report.writers),
                "host": "unknown",
                "pid": int(pid[1]) if pid else 0,
                **self._imported.schemas[name],
                "format": [wire.MAJOR, wire.MINOR],
                "writer": name,
            }
            layouts = WriterSchema.of(schema).layouts[:2]
            is_large = any(leaf.row_size >= wire.LARGE_ROW for layout in layouts for leaf in layout.leaves())
            opened = BatchFiles(self._storage, schema, _ZSTD_LEVEL, fsync=False)
            self._report.writers.append(name)
            self._open[name] = opened, ChunkWriter(lambda: opened, LARGE_CHUNK if is_large else SMALL_CHUNK)
        return self._open[name][1]
