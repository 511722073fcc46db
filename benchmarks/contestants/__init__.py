"""Recorders: gym-trace, its peers, and hand-written ones; one module each, with a class Entry."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import workloads

# Names and titles of contestants, in the order of the tables.
TITLES = {
    "gym-trace": "gym-trace",
    "minari-hdf5": "Minari, HDF5, lossless",
    "minari-arrow": "Minari, Arrow, lossless",
    "minari-default": "Minari, default settings (HDF5, images as JPEG)",
    "envlogger": "EnvLogger, riegeli",
    "lerobot": "LeRobotDataset",
    "gym-recording": "gym_recording",
    "npz": "lists + np.savez_compressed, one file per episode",
    "h5py": "h5py, append per step, gzip",
}
FLOORS = {
    "empty": "an empty wrapper",
    "ring": "copying into a ring",
    "canned": "gym-trace, on the repeated rows",
}


class Contestant(ABC):
    """A way to record and read. The defaults suit most.

    Attributes:
        packages: packages whose versions are reported.
        note: note for readers of the tables.
        tasks: measurements of this contestant only.
    """

    packages: tuple[str, ...] = ()
    note = ""
    tasks: ClassVar[dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]]] = {}

    def refuses(self, workload: workloads.Workload) -> str:
        """Return the reason why the workload is not supported; empty if it is."""
        return "no vector environments" if workload.lanes else ""

    # -- recording ----------------------------------------------------------------------------------------------------

    def make(self, workload: workloads.Workload) -> Any:
        """Make the environment for the contestant, unrecorded."""
        return workload.make()

    @abstractmethod
    def wrap(self, env: Any, directory: str) -> Any:
        """Wrap the environment with recording to an empty directory."""

    def actions(self, workload: workloads.Workload, env: Any, steps: int) -> list[Any]:
        return workload.actions(env, steps)

    def start(self, env: Any) -> None:
        """Do the first reset, which is not measured: seeding an emulator is slow."""
        env.reset(seed=0)

    def run(self, workload: workloads.Workload, env: Any, actions: Any) -> None:
        """Run the loop, which is the same with and without recording."""
        (workloads.run_lanes if workload.lanes else workloads.run)(env, actions)

    def finish(self, env: Any) -> None:
        """Return when all recorded data is readable."""
        env.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, directory: str) -> Any:
        """Open a reader for the methods below."""

    @abstractmethod
    def lengths(self, reader: Any) -> np.ndarray:
        """Return the number of steps of each episode."""

    def scan(self, reader: Any) -> tuple[int, int]:
        """Read observations, actions and rewards of all episodes; return steps, and bytes of observations."""
        steps = size = 0
        for index in range(len(self.lengths(reader))):
            observations, _, rewards = self.episode(reader, index)
            steps += len(rewards)
            size += size_of(observations)
        return steps, size

    @abstractmethod
    def episode(self, reader: Any, index: int) -> tuple[Any, Any, Any]:
        """Return observations, actions and rewards of one episode."""

    def window(self, reader: Any, index: int, start: int, stop: int) -> Any:
        """Return observations, actions and rewards of a range of steps of an episode."""
        return [_part(column, start, stop) for column in self.episode(reader, index)]

    def rewards(self, reader: Any) -> int:
        """Read the rewards of all episodes, without other columns if possible; return steps."""
        return self.scan(reader)[0]

    def recording_floors(self, workload: workloads.Workload, directory: str, scale: float) -> dict[str, float]:
        """Return seconds per step for each of FLOORS. Called for one contestant only. scale: factor on steps."""
        return {}

    def reading_floors(self, directory: str) -> dict[str, Callable[[], float]]:
        """Return bare readers of the same data, which return their seconds. Called for one contestant only."""
        return {}

    def readable(self, directory: str) -> int:
        """Return the number of readable steps of a killed process."""
        return int(sum(self.lengths(self.open(directory))))


def _part(column: Any, start: int, stop: int) -> Any:
    if isinstance(column, dict):
        return {name: _part(value, start, stop) for name, value in column.items()}
    return column[start:stop]


def size_of(observations: Any) -> int:
    """Return the bytes of arrays."""
    if isinstance(observations, dict):
        return sum(size_of(value) for value in observations.values())
    return getattr(observations, "nbytes", 0)


def disk_size(directory: str) -> int:
    return sum(os.path.getsize(os.path.join(folder, name)) for folder, _, names in os.walk(directory) for name in names)


def entry(name: str) -> Contestant:
    """Return the contestant of a name in TITLES. Raises ImportError if it is not installed."""
    module, _, variant = name.partition("-") if name.startswith("minari") else (name.replace("-", "_"), "", "")
    entry_class = importlib.import_module("contestants." + module).Entry
    return entry_class(variant) if variant else entry_class()
