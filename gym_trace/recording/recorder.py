"""The base class of recorders: files, the writer thread, errors, exits, forks."""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import register_after_fork
from typing import Any

from gym_trace.errors import RecordingError
from gym_trace.format import wire
from gym_trace.format.directory import new_writer_id
from gym_trace.format.trace_writer import TraceWriter
from gym_trace.model.packing import is_readable, pack, pack_lenient
from gym_trace.model.tensors import plain_array
from gym_trace.model.values import unstored
from gym_trace.model.vocabulary import Outcome
from gym_trace.recording import process_safety as forks
from gym_trace.recording.background import BlockEncoder, BlockWriter
from gym_trace.recording.chunk_builder import ChunkWriter
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.reset_record import Start, packed_start, stored_seed
from gym_trace.recording.segment import snapshot
from gym_trace.storage.protocol import Storage


class Recorder(ABC):
    """One writer of a trace, fed from one thread. Subclasses define what a block is, and how it is encoded."""

    limit: int  # set to 0 when the caller's thread should look at failures and complaints
    block: Any  # the block that is being filled
    largest_value = wire.MAX_VALUES // 4  # bytes of one MessagePack value, so that a block of them can be stored

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
    def _new_encoder(self) -> BlockEncoder:
        """A new encoder of the recorder's blocks."""

    @abstractmethod
    def _new_block(self) -> Any:
        """The first block."""

    @abstractmethod
    def end(self, outcome: Outcome) -> None:
        """Ends the open episodes."""

    @abstractmethod
    def open_run(self) -> Any:
        """What another recorder needs to continue the open episodes, or None."""

    @abstractmethod
    def continue_run(self, run: Any) -> None:
        """Continues the episodes of another recorder; writes nothing before a step comes."""

    # -----------------------------------------------------------------------------------------------------------------

    def _reset_state(self) -> None:
        """Sets the state of a writer that has written nothing yet."""
        self._encoder = self._new_encoder()
        self.block = self._new_block()
        self._chunks = ChunkWriter(self._open_writer, self._chunk_bytes)
        name = f"gym-trace {self.writer_id}"
        self._out = BlockWriter(
            name,
            self._encoder,
            self._encoder.begun(self.block),
            self._chunks,
            lambda: self.block,
            self._notice,
            self._options.flush_seconds,
        )
        self._episodes = 0
        self._reported = False
        self._complained: set[str] = set()
        self._pid = os.getpid()

    def _notice(self) -> None:
        if self.failed or any(column not in self._complained for column in list(self._encoder.complaints)):
            self.limit = 0

    def _open_writer(self) -> TraceWriter:
        self._storage.make()
        return TraceWriter(self._storage, self._schema, self._options.level, self._options.fsync)

    @property
    def writer_id(self) -> str:
        """The id in the names of the writer's files."""
        return str(self._schema["writer"])

    @property
    def failed(self) -> bool:
        """Whether writing has failed, so that nothing is recorded any more."""
        return self._out.failure is not None

    @property
    def next_episode(self) -> int:
        """The id that the next episode will have."""
        return self._episodes

    # -- flushing, closing, errors ------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Returns when all steps so far can be read by others. Raises RecordingError."""
        self._out.work(everything=True)
        self._complain()
        self._report()

    def close(self) -> None:
        """Saves everything, seals the batch, ends the thread. Raises RecordingError if something could not be saved."""
        if self._sealed or self._pid != os.getpid():
            return
        self._closed = True
        self.end(Outcome.CLOSED)
        self._out.close(self._summary)
        self._sealed = True  # last: after a Ctrl-C, close() can be called again
        forks.forget(self)
        self._complain()
        self._report()

    def save_at_exit(self, owner: object) -> None:
        """Closes the recorder when owner is garbage-collected, or at exit, whichever comes first."""
        self._owner = weakref.ref(owner)
        self._save_when_owner_goes()

    def _save_when_owner_goes(self) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            forks.close_with(owner, self)

    def _report(self) -> None:
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
        self._report()
        if self._closed:
            self._warn_once("reset", "the recorder is closed: this episode is not recorded")

    def complain(self, column: str, complaint: str) -> None:
        """Gives a warning at the next step, once for each column."""
        self._encoder.complaints.setdefault(column, complaint)
        if column not in self._complained:
            self.limit = 0

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
            with contextlib.suppress(Exception):  # a foreign mapping may raise anything
                info = {key: info[key] for key in keys if key in info}
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
        for column, complaint in list(self._encoder.complaints.items()):
            self._warn_once(column, complaint)

    def _warn_once(self, column: str, complaint: str) -> None:
        if column not in self._complained:
            self._complained.add(column)
            warnings.warn(f"{column}: {complaint}", UserWarning, stacklevel=5)

    # -- forks ---------------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Before a fork: writes everything and ends the thread."""
        self._out.pause()

    def resume(self) -> None:
        """After a fork, in the parent. The thread starts with the next step: Python warns of forks beside threads."""
        self.limit = 0

    def restart_in_child(self) -> None:
        """After a fork, in the child: begins a new writer, which continues the open episodes."""
        self._out.abandon()
        run = self.open_run()
        self._schema = {**self._schema, "writer": new_writer_id(), "pid": os.getpid(), "forked_from": self.writer_id}
        self._reset_state()
        self.continue_run(run)
        self._save_when_owner_goes()
        register_after_fork(self, Recorder._save_when_owner_goes)  # multiprocessing clears the finalizers in a child
