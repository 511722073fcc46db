"""Recording to a URL: into a local directory, the spool, from which a thread publishes sealed files.

Object stores cannot append. So recorders write to the local disk as usual, with the same promise at a crash; only whole
files are published, under names with a random number. A spool survives its processes: the next recorder to the same URL
publishes it, or 'gym-trace push --resume'. One process at a time publishes a spool.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from gym_trace.errors import (
    InvalidOption,
    RecordingError,
    RemoteError,
    TraceError,
    TraceExists,
    TraceNotFound,
    UnpublishedWarning,
    warn,
)
from gym_trace.format.batch_reader import PART, BatchReader
from gym_trace.format.directory import WriterFiles, find_writers, kind_of, sizes_of, writer_of
from gym_trace.format.facts import NAME as FACTS
from gym_trace.format.manifest import SUFFIX
from gym_trace.recording.publishing.transfer import Transfer, TransferReport
from gym_trace.recording.publishing.whole_files import upload
from gym_trace.storage.local import LocalAppender, LocalStorage, lock, open_regular, shared_with_others
from gym_trace.storage.protocol import Holder, Reader, ReadStorage
from gym_trace.storage.remote.address import has_credentials, is_url, local_path, redacted, refuse_web_server, url_of
from gym_trace.storage.remote.cache import MemoryBlocks, bytes_in
from gym_trace.storage.remote.objects import StoredObject
from gym_trace.storage.remote.ranges import RangeReader
from gym_trace.storage.remote.storage import RemoteStorage
from gym_trace.storage.staging import replaced_file

SPOOL_VARIABLE, LIMIT_VARIABLE = "GYM_TRACE_SPOOL", "GYM_TRACE_SPOOL_BYTES"
SPOOL_BYTES = 8 << 30
DESTINATION = "destination.json"  # file of a spool with its URL
_LOCK = ".publishing"
_SUPERSEDED = ".superseded"
_BATCH_BEGUN = ".gtb" + PART
_CHECK_SECONDS = 0.5  # between checks of a spool
_MAX_RETRY_SECONDS = 30.0  # between attempts while the store does not respond
_FULL_SECONDS = 600.0  # a recorder waits this long for space
_OTHER_PROCESS_SECONDS = 60.0  # wait at the end while another process publishes
_NAME = re.compile(r"[^A-Za-z0-9_-]+")
_log = logging.getLogger("gym_trace")


def spool_root() -> Path:
    """Return the directory of all spools: $GYM_TRACE_SPOOL, or one in the user's state directory."""
    if root := os.environ.get(SPOOL_VARIABLE):
        return Path(root).absolute()
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gym-trace" / "spool"


def spool_of(url: str | os.PathLike[str]) -> Path:
    """Return the spool of a URL; create it if needed. Raises InvalidOption, OSError."""
    url = url_of(url)
    if has_credentials(url):
        raise InvalidOption(
            f"{redacted(url)}: has credentials in it; put them into the environment or the settings of the store"
        )
    spool = _own_root() / _name_of(url)
    spool.mkdir(mode=0o700, exist_ok=True)
    _refuse_others(spool, url)
    if destination_of(spool) is None:
        with replaced_file(spool / DESTINATION) as staged:
            staged.write_text(json.dumps({"url": url}), encoding="utf-8")
    return spool


def _name_of(url: str) -> str:
    digest = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{_NAME.sub('-', url.rpartition('/')[2])[:40]}-{digest}"


def _own_root() -> Path:
    """Return the directory of all spools; create it if needed. Raises InvalidOption, OSError."""
    root = spool_root()
    os.makedirs(root, mode=0o700, exist_ok=True)
    if why := shared_with_others(root):
        raise InvalidOption(
            f"{root}: {why}; set {SPOOL_VARIABLE} to a directory that only you can write to (chmod go-w)"
        )
    return root


def _refuse_others(spool: Path, url: str | None) -> None:
    """Raise InvalidOption unless this directory is the spool of a URL: published files are deleted from it."""
    if url is None or spool.name != _name_of(url) or spool.is_symlink() or shared_with_others(spool):
        raise InvalidOption(f"{spool}: not a spool of this user; move it away")


