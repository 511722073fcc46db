"""The episodes of a trace or a view: its writers, the columns of their episodes, and the interface for samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import numpy as np

from gym_trace.data.episode import Episode
from gym_trace.data.packing import pack_lenient
from gym_trace.data.values import Array
from gym_trace.data.vocabulary import Outcome
from gym_trace.errors import InvalidOption, TraceError
from gym_trace.format.fragments import RowIndex
from gym_trace.playback.episode_table import EPISODE, OUTCOME_CODE, ROWS_AT_ONCE, EpisodeRecords, fill, outcome_codes
from gym_trace.playback.writer_reader import WriterReader

_PAGE = 256  # rows of the table that are filled together
_PAGES_AT_ONCE = ROWS_AT_ONCE // _PAGE

AnyRecorded = TypeVar("AnyRecorded", bound="RecordedEpisodes")


class EpisodeIndex:
    """The episodes of a trace or a view. A refresh makes a new index, so code that reads is not disturbed.

    ``index["steps"]`` is one column of the table of episodes; ``index[OUTCOME_CODE]`` the outcomes as numbers.

    Attributes:
        all_readers: readers of all writers of the trace, by the number of the writer.
        bounds: writer number i has the episodes bounds[i] to bounds[i + 1] of the whole trace.
        chosen: indices in the whole trace of the episodes of the view; None: all.
        readers: those of the writers in the view.
    """

    def __init__(
        self, readers: list[WriterReader], bounds: Array, chosen: Array | None = None, writers: Array | None = None
    ):
        """writers: numbers of the writers in the view, ascending; None: all."""
        self.all_readers, self.bounds, self.chosen, self._writers = readers, bounds, chosen, writers
        self.readers = readers if writers is None else [readers[number] for number in writers.tolist()]
        self._pages = np.zeros(-(-len(self) // _PAGE), np.bool_)  # parts of the table that are filled
        self._computed: dict[str, Array] = {}  # columns that were used before the table is filled
        self._last_starts: tuple[Array, Array] = np.empty(0), np.empty(0)  # the last indices, and their reset records
        self._filling = Lock()

    @classmethod
    def whole(cls, readers: Sequence[WriterReader]) -> EpisodeIndex:
        """Return all episodes of these writers."""
        return cls(list(readers), np.cumsum([0, *(len(reader.parts) for reader in readers)], dtype=np.int64))

    def view(self, indices: Array) -> EpisodeIndex:
        """Return a view with the episodes at these indices."""
        chosen = indices if self.chosen is None else self.chosen[indices]
        # An empty view has all writers of this one, so that it still has their spaces.
        writers = np.unique(self._writers_of(chosen)) if len(chosen) else self._writers
        view = EpisodeIndex(self.all_readers, self.bounds, chosen, writers)
        if self._is_filled:  # copied, not computed: a user may have changed the table
            view._table = self._table.take(indices)
            view._table["index"], view._table["writer"] = view._column("index"), view._column("writer")
            view._pages[:] = True
        return view

    def __len__(self) -> int:
        return int(self.bounds[-1]) if self.chosen is None else len(self.chosen)

    def __getitem__(self, name: str) -> Array:
        if not self._is_filled:
            if name not in self._computed:
                self._computed[name] = self._column(name)
                self._computed[name].flags.writeable = False
            return self._computed[name]
        column: Array = outcome_codes(self._table) if name == OUTCOME_CODE else self._table[name]
        return column

    def has_rows_of(self, other: EpisodeIndex) -> bool:
        """Return True if both have the same columns, bit for bit. Keeps none: 10 million rows take 1.3 GB."""
        begins = range(0, len(self), ROWS_AT_ONCE)
        pages = [(begin, min(begin + ROWS_AT_ONCE, len(self))) for begin in begins]
        return len(self) == len(other) and all(
            self._column(name, *page).tobytes() == other._column(name, *page).tobytes()
            for name in EPISODE.names or ()
            for page in pages
        )

    @property
    def table(self) -> Array:
        """All columns of all episodes: the same writable array on every call."""
        for page in range(0, len(self._pages), _PAGES_AT_ONCE):
            if not self._pages[page : page + _PAGES_AT_ONCE].all():
                self._fill(page, _PAGES_AT_ONCE)
        return self._table

    def record(self, index: int) -> Any:
        """Return a copy of one row of the table."""
        page = index // _PAGE
        if not self._pages[page]:
            self._fill(page, 1)
        return self._table[index].copy()

    def records(self, number: int, reader: WriterReader, rows: Array, indices: Array) -> EpisodeRecords:
        """Return rows of the table.

        Args:
            number: number of the writer.
            reader: a reader of the writer: all_readers[number], or one without damaged chunks.
            rows: rows of the episodes, or of their parts, in reader.parts. indices: indices of the episodes here.
        """
        if reader is self.all_readers[number] and self._is_filled:  # a user may have changed the table
            return EpisodeRecords(self._table[indices].__getitem__)
        writer = self._writer_column(number, "writer", rows)
        return EpisodeRecords(partial(reader.parts.column, rows=rows), index=indices, writer=np.full(len(rows), writer))

    @property
    def whole_indices(self) -> Array:
        """The index of each episode in the whole trace."""
        return np.arange(len(self)) if self.chosen is None else self.chosen

    @cached_property
    def rows(self) -> Array:
        """The row of each episode in the table of its writer."""
        indices = self.whole_indices
        rows: Array = indices - self.bounds[self._writers_of(indices)]
        return rows

    @property
    def finished(self) -> Array:
        """(episodes,) bool: False for episodes that are being recorded."""
        if not any(reader.alive for reader in self.readers):
            return np.ones(len(self), np.bool_)
        finished: Array = self[OUTCOME_CODE] != Outcome.RUNNING
        return finished

    def starts_of(self, indices: Array) -> Array:
        """Return the reset records of these episodes as objects; {} if the start was dropped. Not copied.

        Raises CorruptTrace.
        """
        known, found = self._last_starts  # exporters ask for those of a block several times
        if known is not indices:
            found = self._from_writers(indices, WriterReader.starts_of)
            self._last_starts = indices, found
        return found

    def packed_starts_of(self, indices: Array) -> list[bytes]:
        """Return the reset records of these episodes as stored; b"" if the start was dropped. Raises CorruptTrace."""
        found: list[bytes] = self._from_writers(indices, WriterReader.packed_starts_of).tolist()
        return found

    def _from_writers(self, indices: Array, of_rows: Callable[[WriterReader, Array], Array]) -> Array:
        """Return an object for each of these episodes. of_rows: returns those of some rows of a writer."""
        found = np.full(len(indices), None)
        whole_indices = indices if self.chosen is None else self.chosen[indices]
        writers = self._writers_of(whole_indices)
        for number in np.unique(writers).tolist():
            mine = np.flatnonzero(writers == number)
            found[mine] = of_rows(self.all_readers[number], whole_indices[mine] - self.bounds[number])
        return found

    @cached_property
    def _table(self) -> Array:
        return np.empty(len(self), EPISODE)  # the system gives it memory as it is filled

    @property
    def _is_filled(self) -> bool:
        return bool(self._pages.all()) and len(self._pages) > 0

    def _fill(self, page: int, count: int) -> None:
        begin, end = page * _PAGE, min((page + count) * _PAGE, len(self))
        with self._filling:
            if not self._pages[page : page + count].all():
                fill(self._table[begin:end], lambda name: self._column(name, begin, end))
                self._pages[page : page + count] = True

    def _writers_of(self, indices: Array) -> Array:
        """Return the writer's number for each of these episodes of the whole trace."""
        return self.bounds.searchsorted(indices, side="right") - 1

    def _column(self, name: str, begin: int = 0, end: int | None = None) -> Array:
        """Compute a column of the episodes from begin to end. None: to the last one."""
        end = len(self) if end is None else end
        if name == "index":
            return np.arange(begin, end)
        column = np.empty(end - begin, np.int64 if name == OUTCOME_CODE else EPISODE[name])
        if self.chosen is None:
            first, last = self.bounds.searchsorted(begin, side="right") - 1, self.bounds.searchsorted(end)
            for number in range(int(first), int(last)):
                low, high = (min(max(int(at), begin), end) for at in self.bounds[number : number + 2])
                rows: RowIndex = slice(low - int(self.bounds[number]), high - int(self.bounds[number]))
                column[low - begin : high - begin] = self._writer_column(number, name, rows)
            return column
        indices = self.chosen[begin:end]
        writers = self._writers_of(indices)
        for number in np.unique(writers).tolist():
            mine = np.flatnonzero(writers == number)
            column[mine] = self._writer_column(number, name, indices[mine] - self.bounds[number])
        return column

    def _writer_column(self, number: int, name: str, rows: RowIndex) -> Array | int:
        """Return a column of rows of a writer's table. "writer" is one value, the position among the view's readers."""
        if name != "writer":
            return self.all_readers[number].parts.column(name, rows)
        return number if self._writers is None else int(self._writers.searchsorted(number))

    def locate(self, index: int) -> tuple[WriterReader, int]:
        """Return the writer of an episode, and its row in that writer's table."""
        whole = index if self.chosen is None else int(self.chosen[index])
        number = int(self.bounds.searchsorted(whole, side="right")) - 1
        return self.all_readers[number], whole - int(self.bounds[number])

    def selected(self, episodes: slice | Iterable[int] | Array | None) -> tuple[Array, bool]:
        """Return the selected indices, and True if they ascend in the whole trace. Raises InvalidOption."""
        everything = np.arange(len(self))
        if episodes is None:
            chosen = everything
        elif isinstance(episodes, slice):
            chosen = everything[episodes]
        else:
            given = np.asarray(episodes if isinstance(episodes, np.ndarray) else list(episodes))
            if given.size == 0:
                return everything[:0], True
            if given.dtype.kind not in "biu" or given.ndim != 1:
                raise InvalidOption("episodes: pass a slice, indices, or a boolean mask with one element per episode")
            try:
                chosen = everything[given]
            except IndexError as error:
                raise InvalidOption(f"episodes: the trace has {len(everything)} episodes; {error}") from error
        whole = chosen if self.chosen is None else self.chosen[chosen]
        return chosen, bool(np.all(np.diff(whole) > 0))


