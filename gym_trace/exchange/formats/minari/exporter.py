"""Export to Minari."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gym_trace.data.schema import Layouts
from gym_trace.errors import InvalidOption
from gym_trace.exchange.formats.contract import ExportPlan, Target
from gym_trace.exchange.formats.identity import KEY
from gym_trace.exchange.formats.minari.arrow_out import ArrowEpisodes
from gym_trace.exchange.formats.minari.hdf5_out import HDF5Episodes
from gym_trace.exchange.formats.minari.plan import FILE, KINDS, MinariPlan, is_number, is_spec, plan_of
from gym_trace.exchange.formats.source import ExportSource

_VERSION = "0.5.4"  # the first Minari that reads pictures in other forms than JPEG
_IDS = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")  # dataset ids: NAMESPACE/NAME-v0


@dataclass(frozen=True)
class MinariExporter:
    """A dataset of Minari, which minari.load_dataset() finds by the name of its directory: NAMESPACE/NAME-v0.

    kind: how Minari keeps it: "hdf5", "arrow" or "parquet".
    id: of the dataset; "": derived from its path below Minari's directory.
    """

    kind: str = "hdf5"
    id: str = ""

    name: ClassVar[str] = "minari"
    makes: ClassVar[str] = "directory"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidOption(f"kind={self.kind!r}: pass {', '.join(KINDS)}")
        if self.id and not _IDS.fullmatch(self.id):
            raise InvalidOption(f"id={self.id!r}: invalid; pass an id such as cartpole/random-v0")

    def plan(self, source: ExportSource) -> ExportPlan:
        plan = plan_of(source, self.kind == "hdf5")
        return ExportPlan(plan.losses, partial(self._write, source, plan), self._how_to_load)

    def _write(self, source: ExportSource, plan: MinariPlan, target: Target) -> None:
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
            "dataset_id": self.id or _id_of(target.final),
            **_described(source),
        }
        (data / FILE).write_text(json.dumps(metadata))

    def _episodes(self, data: Path, plan: MinariPlan, layouts: Layouts) -> HDF5Episodes | ArrowEpisodes:
        if self.kind == "hdf5":
            return HDF5Episodes(data, plan, layouts)
        return ArrowEpisodes(data, plan, layouts, self.kind)

    def _how_to_load(self, path: Path) -> str:
        path = path.resolve()
        name = self.id or _id_of(path)
        parts = len(Path(name).parts)
        root = Path(*path.parts[:-parts])
        if root / name != path:
            return f"import minari; dataset = minari.MinariDataset({str(path / 'data')!r})"
        if root == _root_of(path) and root != path.parent:
            return f"import minari; dataset = minari.load_dataset({name!r})"
        told = f"import os; os.environ['MINARI_DATASETS_PATH'] = {str(root)!r}"
        return f"{told}\nimport minari; dataset = minari.load_dataset({name!r})"


# -- where a dataset lies --------------------------------------------------------------------------------------------


def _root_of(path: Path) -> Path:
    """The directory in which Minari would look for the dataset at path: the one it does look in, or the parent."""
    given = os.environ.get("MINARI_DATASETS_PATH")
    usual = Path(given) if given else Path.home() / ".minari" / "datasets"
    return usual.resolve() if path.is_relative_to(usual.resolve()) and path != usual.resolve() else path.parent


def _id_of(path: Path) -> str:
    """The id of the dataset at a path: as Minari finds it there, if it can be one."""
    name = path.relative_to(_root_of(path)).as_posix()
    if _IDS.fullmatch(name):
        return name
    return (re.sub(r"[^-\w]+", "-", path.name).strip("-") or "trace") + "-v0"


# -- metadata.json ----------------------------------------------------------------------------------------------------


def _described(source: ExportSource) -> dict[str, Any]:
    """Metadata of the trace in Minari's words."""
    facts, said = source.facts, source.environment
    provenance = source.trace.readers[0].schema.get("provenance")
    policy = provenance.get("policy") if isinstance(provenance, dict) else None
    scores = facts.get("reference_scores")
    low, high = (scores.get(name) if isinstance(scores, dict) else None for name in ("random", "expert"))
    told = {
        "author": [author] if (author := _text(facts, "author")) else None,
        "author_email": [email] if (email := _text(facts, "author_email", "email")) else None,
        "algorithm_name": _text(facts, "algorithm", "algorithm_name") or (policy if isinstance(policy, str) else None),
        "code_permalink": _text(facts, "code", "code_permalink", "homepage"),
        "description": _text(facts, "description"),
        "env_spec": spec if is_spec(spec := said.get("spec")) and not said.get("note") else None,
        "ref_min_score": low if is_number(low) and is_number(high) else None,
        "ref_max_score": high if is_number(low) and is_number(high) else None,
    }
    return {
        "minari_version": _VERSION,
        **{key: value for key, value in told.items() if value is not None},
        KEY: source.about,
    }


def _text(facts: Mapping[str, Any], *names: str) -> str | None:
    return next((facts[name] for name in names if isinstance(facts.get(name), str) and facts[name]), None)
