"""gym-trace, with its defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import floors
import growth
import numpy as np
import workloads

from contestants import Contestant, size_of
from gym_trace import Trace, TraceRecordingVectorWrapper, TraceRecordingWrapper, open_trace, scan_recorded_traces


class Entry(Contestant):
    packages = ("gym-trace", "gymnasium", "zstandard")
    note = "default settings; writes while the loop runs; includes the random generator's state before every reset"

    tasks: ClassVar[dict[str, Any]] = {"sizes": floors.sizes, "batches": growth.batches}

    def refuses(self, workload: workloads.Workload) -> str:
        return ""

    def wrap(self, env: Any, directory: str) -> Any:
        return (TraceRecordingVectorWrapper if hasattr(env, "num_envs") else TraceRecordingWrapper)(env, directory)

    def open(self, directory: str) -> Trace:
        return open_trace(directory)

    def lengths(self, reader: Trace) -> np.ndarray:
        return reader.episodes["steps"]

    def scan(self, reader: Trace) -> tuple[int, int]:
        steps = size = 0

        def count(observations: Any, actions: Any, rewards: Any) -> None:
            nonlocal steps, size
            steps += len(rewards)
            size += size_of(observations)

        scan_recorded_traces(reader.directory, count)
        return steps, size

    def episode(self, reader: Trace, index: int) -> tuple[Any, Any, Any]:
        episode = reader[index]
        return episode.observations, episode.actions, episode.rewards

    def window(self, reader: Trace, index: int, start: int, stop: int) -> Any:
        part = reader[index][start:stop]
        return part.observations, part.actions, part.rewards

    def rewards(self, reader: Trace) -> int:
        return sum(len(episode.rewards) for episode in reader.scan(columns=("rewards",)))

    def recording_floors(self, workload: workloads.Workload, directory: str, scale: float) -> dict[str, float]:
        return floors.wrapping(self, workload, directory, scale)

    def reading_floors(self, directory: str) -> dict[str, Callable[[], float]]:
        blobs = floors.Blobs(directory)
        return {"decompress": blobs.decompress, "decode": blobs.decode}
