"""LeRobotDataset: images as PNG, the rest in Parquet."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from lerobot.datasets import LeRobotDataset

from contestants import Contestant, size_of

NAME = "bench/run"


class FrameAdder(gymnasium.Wrapper):
    """Adds the observation before each step with the results of the step, as LeRobot does."""

    def __init__(self, env: gymnasium.Env, directory: str):
        super().__init__(env)
        self.typed: dict[str, Any] = {}
        features = {
            **self._features("observation", env.observation_space),
            **self._features("action", env.action_space),
            "next.reward": _feature((1,), "float64"),
            "next.terminated": _feature((1,), "bool"),
            "next.truncated": _feature((1,), "bool"),
        }
        root = os.path.join(directory, "data")
        self.data = LeRobotDataset.create(NAME, 30, features, root=root, use_videos=False, image_writer_threads=4)

    def _features(self, name: str, space: gymnasium.Space) -> dict[str, Any]:
        if isinstance(space, spaces.Dict):
            parts = (self._features(f"{name}.{_renamed(key)}", part) for key, part in space.spaces.items())
            return {key: feature for part in parts for key, feature in part.items()}
        if isinstance(space, spaces.Text) or type(space).__name__ == "MissionSpace":
            return {name: _feature((1,), "string")}
        is_image = len(space.shape) == 3 and space.shape[2] == 3 and space.shape[0] >= 32 and space.dtype == np.uint8
        return {name: _feature(space.shape or (1,), "image" if is_image else np.dtype(space.dtype).name)}

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        if self.data.has_pending_frames():
            self.data.save_episode()
        result = self.observation, _ = self.env.reset(**options)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = observation, reward, terminated, truncated, _ = self.env.step(action)
        self.data.add_frame(
            {
                **_values("observation", self.observation),
                **_values("action", action),
                "next.reward": np.array([reward], np.float64),
                "next.terminated": np.array([terminated]),
                "next.truncated": np.array([truncated]),
                "task": "benchmark",
            }
        )
        self.observation = observation
        if terminated or truncated:
            self.data.save_episode()
        return result

    def close(self) -> None:
        if self.data.has_pending_frames():
            self.data.save_episode()
        self.data.finalize()
        super().close()


def _feature(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"dtype": dtype, "shape": tuple(shape), "names": None}


def _renamed(key: str) -> str:
    """Rename "image" in keys: LeRobot expects image statistics for such names, such as MiniGrid's cells."""
    return key.replace("image", "cells")


def _values(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {key: part for k, v in value.items() for key, part in _values(f"{name}.{_renamed(k)}", v).items()}
    return {name: value if isinstance(value, str) else np.atleast_1d(value)}


class Entry(Contestant):
    packages = ("lerobot", "datasets", "pyarrow", "torch", "numpy", "gymnasium")
    note = (
        "images as lossless PNG instead of video; drops the last observation of every episode; read with hf_dataset as "
        "arrays of whole episodes, because its own __getitem__ returns one frame of tensors"
    )

    def wrap(self, env: Any, directory: str) -> FrameAdder:
        return FrameAdder(env, directory)

    def open(self, directory: str) -> LeRobotDataset:
        # Skips the slow search for torchcodec; there are no videos.
        return LeRobotDataset(NAME, root=os.path.join(directory, "data"), video_backend="pyav")

    def lengths(self, reader: LeRobotDataset) -> np.ndarray:
        return np.array(reader.meta.episodes["length"])

    def scan(self, reader: LeRobotDataset) -> tuple[int, int]:
        steps = size = 0
        for start, stop in self._bounds(reader):
            observations, _, rewards = _read(reader, start, stop)
            steps += len(rewards)
            size += size_of(observations)
        return steps, size

    def episode(self, reader: LeRobotDataset, index: int) -> tuple[Any, Any, Any]:
        return _read(reader, *self._bounds(reader)[index])

    def window(self, reader: LeRobotDataset, index: int, start: int, stop: int) -> Any:
        first = self._bounds(reader)[index][0]
        return _read(reader, first + start, first + stop)

    def rewards(self, reader: LeRobotDataset) -> int:
        return len(_column(reader.hf_dataset.data.column("next.reward")))

    def _bounds(self, reader: LeRobotDataset) -> list[tuple[int, int]]:
        if not hasattr(reader, "bounds"):
            episodes = reader.meta.episodes
            reader.bounds = list(zip(episodes["dataset_from_index"], episodes["dataset_to_index"]))
        return reader.bounds


def _read(reader: LeRobotDataset, start: int, stop: int) -> tuple[Any, Any, Any]:
    if reader.meta.image_keys:
        rows = reader.hf_dataset.with_format("numpy")[start:stop]
    else:  # its NumPy format would convert float64 to float32
        table = reader.hf_dataset.with_format("arrow")[start:stop]
        rows = {name: _column(table[name]) for name in table.column_names}
    observations = {name: rows[name] for name in rows if name.startswith("observation")}
    return observations, rows["action"], rows["next.reward"]


def _column(column: Any) -> np.ndarray:
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    rows = len(array)
    while hasattr(array, "storage"):
        array = array.storage
    while hasattr(array, "flatten") and hasattr(array.type, "value_type"):
        array = array.flatten()
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape(rows, -1) if len(values) != rows else values