def recording_path(directory: str | os.PathLike[str]) -> Path:
    """Return where recorders write: the directory, or the spool of a URL. Raises InvalidOption, OSError."""
    local = local_path(directory)
    return spool_of(directory) if local is None else Path(local).absolute()


def destination_of(spool: Path) -> str | None:
    """Return the URL of a spool that lies in the directory of all spools; None for any other directory."""
    try:
        if spool.absolute().parent != spool_root() or shared_with_others(spool_root()):
            return None
        url = json.loads((spool / DESTINATION).read_text(encoding="utf-8"))["url"]
        _refuse_others(spool, url)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidOption):
        return None
    return str(url)


def spools() -> list[Path]:
    """Return the spools of this user that have anything to publish. Raises InvalidOption, OSError."""
    found = sorted(_own_root().iterdir()) if spool_root().is_dir() else []
    return [spool for spool in found if destination_of(spool) is not None and find_writers(LocalStorage(spool))]


class PublishedSpool(NamedTuple):
    """A spool found by publish_spools().

    Attributes:
        spool: its directory. url: where it is published.
        report: copied files; None in a dry run, after an error, and if another process publishes the spool.
        error: why it could not be published; None if it could.

    Examples:
        >>> from pathlib import Path
        >>> spool = gym_trace.recording.PublishedSpool(Path("spool"), "s3://bucket/trace")
        >>> spool.report is None and spool.error is None  # only found so far
        True
    """

    spool: Path
    url: str
    report: TransferReport | None = None
    error: TraceError | OSError | None = None


def publish_spools(workers: int = 2, dry_run: bool = False) -> Iterator[PublishedSpool]:
    """Publish files that killed recorders to URLs left on this machine, one spool after another.

    Args:
        workers: files copied at the same time.
        dry_run: publish nothing; only yield the spools.

    Raises:
        InvalidOption: the directory of the spools is not this user's own. OSError.

    Examples:
        >>> for published in gym_trace.recording.publish_spools(dry_run=True):  # doctest: +SKIP
        ...     print(published.spool, published.url)
    """
    for spool in spools():
        found = PublishedSpool(spool, str(destination_of(spool)))
        try:
            yield found if dry_run else found._replace(report=publish(spool, workers))
        except (TraceError, OSError) as error:
            yield found._replace(error=error)


def refuse_existing(url: str | os.PathLike[str], on_exist: str) -> None:
    """Raise TraceExists if a URL already has a trace and on_exist is "error". Raises RemoteError, InvalidOption."""
    refuse_web_server(url_of(url))
    safe_url = redacted(url_of(url))
    if on_exist == "replace":
        raise InvalidOption(f'{safe_url}: on_exist="replace" is not supported for URLs; pass another URL')
    if on_exist == "error":
        names = RangeReader(url).entries()
        if any(kind_of(name) is not None for name in names):
            raise TraceExists(f'{safe_url}: already holds a trace; pass on_exist="append" to add to it, or another URL')


def publish(spool: Path, workers: int = 2, writer: str | None = None) -> TransferReport | None:
    """Publish the sealed files of a spool, and remove those no longer needed; None: another process publishes it.

    writer: publish only its files; None: all.

    Raises RemoteError, TraceExists, CorruptTrace, InvalidOption, OSError.
    """
    return _publisher_of(spool, destination_of(spool)).publish(workers, writer)


def publish_ended(url: str, writer: str) -> bool:
    """Publish the files that a process of this machine left in the spool; False: it still writes, or try again.

    Raises the errors of publish().
    """
    spool = spool_of(url)
    return LocalStorage(spool).holder(writer + SUFFIX) is None and publish(spool, writer=writer) is not None


def publish_facts(spool: Path, url: str) -> None:
    """Publish the facts of a trace whose steps come from the spools of other machines. Raises RemoteError."""
    if (spool / FACTS).exists():
        upload(RangeReader(url), FACTS, (spool / FACTS).read_bytes(), new=False)


def set_aside(spool: Path, writer: str) -> None:
    """Rename the files of a dead writer, so that they are never published."""
    storage = LocalStorage(spool)
    for name in storage.names():
        if writer_of(name) == writer:
            storage.rename(name, name + _SUPERSEDED)


