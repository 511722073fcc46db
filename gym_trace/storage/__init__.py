"""Storage of traces: interfaces for your own storages, directories, and URLs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_trace.on_first_use import on_first_use

if TYPE_CHECKING:
    from gym_trace.storage.local import LocalStorage
    from gym_trace.storage.opening import path_of
    from gym_trace.storage.protocol import Appender, Mapping, Reader, ReadStorage, Span, Storage
    from gym_trace.storage.remote.address import is_url, redacted
    from gym_trace.storage.staging import replaced_file

_HOMES = {
    **dict.fromkeys(("Appender", "Mapping", "ReadStorage", "Reader", "Span", "Storage"), "gym_trace.storage.protocol"),
    "LocalStorage": "gym_trace.storage.local",
    "is_url": "gym_trace.storage.remote.address",
    "path_of": "gym_trace.storage.opening",
    "replaced_file": "gym_trace.storage.staging",
    "redacted": "gym_trace.storage.remote.address",
}

__all__ = [
    "Appender",
    "LocalStorage",
    "Mapping",
    "ReadStorage",
    "Reader",
    "Span",
    "Storage",
    "is_url",
    "path_of",
    "redacted",
    "replaced_file",
]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)
