"""A hand-written recorder: lists, and one compressed .npz file per episode."""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
import workloads

from contestants import Contestant


class ListRecorder(gymnasium.Wrapper):
    def __init__(self, env: gymnasium.Env, directory: str):
        super().__init__(env)
        self.directory = directory
        self.count = 0
        self.rows: dict[str, list[Any]] = {}

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        self.save()
        observation, info = self.env.reset(**options)
        self.rows = {"actions": [], "rewards": [], "terminations": [], "truncations": []}
        self.observations = [observation]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = observation, reward, terminated, truncated, _ = self.env.step(action)
        self.observations.append(observation)
        self.rows["actions"].append(action)
        self.rows["rewards"].append(reward)
        self.rows["terminations"].append(terminated)
        self.rows["truncations"].append(truncated)
        return result

    def save(self) -> None:
        if not self.rows:
            return
        if isinstance(self.observations[0], dict):
            columns = {"observations/" + key: [row[key] for row in self.observations] for key in self.observations[0]}
        else:
            columns = {"observations": self.observations}
        np.savez_compressed(os.path.join(self.directory, f"{self.count:07}.npz"), **columns, **self.rows)
        self.count += 1
        self.rows = {}

    def close(self) -> None:
        self.save()
        super().close()


class VectorListRecorder(gymnasium.vector.VectorWrapper):
    """Keeps whole batches; the reader must separate the episodes."""

    def __init__(self, envs: gymnasium.vector.VectorEnv, directory: str):
        super().__init__(envs)
        self.path = os.path.join(directory, "run.npz")
        self.rows: list[tuple[Any, ...]] = []

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observations, infos = self.env.reset(**options)
        self.first = observations.copy()
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        result = observations, rewards, terminations, truncations, _ = self.env.step(actions)
        self.rows.append((observations.copy(), actions, rewards.copy(), terminations.copy(), truncations.copy()))
        return result

    def close(self, **options: Any) -> None:
        names = ("observations", "actions", "rewards", "terminations", "truncations")
        np.savez_compressed(self.path, first=self.first, **dict(zip(names, map(np.stack, zip(*self.rows)))))
        self.env.close(**options)


class Entry(Contestant):
    packages = ("numpy", "gymnasium")
    note = (
        "loses the running episode; keeps references, so reused buffers lose their values; text becomes fixed-width "
        "Unicode; vector environments: one file of batches, with episodes not separated"
    )

    def refuses(self, workload: workloads.Workload) -> str:
        return "noise takes minutes of zlib" if workload.name == "noise-x64" else ""

    def wrap(self, env: Any, directory: str) -> Any:
        return (VectorListRecorder if hasattr(env, "num_envs") else ListRecorder)(env, directory)

    def open(self, directory: str) -> list[str]:
        return sorted(os.path.join(directory, name) for name in os.listdir(directory))

    def lengths(self, reader: list[str]) -> np.ndarray:
        return np.array([len(self._columns(path, ("rewards",))["rewards"]) for path in reader])

    def scan(self, reader: list[str]) -> tuple[int, int]:
        steps = size = 0
        for path in reader:
            columns = self._columns(path)
            steps += columns["rewards"].size
            size += sum(array.nbytes for name, array in columns.items() if name.startswith("observations"))
        return steps, size

    def episode(self, reader: list[str], index: int) -> tuple[Any, Any, Any]:
        columns = self._columns(reader[index])
        observations = {name: array for name, array in columns.items() if name.startswith("observations")}
        return observations, columns["actions"], columns["rewards"]

    def rewards(self, reader: list[str]) -> int:
        return sum(self._columns(path, ("rewards",))["rewards"].size for path in reader)

    def readable(self, directory: str) -> int:
        count = 0
        for path in self.open(directory):
            try:
                count += len(self._columns(path)["rewards"])
            except Exception:  # the torn last file: zipfile, zlib and NumPy raise various errors
                continue
        return count

    def _columns(self, path: str, only: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        with np.load(path) as file:
            return {name: file[name] for name in only or file.files if name not in ("terminations", "truncations")}
