"""Export to Minari."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.errors import InvalidOption
from gym_trace.formats.contract import Loss
from gym_trace.formats.minari.arrow_out import ArrowEpisodes
from gym_trace.formats.minari.hdf5_out import HDF5Episodes
from gym_trace.formats.minari.metadata import FILE, IDS, described, root_of
from gym_trace.formats.minari.plan import KINDS, Plan, plan_of
from gym_trace.formats.source import Source
from gym_trace.model.schema import Layouts
from gym_trace.storage.staging import final_path


@dataclass(frozen=True)
class MinariExporter:
    """A data set of Minari, which minari.load_dataset() finds by the name of its directory: NAMESPACE/NAME-v0.

    kind: how Minari keeps it: "hdf5", "arrow" or "parquet".
    id: of the data set; "": as its directory lies below Minari's.
    """

    kind: str = "hdf5"
    id: str = ""

    name: ClassVar[str] = "minari"
    extra: ClassVar[str] = "minari"
    makes: ClassVar[str] = "directory"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidOption(f"kind={self.kind!r}: Minari has {', '.join(KINDS)}")
        if self.id and not IDS.fullmatch(self.id):
            raise InvalidOption(f"id={self.id!r}: Minari's ids are like cartpole/random-v0")

    def lost(self, source: Source) -> Iterator[Loss]:
        """As Exporter."""
        yield from plan_of(source, self.kind).losses

    def write(self, source: Source, target: Path) -> None:
        """As Exporter."""
        plan, data = plan_of(source, self.kind), target / "data"
        data.mkdir()
        said = described(source, final_path(target))
        if self.id:
            said["dataset_id"] = self.id
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
            **said,
        }
        (data / FILE).write_text(json.dumps(metadata))

    def _episodes(self, data: Path, plan: Plan, layouts: Layouts) -> HDF5Episodes | ArrowEpisodes:
        if self.kind == "hdf5":
            return HDF5Episodes(data, plan, layouts)
        return ArrowEpisodes(data, plan, layouts, self.kind)

    def how_to_load(self, path: Path) -> str:
        """As Exporter."""
        path = path.resolve()
        name = json.loads((path / "data" / FILE).read_bytes())["dataset_id"]
        parts = len(Path(name).parts)
        root = Path(*path.parts[:-parts])
        if root / name != path:
            return f"import minari; dataset = minari.MinariDataset({str(path / 'data')!r})"
        if root == root_of(path) and root != path.parent:
            return f"import minari; dataset = minari.load_dataset({name!r})"
        told = f"import os; os.environ['MINARI_DATASETS_PATH'] = {str(root)!r}"
        return f"{told}\nimport minari; dataset = minari.load_dataset({name!r})"
