"""The interface of a trace for code that reads its rows, such as samplers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gym_trace.model.values import Array
from gym_trace.reading.writer_reader import WriterReader


class Recorded(Protocol):
    """Episodes of a trace, or of a view of one; see gym_trace.playback.trace.Trace."""

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
