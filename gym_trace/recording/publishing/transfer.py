"""push and pull: the files of a trace between a directory and a URL.

Batches and videos never change, so existing files are skipped, and an interrupted transfer resumes. A manifest only
grows: the longer one is newer. A push copies manifests last, so that readers of the URL miss no batch; a pull copies
them first, so that batches are missing from a copy until it is complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple

from gym_trace.data.showing.text import count
from gym_trace.errors import (
    CorruptTrace,
    InvalidOption,
    RemoteError,
    TraceError,
    TraceExists,
    TraceNotFound,
    UnsupportedTrace,
)
from gym_trace.format import listed_manifests, wire
from gym_trace.format.batch_reader import PART, size_and_crc
from gym_trace.format.directory import WriterFiles, batch_name, find_writers, kind_of, sizes_of, writer_of
from gym_trace.format.healing import HealReport, heal_batch
from gym_trace.format.kernels import crc32
from gym_trace.format.listed_manifests import ListedManifest
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import open_trace
from gym_trace.playback.writer_reader import WriterReader
from gym_trace.recording.dead_rings import take_in_rings
from gym_trace.recording.publishing.known_objects import KnownObjects, is_opaque
from gym_trace.recording.publishing.whole_files import (
    OnBytes,
    check_crc,
    commit_to_hub,
    download,
    is_hub,
    upload,
)
from gym_trace.storage.local import LocalStorage, refuse_url
from gym_trace.storage.protocol import Overwritten, ReadStorage
from gym_trace.storage.remote.address import is_url, local_path, redacted, refuse_web_server, url_of
from gym_trace.storage.remote.cache import MemoryBlocks
from gym_trace.storage.remote.objects import StoredObject, Wanted, md5_of
from gym_trace.storage.remote.ranges import RangeReader
from gym_trace.storage.remote.storage import RemoteStorage

WORKERS = 4
_READ_BYTES = 8 << 20
_DATA, _TEXT = ("batch", "video", "ring"), ("manifest", "facts")  # kinds of files, in the order of a push
Progress = Callable[[int, int], None]


@dataclass
class TransferReport:
    """Result of push() or pull(): the files copied, or to copy in a dry run.

    Attributes:
        directory, url: both ends; the URL without credentials.
        pushed, pulled: names of the copied files.
        bytes: their bytes.
        same: number of files that were equal at both ends.
        missing: number of batches that the manifests list, but a pull did not find.
        remarks: files that were skipped, replaced or restored, with reasons; files compared by size and ends only;
            the number of other writers at the URL.

    Examples:
        >>> report = gym_trace.push("traces/cartpole", "s3://bucket/cartpole", dry_run=True)  # doctest: +SKIP
        >>> report.pushed, report.bytes  # doctest: +SKIP
    """

    directory: str
    url: str
    pushed: list[str] = field(default_factory=list)
    pulled: list[str] = field(default_factory=list)
    bytes: int = 0
    same: int = 0
    missing: int = 0
    remarks: list[str] = field(default_factory=list)


class _Copy(NamedTuple):
    """A file to copy. new: the destination has no file of this name."""

    name: str
    size: int
    new: bool


class Transfer:
    """Files to copy between a directory and a URL.

    Attributes:
        report: the files.

    writer: copy only its files; None: the whole trace.
    known: versions of batches at the URL that equal the local files; confirmed() adds to it. None: if the store has no
        checksums, compare sizes and ends instead of contents.
    card: makes the card of a dataset on the Hugging Face Hub that has none.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        url: str,
        way: Literal["push", "pull"],
        dry_run: bool,
        writer: str | None = None,
        known: dict[str, StoredObject] | None = None,
        card: Callable[[Path], str] | None = None,
    ):
        refuse_url(directory)
        if not is_url(url):
            raise InvalidOption(f"{url}: not a URL; write file:///PATH for a local directory")
        if way == "push":
            refuse_web_server(url)
        self._url, self._way, self._dry_run, self._writer = url_of(url), way, dry_run, writer
        self._known, self._card = known, card
        self._directory = Path(directory).absolute()
        if (target := local_path(url)) is not None and os.path.realpath(target) == os.path.realpath(directory):
            raise InvalidOption(f"{redacted(self._url)}: is the directory itself; pass another URL")
        self._reader = RangeReader(self._url)
        self.report = TransferReport(str(directory), self._reader.shown)
        self._storage = LocalStorage(self._directory)
        found = self._reader.entries()
        self._remote = {name: stored for name, stored in found.items() if self._is_wanted(name)}
        self._has_listed_manifests = listed_manifests.NAME in found
        self._objects = KnownObjects(self._directory, self._url) if known is None else None
        self._equal: dict[str, StoredObject] = {}  # objects that equal the local files of these names
        self._restored: set[str] = set()  # pulled files that parity has made better than the objects
        self._push: list[_Copy] = []
        self._pull: list[_Copy] = []
        self._compare()

    # -- what to copy -------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        self._outgoing_files = outgoing = self._outgoing() if self._way == "push" else {}
        local = self._local_files()
        if not (outgoing or self._remote):
            raise TraceNotFound(f"{self.report.url}: no trace there")
        same_size = []
        for name in {**outgoing, **self._remote}:
            stored, size = self._remote.get(name), local.get(name)
            if size is not None and self._objects is not None:
                self._objects.look_at(name)
            if stored is None:
                self._plan("push", _Copy(name, outgoing[name], True))
            elif size is None:
                self._plan("pull", _Copy(name, stored.size, True))
            elif stored.size == size and self._is_known(name, stored):
                self.report.same += 1
            elif kind_of(name) in _TEXT:
                self._compare_text(name, stored)
            elif stored.size == size:
                same_size.append(name)
            elif name.endswith(PART):  # its writer has continued
                self._plan("push" if size > stored.size else "pull", _Copy(name, max(size, stored.size), False))
            else:
                raise self._conflict_error(name)
        self._compare_contents(same_size)
        self._check_writers(local)
        self.report.pushed, self.report.pulled = (_sorted_names(copies) for copies in (self._push, self._pull))
        self.report.bytes = sum(copy.size for copy in (*self._push, *self._pull))

    def _check_writers(self, local: Mapping[str, int]) -> None:
        """Raise TraceExists if both sides hold a writer in different files, as before and after a compaction."""
        here, there = ({name for name in names if kind_of(name) == "manifest"} for names in (local, self._remote))
        if self._writer is not None or not (here - there and there - here):
            return
        if self._way == "push":
            others = count(len(there - here), "other writer")
            self.report.remarks.append(f"{self.report.url}: has {others}, and keeps them")
        sides = (self._storage, RemoteStorage(self._url, MemoryBlocks()))
        (ours, theirs) = ({reader.writer: reader for reader in index_of(open_trace(side)).readers} for side in sides)
        for writer in sorted(ours.keys() & theirs.keys()):
            files = [_file_writers(side[writer]) for side in (ours, theirs)]
            if all(files) and files[0] != files[1]:
                raise TraceExists(
                    f"{self.report.url}: holds the episodes of {writer} in other files than {self.report.directory}, "
                    "as before 'edit compact', and would have them twice; nothing copied; pass another URL or directory"
                )

    def _plan(self, way: str, copy: _Copy) -> None:
        if way == self._way:
            (self._push if way == "push" else self._pull).append(copy)

    def _local_files(self) -> dict[str, int]:
        found = sizes_of(self._storage) if self._directory.exists() else {}
        return {name: size for name, size in found.items() if self._is_wanted(name)}

    def _is_wanted(self, name: str) -> bool:
        return kind_of(name) is not None and self._writer in (None, writer_of(name))

    def _writers(self) -> list[WriterFiles]:
        return [files for files in find_writers(self._storage) if self._writer in (None, files.writer)]

    def _outgoing(self) -> dict[str, int]:
        """Return the local files to copy, with their sizes. Raises TraceNotFound."""
        writers = self._writers()
        if not writers:
            raise TraceNotFound(
                f"{self.report.directory}: no trace here; it has no *.manifest.jsonl and no *.gtb files"
            )
        if not self._dry_run and any(
            (files.has_ring or files.has_new_ring) and not files.is_alive() for files in writers
        ):
            self.report.remarks += take_in_rings(self._directory)[1]
            writers = self._writers()
        alive = {files.writer for files in writers if files.is_alive()}
        for writer in sorted(alive):
            self.report.remarks.append(f"{writer}: still recording; only its sealed batches are copied")
        # Before listing the batches, so that a manifest lists none that is not copied.
        manifests = {files.manifest: self._storage.size(files.manifest) for files in writers if files.manifest}
        found = {name: manifests.get(name, size) for name, size in self._local_files().items()}
        return {
            name: size
            for name, size in found.items()
            if not (writer_of(name) in alive and (name.endswith(PART) or kind_of(name) == "ring"))
        }

    def _compare_text(self, name: str, stored: StoredObject) -> None:
        offset, is_prefix = 0, True  # True if one file begins with the other
        with self._storage.open(name) as file:
            size = file.size
            for block in next(self._reader.whole({name: stored}))[1]:
                local = file.read(offset, len(block))
                offset += len(block)
                is_prefix = block.startswith(local)
                if offset >= size or not is_prefix:
                    break
        is_facts = kind_of(name) == "facts"
        if is_prefix and size == stored.size:
            self.report.same += 1
            self._equal[name] = stored
        elif is_facts or is_prefix:
            if is_facts or size > stored.size:
                self._plan("push", _Copy(name, size, False))
            if is_facts or stored.size > size:
                self._plan("pull", _Copy(name, stored.size, False))
        else:
            raise self._conflict_error(name)

    def _compare_contents(self, names: list[str]) -> None:
        """Compare files of the same size that are not known to be the same."""
        by_ends = [name for name in names if self._known is None and is_opaque(self._remote[name])]
        differing = self._with_other_ends(by_ends)
        self._equal |= {name: self._remote[name] for name in by_ends if name not in differing}
        if same := len(by_ends) - len(differing):
            self.report.same += same
            self.report.remarks.append(
                f"{same} files: compared by size, first and last bytes, as {self.report.url} lists no checksums; "
                f"'gym-trace check {self.report.url}' reads them"
            )
        wanted = {name: self._remote[name] for name in names if name not in by_ends or name in differing}
        for name, content in self._reader.whole(wanted):
            crc = self._crc_unless_same(name, content)
            if crc is None:
                self.report.same += 1
            else:
                self._replace_damaged(name, crc)

    def _with_other_ends(self, names: list[str]) -> list[str]:
        """Return the files whose first or last bytes differ; those of a batch contain its id."""
        wanted = []
        for name in names:
            stored = self._remote[name]
            ends = {0, max(0, stored.size - wire.HEADER_SIZE)}
            wanted += [Wanted(name, stored, at, min(wire.HEADER_SIZE, stored.size - at)) for at in sorted(ends)]
        differing = []
        for request, data in zip(wanted, self._reader.read(wanted)):
            with self._storage.open(request.name) as file:
                if file.read(request.offset, request.length) != data:
                    differing.append(request.name)
        return differing

    def _replace_damaged(self, name: str, remote_crc: int) -> None:
        """Replace the file whose manifest lists the checksum of the other one: it is damaged.

        remote_crc: checksum of the object. Raises TraceExists if neither is damaged, CorruptTrace if only the local
        file is, and this is not a pull.
        """
        remote, path = RemoteStorage(self._url, MemoryBlocks()), self._storage.path(name)
        with self._storage.open(name) as file:
            size, local_crc = size_and_crc(file)
        if local_crc == _listed_crcs(remote, [name]).get(name):
            damaged = f"{remote.path(name)}: damaged; "
            if self._way == "push":
                self._plan("push", _Copy(name, size, False))
                self.report.remarks.append(damaged + "the intact file here replaces it")
            else:
                self.report.remarks.append(damaged + "the file here is intact, and 'gym-trace push' puts it there")
        elif remote_crc == (listed := _listed_crcs(self._storage, [name]).get(name)):
            if self._way == "push":
                check_crc(local_crc, listed, path)
            self._plan("pull", _Copy(name, size, False))
            self.report.remarks.append(f"{path}: damaged; the intact file at the URL replaces it")
        else:
            raise self._conflict_error(name)

    def _is_known(self, name: str, stored: StoredObject) -> bool:
        """Return True if a checksum or an earlier comparison shows that the local file begins with an object."""
        if self._known is not None and self._known.get(name) == stored:
            return True
        if self._objects is not None and self._objects.has(name, stored):
            return True
        md5 = md5_of(stored)
        if md5 is None:
            return False
        digest = hashlib.md5(usedforsecurity=False)
        with self._storage.open(name) as file:
            for offset in range(0, stored.size, _READ_BYTES):
                digest.update(file.read(offset, min(_READ_BYTES, stored.size - offset)))
        return digest.hexdigest() == md5

    def _crc_unless_same(self, name: str, content: Iterable[bytes]) -> int | None:
        """Return None if the local file begins with the content of an object, otherwise its checksum."""
        offset, crc, is_same = 0, 0, True
        with self._storage.open(name) as file:
            for block in content:
                is_same = is_same and file.read(offset, len(block)) == block
                offset, crc = offset + len(block), crc32(block, crc)
        return None if is_same else crc

    def _conflict_error(self, name: str) -> TraceError:
        return TraceExists(
            f"{self.report.url}/{name}: differs from the file of this name in {self.report.directory}; nothing copied; "
            "pass another URL or directory"
        )

    # -- copying ------------------------------------------------------------------------------------------------------

    def run(self, workers: int = WORKERS, on_progress: Progress | None = None) -> TransferReport:
        if workers < 1:
            raise InvalidOption(f"workers={workers}: use 1 or more")
        if self._dry_run:
            return self.report
        done, lock = 0, Lock()

        def add(size: int) -> None:
            nonlocal done
            with lock:
                done += size
                if on_progress is not None:
                    on_progress(done, self.report.bytes)

        if self._pull:
            os.makedirs(self._directory, exist_ok=True)
        push = self._push
        if push and is_hub(self._url):
            commit_to_hub(self._url, self._directory, self.report.pushed, add, self._card)
            push = []
        remote = RemoteStorage(self._url, MemoryBlocks()) if self._pull else None
        crcs = _listed_crcs(self._storage, push), _listed_crcs(remote, self._pull)
        for kinds in (_DATA, _TEXT):
            calls = [partial(self._upload, copy, crcs[0], add) for copy in push if kind_of(copy.name) in kinds]
            _run_all(calls, workers)
        self._download(sorted(self.report.pulled, key=lambda name: kind_of(name) in _DATA), crcs[1], add)
        if self._way == "pull":
            self._report_missing()
        if self._objects is not None:
            listed = self._remote
            if self._push:  # the store has given these objects their tags
                listed = self._reader.entries()
                pushed = {copy.name: copy.size for copy in self._push}
                self._equal |= {name: it for name, it in listed.items() if pushed.get(name) == it.size}
            self._objects.add(self._equal.items())
            if self._way == "push" and (self._push or not self._has_listed_manifests):
                self._list_manifests_if_possible(listed)
        return self.report

    def _report_missing(self) -> None:
        """Report the batches that the directory lacks after a pull, though its manifests list them."""
        writers = {writer_of(name) for name in self._remote}
        for files in find_writers(self._storage):
            for numbers in files.missing() if files.writer in writers else ():
                self.report.missing += len(numbers)
                first, last = (batch_name(files.writer, number) for number in (numbers.start, numbers.stop - 1))
                shown = first if first == last else f"{first} to {last}"
                self.report.remarks.append(
                    f"{self.report.url}/{shown}: missing there; push it again from where it was recorded"
                )

    def _list_manifests_if_possible(self, listed: Mapping[str, StoredObject]) -> None:
        """See _list_manifests(). The file only saves requests, so an error is a remark."""
        try:
            self._list_manifests(listed)
        except (FileNotFoundError, Overwritten):  # another push writes it
            return
        except (RemoteError, TraceExists) as error:
            self.report.remarks.append(
                f"{self.report.url}: opening takes more requests, because {listed_manifests.NAME} is not up to date; "
                f"all files of the trace are copied ({error})"
            )

    def _list_manifests(self, listed: Mapping[str, StoredObject]) -> None:
        """Write the file with the manifests of all writers at the URL, if they are many. listed: objects there."""
        objects = {name: it for name, it in listed.items() if kind_of(name) == "manifest" and it.version}
        is_local_or_hub = local_path(self._url) is not None or is_hub(self._url)
        if is_local_or_hub or len(objects) < listed_manifests.LEAST_WRITERS:
            return
        found = {}
        if (index := listed.get(listed_manifests.NAME)) is not None and index.size <= listed_manifests.MOST_BYTES:
            raw = next(self._reader.read([Wanted(listed_manifests.NAME, index, 0, index.size)]))
            for name, manifest in listed_manifests.unpacked_manifests(raw).items():
                if name in objects and manifest.version == objects[name].version:
                    found[name] = manifest
        for name in objects.keys() & self._outgoing_files.keys():
            with self._storage.open(name) as file:
                if file.size >= objects[name].size:
                    found[name] = ListedManifest(objects[name].version, file.read(0, objects[name].size))
        others = [Wanted(name, it, 0, it.size) for name, it in objects.items() if name not in found]
        if sum(request.length for request in others) <= listed_manifests.MOST_BYTES:
            for request, content in zip(others, self._reader.read(others)):
                found[request.name] = ListedManifest(request.stored.version, content)
        upload(self._reader, listed_manifests.NAME, listed_manifests.packed_manifests(found), new=False)

    def confirmed(self) -> dict[str, int]:
        """Return the local files that the URL has after a push, with their sizes. Lists the URL again."""
        listed, pushed = self._reader.entries(), set(self.report.pushed)
        confirmed, others = dict[str, StoredObject](), dict[str, StoredObject]()
        for name, size in self._outgoing_files.items():
            stored = listed.get(name)
            if stored is not None and stored.size == size:
                is_compared = stored == self._remote.get(name) if name not in pushed else md5_of(stored) is None
                (confirmed if is_compared or self._is_known(name, stored) else others)[name] = stored
        for name, content in self._reader.whole(others):
            if self._crc_unless_same(name, content) is None:
                confirmed[name] = others[name]
        if self._known is not None:
            self._known |= {
                name: stored
                for name, stored in confirmed.items()
                if kind_of(name) not in _TEXT and not name.endswith(PART)
            }
        return {name: stored.size for name, stored in confirmed.items()}

    def _upload(self, copy: _Copy, crcs: Mapping[str, int], add: OnBytes) -> None:
        content: Path | bytes = self._directory / copy.name
        with self._storage.open(copy.name) as file:
            if copy.name in crcs:
                check_crc(size_and_crc(file)[1], crcs[copy.name], str(content))
            if kind_of(copy.name) in _TEXT:
                content = file.read(0, copy.size)
        upload(self._reader, copy.name, content, copy.new)
        add(copy.size)

    def _download(self, names: Iterable[str], crcs: Mapping[str, int], add: OnBytes) -> None:
        for name, content in self._reader.whole({name: self._remote[name] for name in names}):
            crc = crcs.get(name)
            restore = partial(self._restore, name, crc)
            download(content, f"{self.report.url}/{name}", self._directory / name, crc, restore, add)
            if self._objects is not None and name not in self._restored:
                self._objects.look_at(name)
                self._equal[name] = self._remote[name]

    def _restore(self, name: str, crc: int | None, staged: Path) -> bool:
        """Restore a fetched batch by its parity; return False if its checksum is then not the one in the manifest."""
        healed = HealReport()
        with suppress(CorruptTrace, UnsupportedTrace):
            heal_batch(LocalStorage(staged.parent), staged.name, crc, healed)
        if healed.hopeless or not healed.healed:
            return False
        self._restored.add(name)
        self.report.remarks.append(f"{self.report.url}/{name}: damaged; the copy here is restored by parity")
        return True


