"""Entry points, by which installed packages add formats, rules, policies and states to gym-trace."""

from __future__ import annotations

import functools
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group. Reads the metadata of all packages again only if a folder of them changed."""
    return _entry_points(group, tuple((folder, _changed(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=16)
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    import importlib.metadata  # here, because it takes a tenth of the start of most commands, which have no use for it

    return tuple(importlib.metadata.entry_points(group=group))


def _changed(folder: str) -> int:
    try:
        return os.stat(folder or os.curdir).st_mtime_ns
    except OSError:
        return 0
