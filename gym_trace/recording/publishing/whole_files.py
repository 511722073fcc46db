"""Copy whole files of a trace to and from an object store, each atomically, or in commits to a dataset."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gym_trace.errors import CorruptTrace, InvalidOption, MissingExtra, RemoteError, TraceExists
from gym_trace.format.kernels import crc32
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.remote.objects import persistently
from gym_trace.storage.remote.ranges import RangeReader
from gym_trace.storage.staging import replaced_file

OnBytes = Callable[[int], None]


def upload(reader: RangeReader, name: str, content: Path | bytes, new: bool) -> None:
    """Publish a file, or bytes. A conflict with an object of the same content is a success whose response was lost.

    Args:
        reader: reader of the URL to publish to.
        new: create the object, and fail if it exists; False: overwrite it.

    Raises TraceExists if an object of this name has other content, RemoteError, OSError.
    """
    try:
        persistently(lambda: reader.store.put(name, content, new), f"{reader.shown}/{name}")
    except FileNotFoundError:
        raise RemoteError(f"{reader.shown}: no such bucket or container; check the URL") from None
    except FileExistsError:
        if not _is_same(reader, name, content):
            raise TraceExists(f"{reader.shown}/{name}: exists with other content; pass another URL") from None


def download(
    blocks: Iterable[bytes],
    shown: str,
    target: Path,
    crc: int | None,
    restore: Callable[[Path], bool],
    on_bytes: OnBytes,
) -> None:
    """Write the blocks of an object into a file, which replaces the target once it is complete and checked.

    shown: URL of the object, for messages. restore: repairs a file with another checksum; returns False if it cannot.

    Raises CorruptTrace for another checksum than crc, RemoteError, OSError.
    """
    try:
        with replaced_file(target) as staged:
            found = 0
            with open(staged, "xb") as file:
                for block in blocks:
                    file.write(block)
                    found = crc32(block, found)
                    on_bytes(len(block))
            if crc not in (None, found) and not restore(staged):
                check_crc(found, crc, shown)
        LocalStorage(target.parent).sync()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from None
        raise


def check_crc(found: int, listed: int | None, where: str) -> None:
    """Raise CorruptTrace if the checksum is not the listed one."""
    if listed is not None and found != listed:
        raise CorruptTrace(f"checksum {found:#x}, but {listed:#x} in the manifest", where)


def _is_same(reader: RangeReader, name: str, content: Path | bytes) -> bool:
    """Read an object back and compare it with a file, or bytes."""
    stored = reader.entries().get(name)
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    if stored is None or stored.size != size:
        return False
    with open(content, "rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        return all(file.read(len(it)) == it for _, blocks in reader.whole({name: stored}) for it in blocks)


_HUB_URL = re.compile(r"hf://datasets/(?P<name>[^/@]+/[^/@]+)(?:@(?P<revision>[^/]+))?(?P<below>/.*)?")
_FILES_PER_COMMIT = 50
_CARD = "README.md"


def is_hub(url: str) -> bool:
    return url.startswith("hf://")


def commit_to_hub(
    url: str, directory: Path, names: Sequence[str], on_bytes: Callable[[int], None], card: Callable[[Path], str] | None
) -> None:
    """Add files to a dataset; create it as private if needed. card: makes the card of a dataset that has none.

    Raises InvalidOption, MissingExtra, RemoteError.
    """
    match = _HUB_URL.fullmatch(url)
    if match is None:
        raise InvalidOption(f"{url}: not a dataset; write hf://datasets/USER/NAME")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError:
        raise MissingExtra("hf:// needs huggingface_hub; install it with: pip install huggingface_hub") from None
    api: Any = HfApi()
    dataset: dict[str, Any] = {"repo_id": match["name"], "repo_type": "dataset"}
    target = {"revision": match["revision"], **dataset}
    folder = (match["below"] or "").strip("/")
    persistently(partial(api.create_repo, **dataset, private=True, exist_ok=True), url)
    has_card = persistently(partial(api.file_exists, filename=_CARD, **target), url)
    for begin in range(0, len(names), _FILES_PER_COMMIT):
        committed = names[begin : begin + _FILES_PER_COMMIT]
        added: list[Any] = [
            CommitOperationAdd(f"{folder}/{name}".lstrip("/"), str(directory / name)) for name in committed
        ]
        if card is not None and not has_card and begin + _FILES_PER_COMMIT >= len(names):
            added.append(CommitOperationAdd(_CARD, card(directory).encode()))
        message = f"{len(committed)} files of a gym-trace recording"
        persistently(partial(api.create_commit, operations=added, commit_message=message, **target), url)
        on_bytes(sum((directory / name).stat().st_size for name in committed))