def _sorted_names(copies: Iterable[_Copy]) -> list[str]:
    order = {kind: position for position, kind in enumerate((*_DATA, *_TEXT))}
    return [copy.name for copy in sorted(copies, key=lambda copy: (order[str(kind_of(copy.name))], copy.name))]


def _file_writers(reader: WriterReader) -> set[str | None]:
    """Return the writers that name the batches of a writer, also of those that an interrupted pull has not copied."""
    names = [batch.name for batch in reader.batches] + [os.path.basename(damage.path) for damage in reader.damage]
    return {writer_of(name) for name in names if kind_of(name) == "batch"}


def _listed_crcs(storage: ReadStorage | None, copies: Collection[object]) -> dict[str, int]:
    """Return the checksums that the manifests of a trace list, by file."""
    if storage is None or not copies:
        return {}
    found: dict[str, int] = {}
    for files in find_writers(storage):
        for name, entry in files.listed()[0].items():
            if isinstance(crc := entry.get("crc32"), int):
                found[name] = crc
    return found


def _run_all(calls: Sequence[Callable[[], None]], workers: int) -> None:
    """Make calls in parallel; start no more after an error."""
    with ThreadPoolExecutor(workers, "gym-trace-copy") as pool:
        try:
            futures = [pool.submit(call) for call in calls]
        except RuntimeError:  # the interpreter is exiting, and starts no threads
            for call in calls:
                call()
            return
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