def _prune(spool: Path, published: dict[str, int]) -> None:
    """Remove published files. A writer that is alive or has a ring keeps the batches that its ring continues."""
    storage = LocalStorage(spool)
    for files in find_writers(storage):
        own = {name: size for name, size in sizes_of(storage).items() if writer_of(name) == files.writer}
        if not files.is_alive() and own.items() <= published.items():
            for name in sorted(own, key=lambda name: name == files.manifest):  # the manifest last
                storage.remove(name)
        elif files.is_alive() or files.has_ring:
            for name in _outdated_batches(files):
                if name in own and published.get(name) == own[name]:
                    storage.remove(name)


def _outdated_batches(files: WriterFiles) -> list[str]:
    """Return the batches before the last one that stores which slabs of the ring are in batches."""
    names = list(files.batches.values())
    for index in range(len(names) - 1, 0, -1):
        if not names[index].endswith(PART):
            with contextlib.suppress(TraceError, OSError):
                if BatchReader(files.storage, names[index]).slabs.complete:
                    return names[:index]
    return []


class SpooledTrace(ReadStorage):
    """A spool together with the files that were published and removed from it."""

    def __init__(self, spool: Path, url: str):
        self._local, self._remote = LocalStorage(spool), RemoteStorage(url, MemoryBlocks())
        self.root = self._remote.root

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SpooledTrace) and self._local == other._local

    def __hash__(self) -> int:
        return hash(self._local)

    def names(self) -> list[str]:
        names = set(self._local.names())  # first, because files move from the spool to the URL
        with contextlib.suppress(TraceNotFound):
            names.update(self._remote.names())
        return list(names)

    def size(self, name: str) -> int:
        try:
            return self._local.size(name)
        except FileNotFoundError:
            return self._published(name).size(name)

    def open(self, name: str, holes: int = 0) -> Reader:
        try:
            return self._local.open(name, holes)
        except FileNotFoundError:
            return self._published(name).open(name)

    def holder(self, name: str) -> Holder | None:
        return self._local.holder(name)

    def _published(self, name: str) -> RemoteStorage:
        try:
            self._remote.stored(name)
        except (FileNotFoundError, TraceNotFound):  # published since the last listing of the URL
            with contextlib.suppress(TraceNotFound):
                self._remote.names()
        return self._remote


def recorded(path_or_url: str | os.PathLike[str]) -> ReadStorage:
    """Return the storage of a recording in a directory or at a URL; for a spool, also with files published from it."""
    if is_url(path_or_url):
        return RemoteStorage(url_of(path_or_url), MemoryBlocks())
    url = destination_of(Path(path_or_url))
    return LocalStorage(path_or_url) if url is None else SpooledTrace(Path(path_or_url), url)


class SpoolStorage(LocalStorage):
    """The spool of a URL: create() of a batch waits for space, and settle() until everything is published."""

    def __init__(self, directory: str | os.PathLike[str], url: str):
        super().__init__(directory)
        self._url = url

    def create(self, name: str, lock: bool = False) -> LocalAppender:
        publisher = _publisher_of(self.root, self._url)
        if name.endswith(_BATCH_BEGUN):
            publisher.wait_for_space()
        file = super().create(name, lock)
        publisher.start()
        return file

    def settle(self) -> None:
        if not _is_left_to_parent:
            _publisher_of(self.root, self._url).finish()


_is_left_to_parent = False
_own: str | None = None
_may_publish: Callable[[], bool] | None = None


def leave_to_parent(own: str | None = None, may_publish: Callable[[], bool] | None = None) -> None:
    """Leave publishing at the end of recordings to the process that started this one; see published().

    own: the only writer that this process publishes until then; None: all. may_publish: called before each attempt.
    """
    global _is_left_to_parent, _own, _may_publish
    _is_left_to_parent, _own, _may_publish = True, own, may_publish


@contextlib.contextmanager
def published(spool: Path, url: str) -> Iterator[None]:
    """At the end of the block, publish files that processes started in it left in the spool of a URL."""
    try:
        yield
    finally:
        _publisher_of(spool, url).finish()


