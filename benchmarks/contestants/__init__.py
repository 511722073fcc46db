"""Who records: gym-trace, its peers, and what people write by hand; a module each, with a class Entry."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import workloads

# In the order of the tables, with what each module is imported for.
TITLES = {
    "gym-trace": "gym-trace",
    "minari-hdf5": "Minari, HDF5, lossless",
    "minari-arrow": "Minari, Arrow, lossless",
    "minari-default": "Minari as it comes (HDF5, images as JPEG)",
    "envlogger": "EnvLogger, riegeli",
    "lerobot": "LeRobotDataset",
    "gym-recording": "gym_recording",
    "npz": "lists + np.savez_compressed, a file an episode",
    "h5py": "h5py, append per step, gzip",
}
FLOORS = {"empty": "an empty wrapper", "ring": "copying into a ring"}


class Contestant(ABC):
    """One way to record and read. What is here does for most.

    Attributes:
        packages: whose versions say what was measured.
        note: what a reader of the tables has to know.
        tasks: measurements that it alone is asked for.
    """

    packages: tuple[str, ...] = ()
    note = ""
    tasks: ClassVar[dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]] = {}

    def refuses(self, workload: workloads.Workload) -> str:
        """Why the workload cannot be recorded; empty if it can."""
        return "no vector environments" if workload.lanes else ""

    # -- recording ----------------------------------------------------------------------------------------------------

    def make(self, workload: workloads.Workload) -> Any:
        """The environment as the contestant takes it, unrecorded."""
        return workload.make()

    @abstractmethod
    def wrap(self, env: Any, directory: str) -> Any:
        """The environment with recording to an empty directory."""

    def actions(self, workload: workloads.Workload, env: Any, steps: int) -> list[Any]:
        return workload.actions(env, steps)

    def start(self, env: Any) -> None:
        """The first reset, which is not measured: emulators take long for a seed."""
        env.reset(seed=0)

    def run(self, workload: workloads.Workload, env: Any, actions: Any) -> None:
        """The loop after that, which is the same with and without recording."""
        (workloads.run_lanes if workload.lanes else workloads.run)(env, actions)

    def finish(self, env: Any) -> None:
        """Returns when everything recorded can be read."""
        env.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, directory: str) -> Any:
        """A reader of a directory, which the methods below are given."""

    @abstractmethod
    def lengths(self, reader: Any) -> np.ndarray:
        """The number of steps of each episode."""

    def scan(self, reader: Any) -> tuple[int, int]:
        """Reads observations, actions and rewards of all episodes; returns steps, and bytes of observations."""
        steps = size = 0
        for index in range(len(self.lengths(reader))):
            observations, _, rewards = self.episode(reader, index)
            steps += len(rewards)
            size += size_of(observations)
        return steps, size

    @abstractmethod
    def episode(self, reader: Any, index: int) -> tuple[Any, Any, Any]:
        """Observations, actions and rewards of one episode."""

    def window(self, reader: Any, index: int, start: int, stop: int) -> Any:
        """The same of some steps of an episode."""
        return [_part(column, start, stop) for column in self.episode(reader, index)]

    def rewards(self, reader: Any) -> int:
        """Reads the rewards of all episodes, without anything else if that is possible; returns steps."""
        return self.scan(reader)[0]

    def recording_floors(self, workload: workloads.Workload) -> dict[str, float]:
        """Seconds a step for each of FLOORS. Asked of one contestant only."""
        return {}

    def reading_floors(self, directory: str) -> dict[str, Callable[[], float]]:
        """What reads the same with nothing around it: functions that return the seconds they take. Likewise."""
        return {}

    def readable(self, directory: str) -> int:
        """How many steps can be read of what a killed process has left."""
        return int(sum(self.lengths(self.open(directory))))


def _part(column: Any, start: int, stop: int) -> Any:
    if isinstance(column, dict):
        return {name: _part(value, start, stop) for name, value in column.items()}
    return column[start:stop]


def size_of(observations: Any) -> int:
    """Bytes of arrays."""
    if isinstance(observations, dict):
        return sum(size_of(value) for value in observations.values())
    return getattr(observations, "nbytes", 0)


def disk_size(directory: str) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


def entry(name: str) -> Contestant:
    """The contestant of a name in TITLES. Raises ImportError where it is not installed."""
    module, _, variant = name.partition("-") if name.startswith("minari") else (name.replace("-", "_"), "", "")
    entry_class = importlib.import_module("contestants." + module).Entry
    return entry_class(variant) if variant else entry_class()
