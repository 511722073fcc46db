"""Interfaces of exporters and importers, one per format, built in or from another package (see registry.py).

The contract below is the only thing that the rest of gym-trace knows about a format; conformance/ tests it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from gym_trace.exchange.formats.imported import Imported
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.row_types import RowType


class Loss(NamedTuple):
    """Part of a trace that a format cannot store.

    what: one of LOSSES. why: a sentence, with the amount.

    Examples:
        >>> gym_trace.formats.Loss("seed", "the format has no place for it")
        Loss(what='seed', why='the format has no place for it')
    """

    what: str
    why: str

    def __str__(self) -> str:
        return self.why


class Target(NamedTuple):
    """Paths of an export.

    staged: write here: an empty directory, or a file that does not exist. It is renamed to final once the export is
    complete, and removed if it fails. final: absolute.

    Examples:
        >>> def write(target):
        ...     target.staged.write_text("one file")  # it becomes target.final
    """

    staged: Path
    final: Path


class ExportPlan(NamedTuple):
    """The export of one trace.

    losses: what the format cannot store of the trace.
    write: write the trace in memory that does not grow with it. Raises OSError, CorruptTrace.
    how_to_load: called after write with the path of the export; return Python that loads it with the usual package.

    Examples:
        >>> plan = gym_trace.formats.ExportPlan([], lambda target: target.staged.touch(), "open('{}').read()".format)
        >>> plan.how_to_load("steps.txt")
        "open('steps.txt').read()"
    """

    losses: Sequence[Loss]
    write: Callable[[Target], None]
    how_to_load: Callable[[Path], str]


class Exporter(Protocol):
    """An export format: a frozen dataclass whose fields are its options.

    Attributes:
        name: as in ``gym-trace export --to NAME``.
        makes: "directory" or "file".
        finals: optional; what the source yields in place of an unknown final observation. "repeated" (default): the
            observation before it. "left out", for formats of transitions: the episode without its last step, unless
            that step terminated it; then as "repeated". "kept", for formats that can mark it, or have no final
            observations: the placeholder. export() reports the loss.
        keeps_branch_prefix: optional; True: also export the steps of a branched episode that repeat the episode it
            branched from. Otherwise the source leaves them out, and export() reports the loss.
        keeps_states: optional; True: states of the environment are exported, too. Otherwise export() reports the loss.

    Examples:
        >>> class Lengths:  # an Exporter
        ...     name, makes = "lengths", "file"
        ...
        ...     def plan(self, source):
        ...         def write(target):
        ...             text = "\\n".join(str(len(episode)) for episode, _ in source.scan())
        ...             target.staged.write_text(text)
        ...
        ...         losses = [gym_trace.formats.Loss("steps", "only counted")]
        ...         return gym_trace.formats.ExportPlan(losses, write, "open({}).read()".format)
        >>> report = gym_trace.export("traces/cartpole", "lengths.txt", Lengths())
        >>> report.episodes, [loss.what for loss in report.lost]
        (20, ['steps'])
    """

    name: ClassVar[str]
    makes: ClassVar[str]

    def plan(self, source: ExportSource) -> ExportPlan:
        """Check the trace, and write nothing yet. Raises InvalidOption if the format cannot hold it."""


class Importer(Protocol):
    """An import format: a frozen dataclass whose fields are its options.

    Attributes:
        name: as in ``gym-trace import --from NAME``.
        skips_links: optional; True if it opens no links. Otherwise, import_trace() rejects a directory with links out
            of it.

    Examples:
        >>> class Mine:  # an Importer
        ...     name = "mine"
        ...
        ...     def recognises(self, path):
        ...         return path.suffix == ".mine"
        ...
        ...     def read(self, path):
        ...         space = gymnasium.spaces.Discrete(4)
        ...         steps = gym_trace.formats.NewSteps(np.arange(4), np.zeros(3, int), np.ones(3))
        ...         episode = gym_trace.formats.NewEpisode(3, [steps], outcome="terminated")
        ...         schema = gym_trace.formats.new_schema("mine", space, space)
        ...         return gym_trace.formats.imported("mine", [episode], schema)
        >>> with open("one.mine", "w"):
        ...     pass
        >>> gym_trace.import_trace("one.mine", "traces/mine", Mine()).steps
        3
    """

    name: ClassVar[str]

    def recognises(self, path: Path) -> bool:
        """Return True if path looks like this format. Must read little, and not raise for another format."""

    def read(self, path: Path) -> Imported:
        """Read the source as a trace. Must neither change it, nor run or unpickle anything in it.

        Raises UnreadableRecording, also while the episodes are read.
        """


@dataclass
class ExportReport:
    """Result of export().

    Attributes:
        format, path: of the output.
        episodes, steps: how many.
        running: number of episodes that were skipped, as they are still being recorded.
        lost: parts of the trace that were not stored.
        how_to_load: Python that loads it.
        bytes: size of the output. seconds: the time that it took.

    Examples:
        >>> report = gym_trace.export("traces/cartpole", "report.csv")
        >>> report.episodes, report.steps, report.running
        (20, 461, 0)
    """

    format: str
    path: Path
    episodes: int = 0
    steps: int = 0
    running: int = 0
    lost: list[Loss] = field(default_factory=list)
    how_to_load: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass
class ImportReport:
    """Result of import_trace().

    Attributes:
        format, path: of the source.
        destination: the trace.
        kinds: kinds of recordings, in words: "Minari", "gym_recording".
        writers: their ids.
        episodes, steps: how many.
        videos: names of the videos that were copied.
        warnings: one sentence per missing fact.
        bytes: size of the trace. seconds: the time that it took.

    Examples:
        >>> _ = gym_trace.export("traces/cartpole", "report.jsonl")
        >>> report = gym_trace.import_trace("report.jsonl", "traces/report")
        >>> report.kinds, report.warnings
        (['JSON lines'], [])
    """

    format: str
    path: Path
    destination: Path
    kinds: list[str] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    episodes: int = 0
    steps: int = 0
    videos: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object.

        Examples:
            >>> _ = gym_trace.export("traces/cartpole", "plain.jsonl")
            >>> gym_trace.import_trace("plain.jsonl", "traces/plain").to_json()["episodes"]
            20
        """
        return {**vars(self), "path": str(self.path), "destination": str(self.destination)}