class RecordedEpisodes(Protocol):
    """The episodes of a trace or a view, for code that reads their rows; see gym_trace.playback.trace.Trace."""

    @property
    def directory(self) -> Path: ...

    @property
    def episodes(self) -> Array: ...

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def _content(self) -> EpisodeIndex: ...

    @property
    def _whole(self: AnyRecorded) -> AnyRecorded: ...

    def __len__(self) -> int: ...

    def __getitem__(self: AnyRecorded, index: slice | Array) -> AnyRecorded: ...

    def scan(self, columns: Iterable[str] | None = None, episodes: Array | None = None) -> Iterator[Episode]: ...

    def find_steps(self, where: str) -> Array: ...

    def refresh(self) -> int: ...


def index_of(trace: RecordedEpisodes) -> EpisodeIndex:
    """Return the episodes of a trace or a view, column by column; .episodes builds the whole table."""
    return trace._content


def whole_of(trace: AnyRecorded) -> AnyRecorded:
    """Return the whole trace as it was when a view of it was made; a whole trace itself."""
    return trace._whole


def finished_view(trace: AnyRecorded) -> AnyRecorded:
    """Return the finished episodes of a trace, for formats that need equal spaces and finished episodes.

    Raises InvalidOption without episodes, if their spaces differ, or if they have only statistics; CorruptTrace
    if files cannot be read.
    """
    is_finished = index_of(trace).finished
    view = trace if is_finished.all() else trace[is_finished]
    if not len(view):
        raise InvalidOption(f"{trace.directory}: no episodes to export")
    for reader in index_of(view).readers:
        for damage in reader.damage:
            raise damage.error()
    try:
        for name in ("observation_space", "action_space"):
            writer_agreed_on(view, name)
    except TraceError as error:
        advice = "choose episodes with the same spaces, such as --where 'writer == \"…\"'"
        raise InvalidOption(f"{error}; they cannot be exported together: {advice}") from error
    if any(reader.about.has_only_statistics for reader in readers_with_episodes(view)):
        raise InvalidOption(f"{trace.directory}: only statistics of episodes; no steps to export")
    return view


def readers_with_episodes(trace: RecordedEpisodes) -> list[WriterReader]:
    """Return the readers of the writers that have episodes in a trace."""
    content = index_of(trace)
    return [content.readers[number] for number in np.unique(content["writer"]).tolist()]


def writer_agreed_on(trace: RecordedEpisodes, name: str) -> WriterReader:
    """Return a writer. Raises TraceError if writers with episodes differ in this field of the schema."""
    having = readers_with_episodes(trace) or index_of(trace).readers
    values = {pack_lenient(writer.schema.get(name))[0] for writer in having}
    if len(values) > 1:
        raise TraceError(
            f"{trace.directory}: the writers of this trace have different values of {name}; "
            "use trace[[i]] for that of episode i"
        )
    return having[0]
