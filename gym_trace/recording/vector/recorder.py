"""Batches in: what the wrapper of a vector environment tells its recorder."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from gym_trace.errors import UnstorableValue
from gym_trace.format import wire
from gym_trace.format.columns import Path
from gym_trace.model.layout import Layout, Leaf, as_kept, integers_fit, taken_apart
from gym_trace.model.values import Array
from gym_trace.recording.filters import Filters
from gym_trace.recording.options import RecordingOptions
from gym_trace.recording.recorder import Recorder
from gym_trace.recording.segment import Rows, size_of
from gym_trace.recording.vector.block import StepMemory
from gym_trace.recording.vector.encoder import LaneEncoder
from gym_trace.recording.vector.events import End, EventBlock, Interrupted, OpenEpisodes, Reset, Step
from gym_trace.recording.vector.filters import LaneFilters
from gym_trace.storage.protocol import Storage

_ROWS = 128  # of each lane that make a block, if that is not too large
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 16 << 20
_AHEAD = 2  # blocks that may wait for the thread: NumPy lets go of the interpreter lock over such large arrays


class LaneRecorder(Recorder):
    """One writer of a trace, fed with steps of all lanes at a time from one thread.

    Before each step or reset the caller asks whether it is ready(), and sets .expecting; add() ends that. If the next
    one finds it set, an exception such as Ctrl-C fell in between. Nobody knows then what the lanes have done: their
    episodes are cut, and each lane is recorded again from its next episode on.
    """

    block: EventBlock
    _encoder: LaneEncoder

    def __init__(
        self,
        storage: Storage,
        schema: dict[str, Any],
        count: int,
        mode: str,
        observation: Layout,
        action: Layout,
        filters: Filters,
        options: RecordingOptions,
        lazy: bool,
    ):
        self._count, self._mode = count, mode
        self._leaves = list(observation.leaves()), list(action.leaves())
        self._leaves_out_steps = filters.steps
        self.filters = LaneFilters(filters, mode, count) if filters.any else None
        sizes = [leaf.row_size for leaves in self._leaves for leaf in leaves]
        if max(sizes, default=0) > wire.MAX_COLUMN // 4:
            raise UnstorableValue(f"one observation or action takes more than {wire.MAX_COLUMN // 4} bytes")
        row_size = 10 + sum(sizes)
        self._capacity = min(_MOST_BYTES, max(_LEAST_BYTES, _ROWS * count * row_size))
        self._times = max(1, self._capacity // (count * row_size))
        self.largest_value = wire.MAX_VALUES // 2 // count
        self.expecting = False  # a step or reset has begun that was not told yet
        chunk_bytes = self._times * count * row_size * 3 // 4  # a block is one chunk, whatever it lacks
        super().__init__(storage, schema, chunk_bytes, options, filters.summary, lazy)

    def _reset_state(self) -> None:
        super()._reset_state()
        self._size = 0
        self._until = self._end_of_block()
        self._memory = StepMemory(self._count, self._times)
        self._requested: deque[Any] = deque()
        self.limit = 1
        if self.filters is not None:
            self.filters.forget()

    def _new_encoder(self) -> LaneEncoder:
        return LaneEncoder(self._count, self._mode, *self._leaves, self._leaves_out_steps)

    def _new_block(self) -> EventBlock:
        return EventBlock()

    def _end_of_block(self) -> float:
        """When the block is old enough to be handed on, in nanoseconds: in a hurry the thread gets little done."""
        return (self.block.created + self._out.patience) * 1e9

    def ready(self) -> bool:
        """Makes room for an event; says whether there is any use in telling it. Raises RecordingError, once."""
        if not self.limit:
            self.limit = 1
            self._complain()
            self._report()
        if self._closed or self.failed:
            return False
        if self.expecting:
            self.block.events.append(Interrupted(time.time_ns(), time.monotonic_ns()))
            if self.filters is not None:
                self.filters.lose_track()
            self.expecting = False
        if self._size >= self._capacity or self.block.steps >= self._times:
            self._next_block()
        return True

    def _next_block(self) -> None:
        """Hands on what the block holds, and goes on in a new one."""
        self.block, self._size = EventBlock(self.block), 0
        self._until = self._end_of_block()
        if self.filters is None:  # with them it takes Python for each lane
            self._out.encode()  # here: the thread would contend for the interpreter lock, at every step of NumPy
        self._requested.append(self._out.request())
        if len(self._requested) > _AHEAD:
            self._out.wait(self._requested.popleft())
        self._out.catch_up()

    def add(self, event: Reset | Step) -> None:
        """Takes an event, whose arrays are the recorder's from now on."""
        self._size += sum(map(size_of, event.observations)) + 64
        if isinstance(event, Step):
            self._size += sum(map(len, event.infos or ()))
            self._size += sum(map(size_of, event.actions)) + sum(map(size_of, event.notes.values())) + 10 * self._count
            self.block.steps += 1
        if event.monotonic > self._until:
            self._size = self._capacity
        self._out.start()
        self.block.events.append(event)
        self.expecting = False

    def room(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Where rows of the next step may be put, one a lane: the same place if asked again."""
        columns = self.block.columns
        column = columns.get(path)
        if column is None:
            column = columns[path] = self._memory.column(path, dtype, shape)
        return column[:, self.block.steps] if column.dtype == dtype else np.empty((self._count, *shape), dtype)

    def end(self, outcome: int) -> None:
        self.block.events.append(End(outcome, time.time_ns(), time.monotonic_ns()))

    # -- forks and copies ---------------------------------------------------------------------------------------------

    def open_run(self) -> OpenEpisodes | None:
        """What another recorder needs to go on with the episodes that are open here, or None."""
        if self._closed or self.failed or self.expecting:
            return None
        progress = self._out.progress()
        return None if progress is None else self._encoder.open_run(progress)

    def continue_run(self, run: OpenEpisodes | None) -> None:
        """Takes over the episodes of another recorder when the next step comes; writes nothing if none comes."""
        if run is not None:
            self.block.events.append(run)
            if self.filters is not None:
                self.filters.continue_run(run)


class BatchPacker:
    """Copies batched values of a space into rows for its leaves.

    Args:
        layout: of the space of one lane.
        count: how many lanes there are.
        iterate: takes a batch that has not the structure of the space to one value a lane, or raises.
        recorder: whose rows they are; what goes wrong here it is told, and nobody else.
    """

    def __init__(self, layout: Layout, count: int, iterate: Callable[[Any], list[Any]], recorder: LaneRecorder):
        self._layout, self._count = layout, count
        self._leaves = list(layout.leaves())
        self._iterate, self._recorder = iterate, recorder

    def step(self, value: Any) -> list[Rows]:
        """Rows of a value for all lanes at a step."""
        try:
            parts = self._layout.split(value)
            return [self._of_step(leaf, part) for leaf, part in zip(self._leaves, parts)]
        except Exception:  # a batch of another structure, or of other people's making
            return self.single(self._iterate(value))

    def _of_step(self, leaf: Leaf, part: Any) -> Rows:
        if type(part) is np.ndarray and part.dtype == leaf.dtype and part.shape == (self._count, *leaf.shape):
            room = self._recorder.room(leaf.path, part.dtype, leaf.shape)
            room[...] = part
            return room
        return self._rows(leaf, part, None)

    def batch(self, value: Any, lanes: Array | None = None) -> list[Rows]:
        """Rows of a value for all lanes, or of those lanes in it."""
        try:
            parts = self._layout.split(value)
            return [self._rows(leaf, part, lanes) for leaf, part in zip(self._leaves, parts)]
        except Exception:  # as above
            values = self._iterate(value)
            return self.single(values if lanes is None else [values[lane] for lane in lanes])

    def single(self, values: list[Any]) -> list[Rows]:
        """Rows of one value a lane."""
        columns = zip(*[taken_apart(self._layout, value) for value in values])
        return [self._stacked(leaf, list(column)) for leaf, column in zip(self._leaves, columns)]

    def _rows(self, leaf: Leaf, part: Any, lanes: Array | None) -> Rows:
        if leaf.dtype is not None:
            part = array = self._recorder.plain(leaf.column, part)
            plain = isinstance(array, (list, tuple)) and leaf.dtype.kind in "iub"
            if plain and (leaf.shape or set(map(type, array)) == {int}):  # scalars of NumPy have a width
                array = np.asarray(array)
                is_integer = array.dtype.kind in "iu"
                if is_integer and integers_fit(leaf.dtype, int(array.min(initial=0)), int(array.max(initial=0))):
                    array = array.astype(leaf.dtype)
            if type(array) is np.ndarray and array.shape == (self._count, *leaf.shape):
                chosen = array if lanes is None else array[lanes]
                if array.dtype != leaf.dtype and array.dtype.kind == leaf.dtype.kind and array.dtype.isnative:
                    self._complain_of(leaf)
                    return np.array(chosen, order="C", subok=False)
                if array.dtype == leaf.dtype:
                    return np.array(chosen, leaf.dtype, order="C", subok=False)
        if len(part) != self._count:
            raise LookupError
        return self._stacked(leaf, list(part) if lanes is None else [part[lane] for lane in lanes])

    def _stacked(self, leaf: Leaf, values: list[Any]) -> Rows:
        if leaf.dtype is None:
            return [self._recorder.packed(leaf.column, value) for value in values]
        arrays = [as_kept(self._recorder.plain(leaf.column, value), leaf) for value in values]
        if all(map(leaf.fits, arrays)):
            return np.array(arrays, leaf.dtype).reshape(len(arrays), *leaf.shape)
        packed = [self._recorder.packed(leaf.column, array) for array in arrays]
        self._complain_of(leaf)  # after what is to say of values that cannot be stored
        return packed

    def _complain_of(self, leaf: Leaf) -> None:
        complaint = "got values that are not as the space says; recorded exactly as they are"
        self._recorder.complain(leaf.column, complaint)
