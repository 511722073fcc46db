"""Interfaces of exporters and importers, one per format, built in or from another package (see registry.py).

Which of its own words a format is described with is up to it; what it does to a trace is said here, and
gym_trace.formats.conformance tests it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from gym_trace.formats.imported import Imported
from gym_trace.formats.source import Source

# What a loss can be of.
LOSSES = frozenset(
    (
        "annotations",
        "dtype",
        "empty_episode",
        "facts",
        "final_observation",
        "flags",
        "identity",
        "infos",
        "options",
        "outcome",
        "parts",
        "pixels",
        "reset_info",
        "seed",
        "spaces",
        "structure",
        "text",
    )
)


class Loss(NamedTuple):
    """Something of a trace that a format cannot say.

    what: one of LOSSES. why: a sentence, with how much of the trace it is of.
    """

    what: str
    why: str

    def __str__(self) -> str:
        return self.why


class Target(NamedTuple):
    """Paths of an export.

    staged: write here: an empty directory, or a file that does not exist. It is renamed to final once the export is
    complete, and removed if it fails. final: absolute.
    """

    staged: Path
    final: Path


class Plan(NamedTuple):
    """The export of one trace.

    losses: what the format cannot store of the trace.
    write: write the trace in memory that does not grow with it. Raises OSError, CorruptTrace.
    how_to_load: called after write with the path of the export; return Python that loads it with the usual package.
    """

    losses: Sequence[Loss]
    write: Callable[[Target], None]
    how_to_load: Callable[[Path], str]


class Exporter(Protocol):
    """A format that traces are written in: a frozen dataclass whose fields are its options.

    Attributes:
        name: as in ``gym-trace export --to NAME``.
        extra: of gym-trace, which installs what writing needs; "" where nothing is.
        makes: "directory" or "file".
        finals: optional; what the source gives where a final observation is unknown. "repeated" (default): the
            observation before it. "left out", for formats of transitions: the episode without its last step, unless
            that step terminated it; then as "repeated". "kept", for formats that can mark it, or have no final
            observations: the placeholder. export() reports the loss.
    """

    name: ClassVar[str]
    extra: ClassVar[str]
    makes: ClassVar[str]

    def plan(self, source: Source) -> Plan:
        """Check everything, and write nothing yet. Raises InvalidOption if the format cannot hold the trace."""


class Importer(Protocol):
    """A format that traces are made of; a frozen dataclass whose fields are its options, where it has any.

    Attributes:
        name: as in ``gym-trace import --from NAME``.
        extra: of gym-trace, which installs what reading needs; "" where nothing is.
        skips_links: may be left out. True: it opens no links by itself, so that a directory may have some that lead out
            of it; otherwise the import refuses these.
    """

    name: ClassVar[str]
    extra: ClassVar[str]

    def recognises(self, path: Path) -> bool:
        """Return True if path looks like this format. Reads little, and never raises for another format."""

    def read(self, path: Path) -> Imported:
        """Read the source as a trace. Nothing of it is run or unpickled, and it is never changed.

        Raises UnreadableRecording, also while the episodes are read.
        """


@dataclass
class ExportReport:
    """Result of export().

    Attributes:
        format, path: what, and where.
        episodes, steps: how many.
        running: episodes that were left out, because they are being recorded still.
        lost: what of the trace is not in it.
        how_to_load: Python that loads it.
    """

    format: str
    path: Path
    episodes: int = 0
    steps: int = 0
    running: int = 0
    lost: list[Loss] = field(default_factory=list)
    how_to_load: str = ""


@dataclass
class ImportReport:
    """Result of import_trace().

    Attributes:
        format, path: what it was imported from.
        destination: the trace.
        kinds: what it was, in words: "Minari", "gym_recording".
        writers: their ids.
        episodes, steps: how many.
        videos: names of the videos that were copied.
        notes: what the import could not know, in a sentence each.
    """

    format: str
    path: Path
    destination: Path
    kinds: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    videos: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "path": str(self.path), "destination": str(self.destination)}
