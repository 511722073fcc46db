"""Minari: its DataCollector, and the dataset created from it."""

from __future__ import annotations

import importlib
import os
import string
import warnings
from typing import Any

import gymnasium
import minari
import numpy as np
import workloads
from gymnasium import spaces
from minari.dataset.minari_storage import MinariStorage

from contestants import Contestant, size_of

DATASET = "bench/run-v0"

for _module in ("jax.tree_util", "minari.dataset._storages.arrow_storage", "minari.dataset._storages.hdf5_storage"):
    importlib.import_module(_module)  # Minari imports them at the first step


class Entry(Contestant):
    packages = ("minari", "gymnasium", "h5py", "pyarrow")
    note = (
        "seeds every unseeded reset; keeps references to values, so buffers that an environment reuses come back as "
        "copies of their last value; cannot store MiniGrid's mission space, which is replaced by Text; always reads "
        "whole episodes; until create_dataset(), all data is in a temporary folder, which load_dataset() cannot find "
        "after a kill"
    )

    def __init__(self, variant: str):
        warnings.simplefilter("ignore")
        self.data_format = None if variant == "default" else variant
        self.jpeg = variant == "default"

    def refuses(self, workload: workloads.Workload) -> str:
        if self.jpeg and not workload.images:
            return "as with HDF5, lossless"
        return super().refuses(workload)

    def wrap(self, env: Any, directory: str) -> Any:
        os.environ["MINARI_DATASETS_PATH"] = directory
        return minari.DataCollector(
            env,
            observation_space=_storable(env.observation_space),
            data_format=self.data_format,
            jpeg_encoding=self.jpeg,
        )

    def finish(self, env: Any) -> None:
        if isinstance(env, minari.DataCollector):
            env.create_dataset(DATASET)
        env.close()

    def open(self, directory: str) -> minari.MinariDataset:
        os.environ["MINARI_DATASETS_PATH"] = directory
        return minari.load_dataset(DATASET)

    def lengths(self, reader: minari.MinariDataset) -> np.ndarray:
        metadata = reader.storage.get_episode_metadata(reader.episode_indices)
        return np.array([episode["total_steps"] for episode in metadata])

    def scan(self, reader: minari.MinariDataset) -> tuple[int, int]:
        steps = size = 0
        for episode in reader.iterate_episodes():
            steps += len(episode.rewards)
            size += size_of(episode.observations)
        return steps, size

    def episode(self, reader: minari.MinariDataset, index: int) -> tuple[Any, Any, Any]:
        episode = reader[index]
        return episode.observations, episode.actions, episode.rewards

    def readable(self, directory: str) -> int:
        folders = [entry.path for entry in os.scandir(directory) if entry.is_dir()]
        storages = [MinariStorage.read(folder) for folder in folders]
        return sum(len(e["rewards"]) for s in storages for e in s.get_episodes(range(s.total_episodes)))


def _storable(space: gymnasium.Space) -> gymnasium.Space:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _storable(part) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Space) and type(space).__name__ == "MissionSpace":
        return spaces.Text(64, charset=string.printable)
    return space
