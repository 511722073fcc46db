"""The manifests of many writers in one file at a URL, which saves a request for each (docs/FORMAT.md, section 7)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

import zstandard

from gym_trace.data.packing import pack, unpack
from gym_trace.errors import CorruptTrace, RemoteError
from gym_trace.storage.memory import MemoryStorage
from gym_trace.storage.protocol import ReadStorage, Span

NAME = "manifests.index"
LEAST_WRITERS = 16  # the manifests of fewer writers are read in parallel
MOST_BYTES = 64 << 20  # size limit of the decompressed file
_OVERHEAD = 64  # upper bound for the bytes that MessagePack adds to one manifest


class ListedManifest(NamedTuple):
    """A manifest, and the version that the store listed for it: other versions have other bytes."""

    version: str
    content: bytes


def packed_manifests(manifests: Mapping[str, ListedManifest]) -> bytes:
    """Return the file for these manifests, by name; the largest ones are omitted if they do not fit."""
    chosen, size = {}, 0
    for name, (version, content) in sorted(manifests.items(), key=lambda item: len(item[1].content)):
        size += len(name) + len(version) + len(content) + _OVERHEAD
        if size > MOST_BYTES:
            break
        chosen[name] = [version, content]
    return zstandard.ZstdCompressor(level=9, write_checksum=True).compress(pack(chosen))


def unpacked_manifests(raw: bytes) -> dict[str, ListedManifest]:
    """Return the manifests in the bytes of a file, by name; none if it is damaged, because it is only a copy."""
    try:
        if not 0 <= zstandard.frame_content_size(raw) <= MOST_BYTES:  # -1: unknown
            return {}
        found = unpack(zstandard.ZstdDecompressor(max_window_size=MOST_BYTES).decompress(raw))
    except (zstandard.ZstdError, CorruptTrace):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {
        name: ListedManifest(*item)
        for name, item in items
        if isinstance(item, list) and [type(part) for part in item] == [str, bytes]
    }


def current_manifests(storage: ReadStorage, names: Collection[str]) -> MemoryStorage:
    """Return those manifests of these names that the file at a URL has in their listed size and version.

    A file that cannot be read, for example because a push is replacing it, counts as empty.
    """
    current = {}
    with suppress(FileNotFoundError, RemoteError):
        size = min(storage.size(NAME), MOST_BYTES)
        storage.expect([Span(NAME, 0, size)])
        with storage.open(NAME) as file:
            listed = unpacked_manifests(file.read(0, size))
        for name in listed.keys() & set(names):
            version, content = listed[name]
            if (storage.size(name), storage.version(name)) == (len(content), version):
                current[name] = content
    return MemoryStorage(storage.root, current)
