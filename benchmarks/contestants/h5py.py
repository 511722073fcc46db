"""A hand-written HDF5 recorder whose datasets grow by one row per step."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import h5py
import numpy as np
from gymnasium import spaces

from contestants import Contestant

LARGE = 4096  # bytes; larger rows have one chunk each


class StepAppender(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, directory: str):
        super().__init__(env)
        self.file = h5py.File(os.path.join(directory, "run.h5"), "w")
        self.columns: dict[str, h5py.Dataset] = {}
        self._add_columns("observations", env.observation_space)
        self._add_columns("actions", env.action_space)
        self._add_column("rewards", (), np.float64)
        self._add_column("terminations", (), np.bool_)
        self._add_column("truncations", (), np.bool_)
        self._add_column("starts", (), np.int64)  # steps before each reset

    def _add_columns(self, name: str, space: gymnasium.Space) -> None:
        if isinstance(space, spaces.Dict):
            for key, part in space.spaces.items():
                self._add_columns(f"{name}/{key}", part)
        elif isinstance(space, spaces.Text) or type(space).__name__ == "MissionSpace":
            self._add_column(name, (), h5py.string_dtype())
        else:
            self._add_column(name, space.shape, space.dtype)

    def _add_column(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        size = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=int))
        chunks = (1 if size > LARGE else 1024, *shape)
        self.columns[name] = self.file.create_dataset(
            name, (0, *shape), dtype, maxshape=(None, *shape), chunks=chunks, compression="gzip"
        )

    def _append(self, name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                self._append(f"{name}/{key}", part)
            return
        column = self.columns[name]
        count = column.shape[0]
        column.resize(count + 1, axis=0)
        column[count] = value

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        self._append("starts", self.columns["rewards"].shape[0])
        self._append("observations", observation)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = observation, reward, terminated, truncated, _ = self.env.step(action)
        self._append("observations", observation)
        self._append("actions", action)
        self._append("rewards", reward)
        self._append("terminations", terminated)
        self._append("truncations", truncated)
        return result

    def close(self) -> None:
        self.file.close()
        super().close()


class Reader:
    def __init__(self, directory: str):
        self.file = h5py.File(os.path.join(directory, "run.h5"), "r")
        self.bounds = np.append(self.file["starts"][:], self.file["rewards"].shape[0])

    def columns(self, name: str, start: int, stop: int) -> Any:
        node = self.file[name]
        if isinstance(node, h5py.Group):
            return {key: self.columns(f"{name}/{key}", start, stop) for key in node}
        return node[start:stop]


class Entry(Contestant):
    packages = ("h5py", "gymnasium")
    note = "one chunk per row of more than 4 KiB, or per 1,024 smaller rows; a killed process leaves an unreadable file"

    def wrap(self, env: Any, directory: str) -> Any:
        return StepAppender(env, directory)

    def open(self, directory: str) -> Reader:
        return Reader(directory)

    def lengths(self, reader: Reader) -> np.ndarray:
        return np.diff(reader.bounds)

    def episode(self, reader: Reader, index: int) -> tuple[Any, Any, Any]:
        return self.window(reader, index, 0, int(reader.bounds[index + 1] - reader.bounds[index]))

    def window(self, reader: Reader, index: int, start: int, stop: int) -> Any:
        first = int(reader.bounds[index])
        seen = first + index  # each episode has one more observation than steps
        observations = reader.columns("observations", seen + start, seen + stop + 1)
        actions = reader.columns("actions", first + start, first + stop)
        return observations, actions, reader.columns("rewards", first + start, first + stop)

    def rewards(self, reader: Reader) -> int:
        return len(reader.file["rewards"][:])
