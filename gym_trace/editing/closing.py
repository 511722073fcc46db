"""End of a writer's copy: the rest of its manifest, and the videos of its episodes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from typing import Any

from gym_trace.format import manifest
from gym_trace.format.directory import video_name
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.reading.writer_reader import WriterReader
from gym_trace.storage.protocol import Storage

Entries = list[dict[str, Any]]


def entries_of(reader: WriterReader) -> Entries:
    """The lines of a manifest that are not about its files."""
    return [entry for entry in reader.files.entries() if entry.get("type") not in ("writer", "batch")]


def finish(writer: TraceWriter, storage: Storage, entries: Entries) -> None:
    """Seals, and has the manifest say the same; what has died, and so does not say closed, stays known to have died."""
    closed = next((entry for entry in entries if entry.get("type") == "closed"), None)
    if closed is None:
        writer.seal()
    else:
        writer.close({key: value for key, value in closed.items() if key not in ("type", "episodes", "steps")})
    for entry in entries:
        if entry.get("type") != "closed":
            manifest.append(storage, writer.writer, entry)


def copy_videos(readers: Iterable[WriterReader], storage: Storage, episodes: Collection[int] | None = None) -> None:
    """Videos of episodes that were filmed while they were recorded, if they are there as manifests tell.

    episodes: ids of those that are wanted; None: all.
    """
    for reader, entry in ((one, entry) for one in readers for entry in entries_of(one)):
        episode = entry.get("episode")
        if entry.get("type") != "video" or not isinstance(episode, int) or episode < 0:
            continue
        if episodes is not None and episode not in episodes:
            continue
        name = video_name(reader.writer, episode)
        with contextlib.suppress(FileNotFoundError, FileExistsError), reader.files.storage.open(name) as file:
            if file.size == entry.get("bytes") and name == entry.get("file"):
                copy = storage.create(name)
                try:
                    copy.copy(file, 0, file.size)
                finally:
                    copy.close()
