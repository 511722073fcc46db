"""Export to Minari."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.formats.contract import Plan, Target
from gym_trace.formats.minari.arrow_out import ArrowEpisodes
from gym_trace.formats.minari.hdf5_out import HDF5Episodes
from gym_trace.formats.minari.metadata import FILE, IDS, described, id_of, root_of
from gym_trace.formats.minari.plan import KINDS, MinariPlan, plan_of
from gym_trace.formats.source import Source
from gym_trace.model.schema import Layouts


@dataclass(frozen=True)
class MinariExporter:
    """A data set of Minari, which minari.load_dataset() finds by the name of its directory: NAMESPACE/NAME-v0.

    kind: how Minari keeps it: "hdf5", "arrow" or "parquet".
    id: of the data set; "": as its directory lies below Minari's.
    """

    kind: str = "hdf5"
    id: str = ""

    name: ClassVar[str] = "minari"
    makes: ClassVar[str] = "directory"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidOption(f"kind={self.kind!r}: Minari has {', '.join(KINDS)}")
        if self.id and not IDS.fullmatch(self.id):
            raise InvalidOption(f"id={self.id!r}: Minari's ids are like cartpole/random-v0")

    def plan(self, source: Source) -> Plan:
        plan = plan_of(source, self.kind == "hdf5")
        return Plan(plan.losses, partial(self._write, source, plan), self._how_to_load)

    def _write(self, source: Source, plan: MinariPlan, target: Target) -> None:
        data = target.staged / "data"
        data.mkdir()
        with self._episodes(data, plan, source.layouts) as episodes:
            for window in source.windows():
                if window.start == 0:
                    episodes.begin(window.episode, source.identity(window.episode))
                episodes.add(window)
        size = sum(file.stat().st_size for file in data.rglob("*"))
        metadata: dict[str, Any] = {
            "total_episodes": episodes.count,
            "total_steps": source.steps,
            "data_format": self.kind,
            "jpeg_encoding": False,
            "observation_space": plan.spaces[0],
            "action_space": plan.spaces[1],
            "dataset_size": float(np.round(size / 1e6, 1)),
            "dataset_id": self.id or id_of(target.final),
            **described(source),
        }
        (data / FILE).write_text(json.dumps(metadata))

    def _episodes(self, data: Path, plan: MinariPlan, layouts: Layouts) -> HDF5Episodes | ArrowEpisodes:
        if self.kind == "hdf5":
            return HDF5Episodes(data, plan, layouts)
        return ArrowEpisodes(data, plan, layouts, self.kind)

    def _how_to_load(self, path: Path) -> str:
        path = path.resolve()
        name = self.id or id_of(path)
        parts = len(Path(name).parts)
        root = Path(*path.parts[:-parts])
        if root / name != path:
            return f"import minari; dataset = minari.MinariDataset({str(path / 'data')!r})"
        if root == root_of(path) and root != path.parent:
            return f"import minari; dataset = minari.load_dataset({name!r})"
        told = f"import os; os.environ['MINARI_DATASETS_PATH'] = {str(root)!r}"
        return f"{told}\nimport minari; dataset = minari.load_dataset({name!r})"
