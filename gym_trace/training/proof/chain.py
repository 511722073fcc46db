"""Log of entries, each with the digest of the one before: changed, removed and inserted entries show."""

from __future__ import annotations

import errno
import hashlib
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from gym_trace.data.packing import unpack
from gym_trace.errors import CorruptRun, CorruptTrace, InvalidOption, RecordingError, TraceNotFound
from gym_trace.format.manifest import json_of
from gym_trace.storage.local import lock, open_regular, size_on_disk
from gym_trace.training.proof.result import Proof

_MAX_ENTRY_BYTES = 1 << 30
_MAX_ABOUT_BYTES = 16 << 20
_FRAME_BYTES = 16
_WRITER_SECONDS = 60.0  # in which the previous writer ends

ABOUT = "proof.json"  # begins the log of an UpdateLog; run.json begins that of a training run
START, UPDATE, END = "start", "update", "end"  # kinds of entries


def directory_of(directory: str | os.PathLike[str]) -> Path:
    """Return the directory of a log, given itself or the trace."""
    path = Path(directory).absolute()
    is_trace = any(path.glob("*.manifest.jsonl"))
    return path.with_name(path.name + ".proof") if is_trace else path


class LogEntry(NamedTuple):
    """Entry of a log.

    Attributes:
        kind: "start", "update", "end" …; "" in logs of older releases, without digests. content: plain data.
        at, end: offsets of its body. head: digest of everything up to this entry.
    """

    kind: str
    content: Any
    at: int
    end: int
    head: bytes


