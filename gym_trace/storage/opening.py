"""Open a path or a URL as a storage."""

from __future__ import annotations

import os
from pathlib import Path

from gym_trace.errors import InvalidOption
from gym_trace.storage.local import LocalStorage, directories_in
from gym_trace.storage.protocol import ReadStorage
from gym_trace.storage.remote.address import UrlPath, local_path, redacted, url_of


def storage_at(
    location: str | os.PathLike[str] | ReadStorage,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
) -> ReadStorage:
    """Return the storage at a path or URL; return a storage unchanged. Reads nothing.

    cache: see open_trace(). Raises InvalidOption, MissingExtra, RemoteError.
    """
    storage = location
    if not isinstance(storage, ReadStorage) and (local := local_path(storage)) is not None:
        storage = LocalStorage(local)
    if isinstance(storage, ReadStorage):
        if cache is not None or cache_bytes is not None:
            raise InvalidOption("cache, cache_bytes: only for URLs; omit them")
        return storage
    from gym_trace.storage.remote.cache import CACHE_BYTES, DiskBlocks
    from gym_trace.storage.remote.storage import RemoteStorage

    if cache is None and cache_bytes is not None:
        raise InvalidOption("cache_bytes: also pass cache")
    blocks = None if cache is None else DiskBlocks(cache, CACHE_BYTES if cache_bytes is None else cache_bytes)
    return RemoteStorage(storage, blocks)


def folders_at(location: str | os.PathLike[str]) -> list[str]:
    """Return the names of the directories in a directory or below a URL, sorted, without links and hidden ones.

    Raises OSError, InvalidOption, MissingExtra, RemoteError.
    """
    if (local := local_path(location)) is not None:
        return directories_in(local)
    from gym_trace.storage.remote.objects import persistently
    from gym_trace.storage.remote.stores import store_at

    url = url_of(location)
    found = persistently(lambda: store_at(url).folders(), redacted(url))
    return sorted(name for name in found if name and not name.startswith("."))


def absolute(storage: ReadStorage) -> ReadStorage:
    """Make the path of a storage absolute, so that it survives a change of the current directory."""
    is_relative = type(storage) is LocalStorage and not os.path.isabs(storage.root)
    return LocalStorage(os.path.abspath(storage.root)) if is_relative else storage


def path_of(root: str) -> Path:
    """Return the root of a storage as a path; a URL keeps its slashes, but file:///x is /x.

    Raises InvalidOption for s3:// alone.

    Examples:
        >>> gym_trace.storage.path_of("/data/cartpole").name
        'cartpole'
    """
    local = local_path(root)
    return UrlPath(url_of(root)) if local is None else Path(local)
