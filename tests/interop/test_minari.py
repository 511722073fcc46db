"""Minari: what its own loader gives of an export, and what becomes of data sets that it has written itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minari
import pytest

import gym_trace
from gym_trace.interop.conformance import Loaded, check_exporter, check_importer
from gym_trace.interop.minari.exporter import MinariExporter
from gym_trace.interop.minari.importer import MinariImporter

KINDS = ["hdf5", "arrow", "parquet"]


def load(path: Path) -> Iterator[Loaded]:
    """The episodes as minari.MinariDataset gives them."""
    dataset = minari.MinariDataset(path / "data")
    assert dataset.total_steps == sum(map(len, dataset.iterate_episodes()))
    assert len(dataset.sample_episodes(1)) == 1
    metadata = dataset.storage.get_episode_metadata(dataset.episode_indices)
    for episode, said in zip(dataset.iterate_episodes(), metadata, strict=True):
        assert said["total_steps"] == len(episode)
        assert said["id"] == episode.id
        repr(episode)
        columns = dict(episode.infos)
        annotations = columns.pop("annotations", {})
        for name in [name for name in columns if name.startswith("annotations/")]:  # of arrow
            annotations[name.removeprefix("annotations/")] = columns.pop(name)
        rows = [{name: column[i + 1] for name, column in columns.items()} for i in range(len(episode))]
        yield Loaded(
            episode.observations,
            episode.actions,
            episode.rewards,
            episode.terminations,
            episode.truncations,
            seed=said.get("seed"),
            options=said.get("options"),
            infos=rows if columns else None,
            annotations={name: column[1:] for name, column in annotations.items()},
            identity=said["gym_trace"],
        )


@pytest.mark.parametrize("kind", KINDS)
def test_minari_reads_what_was_recorded(tmp_path: Path, kind: str) -> None:
    refused = check_exporter(MinariExporter(kind), load, tmp_path)
    assert set(refused) == ({"several-rewards"} if kind != "hdf5" else set())


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_exported_comes_back(tmp_path: Path, kind: str) -> None:
    check_importer(MinariExporter(kind), MinariImporter(), tmp_path)


_: Any = (json, gym_trace)