class Chain:
    """Log in a file, updates.msgpack.

    Args:
        about: file beside it; the first entry has its digest. advice: returns what to do if the log is damaged.
    """

    def __init__(self, about: Path, advice: Callable[[], str] = lambda: "restore a copy, or train again"):
        self.about, self.path = about, about.with_name("updates.msgpack")
        self._advice = advice

    def _root(self) -> bytes:
        try:
            return digest(self._about_bytes())
        except OSError as error:
            raise self.damaged(f"{self.about.name} beside it cannot be read: {error.strerror}") from error

    def _about_bytes(self) -> bytes:
        with open(open_regular(self.about, os.O_RDONLY), "rb") as file:
            raw = file.read(_MAX_ABOUT_BYTES + 1)
        if len(raw) > _MAX_ABOUT_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return raw

    def facts(self) -> dict[str, Any]:
        """Return the content of the file beside the log; empty if it is not an object. Raises OSError, ValueError."""
        try:
            found = json_of(self._about_bytes())
        except RecursionError as error:
            raise ValueError("nested too deep") from error
        return found if isinstance(found, dict) else {}

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries. An unfinished last one is skipped.

        Raises CorruptTrace for a damaged entry, and for one without the digest of the entry before.
        """
        head = b""
        for at, body in self._bodies():
            is_first = not head
            head = head or self._root()
            try:
                found = unpack(body)
            except CorruptTrace as error:
                raise self.damaged(f"{error.problem} at byte {at}") from error
            kind, content = "", found
            if isinstance(found, list) and len(found) == 3 and isinstance(found[0], bytes):
                previous, kind, content = found
                if previous != head:
                    changed = f"{self.about.name} beside it has changed, or is of another log"
                    raise self.damaged(
                        changed if is_first else f"the entry at byte {at} does not follow the one before"
                    )
            head = digest(head, body)
            yield LogEntry(str(kind), content, at, at + len(body), head)

    def kinds(self) -> Counter[str]:
        """Return the number of entries of each kind. Raises CorruptTrace, also for entries without a start."""
        found, before = Counter[str](), END
        for entry in self.entries():
            if before == END and entry.kind != START:
                raise self.damaged(f"the entry at byte {entry.at} follows no start")
            before = entry.kind
            found[before] += 1
        return found

    def damaged(self, problem: str) -> CorruptRun:
        """Return the error for a damaged log."""
        return CorruptRun(problem, self.path, self._advice())

    def _bodies(self) -> Iterator[tuple[int, bytes]]:
        """Yield offset and bytes of each body."""
        try:
            fd = open_regular(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError as error:
            raise self.damaged(f"cannot be read: {error.strerror}") from error
        with open(fd, "rb") as file:
            try:
                whole, at = size_on_disk(fd, self.path), 0
            except CorruptTrace as error:
                raise self.damaged(error.problem) from error
            while len(head := file.read(_FRAME_BYTES)) == _FRAME_BYTES:
                size, checksum = int.from_bytes(head[2:6], "big"), int.from_bytes(head[7:11], "big")
                at += _FRAME_BYTES
                if head != frame(size, checksum) or size > _MAX_ENTRY_BYTES:
                    raise self.damaged(f"no entry at byte {at - _FRAME_BYTES}")
                if at + size > whole:
                    return
                body = file.read(size)
                if zlib.crc32(body) != checksum:
                    raise self.damaged(f"checksum mismatch of the entry at byte {at - _FRAME_BYTES}")
                yield at, body
                at += size

    def open(self, patience: float | None = None) -> ChainWriter:
        """Open the log to append entries, and cut off an unfinished one.

        Waits up to `patience` seconds (None: 60) for the previous writer, which may still save. Raises OSError,
        CorruptTrace, InvalidOption.
        """
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open as long as the writer
        try:
            until = time.monotonic() + (_WRITER_SECONDS if patience is None else patience)
            while not lock(file.fileno()):
                if time.monotonic() > until:
                    raise InvalidOption(f"{self.path}: another process still writes to it; wait for it to end")
                time.sleep(0.05)
            head, end, kinds = self._root(), 0, Counter[str]()
            for entry in self.entries():
                head, end = entry.head, entry.end
                kinds[entry.kind] += 1
            os.ftruncate(file.fileno(), end)
        except BaseException:
            file.close()
            raise
        return ChainWriter(file, head, kinds)


class ChainWriter:
    """Open log; other writers are locked out.

    Attributes:
        kinds: number of entries of each kind when it was opened.
    """

    def __init__(self, file: BinaryIO, head: bytes, kinds: Counter[str]):
        self._file, self._head, self.kinds = file, head, kinds

    def append(self, kind: str, content: Any) -> None:
        """Add an entry. Raises RecordingError, and leaves the log unchanged."""
        body: bytes = msgpack.packb([self._head, kind, content])
        if len(body) > _MAX_ENTRY_BYTES:
            raise RecordingError(f"log of updates: an update of {len(body):,} bytes; pass less, or Steps")
        entry = frame(len(body), zlib.crc32(body)) + body
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(entry) != len(entry):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            raise RecordingError(f"log of updates: write failed: {error.strerror}") from error
        self._head = digest(self._head, body)

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        """Close the file, and release the lock."""
        self._file.close()

    def __enter__(self) -> ChainWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def count_entries(kinds: Counter[str], known: Iterable[str], about: str, proof: Proof) -> None:
    """Add the number of entries to the proof, and those of unknown kinds. about: name of the file beside the log."""
    proof.proved.append(f"log: {kinds.total():,} entries, each with the digest of the one before, from {about} on")
    for kind in sorted(kinds.keys() - set(known)):
        proof.unproved.append(f"{kinds[kind]:,} entries of the log: of the unknown kind {kind!r:.40}")


def chain_in(directory: Path) -> Chain:
    """Return the log of an UpdateLog or of a training run. Raises TraceNotFound."""
    for name in (ABOUT, "run.json"):
        if (directory / name).is_file():
            return Chain(directory / name)
    raise TraceNotFound(f"{directory}: has no log of updates: neither {ABOUT} nor run.json")


def digest(*parts: bytes) -> bytes:
    """Return the BLAKE2b digest of bytes, 32 bytes."""
    found = hashlib.blake2b(digest_size=32)
    for part in parts:
        found.update(part)
    return found.digest()


def frame(size: int, checksum: int) -> bytes:
    """Return the bytes before a body; together they are a MessagePack array of size, checksum and body.

    The size is stored twice, to distinguish an unfinished entry from one whose size was changed.
    """
    return b"\x93\xce%b\xce%b\xc6%b" % tuple(number.to_bytes(4, "big") for number in (size, checksum, size))
