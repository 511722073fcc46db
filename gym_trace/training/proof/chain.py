"""Log of entries, each with the digest of the one before: what is changed, removed or put in between shows."""

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

_MOST_ENTRY = 1 << 30  # bytes
_MOST_ABOUT = 16 << 20
_FRAME = 16
_PATIENCE = 60.0  # seconds for the previous writer to end

ABOUT = "proof.json"  # begins the log of an UpdateLog; run.json begins that of a training run
START, UPDATE, END = "start", "update", "end"  # kinds of entries


def directory_of(place: str | os.PathLike[str]) -> Path:
    """Return the directory of a log: itself, or the one beside a trace."""
    path = Path(place).absolute()
    is_trace = any(path.glob("*.manifest.jsonl"))
    return path.with_name(path.name + ".proof") if is_trace else path


class LogEntry(NamedTuple):
    """Entry of a log.

    Attributes:
        kind: "start", "update", "end" …; "" in logs of releases before the chain. content: plain data.
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
        about: file beside it, whose bytes the first entry follows. advice: returns what to do about a damaged log.
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
            raw = file.read(_MOST_ABOUT + 1)
        if len(raw) > _MOST_ABOUT:
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

        Raises CorruptTrace for a damaged one, and for one that does not follow the one before.
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
        """Yield the offset of each body, and the body."""
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
            while len(head := file.read(_FRAME)) == _FRAME:
                size, checksum = int.from_bytes(head[2:6], "big"), int.from_bytes(head[7:11], "big")
                at += _FRAME
                if head != frame(size, checksum) or size > _MOST_ENTRY:
                    raise self.damaged(f"no entry at byte {at - _FRAME}")
                if at + size > whole:
                    return
                body = file.read(size)
                if zlib.crc32(body) != checksum:
                    raise self.damaged(f"checksum mismatch of the entry at byte {at - _FRAME}")
                yield at, body
                at += size

    def open(self, patience: float | None = None) -> ChainWriter:
        """Open the log to append entries, and cut off an unfinished one.

        Waits for the previous writer, which may still save, for 60 seconds or those of patience. Raises OSError,
        CorruptTrace, InvalidOption.
        """
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        file = open(fd, "ab", buffering=0)  # noqa: SIM115 - open as long as the writer
        try:
            until = time.monotonic() + (_PATIENCE if patience is None else patience)
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
    """Open log, locked for other writers.

    Attributes:
        kinds: number of entries of each kind when it was opened.
    """

    def __init__(self, file: BinaryIO, head: bytes, kinds: Counter[str]):
        self._file, self._head, self.kinds = file, head, kinds

    def append(self, kind: str, content: Any) -> None:
        """Add an entry. Raises RecordingError, and leaves the log unchanged."""
        body: bytes = msgpack.packb([self._head, kind, content])
        if len(body) > _MOST_ENTRY:
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
    """Say how many entries a log has, and of which other kinds. about: name of the file that it follows."""
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
    """Return the head of a body: with it, a MessagePack array of size, checksum and body.

    The size is there twice, which distinguishes an unfinished entry from one whose size was changed.
    """
    return b"\x93\xce%b\xce%b\xc6%b" % tuple(number.to_bytes(4, "big") for number in (size, checksum, size))
