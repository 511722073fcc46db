"""The base class of recorders: files, the writer thread, errors, exits, forks."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import register_after_fork
from typing import Any

from gym_trace.errors import RecordingError, raise_if_of_signal
from gym_trace.format import wire
from gym_trace.format.directory import new_writer_id
from gym_trace.format.manifest import SUFFIX
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.packing import is_readable, pack, pack_lenient
from gym_trace.model.tensors import plain_array
from gym_trace.model.values import unstored
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording import process_safety as forks
from gym_trace.recording.background import SlabWriter
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.reset_record import Start, packed_start, stored_seed
from gym_trace.ring.chunk_builder import ChunkWriter
from gym_trace.ring.memory import Ring
from gym_trace.ring.segment import snapshot
from gym_trace.storage.interrupts import held_back
from gym_trace.storage.protocol import Storage

_UNMAPPED_SECONDS = 1.0
_UNMAPPED = "no file can be mapped into memory whose pages are sure to outlive the process"
_SHORTAGE = "no file descriptors are left for the ring; it is tried again each second"
_log = logging.getLogger("gym_trace")


class Recorder(ABC):
    """One writer of a trace, fed from one thread. Subclasses define what is in a slab, and how it is decoded."""

    largest_value = wire.MAX_VALUES // 4  # bytes of one MessagePack value, so that a slab of them can be stored

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        chunk_bytes: int,
        options: RecordingOptions,
        summary: Callable[[], dict[str, Any]],
        lazy: bool,
    ):
        self._storage = storage
        self._schema = schema
        self._chunk_bytes = chunk_bytes
        self._options = options
        self._summary = summary
        self._owner: weakref.ref[object] | None = None
        self._closed = self._sealed = False
        self._reset_state()
        if not lazy:
            self._chunks.writer = self._open_writer()
        forks.watch(self)

    # -- what subclasses provide --------------------------------------------------------------------------------------

    @abstractmethod
    def _new_ring(self, slab_bytes: int) -> Ring:
        """A ring for the recorder's slabs, of at least so many bytes each. Raises OSError."""

    @abstractmethod
    def _submit(self) -> None:
        """Has what the slab holds written."""

    @abstractmethod
    def _turn(self) -> None:
        """Has what the slab holds written, and goes on in the next one. Ctrl-C may interrupt it; it can be repeated."""

    @abstractmethod
    def _position(self) -> Any:
        """What changes with each step, in memory of this process alone."""

    @abstractmethod
    def _let_go(self) -> None:
        """In a forked child: sees to it that nothing more is put into the slabs, which are the parent's."""

    @abstractmethod
    def end(self, outcome: Outcome) -> None:
        """Ends the open episodes."""

    @property
    @abstractmethod
    def has_steps(self) -> bool:
        """Whether any step was recorded, or may have been."""

    @abstractmethod
    def open_run(self) -> Any:
        """What another recorder needs to continue the open episodes, or None."""

    @abstractmethod
    def continue_run(self, run: Any) -> None:
        """Continues the episodes of another recorder; writes nothing before a step comes."""

    # -----------------------------------------------------------------------------------------------------------------

    def _reset_state(self) -> None:
        """Sets the state of a writer that has written nothing yet."""
        self._complaints: dict[str, str] = {}  # by column
        self._at_fork: tuple[Any, Any] = (None, None)  # position, and what to continue there
        self._chunks = ChunkWriter(self._open_writer, self._chunk_bytes)
        self._out = SlabWriter(f"gym-trace {self.writer_id}", self._chunks, self._notice)
        self._ring: Ring | None = None
        self._episodes = 0
        self._reported = self._said_unmapped = False
        self._complained: set[str] = set()
        self.limit = 1  # 0: the caller's thread is to look at failures and complaints before the next step
        self._is_due = False  # the slab is to be turned before the next step
        self._pid = os.getpid()
        self._thread = threading.get_ident()

    def _notice(self) -> None:
        """Has the caller's thread look at failures and complaints soon. Any thread may call it."""
        self.limit = 0

    def _open_writer(self) -> TraceWriter:
        self._storage.make()
        return TraceWriter(self._storage, self._schema, self._options.level, self._options.fsync)

    def _open_ring(self, slab_bytes: int = 0) -> Ring | None:
        """The ring, made if there is none yet; None if that fails, which ends the recording."""
        if self._ring is None and not self.failed:
            with held_back():  # files that are half made could not be made again
                self._make_ring(slab_bytes)
        return self._ring

    def _make_ring(self, slab_bytes: int) -> None:
        try:
            if self._chunks.writer is None:
                self._chunks.writer = self._open_writer()
            self._ring = self._ring_of(slab_bytes)
        except Exception as error:  # of any kind: reported at the next step
            self._out.fail(error)

    def _ring_of(self, slab_bytes: int) -> Ring:
        """As _new_ring(), with a warning, once, where the ring does not outlive the process."""
        ring = self._new_ring(slab_bytes)
        if not (ring.mapped or self._said_unmapped):
            self._said_unmapped = True
            why = _UNMAPPED if ring.shortage is None else f"{_SHORTAGE} ({ring.shortage.strerror})"
            _log.warning("%s: a kill can lose the last second here: %s", self._storage.root, why)
        return ring

    @property
    def flush_seconds(self) -> float:
        """Within which what is recorded goes into a batch: soon, where nothing else survives the process."""
        mapped = self._ring is None or self._ring.mapped
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
        """Whether nothing is recorded any more: writing has failed, or the files are closed."""
        return self._sealed or self._out.failure is not None

    @property
    def next_episode(self) -> int:
        """The id that the next episode will have."""
        return self._episodes

    # -- flushing, closing, errors ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Returns when all steps so far are in a batch. Raises RecordingError.

        From another thread, or a signal handler that has interrupted the recorder, it only has the next step do that.
        """
        if self._pid != os.getpid() or self._sealed:
            return
        if self._is_busy():
            self._is_due = True
            self._notice()
            return
        if self._ring is not None and not self.failed:
            self._turn()
            self._out.wait()
        self._complain()
        self.report()

    def _is_busy(self) -> bool:
        """Whether the caller may have interrupted the recorder: it is another thread, or in a signal handler."""
        if threading.get_ident() != self._thread and any(self._thread == t.ident for t in threading.enumerate()):
            return True
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in _INNER and frame.f_locals.get("self") in (self, getattr(self, "slab", self)):
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def secure(self) -> None:
        """Returns when all steps so far survive this process: at once, where memory is a file. As flush()."""
        if self._ring is not None and not self._ring.mapped:
            self.flush()

    def close(self) -> None:
        """Saves everything, seals the batch, ends the thread. Raises RecordingError if something could not be saved."""
        if self._sealed or self._pid != os.getpid():
            return
        self._closed = True
        if not self._out.is_finished:
            self.end(Outcome.CLOSED)
            if self._ring is not None and not self.failed:
                self._submit()
            self._out.close(self._summary)
        if self._ring is not None:
            if self._out.is_complete:
                self._remove(self._ring)
            else:
                self._ring.abandon()
        self._sealed = True  # last: after a Ctrl-C, close() can be called again
        forks.forget(self)
        self._complain()
        self.report()

    def _remove(self, ring: Ring) -> None:
        try:
            ring.remove()
        except OSError as error:
            raise_if_of_signal(error)
            self.complain("ring", f"{error}; all that was in it is saved, remove the file yourself")

    def save_at_exit(self, owner: object) -> None:
        """Closes the recorder when owner is garbage-collected, or at exit, whichever comes first."""
        self._owner = weakref.ref(owner)
        self._save_when_owner_goes()

    def _save_when_owner_goes(self) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            forks.close_with(owner, self)

    def report(self) -> None:
        """Raises the failure, or warns of it, the first time."""
        failure = self._out.failure
        if failure is None or self._reported:
            return
        self._reported = True
        message = (
            f"recording to {self._storage.root} has stopped: {failure}; what was written before can be read, "
            "the environment can go on without being recorded"
        )
        if self._options.on_error == "raise":
            raise RecordingError(message) from failure
        warnings.warn(message, RuntimeWarning, stacklevel=4)

    def warn_if_unrecorded(self) -> None:
        """To be called before a reset: reports a failure to write, or that close() was called."""
        self.report()
        if self._closed:
            self._warn_once("reset", "the recorder is closed: this episode is not recorded")

    def prepare(self) -> None:
        """To be called before a reset that is recorded: reports that there is no room for a ring."""
        if not self._closed:
            self._open_ring()
            self.report()

    def complain(self, column: str, complaint: str) -> None:
        """Gives a warning at the next step, once for each column."""
        self._complaints.setdefault(column, complaint)
        if column not in self._complained:
            self._notice()

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
        """The start of the next episode. options: packed. rng_state: of the generator before the reset."""
        kept, remarks = packed_start(seed, options, rng_state, reset_info)
        if remarks:
            self.complain("reset", remarks[0])
        return Start(self._episodes, lane, stored_seed(seed), kept, utc, monotonic)

    def packed_info(self, info: Any, keys: Sequence[str] | None) -> bytes:
        """An info as MessagePack. keys: those to keep, if it is a map; None for all."""
        if keys is not None and isinstance(info, Mapping):
            try:
                info = {key: info[key] for key in keys if key in info}
            except Exception as error:  # a foreign mapping may raise anything
                raise_if_of_signal(error)
        return self.packed("infos", info)

    def packed(self, column: str, value: Any) -> bytes:
        """A value of a column as MessagePack. What cannot be stored is replaced by its repr, with a warning."""
        packed, remarks = pack_lenient(value)
        if len(packed) > self.largest_value or not is_readable(packed):
            remarks = [f"a value of {len(packed)} bytes is too large to be stored; its repr is kept"]
            packed = pack(unstored(value))
        if remarks:
            self.complain(column, remarks[0])
        return packed

    def plain(self, column: str, value: Any) -> Any:
        """As plain_array(), with its remarks as warnings."""
        remarks: list[str] = []
        value = plain_array(value, remarks)
        if remarks:
            self.complain(column, remarks[0])
        return value

    def snapshot(self, column: str, value: Any) -> Any:
        """As segment.snapshot(), with a warning for what cannot be stored; never raises."""
        return snapshot(value, lambda other: self.packed(column, other))

    def _complain(self) -> None:
        """Gives the warnings that the encoder has collected, in the caller's thread."""
        for column, complaint in list(self._complaints.items()):
            self._warn_once(column, complaint)

    def _warn_once(self, column: str, complaint: str) -> None:
        if column not in self._complained:
            self._complained.add(column)
            warnings.warn(f"{column}: {complaint}", UserWarning, stacklevel=5)

    # -- forks ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Before a fork: waits for what is being written, ends the thread, and copies what a child begins with.

        The slabs are the parent's, who may be using them again when the child gets to run.
        """
        self._out.pause()
        self._at_fork = self._position(), self.open_run()

    def restart_in_child(self) -> None:
        """After a fork, in the child: begins a new writer, which continues the open episodes."""
        self._out.abandon()
        position, run = self._at_fork
        if position != self._position():  # another thread has taken a step since
            run = None
        self._let_go()
        if self._ring is not None:
            self._ring.abandon()
        self._schema = {**self._schema, "writer": new_writer_id(), "pid": os.getpid(), "forked_from": self.writer_id}
        self._reset_state()
        self.continue_run(run)
        self._save_when_owner_goes()
        register_after_fork(self, Recorder._save_when_owner_goes)  # multiprocessing clears the finalizers in a child


_INNER: set[str] = {__file__}  # the files of what must not be interrupted to turn a slab


def not_to_be_interrupted(file: str) -> None:
    """Has flush() leave a recorder alone while code of that file is at work on it."""
    _INNER.add(file)
