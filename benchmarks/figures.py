"""Figures of the runs: medians with min and max."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

# Measured with a checkout of openai/gym-recording, gym 0.9.7 and NumPy 1.23 on another machine with two cores.
ELSEWHERE = {"added": 3.9, "bytes": 72.0, "read": 1 / 0.60}
OURS = "gym-trace"
LOSSLESS = ("minari-hdf5", "minari-arrow", "envlogger", "lerobot", "gym-recording", "npz", "h5py")

Run = dict[str, Any]


class Spread(NamedTuple):
    """A median with min and max of the runs."""

    median: float
    least: float
    most: float


def spread(values: list[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def of(runs: list[Run], figure: Callable[[Run], float]) -> Spread | None:
    """Return a figure of the measured runs, or None without any."""
    measured = [run for run in runs if "error" not in run and "refused" not in run]
    return spread([figure(run) for run in measured]) if measured else None


def why_not(runs: list[Run]) -> str:
    """Return the reason why the runs have no result."""
    for run in runs:
        if "refused" in run:
            return str(run["refused"])
        if "error" in run:
            return "failed: " + str(run["error"])
    return "not run"


class Recorded:
    """Recording figures of one contestant and workload; times in µs per step."""

    def __init__(self, runs: list[Run]):
        self.loop = of(runs, lambda r: 1e6 * r["raw"]["wall"] / r["steps"])
        self.added = of(runs, lambda r: _added(r, r["recorded"], "wall"))
        self.cpu = of(runs, lambda r: _added(r, r["recorded"], "cpu"))
        self.share = of(runs, lambda r: r["recorded"]["wall"] / r["raw"]["wall"] - 1)
        self.bytes = of(runs, lambda r: r["bytes"] / r["steps"])
        self.finish = of(runs, lambda r: r["recorded"]["finish"])
        self.memory = of(runs, lambda r: r["recorded"]["memory"])
        self.steps = of(runs, lambda r: r["steps"])
        self.floors = {name: of(runs, lambda r, n=name: 1e6 * r["floors"][n]) for name in _floors(runs)}
        self.over_ring = _canned_over_ring(runs)  # run by run, because the speed of the machine varies


def _canned_over_ring(runs: list[Run]) -> Spread | None:
    ratios = [run["floors"]["canned"] / run["floors"]["ring"] for run in runs if "canned" in run.get("floors", {})]
    return spread(ratios) if ratios else None


def _added(run: Run, loop: Run, clock: str) -> float:
    return 1e6 * (loop[clock] - run["raw"][clock]) / run["steps"]


def _floors(runs: list[Run]) -> list[str]:
    return list(next((run["floors"] for run in runs if run.get("floors")), {}))


class Read:
    """Reading figures of one contestant and workload; throughput in million steps/s and GB/s, the rest in seconds."""

    def __init__(self, runs: list[Run]):
        self.first = of(runs, lambda r: r["steps"] / r["first"] / 1e6)
        self.again = of(runs, lambda r: r["steps"] / r["again"] / 1e6)
        self.bandwidth = of(runs, lambda r: r["size"] / r["again"] / 1e9)
        self.p50 = of(runs, lambda r: r["episodes"]["p50"])
        self.p99 = of(runs, lambda r: r["episodes"]["p99"])
        whole = [run for run in runs if "window" in run]
        self.window = of(whole, lambda r: r["window"])
        self.rewards = of(whole, lambda r: r["steps"] / r["rewards"] / 1e6)
        random = [run["episodes"] for run in runs if "steps" in run.get("episodes", {})]
        arrays = [episodes for episodes in random if episodes["bytes"]]
        self.per_step = of(random, lambda e: e["seconds"] / e["steps"])
        self.access = of(arrays, lambda e: e["bytes"] / e["seconds"] / 1e9)
        self.copy = of(arrays, lambda e: e["bytes"] / e["copied"] / 1e9)
        self.over_copy = of(arrays, lambda e: e["seconds"] / e["copied"])
        self.open = of(runs, lambda r: r["open"])
        self.memory = of(runs, lambda r: r["memory"])
        self.floors = {
            name: (of(runs, lambda r, n=name: r["steps"] / r["floors"][n] / 1e6),
                   of(runs, lambda r, n=name: r["size"] / r["floors"][n] / 1e9))
            for name in _floors(runs)
        }  # fmt: skip
        # Compared run by run, because the speed of the machine varies.
        ratio = [r["again"] / r["floors"]["decode"] for r in runs if r.get("floors")]
        self.over_floor = spread(ratio) if ratio else None


class Killed:
    """Data loss of one contestant, in seconds of steps."""

    def __init__(self, runs: list[Run]):
        stepped = [run for run in runs if "stepped" in run]
        lost = [run["seconds"] * max(0, 1 - run.get("readable", 0) / max(1, run["stepped"])) for run in stepped]
        self.lost = spread(lost) if lost else None
        self.ran = spread([run["seconds"] for run in stepped]) if lost else None
        self.problem = next((run["error"] for run in stepped if "error" in run), "")
        self.none_readable = bool(stepped) and not any(run.get("readable") for run in stepped)


class Figures:
    """All figures, by workload and contestant."""

    def __init__(self, results: dict[str, Any]):
        self.results = results
        self.recorded = {w: {c: Recorded(r) for c, r in by.items()} for w, by in results["recording"].items()}
        self.read = {w: {c: Read(r) for c, r in by.items()} for w, by in results["reading"].items()}
        self.killed = {c: Killed(runs) for c, runs in results["kill"].items()}
        self.sizes = {w: s for w, s in results.get("sizes", {}).items() if "error" not in s}
        self.growth = {
            int(count): (Recorded([r["recorded"] for r in runs]), Read([r["read"] for r in runs]))
            for count, runs in results.get("growth", {}).get("runs", {}).items()
        }

    def best(self, kind: str, workload: str, names: tuple[str, ...], figure: str, least: bool = True) -> float | None:
        """Return the smallest (or largest) median of a figure among contestants; None if none was measured."""
        found = [getattr(getattr(self, kind)[workload][name], figure)
                 for name in names if name in getattr(self, kind).get(workload, {})]  # fmt: skip
        medians = [spread.median for spread in found if spread is not None]
        return (min if least else max)(medians) if medians else None

    def seal_times(self) -> list[tuple[int, int, float]]:
        """Return (first batch, last batch, median seconds per seal) of groups that grow by a factor of 2.5."""
        times = self.results.get("growth", {}).get("batches", {})
        seconds = (
            [s for s in times.get("sealing", []) if s > 1e-5] if isinstance(times, dict) else []
        )  # the last is empty
        rows, begin = [], 0
        while begin < len(seconds):
            end = min(len(seconds), max(begin + 5, int(begin * 2.5)))
            rows.append((begin + 1, end, statistics.median(seconds[begin:end])))
            begin = end
        return rows
