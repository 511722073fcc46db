"""Objects at a URL that equal local files, remembered between transfers where a store lists no checksums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gym_trace.errors import InvalidOption
from gym_trace.storage.local import cache_root
from gym_trace.storage.remote.objects import StoredObject, is_tagged, md5_of
from gym_trace.storage.staging import replaced_file


def is_opaque(stored: StoredObject) -> bool:
    """Return True if the tag of an object changes with its content, but is not a checksum of it."""
    return is_tagged(stored) and md5_of(stored) is None


class KnownObjects:
    """Tags of the objects at a URL that were compared with the files in a directory, or copied.

    They are in the user's cache directory, if no other user can write there. Without them, files are compared again.
    """

    def __init__(self, directory: Path, url: str):
        self._directory = directory
        self._digest = hashlib.sha256(f"{directory}\0{url}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._known: dict[str, object] | None = None
        self._files: dict[str, list[int]] = {}

    def look_at(self, name: str) -> None:
        """Note the version of a file before it is compared: what changes later is not what was compared."""
        with suppress(FileNotFoundError):  # removed since it was listed
            local = (self._directory / name).stat()
            self._files[name] = [local.st_size, local.st_mtime_ns, local.st_ino]

    def has(self, name: str, stored: StoredObject) -> bool:
        """Return True if the file and the object are those that were equal."""
        return is_opaque(stored) and self._read().get(name) == self._entry(name, stored)

    def add(self, equal: Iterable[tuple[str, StoredObject]]) -> None:
        """Remember names and objects that equal the files of these names, in the version of the last look_at()."""
        new = {name: self._entry(name, stored) for name, stored in equal if is_opaque(stored)}
        if not new or (known := self._read()) == known | new:
            return
        known |= new
        with suppress(OSError, InvalidOption), replaced_file(self._file()) as staged:
            staged.write_text(json.dumps(known), encoding="utf-8")

    def _file(self) -> Path:
        return cache_root() / "objects" / f"{self._digest}.json"

    def _read(self) -> dict[str, object]:
        if self._known is None:
            self._known = {}
            with suppress(OSError, InvalidOption, ValueError, AttributeError):
                self._known = dict(json.loads(self._file().read_text(encoding="utf-8")).items())
        return self._known

    def _entry(self, name: str, stored: StoredObject) -> list[object]:
        return [stored.size, stored.version, *self._files.get(name, ())]
