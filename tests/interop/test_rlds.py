"""RLDS as tensorflow_datasets reads and writes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tfds = pytest.importorskip("tensorflow_datasets")

import gym_trace
from gym_trace.interop.conformance import Loaded, check_exporter, check_importer
from gym_trace.interop.rlds.exporter import RldsExporter
from gym_trace.interop.rlds.importer import RldsImporter
from gym_trace.interop.rlds.values import from_json, unpacked

pytestmark = pytest.mark.filterwarnings("ignore")


def episodes(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The steps of each episode, stacked, and its metadata, as TensorFlow Datasets gives them."""
    builder = tfds.builder_from_directory(str(path))
    config = tfds.ReadConfig(interleave_cycle_length=1)
    for split in builder.info.splits:
        for episode in builder.as_dataset(split=split, read_config=config):
            count = int(episode["steps"].cardinality())
            steps = next(iter(tfds.as_numpy(episode["steps"].batch(max(count, 1)))))
            yield steps, tfds.as_numpy(episode["episode_metadata"])


def arranged(tree: Any, expected: Any, last: bool) -> Any:
    """A tree of features as the space has it, with texts read."""
    if isinstance(expected, dict):
        return {key: arranged(tree[str(key)], part, last) for key, part in expected.items()}
    if isinstance(expected, tuple):
        return tuple(arranged(tree[str(key)], part, last) for key, part in enumerate(expected))
    rows = tree if last else tree[:-1]
    return list(unpacked(rows)) if rows.dtype == object else rows


def load_like(trace: gym_trace.Trace, path: Path) -> Iterator[Loaded]:
    likes = trace[0].observations, trace[0].actions
    for steps, known in episodes(path):
        assert steps["is_last"].tolist() == [False] * (len(steps["is_last"]) - 1) + [True]
        notes = {name: arranged(rows, None, False) for name, rows in steps.get("annotations", {}).items()}
        infos = [from_json(text) for text in steps["info"][:-1]] if "info" in steps else []
        yield Loaded(
            arranged(steps["observation"], likes[0], True),
            arranged(steps["action"], likes[1], False),
            steps["reward"][:-1],
            steps["terminated"][:-1],
            steps["truncated"][:-1],
            outcome=known["outcome"].decode(),
            infos=infos or None,
            annotations=notes,
            identity=known["gym_trace"].decode(),
        )
