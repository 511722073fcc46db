"""Recorders: one writer of a trace, with the files, the writer thread, errors, exits and forks."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from multiprocessing.util import register_after_fork
from typing import Any, Protocol, TypeVar

from gym_trace.data.layout import Leaf
from gym_trace.data.packing import is_readable, pack, pack_lenient
from gym_trace.data.tensors import plain_array
from gym_trace.data.values import unstored
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import RecordingError, UnstorableValue, raise_if_of_signal, warn
from gym_trace.format import wire
from gym_trace.format.batch_files import BatchFiles
from gym_trace.format.directory import new_writer_id
from gym_trace.format.manifest import SUFFIX
from gym_trace.format.ring.chunk_builder import ChunkWriter
from gym_trace.format.ring.memory import NOT_BEGUN, Ring
from gym_trace.format.ring.segment import snapshot
from gym_trace.recording import process_safety as forks
from gym_trace.recording.background import SlabWriter
from gym_trace.recording.flush_clock import FlushClock
from gym_trace.recording.newest import NewestBatches
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.reset_record import Start, packed_start, stored_seed
from gym_trace.storage.interrupts import held_back
from gym_trace.storage.protocol import Storage

_UNMAPPED_SECONDS = 1.0
_MOST_ENCODERS = 8
_log = logging.getLogger("gym_trace")
Result = TypeVar("Result")


class State(Enum):
    """The state of the episodes of a recorder."""

    IDLE = "no episode is open"
    OPEN = "a run of steps is open"
    PAUSED = "the episode is open, between two runs of steps"
    WAITING = "a step or reset has begun, and its result is not recorded yet"
    ENDED = "the episode has ended; further steps are another part of it"
    TAKEN_OVER = "the original of this copy records the open episode"


class Phase(Enum):
    """The life of a writer. If writing fails, it records no more."""

    RECORDING = "steps are recorded"
    CLOSING = "close() was called; it can be called again after an interrupt"
    CLOSED = "the files are closed"


_RECORDING, _CLOSED = Phase.RECORDING, Phase.CLOSED  # attributes of an Enum are slow before Python 3.12


def encoders() -> int:
    """Return the number of threads that encode a slab: half of the cores, as the environment needs the others."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_ENCODERS, cores // 2))


class Slabs(Protocol):
    """Fills the slabs of a recorder, and decodes them."""

    slab: Any  # the slab being filled: RowSlab or LaneSlab
    chunk_bytes: int  # see ChunkWriter
    largest_value: int  # bytes of the largest MessagePack value; a slab of them must fit a column

    def reset(self) -> None:
        """Set the state of a new writer."""

    def new_ring(self, slab_bytes: int) -> Ring:
        """Create a ring whose slabs have at least slab_bytes each. Raises OSError."""

    def submit(self) -> None:
        """Submit the content of the slab for writing."""

    def switch_slab(self) -> None:
        """Submit the content of the slab and continue in the next one. Safe to repeat after a Ctrl-C."""

    def detach(self) -> None:
        """In a forked child: stop writing to the slabs, which the parent owns; only a step in progress may go on."""


class Episodes(Protocol):
    """Records the episodes of a recorder in its slabs."""

    @property
    def has_steps(self) -> bool:
        """True if a step may have been recorded."""

    @property
    def is_open(self) -> bool:
        """True if an episode may be open, of this recorder or of the one that it is a copy of."""

    def reset(self) -> None:
        """Set the state of a new writer."""

    def end(self, outcome: Outcome) -> None:
        """End the open episodes."""

    def take_over(self) -> None:
        """Become the copy of a recorder with an open episode: record nothing until the next reset."""