class _Publisher:
    """Publishes the spool of a URL, in a thread until the spool is empty, or when asked."""

    def __init__(self, spool: Path, url: str):
        self._spool, self._url = spool, url
        self._limit = bytes_in(LIMIT_VARIABLE, SPOOL_BYTES)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._done: dict[str, int] | None = None  # published files; None: not tried yet
        self._known: dict[str, StoredObject] = {}  # batches at the URL that equal those of the spool

    def publish(self, workers: int = 2, writer: str | None = None) -> TransferReport | None:
        """See publish()."""
        _refuse_others(self._spool, self._url)
        with open(open_regular(self._spool / _LOCK, os.O_RDWR | os.O_CREAT), "rb") as held:
            if not lock(held.fileno()):
                return None
            try:
                transfer = Transfer(self._spool, self._url, "push", dry_run=False, writer=writer, known=self._known)
            except TraceNotFound:
                return TransferReport(str(self._spool), redacted(self._url))
            report = transfer.run(workers, None)
            _prune(self._spool, transfer.confirmed())
            return report

    def start(self) -> None:
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="gym-trace-publish", daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        wait = _CHECK_SECONDS
        while True:
            time.sleep(wait)
            try:
                sealed = self._sealed(_own)
                if sealed != self._done:
                    if (_may_publish is None or _may_publish()) and self.publish(writer=_own) is not None:
                        self._done = dict(sealed.items() & self._sealed(_own).items())
                elif not sealed and self._has_ended():
                    return
                wait = _CHECK_SECONDS
            except (TraceError, OSError) as error:
                if wait == _CHECK_SECONDS:
                    _log.warning("%s; recording continues in %s", error, self._spool)
                wait = min(_MAX_RETRY_SECONDS, 2 * wait)

    def _has_ended(self) -> bool:
        """Return True, and end the thread, if the spool is empty; start() starts another one."""
        with self._starting:
            if any(_own in (None, files.writer) for files in find_writers(LocalStorage(self._spool))):
                return False
            self._thread = None
            return True

    def _sealed(self, writer: str | None = None) -> dict[str, int]:
        """Return the files that can be published, with their sizes. writer: only its files; None: all."""
        sizes = sizes_of(LocalStorage(self._spool))
        sizes = {name: size for name, size in sizes.items() if writer in (None, writer_of(name))}
        return {name: size for name, size in sizes.items() if kind_of(name) != "ring" and not name.endswith(PART)}

    def wait_for_space(self) -> None:
        """Wait until a batch fits. Raises OSError after a while, as for a full disk: the steps stay in the ring."""
        if self._unpublished_bytes() < self._limit:
            return
        _log.warning("%s: full; recording waits until %s can be reached", self._spool, redacted(self._url))
        until = time.monotonic() + _FULL_SECONDS
        self.start()
        while self._unpublished_bytes() >= self._limit:
            if time.monotonic() > until:
                raise OSError(errno.ENOSPC, f"{self._spool} is full, and {redacted(self._url)} does not respond")
            time.sleep(0.05)

    def _unpublished_bytes(self) -> int:
        """Return the bytes that are not published."""
        done = self._done or {}
        return sum(size for name, size in self._sealed().items() if done.get(name) != size)

    def finish(self) -> None:
        """Publish everything that is closed. Warns about files that stay. Raises RecordingError for a conflict."""
        until = time.monotonic() + _OTHER_PROCESS_SECONDS
        try:
            while self.publish() is None:
                if time.monotonic() > until:
                    raise RemoteError(f"{redacted(self._url)}: another thread or process is still publishing")
                time.sleep(0.05)
            if any(not files.is_alive() for files in find_writers(LocalStorage(self._spool))):
                raise RemoteError(f"{redacted(self._url)}: lists other files than were uploaded")
        except TraceExists as error:
            raise RecordingError(f"{error}; the recording is in {self._spool}") from None
        except (TraceError, OSError) as error:
            text = f"{error}; unpublished files stay in {self._spool}: 'gym-trace push --resume' publishes them"
            warn(text, UnpublishedWarning)


_publishers: dict[tuple[int, str], _Publisher] = {}


def _publisher_of(spool: str | Path, url: str | None) -> _Publisher:
    """Return the publisher of this process; threads and locks do not survive a fork. Raises InvalidOption."""
    key = os.getpid(), str(spool)
    if key not in _publishers:
        _refuse_others(Path(spool), url)
        _publishers[key] = _Publisher(Path(spool), str(url))
    return _publishers[key]
