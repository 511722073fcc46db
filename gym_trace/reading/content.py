"""The content of a trace or a view: its writers and a table of its episodes; and its interface for samplers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.model.values import Array
from gym_trace.reading.episode_table import EPISODE
from gym_trace.reading.writer_reader import WriterReader


class Content(NamedTuple):
    """Replaced as a whole: readers continue with the content they have."""

    writers: list[WriterReader]  # of the trace
    bounds: Array  # the episodes of writer i are those from bounds[i] to bounds[i + 1] of the trace
    chosen: Array | None  # which of these are in the view; None: all
    readers: list[WriterReader]  # of the view
    table: Array

    @classmethod
    def whole(cls, writers: Sequence[WriterReader]) -> Content:
        """All that these writers have recorded."""
        tables = [writer.parts.table for writer in writers]
        bounds = np.cumsum([0, *map(len, tables)], dtype=np.int64)
        if len(tables) == 1:
            table = tables[0]  # which says so itself
        else:
            table = np.concatenate([np.empty(0, EPISODE), *tables])
            table["index"] = np.arange(len(table))
            table["writer"] = np.repeat(np.arange(len(tables)), np.diff(bounds))
        return cls(list(writers), bounds, None, list(writers), table)

    def view(self, places: Array) -> Content:
        """Only the episodes at these places."""
        table = self.table.take(places)
        table["index"] = np.arange(len(table))
        present, table["writer"] = np.unique(table["writer"], return_inverse=True)
        readers = [self.readers[number] for number in present.tolist()] or self.readers
        chosen = places if self.chosen is None else self.chosen[places]
        return self._replace(chosen=chosen, readers=readers, table=table)

    def place(self, index: int) -> tuple[WriterReader, int]:
        """The writer of an episode, and its row there."""
        whole = index if self.chosen is None else int(self.chosen[index])
        number = int(self.bounds.searchsorted(whole, side="right")) - 1
        return self.writers[number], whole - int(self.bounds[number])

    def selected(self, episodes: slice | Iterable[int] | Array | None) -> tuple[Array, bool]:
        """The places asked for, and whether the episodes there ascend in the trace. Raises InvalidOption."""
        everything = np.arange(len(self.table))
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


class Recorded(Protocol):
    """The episodes of a trace or a view, for code that reads their rows; see gym_trace.playback.trace.Trace."""

    @property
    def directory(self) -> Path: ...

    @property
    def episodes(self) -> Array: ...

    @property
    def readers(self) -> list[WriterReader]: ...

    @property
    def rows(self) -> Array: ...

    @property
    def whole(self) -> Recorded: ...

    def refresh(self) -> int: ...

    def writer_agreed_on(self, name: str) -> WriterReader: ...
