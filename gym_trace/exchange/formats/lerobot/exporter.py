"""Export to LeRobot datasets, version 3, which LeRobotDataset loads from a directory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import numpy as np

from gym_trace.errors import InvalidOption, MissingExtra
from gym_trace.exchange.formats.contract import ExportPlan, Loss, Target, losses, mixed_dtypes
from gym_trace.exchange.formats.lerobot.features import (
    FINAL,
    TASK_INDEX,
    TIMESTAMP,
    Feature,
    Origin,
    features_of,
    timestamps,
)
from gym_trace.exchange.formats.lerobot.writer import DatasetWriter
from gym_trace.exchange.formats.source import ExportSource
from gym_trace.playback.scan import KEPT

_DEFAULT_FPS = 30
_MOST_FPS = 1000
_NO_ROWS = np.empty(0, object)


@dataclass(frozen=True)
class LeRobotExporter:
    """LeRobot dataset, version 3: Parquet, with images as PNG or MP4, for LeRobotDataset

    Attributes:
        video: store images in MP4 files (lossless H.264, needs PyAV) instead of PNG in the tables.
        fps: steps per second, 1 to 1000; None: the fact fps of the trace, otherwise 30.
        task: description of the task; None: the fact task of the trace, otherwise the environment id.
    """

    name: ClassVar[str] = "lerobot"
    makes: ClassVar[str] = "directory"
    finals: ClassVar[str] = KEPT

    video: bool = False
    fps: int | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.video, bool):
            raise InvalidOption(f"video={self.video!r}: pass true or false")
        if self.fps is not None and not _is_fps(self.fps):
            raise InvalidOption(f"fps={self.fps!r}: pass whole steps per second, 1 to {_MOST_FPS}")
        if self.task is not None and not (isinstance(self.task, str) and self.task):
            raise InvalidOption(f"task={self.task!r}: pass a text that describes the task")
        if self.video and find_spec("av") is None:
            raise MissingExtra("videos need PyAV: pip install 'gym-trace[video]'")

    def plan(self, source: ExportSource) -> ExportPlan:
        """Plan the export. Its losses are those of LeRobotDataset; an import restores everything."""
        if not source.steps:
            raise InvalidOption(f"{source.trace.directory}: no steps; LeRobot needs at least one")
        origin = Origin.of(source)
        features = features_of(source, self.video, origin)
        return ExportPlan(
            list(_losses(source, features)), partial(self._write, source, features, origin), self._how_to_load
        )

    def _write(self, source: ExportSource, features: list[Feature], origin: Origin, target: Target) -> None:
        fps = self._fps(source)
        task = self.task or _text(source.facts.get("task")) or _text(source.environment.get("id")) or "gym-trace"
        tasks = [task] if self.task or not _has_tasks(source, origin) else list(origin.tasks)
        counted = [feature for feature in features if _is_counted(source, feature, tasks, fps)]
        features = [feature for feature in features if feature not in counted]
        counted = [feature._replace(name=str(feature.path[1])) for feature in counted]
        writer = DatasetWriter(source, target.staged, features, counted, fps, tasks, origin.robot_type)
        try:
            writer.write()
        finally:
            writer.detach()

    def _how_to_load(self, path: Path) -> str:
        return (
            "from lerobot.datasets.lerobot_dataset import LeRobotDataset\n"
            f"dataset = LeRobotDataset({path.name!r}, root={str(path.resolve())!r})"
        )

    def _fps(self, source: ExportSource) -> int:
        return next((int(fps) for fps in (self.fps, source.facts.get("fps")) if _is_fps(fps)), _DEFAULT_FPS)


def _losses(source: ExportSource, features: list[Feature]) -> Iterator[Loss]:
    yield Loss("final_observation", f"final observations: not returned by LeRobotDataset; stored in {FINAL}")
    yield from losses(source, "outcome", "flags", "empty_episode", "parts", restored=True)
    yield from mixed_dtypes({feature.path: source.forms[feature.path] for feature in features})
    wide = [feature.name for feature in features if feature.dtype.str[1:] == "f8" and feature.kind == "array"]
    if wide:
        yield Loss("dtype", f"LeRobotDataset returns float64 as float32; the files keep float64: {', '.join(wide)}")
    if other := [feature.name for feature in features if feature.kind == "values" and feature.path[0] != "infos"]:
        yield Loss("spaces", f"values other than arrays of one dtype and shape become JSON: {', '.join(other)}")


def _has_tasks(source: ExportSource, origin: Origin) -> bool:
    """Return True if every step has a valid index into the tasks of the dataset it was imported from."""
    form = source.forms.get(TASK_INDEX)
    if not origin.tasks or form is None or form.dtype != np.int64 or form.shape:
        return False
    count = len(origin.tasks)
    indices = (window.columns.get(TASK_INDEX, _NO_ROWS) for window in source.survey("annotations") if window.steps)
    return all(rows.dtype == np.int64 and bool(((rows >= 0) & (rows < count)).all()) for rows in indices)


def _is_counted(source: ExportSource, feature: Feature, tasks: list[str], fps: int) -> bool:
    """Return True for an imported annotation that equals one of the COUNTED columns of this export."""
    if feature.path == TASK_INDEX:
        return len(tasks) > 1
    if feature.path != TIMESTAMP or feature.dtype != np.float32 or feature.shape:
        return False
    for window in source.survey("annotations"):
        steps = np.arange(window.start, window.start + window.steps)
        if window.columns.get(TIMESTAMP, _NO_ROWS).tobytes() != timestamps(steps, fps).tobytes():
            return False
    return True


def _is_fps(fps: Any) -> TypeGuard[int | float]:
    is_whole = isinstance(fps, (int, float)) and not isinstance(fps, bool) and fps == fps // 1
    return is_whole and 1 <= fps <= _MOST_FPS


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else ""