# -- losses that most formats have ------------------------------------------------------------------------------------


RESTORED = "; only an import restores them"


def losses(source: ExportSource, *names: str, restored: bool = False) -> Iterator[Loss]:
    """Yield the named losses that apply, such as "seed" if an episode has one. Raises CorruptTrace.

    names: "final_observation", "seed", "options", "reset_info", "outcome", "flags", "infos", "annotations", "identity",
    "dtype", "empty_episode", "parts", "facts". restored: the file has them, but only an importer reads them.

    Examples:
        >>> source = gym_trace.formats.ExportSource(gym_trace.open_trace("traces/cartpole"))
        >>> [loss.what for loss in gym_trace.formats.losses(source, "seed", "infos")]  # no infos were recorded
        ['seed']
    """
    for name in names:
        noun, sentence, find = _USUAL[name]
        if found := find(source):
            amount = f"{found:,} {noun}{'s' * (found != 1)}" if isinstance(found, int) else ", ".join(sorted(found))
            yield Loss(name, sentence.format(amount) + RESTORED * restored)


def mixed_dtypes(forms: Mapping[Any, RowType | None]) -> Iterator[Loss]:
    """Yield the loss of columns whose rows had several dtypes. forms: by the paths of the columns."""
    if mixed := _mixed(forms):
        yield Loss("dtype", _USUAL["dtype"][1].format(", ".join(sorted(mixed))))


def _mixed(forms: Mapping[Any, RowType | None]) -> list[str]:
    return [f"{'/'.join(map(str, path))} ({form.dtype})" for path, form in forms.items() if form and form.mixed]


# By name: noun, sentence, and a function that returns the count or the names.
_USUAL: dict[str, tuple[str, str, Callable[[ExportSource], int | list[str]]]] = {
    "annotations": (
        "",
        "annotations are not kept: {}",
        lambda source: [str(path[1]) for path in source.forms if path[0] == "annotations"],
    ),
    "dtype": (
        "",
        "rows of several dtypes are written as one that holds them all: {}",
        lambda source: _mixed(source.forms),
    ),
    "empty_episode": (
        "episode",
        "{} without steps: skipped",
        lambda source: int(np.count_nonzero(source.episodes["steps"] == 0)),
    ),
    "facts": ("", "facts of the trace are not kept: {}", lambda source: list(source.facts)),
    "final_observation": ("", "the final observation of each episode is not kept", lambda _: 1),
    "flags": (
        "",
        "terminated and truncated flags before the end of an episode are not kept",
        ExportSource.has_flags_within,
    ),
    "identity": ("", "writer, id, times and generator state of an episode are not kept", lambda _: 1),
    "infos": ("", "infos are not kept", lambda source: int(("infos",) in source.forms)),
    "options": (
        "episode",
        "the reset options of {} are not kept",
        lambda source: sum(bool(episode.options) for episode in source.trace.scan(columns=())),
    ),
    "outcome": (
        "episode",
        "{} without an end (cut, closed or lost) become truncated",
        lambda source: int(np.isin(source.episodes["outcome"], ("cut", "closed", "lost")).sum()),
    ),
    "parts": (
        "part",
        "{} of episodes with unrecorded steps become whole episodes",
        lambda source: int(source.is_part.sum()),
    ),
    "reset_info": (
        "episode",
        "the reset infos of {} are not kept",
        lambda source: sum(episode.reset_info is not None for episode in source.trace.scan(columns=())),
    ),
    "seed": (
        "seed",
        "the {} of episodes are not kept",
        lambda source: int(np.count_nonzero(source.episodes["seed"] != -1)),
    ),
}
# Values of Loss.what.
LOSSES = frozenset((*_USUAL, "pixels", "repeated_steps", "spaces", "states", "structure", "text"))
