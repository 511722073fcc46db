"""Export: a LeRobot data set, version 3, as LeRobotDataset loads it from a directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.interop.contract import Loss
from gym_trace.interop.lerobot.features import FINAL, Feature, features_of
from gym_trace.interop.lerobot.writer import DatasetWriter
from gym_trace.interop.losses import losses
from gym_trace.interop.source import Source
from gym_trace.interop.steps.windows import KEPT

_FPS = 30
_MOST_FPS = 1000


@dataclass(frozen=True)
class LeRobotExporter:
    """LeRobot data set, version 3: Parquet, with pictures as PNG or MP4, for LeRobotDataset

    Attributes:
        video: whether pictures go into MP4 files (H.264 without loss, needs PyAV) and not into the tables as PNG.
        fps: steps a second, 1 to 1000; None: as facts of the trace say (fps), otherwise 30.
        task: what is done, in words; None: as facts of the trace say (task), otherwise the id of the environment.
    """

    name: ClassVar[str] = "lerobot"
    extra: ClassVar[str] = "lerobot"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    video: bool = False
    fps: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.video, bool):
            raise InvalidOption(f"video={self.video!r}: give true or false")
        if self.fps is not None and not _is_fps(self.fps):
            raise InvalidOption(f"fps={self.fps!r}: give a whole number of steps a second, 1 to {_MOST_FPS}")
        if self.task is not None and not (isinstance(self.task, str) and self.task):
            raise InvalidOption(f"task={self.task!r}: give what is done, in words")
        if self.video and find_spec("av") is None:
            raise MissingExtra("videos need PyAV: pip install 'gym-trace[video]'")

    def lost(self, source: Source) -> Iterator[Loss]:
        """What LeRobotDataset does not give. It is in the directory all the same, from which an import has it back."""
        features = features_of(source, self.video)
        if not source.steps:
            raise InvalidOption(f"{source.trace.directory}: there is no step, and LeRobot loads nothing without one")
        kept = f"LeRobotDataset does not give it; {FINAL} has it"
        yield Loss("final_observation", f"the final observation of each episode has no place: {kept}")
        for loss in losses(source, "outcome", "flags", "empty_episode", "parts"):
            yield Loss(loss.what, f"{loss.why}, by LeRobotDataset; an import has it back")
        wide = [feature.name for feature in features if feature.dtype.str[1:] == "f8" and feature.kind == "array"]
        if wide:
            yield Loss("dtype", f"LeRobotDataset gives float64 as float32, the files have it whole: {', '.join(wide)}")
        if mixed := [str(feature.name) for feature in features if _is_mixed(source, feature)]:
            yield Loss("dtype", f"rows of several dtypes are written as the widest of them: {', '.join(mixed)}")
        if other := [feature.name for feature in features if feature.kind == "values" and feature.path[0] != "infos"]:
            yield Loss("spaces", f"values that are no arrays of one form are JSON texts: {', '.join(other)}")

    def write(self, source: Source, target: Path) -> None:
        """See Exporter."""
        features = features_of(source, self.video)
        task = self.task or _text(source.facts.get("task")) or _text(source.environment.get("id")) or "gym-trace"
        writer = DatasetWriter(source, target, features, self._fps(source), task)
        try:
            writer.write()
        finally:
            writer.drop()

    def how_to_load(self, path: Path) -> str:
        """See Exporter."""
        return (
            "from lerobot.datasets.lerobot_dataset import LeRobotDataset\n"
            f"dataset = LeRobotDataset({path.name!r}, root={str(path.resolve())!r})"
        )

    def _fps(self, source: Source) -> int:
        said = [self.fps, source.facts.get("fps")]
        return int(next(filter(_is_fps, said), None) or _FPS)


def _is_fps(fps: Any) -> bool:
    whole = isinstance(fps, (int, float)) and not isinstance(fps, bool) and fps == fps // 1
    return whole and 1 <= fps <= _MOST_FPS


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else ""


def _is_mixed(source: Source, feature: Feature) -> bool:
    form = source.forms[feature.path]
    return form is not None and form.mixed
