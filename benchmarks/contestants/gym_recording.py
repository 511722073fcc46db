"""gym_recording from a checkout, with gym 0.9.7, in a loop of that API."""

from __future__ import annotations

import os
import warnings
from typing import Any

import gym
import gym_recording.playback
import gym_recording.wrappers
import numpy as np
import workloads

from contestants import Contestant


class Entry(Contestant):
    packages = ("gym", "numpy")
    note = "reader maps files into memory; the arrays are not touched here, in its favour"

    def refuses(self, workload: workloads.Workload) -> str:
        return "" if workload.name == "cartpole" else "not in gym 0.9.7"

    def make(self, workload: workloads.Workload) -> Any:
        warnings.simplefilter("ignore")
        env = gym.make("CartPole-v1")
        env.seed(0)
        return env

    def actions(self, workload: workloads.Workload, env: Any, steps: int) -> list[Any]:
        return np.random.default_rng(0).integers(0, 2, steps).tolist()

    def wrap(self, env: Any, directory: str) -> Any:
        wrapper = gym_recording.wrappers.TraceRecordingWrapper(env)
        os.rmdir(wrapper.directory)  # it ignores the given directory and makes its own
        wrapper.directory = wrapper.recording.directory = directory
        return wrapper

    def start(self, env: Any) -> None:
        env.reset()

    def run(self, workload: workloads.Workload, env: Any, actions: Any) -> None:
        for action in actions:
            _, _, done, _ = env.step(action)
            if done:
                env.reset()

    def finish(self, env: Any) -> None:
        """Close it; it divides by zero without a step since the last save."""
        if not env.recording.buffered_step_count:
            env.step(0)
        env.close()

    def open(self, directory: str) -> str:
        return directory

    def lengths(self, reader: str) -> np.ndarray:
        lengths: list[int] = []
        gym_recording.playback.scan_recorded_traces(reader, lambda _, actions, rewards: lengths.append(len(rewards)))
        return np.array(lengths, int)

    def scan(self, reader: str) -> tuple[int, int]:
        counts = [0, 0]

        def count(observations: Any, actions: Any, rewards: Any) -> None:
            counts[0] += len(rewards)
            counts[1] += observations.nbytes

        gym_recording.playback.scan_recorded_traces(reader, count)
        return counts[0], counts[1]

    def episode(self, reader: str, index: int) -> tuple[Any, Any, Any]:
        """Return one episode by reading all episodes before it: there is no random access."""
        found: list[Any] = []
        gym_recording.playback.scan_recorded_traces(reader, lambda *columns: found.append(columns), index + 1)
        return found[index]