class Recorder:
    """One writer of a trace, used from one thread: its files, the writer thread, errors, exits and forks.

    Args:
        summary: returns the last entry of the manifest.

    Attributes:
        slabs: fills slabs and decodes them; attach() sets slabs and episodes.
        episodes: records episodes in the slabs.
        out: the thread that writes slabs.
        ring: the memory of the slabs, once it is open.
        clock: the time at which the slab is due.
        phase: see Phase.
        next_episode: the id that the next episode will have.
        needs_attention: True if failures and complaints must be checked before the next step.
        thread: the thread that records.
        is_in_use: True while a method that uses the recorder is being executed.
        catch_up: records the steps whose rows are on their way from a device.
    """

    slabs: Slabs
    episodes: Episodes

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        options: RecordingOptions,
        summary: Callable[[], dict[str, Any]],
    ):
        self._storage, self._schema, self._options, self._summary = storage, schema, options, summary
        self._owner: weakref.ref[object] | None = None
        self.phase = Phase.RECORDING
        self.catch_up: Callable[[], None] = _nothing

    def attach(self, slabs: Slabs, episodes: Episodes, lazy: bool) -> None:
        """Begin to record with these collaborators. lazy: True to create no files before the first reset."""
        self.slabs, self.episodes = slabs, episodes
        self._reset()
        if not lazy:
            self._chunks.writer = self._open_writer()
        forks.watch(self)

    def begin_again(self) -> None:
        """Call before a reset, or a step of lanes: in a forked child, record from now on."""
        if self.out.is_abandoned:
            self._reset()

    def _reset(self) -> None:
        """Set the state of a new writer."""
        self._complaints: dict[str, str] = {}  # complaints by column
        self._complained: set[str] = set()  # columns with an issued warning, and "failure" once it is reported
        self._chunks = ChunkWriter(self._open_writer, self.slabs.chunk_bytes)
        self.out = SlabWriter(f"gym-trace {self.writer_id}", self._chunks, self.notice)
        self.ring: Ring | None = None
        self.clock = FlushClock()
        self.next_episode = 0
        self.needs_attention = self.is_in_use = False
        self._pid = os.getpid()
        self.thread = threading.get_ident()
        self.slabs.reset()
        self.episodes.reset()

    def notice(self) -> None:
        """Ask the caller's thread to check for failures and complaints. Any thread may call it."""
        self.needs_attention = True
        self.slabs.slab.disable_fast_path()

    def _open_writer(self) -> BatchFiles:
        self._storage.make()
        options = self._options
        arguments, threads = (self._storage, self._schema, options.level, options.fsync), encoders() - 1
        if options.keep_bytes is None:
            files = BatchFiles(*arguments, threads=threads)
        else:
            files = NewestBatches(*arguments, options.keep_bytes, options.keep_if, threads)
        files.reserve()
        return files

    def open_ring(self, slab_bytes: int = 0) -> Ring | None:
        """Return the ring, created on first use; None if that fails, which ends the recording."""
        if self.ring is None and not self.failed:
            self.make_ring(slab_bytes)
        return self.ring

    def make_ring(self, slab_bytes: int) -> None:
        """Create the ring, or another one in its place, and open the writer; report errors at the next step."""
        with held_back():  # an interrupt would leave half-made files
            if self.failed:  # closed or forked by a signal handler before
                return
            try:
                if self._chunks.writer is None:
                    self._chunks.writer = self._open_writer()
                ring, self.ring = self.ring, self._new_ring(slab_bytes)
                if ring is not None:
                    self.ring.sequence = ring.sequence
                    ring.abandon()
            except Exception as error:  # any error: reported at the next step
                self.out.fail(error)

    def new_ring(
        self,
        kind: int,
        layout: dict[str, Any],
        slabs: int,
        slab_bytes: int,
        begun: tuple[bytes, bytes] = NOT_BEGUN,
    ) -> Ring:
        """Create a ring in the trace; see Ring. Raises OSError."""
        return Ring(self._storage, self.writer_id, kind, layout, slabs, slab_bytes, begun)

    def _new_ring(self, slab_bytes: int) -> Ring:
        """Create a ring; warn once if it does not survive the process."""
        ring = self.slabs.new_ring(slab_bytes)
        if not (ring.mapped or "unmapped" in self._complained):
            self._complained.add("unmapped")
            why = "the file system has no safe memory-mapped files"
            if ring.shortage is not None:
                why = f"no file descriptors left for the ring; retrying every second ({ring.shortage.strerror})"
            _log.warning("%s: a kill can lose the last second: %s", self._storage.root, why)
        return ring

    @property
    def flush_seconds(self) -> float:
        """Interval of flushes; short if the ring does not survive the process."""
        mapped = self.ring is None or self.ring.mapped
        return self._options.flush_seconds if mapped else min(_UNMAPPED_SECONDS, self._options.flush_seconds)

    @property
    def writer_id(self) -> str:
        """The id in the names of the writer's files."""
        return str(self._schema["writer"])

    @property
    def manifest(self) -> str:
        """The path of the writer's manifest."""
        return self._storage.path(self.writer_id + SUFFIX)

    @property
    def failed(self) -> bool:
        """True if recording has ended: writing has failed, or the files are closed. Also before begin_again()."""
        return self.out.failure is not None or self.phase is _CLOSED

    @property
    def is_closed(self) -> bool:
        """True if close() was called."""
        return self.phase is not _RECORDING

    @property
    def has_steps(self) -> bool:
        """True if a step may have been recorded."""
        return self.episodes.has_steps

    # -- flushing, closing, errors ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all steps so far to a batch and wait for it. Raises RecordingError.

        If called from another thread, or from a signal handler inside the recorder, the next step does it instead.
        """
        if self._pid != os.getpid() or self.phase is Phase.CLOSED:
            return
        if self.is_in_use or getattr(self.slabs.slab, "is_in_use", False) or self._is_in_another_thread():
            self.clock.request()
            self.notice()
            return
        if self.ring is not None and not self.failed:
            self.is_in_use = True
            try:
                self.catch_up()
                self.slabs.switch_slab()
                self.out.wait()
            finally:
                self.is_in_use = False
        self.attend()
        self.report()

    def _is_in_another_thread(self) -> bool:
        """Return True if another thread, which is alive, records the open episode."""
        own = self.thread
        return threading.get_ident() != own and any(own == thread.ident for thread in threading.enumerate())

    def secure(self) -> None:
        """Make all steps so far survive this process; with a mapped ring they already do. Raises like flush()."""
        if self.ring is not None and not self.ring.mapped:
            self.flush()

    def close(self) -> None:
        """Save everything, seal the batch, end the thread. Raises RecordingError if steps could not be saved."""
        if self.phase is Phase.CLOSED or self._pid != os.getpid():
            return
        self.is_in_use = True  # flush() in a signal handler would record a step twice
        try:
            self.catch_up()
        finally:
            self.is_in_use = False
        self.phase = Phase.CLOSING
        if not self.out.is_finished:
            self.episodes.end(Outcome.CLOSED)
            if self.ring is not None and not self.failed:
                self.slabs.submit()
            self.out.close(self._summary)
        if self.ring is not None:
            if self.out.is_complete:
                try:
                    self.ring.remove()
                except OSError as error:
                    raise_if_of_signal(error)
                    self.complain("ring", f"{error}; all its steps are saved, delete the file")
            else:
                self.ring.abandon()
        self.phase = Phase.CLOSED
        self.slabs.reset()  # the memory of the ring is free now, or once arrays in it are
        forks.forget(self)
        self._storage.settle()
        self.attend()
        self.report()

    def save_at_exit(self, owner: object) -> None:
        """Close the recorder when owner is garbage-collected, or at exit."""
        self._owner = weakref.ref(owner)
        self._save_when_owner_goes()

    def _save_when_owner_goes(self) -> None:
        owner = self._owner and self._owner()
        if owner is not None:
            forks.close_with(owner, self)

    def report(self) -> None:
        """Raise the failure, or warn of it, once."""
        failure = self.out.failure
        if failure is None or "failure" in self._complained:
            return
        self._complained.add("failure")
        is_kept = self.ring is None or self.ring.mapped or self.out.is_complete
        rest = (
            "earlier steps stay readable" if is_kept else "steps since the last write, which were in memory, are lost"
        )
        message = (
            f"{self._storage.root}: recording has stopped: {failure}; {rest}, the environment continues unrecorded"
        )
        if self._options.on_error == "raise":
            raise RecordingError(message) from failure
        warn(message, RuntimeWarning)

    def warn_if_unrecorded(self) -> None:
        """Call before a reset: report a failure to write, or warn that close() was called."""
        self.report()
        if self.is_closed:
            self._warn_once("reset", "the recorder is closed; this episode is not recorded")

    def prepare(self) -> None:
        """Call before a recorded reset: open the ring, and report errors."""
        if self.ring is None and not self.is_closed:
            self.open_ring()
            self.report()

    def complain(self, column: str, complaint: str) -> None:
        """Warn at the next step, once per column."""
        self._complaints.setdefault(column, complaint)
        if column not in self._complained:
            self.notice()

    def start(
        self,
        lane: int,
        seed: Any,
        options: bytes | None,
        rng_state: Any,
        reset_info: bytes | None,
        utc: int,
        monotonic: int,
    ) -> Start:
        """Return the start of the next episode. options: packed. rng_state: state of the generator before the reset."""
        reset_record, warnings_found = packed_start(seed, options, rng_state, reset_info)
        if warnings_found:
            self.complain("reset", warnings_found[0])
        return self.next_episode, lane, stored_seed(seed), reset_record, utc, monotonic

    def packed_info(self, info: Any, keys: Sequence[str] | None) -> bytes:
        """Return an info as MessagePack. keys: keys to keep, if it is a map; None for all."""
        if keys is not None and isinstance(info, Mapping):
            try:
                info = {key: info[key] for key in keys if key in info}
            except Exception as error:  # a foreign mapping may raise anything
                raise_if_of_signal(error)
        return self.packed("infos", info)

    def packed(self, column: str, value: Any) -> bytes:
        """Return a value of a column as MessagePack. Values that cannot be stored become their repr, with a warning."""
        packed, warnings_found = pack_lenient(value)
        if len(packed) > self.slabs.largest_value or not is_readable(packed):
            warnings_found = [f"a value of {len(packed)} bytes is too large to be stored; its repr is kept"]
            packed = pack(unstored(value))
        if warnings_found:
            self.complain(column, warnings_found[0])
        return packed

    def plain(self, column: str, value: Any) -> Any:
        """Convert like plain_array(), and issue its warnings."""
        warnings_found: list[str] = []
        value = plain_array(value, warnings_found)
        if warnings_found:
            self.complain(column, warnings_found[0])
        return value

    def snapshot(self, column: str, value: Any) -> Any:
        """Copy like segment.snapshot(), with a warning for values that cannot be stored; never raises."""
        return snapshot(value, lambda other: self.packed(column, other))

    def warn_of_copy(self) -> None:
        """Warn, once, that the steps of a copy are not recorded yet."""
        complaint = "a copied or forked recorder records from its next episode on; call reset() or begin()"
        self._warn_once("copy", complaint)

    def attend(self) -> None:
        """Issue the collected warnings in the caller's thread."""
        self.needs_attention = False
        for column, complaint in list(self._complaints.items()):
            self._warn_once(column, complaint)

    def _warn_once(self, column: str, complaint: str) -> None:
        if column not in self._complained:
            self._complained.add(column)
            warn(f"{column}: {complaint}")

    # -- forks ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Call before a fork: finish writing and end the thread."""
        self.out.pause()

    def restart_in_child(self) -> None:
        """Call in a forked child: become a new writer, because the parent owns the files and the slabs."""
        is_open = self.episodes.is_open
        self.out.abandon()
        self._complained.add("failure")
        self.slabs.detach()
        self.episodes.reset()
        if self.ring is not None:
            self.ring.abandon()  # a step that the fork has interrupted goes on in private memory
        self.ring = None
        self._schema = {**self._schema, "writer": new_writer_id(), "pid": os.getpid(), "forked_from": self.writer_id}
        self._pid, self.is_in_use = os.getpid(), False
        if is_open:
            self.episodes.take_over()
        self._save_when_owner_goes()
        register_after_fork(self, Recorder._save_when_owner_goes)  # multiprocessing clears the finalizers in a child


def _nothing() -> None:
    pass


def using_recorder(method: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a method that uses .recorder: if a signal handler calls flush() within it, the next step flushes."""

    @functools.wraps(method)
    def wrapped(self: Any, *arguments: Any) -> Result:
        recorder = self.recorder
        recorder.is_in_use = True
        try:
            return method(self, *arguments)
        finally:
            recorder.is_in_use = False

    return wrapped


def largest_row(leaves: Iterable[Leaf]) -> int:
    """Return the bytes of the largest row. Raises UnstorableValue if it is too large to be stored."""
    largest = max(leaves, key=lambda leaf: leaf.row_size, default=None)
    if largest is not None and largest.row_size > wire.MAX_COLUMN // 4:
        name = "/".join(map(str, largest.path))
        raise UnstorableValue(f"{name}: {largest.row_size} bytes per row; the limit is {wire.MAX_COLUMN // 4}")
    return 0 if largest is None else largest.row_size
