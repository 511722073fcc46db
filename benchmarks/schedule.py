"""The order of measurements: in each repetition, all contestants take turns."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import workloads
from peers import HERE, Worker

OURS = "gym-trace"
MAIN = ("cartpole", "halfcheetah", "pong")  # peers get less time for the others
KILL_SECONDS = 2.0
GROWTH = (1_000, 10_000, 100_000, 1_000_000)
# Numbers of episodes for opening, by peer: as many as it records in some seconds.
OPENED = {
    "minari-hdf5": (300, 1_000), "minari-arrow": (300,), "envlogger": (1_000, 10_000, 100_000),
    "lerobot": (300,), "npz": (1_000, 10_000), "h5py": (1_000, 10_000),
}  # fmt: skip


class Bench:
    """Runs the sections and collects their results.

    Args:
        workers: workers of the contestants, by name.
        scale: factor on the steps of gym-trace, and on the time of peers.
    """

    def __init__(self, workers: dict[str, Worker], chosen: list[workloads.Workload], repeats: int, scale: float):
        self.workers, self.workloads = workers, chosen
        self.repeats, self.scale = repeats, scale
        self.results: dict[str, Any] = {}
        self._kept: dict[str, str] = {}  # recordings of gym-trace, for sizes()
        self._work = tempfile.mkdtemp(prefix="gym-trace-bench-")

    def close(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    @contextmanager
    def _directory(self) -> Iterator[str]:
        directory = tempfile.mkdtemp(dir=self._work)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def recording_and_reading(self) -> None:
        steps: dict[tuple[str, str], int | None] = {}
        recording = self.results["recording"] = {w.name: {name: [] for name in self.workers} for w in self.workloads}
        reading = self.results["reading"] = {w.name: {name: [] for name in self.workers} for w in self.workloads}
        for repeat in range(self.repeats):
            for workload in self.workloads:
                _say(f"repetition {repeat + 1} of {self.repeats}: {workload.title}")
                for name in self.workers:
                    with self._directory() as directory:
                        recorded, read = self._one(name, workload, repeat, steps, directory)
                        recording[workload.name][name].append(recorded)
                        if read:
                            reading[workload.name][name].append(read)
                        if name == OURS and repeat == self.repeats - 1 and "error" not in recorded:
                            self._kept[workload.name] = shutil.move(directory, directory + "-kept")

    def _one(
        self, name: str, workload: workloads.Workload, repeat: int, steps: dict[Any, int | None], directory: str
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        worker, ours = self.workers[name], name == OURS
        seconds = self.scale * (1.0 if workload.name in MAIN else 0.4)
        if ours:
            steps[name, workload.name] = max(workload.lanes, 20, int(workload.steps * self.scale))
        recorded = worker.do(
            "record", directory, workload=workload.name, steps=steps.get((name, workload.name)), seconds=seconds,
            floors=ours, scale=self.scale,
        )  # fmt: skip
        if "refused" in recorded or "error" in recorded:
            return recorded, None
        steps[name, workload.name] = recorded["steps"]
        if workload.lanes and not ours:  # npz does not separate the episodes of lanes
            return recorded, None
        return recorded, worker.do(
            "read", directory, seconds=max(0.05, 0.3 * seconds), repeat=repeat, floors=ours
        )  # fmt: skip

    def sizes(self) -> None:
        """Measure sizes, two workloads at a time, because nothing is timed."""

        def sized(number: int, names: list[str]) -> dict[str, Any]:
            worker = Worker(OURS, sys.executable, subprocess.DEVNULL)
            found = {name: worker.do("sizes", self._kept[name], 600) for name in names}
            worker.close()
            return found

        names = [workload.name for workload in workloads.SINGLE if workload.name in self._kept]
        _say("zstd -19 and xz -9 of the same columns")
        with ThreadPoolExecutor(2) as pool:
            halves = pool.map(sized, range(2), [names[0::2], names[1::2]])
            self.results["sizes"] = {name: sizes for half in halves for name, sizes in half.items()}
        for directory in self._kept.values():
            shutil.rmtree(directory)

    def kills(self) -> None:
        kills: dict[str, list[Any]] = {name: [] for name in self.workers if name != "minari-default"}
        self.results["kill"] = kills
        for repeat in range(self.repeats):
            _say(f"killing, repetition {repeat + 1} of {self.repeats}")
            for name, runs in kills.items():
                with self._directory() as directory:
                    killed = self.workers[name].do(
                        "kill", directory, workload="cartpole", seconds=KILL_SECONDS * max(self.scale, 0.1)
                    )
                    runs.append({**killed, **self.workers[name].do("count", directory)})

    def opening(self) -> None:
        """Measure opening many episodes with peers; growth() covers gym-trace."""
        opening: dict[str, dict[str, Any]] = {}
        self.results["opening"] = opening
        for name, counts in OPENED.items():
            for count in counts if name in self.workers else ():
                count = int(count * self.scale) or 1
                _say(f"opening {count:,} episodes of {name}")
                with self._directory() as directory:
                    built = self._built(name, count, directory)
                    runs = [built] if "error" in built else [
                        self.workers[name].do("open", directory) for _ in range(self.repeats)
                    ]  # fmt: skip
                    opening.setdefault(name, {})[str(count)] = runs

    def _built(self, name: str, episodes: int, directory: str) -> dict[str, Any]:
        steps = episodes * 3 // 2
        return self.workers[name].do("record", directory, workload="blink", steps=steps, seconds=0, floors=False)

    def growth(self) -> None:
        runs: dict[str, list[Any]] = {}
        self.results["growth"] = {"runs": runs, "batches": []}
        counts = [count for count in GROWTH if count <= max(1_000, self.scale * GROWTH[-1])]
        for repeat in range(self.repeats):
            for count in counts:
                _say(f"{count:,} episodes of gym-trace, repetition {repeat + 1} of {self.repeats}")
                with self._directory() as directory:
                    recorded = self._built(OURS, count, directory)
                    read = self.workers[OURS].do(
                        "read", directory, seconds=self.scale, repeat=repeat, floors=False, brief=True
                    )
                    runs.setdefault(str(count), []).append({"recorded": recorded, "read": read})
        _say("many batches")
        with self._directory() as directory:
            self.results["growth"]["batches"] = self.workers[OURS].do("batches", directory, episodes=counts[-1])

    def startup(self) -> None:
        scripts = Path(sys.executable).parent
        commands = {
            "gym-trace --version": [scripts / "gym-trace", "--version"],
            "minari --version": [scripts / "minari", "--version"],
            "python -c pass": [sys.executable, "-c", "pass"],
        }
        times: dict[str, list[float]] = {name: [] for name, command in commands.items() if Path(command[0]).exists()}
        for _ in range(self.repeats):
            for name in times:
                begin = time.perf_counter()
                subprocess.run(commands[name], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - begin)
        self.results["startup"] = {name: statistics.median(found) for name, found in times.items()}

    def collect(self) -> None:
        """Run collect.py and keep its table."""
        _say("several processes")
        command = [
            sys.executable,
            str(HERE / "collect.py"),
            "--seconds",
            f"{max(1.0, 2 * self.scale)}",
            "--repeats",
            str(min(3, self.repeats)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
        self.results["collect"] = done.stdout or done.stderr  # on failure, report its error


def _say(what: str) -> None:
    print(time.strftime("%H:%M:%S"), what, flush=True)
