"""Predict requests, bytes, CPU time and memory of a trace of any size, from measured constants.

    python benchmarks/scale_model.py [--steps 1e10] [--writers 1000] [--episode 500] [--hours 24] [--latency 30]
    python benchmarks/scale_model.py --measure 1e6 1e7

The first form prints the prediction for steps like those of CartPole. The second one records traces of 1,024 lanes,
measures each operation in a new process, and prints it beside its prediction. Both print Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BATCH_BYTES, BATCH_SECONDS = 64 << 20, 600  # a batch ends after either
BYTES_PER_STEP = 16
INDEX_BYTES_PER_FRAGMENT = 15
WRITER_SCHEMA_BYTES, MOST_SCHEMA_BYTES = 2000, 4 << 20  # a compacted file repeats the schemas of its writers
LARGEST_LISTED_INDEX = 32 << 10  # a manifest repeats indexes that are not larger
LEAST_WRITERS, MOST_MANIFESTS_BYTES = 16, 64 << 20  # push writes manifests.index
OBJECTS_PER_PAGE, LISTING_BYTES_PER_OBJECT = 1000, 300
REQUEST_BYTES, REQUESTS_AT_ONCE = 4 << 20, 16
WINDOWS = "20 batches of windows"


class Costs(NamedTuple):
    """CPU time or memory of one step, episode, batch and writer."""

    step: float = 0
    episode: float = 0
    batch: float = 0
    writer: float = 0


# CPU time in microseconds, measured on 2026-11-28 on two shared cores, beside other work: steps and episodes by
# --measure, batches and writers with 1,500 batches of one writer and one batch of each of 400 writers.
CPU = {
    "open": Costs(0, 0.28, 300, 800),
    "refresh, nothing new": Costs(0, 0, 50, 140),
    "scan": Costs(0.057, 3.2, 300, 800),
    "check": Costs(0.07, 1.1, 2200, 2800),
    "push": Costs(0.03, 0, 630, 1700),
    "push, nothing new": Costs(0, 0, 110, 160),
    "compact": Costs(0.125, 2.5, 1400, 2500),
}
MEMORY = {  # bytes; check reads one writer after the other
    "open": Costs(0, 145, 7600, 6000),
    "compact": Costs(0, 260, 7600, 12000),
}
# Windows of a stream hold steps in memory, up to a number of bytes: their CPU time and memory, without opening.
HELD_CPU, HELD_MEMORY, MOST_HELD_BYTES = Costs(0.215, 2.1), Costs(30, 250), 1 << 30
CHECK_BYTES_PER_EPISODE, BYTES_PER_OPERATION = 240, 10e6


@dataclass
class Trace:
    """A trace of equal writers. episode: mean steps of an episode. hours: how long each writer records."""

    steps: float
    writers: int
    episode: float
    hours: float

    @property
    def bytes(self) -> float:
        return self.steps * BYTES_PER_STEP

    @property
    def episodes(self) -> float:
        return self.steps / self.episode

    @property
    def batches(self) -> int:
        each = max(self.bytes / self.writers / BATCH_BYTES, self.hours * 3600 / BATCH_SECONDS)
        return self.writers * max(1, math.ceil(each))

    @property
    def index_bytes(self) -> float:
        """Bytes of the index of a batch."""
        return 400 + INDEX_BYTES_PER_FRAGMENT * self.episodes / self.batches

    def total(self, costs: Costs) -> float:
        return (
            costs.step * self.steps
            + costs.episode * self.episodes
            + costs.batch * self.batches
            + costs.writer * self.writers
        )

    def compacted(self) -> Trace:
        """Return the trace with full batches, which hold the episodes of many writers."""
        return Trace(self.steps, math.ceil(self.writers * WRITER_SCHEMA_BYTES / MOST_SCHEMA_BYTES), self.episode, 0)

    def part(self, parts: int) -> Trace:
        """Return one of several traces with the same number of writers each."""
        return Trace(self.steps / parts, math.ceil(self.writers / parts), self.episode, self.hours)


class Prediction(NamedTuple):
    """Needs of an operation. pages: requests that wait for each other."""

    requests: float
    pages: float
    bytes: float
    cpu: float
    memory: float


def opening(trace: Trace) -> tuple[float, float, float]:
    """Return the requests, pages of the listing, and bytes to open a trace at a URL."""
    pages = math.ceil((trace.batches + trace.writers + 1) / OBJECTS_PER_PAGE)
    is_small = trace.index_bytes <= LARGEST_LISTED_INDEX
    manifest = 1500 + trace.batches / trace.writers * (200 + 1.37 * (trace.index_bytes if is_small else 64))
    joined = min(trace.writers, MOST_MANIFESTS_BYTES / manifest) if trace.writers >= LEAST_WRITERS else 0
    reads = (joined > 0) + trace.writers - joined + (0 if is_small else trace.batches)
    size = trace.writers * manifest - joined * 1300 + (0 if is_small else trace.batches * trace.index_bytes)
    return pages + reads, pages, size + LISTING_BYTES_PER_OBJECT * (trace.batches + trace.writers)


def predictions(trace: Trace) -> dict[str, Prediction]:
    """Return what each operation takes."""
    requests, pages, size = opening(trace)
    cpu = {name: trace.total(costs) / 1e6 for name, costs in CPU.items()}
    memory = {name: trace.total(costs) + BYTES_PER_OPERATION for name, costs in MEMORY.items()}
    checked = CHECK_BYTES_PER_EPISODE * trace.episodes / trace.writers + BYTES_PER_OPERATION
    listing = LISTING_BYTES_PER_OBJECT * (trace.batches + trace.writers)
    whole = trace.batches + trace.bytes / REQUEST_BYTES
    stored = trace.batches + trace.writers
    held = min(1, MOST_HELD_BYTES / trace.total(HELD_MEMORY))  # share of the steps
    cpu[WINDOWS] = cpu["open"] + held * trace.total(HELD_CPU) / 1e6
    windows = requests + held * trace.bytes / REQUEST_BYTES, pages, size + held * trace.bytes
    needs = {
        "open": (requests, pages, size, memory["open"]),
        "refresh, nothing new": (pages, pages, listing, memory["open"]),
        "scan": (requests + whole, pages, trace.bytes, memory["open"]),
        WINDOWS: (*windows, memory["open"] + held * trace.total(HELD_MEMORY)),
        "check": (pages + whole, pages, trace.bytes, checked),
        "push": (stored + 2 * pages + 1, 2 * pages, trace.bytes, listing),
        "push, nothing new": (pages, pages, listing, listing),
        "compact": (0, 0, 2 * trace.bytes, memory["compact"]),
    }
    return {name: Prediction(*counts, cpu[name], peak) for name, (*counts, peak) in needs.items()}


def table(title: str, trace: Trace, latency: float, bandwidth: float) -> str:
    """Return the predictions as a table. latency: seconds of a request; bandwidth: bytes per second."""
    lines = [
        f"| {title}: {trace.episodes:,.0f} episodes, {trace.batches:,} batches, {_bytes(trace.bytes)} "
        "| requests | bytes | CPU, s | memory, MB | wall, s |",
        "|---" * 6 + "|",
    ]
    for name, one in predictions(trace).items():
        waits = latency * (one.pages + (one.requests - one.pages) / REQUESTS_AT_ONCE)
        wall = max(one.cpu, waits + one.bytes / bandwidth) if one.requests else one.cpu
        counts = f"{one.requests:,.0f} | {_bytes(one.bytes)} | {_seconds(one.cpu)} | {one.memory / 1e6:,.0f}"
        lines.append(f"| {name} | {counts} | {_seconds(wall)} |")
    return "\n".join(lines)


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.0f} GB" if count >= 1e10 else f"{count / 1e6:,.0f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.{0 if seconds >= 10 else 1}f}"


# -- measuring --------------------------------------------------------------------------------------------------------

_MEASURE = """
import json, sys, time
import gym_trace, gym_trace.edit
name, path, out = sys.argv[1:]

def peak():
    return next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

def run():
    if name == "check":
        return gym_trace.check_trace(path)
    if name == "compact":
        return gym_trace.edit.compact(path, out)
    trace = gym_trace.open_trace(path)
    if name == "scan":
        for episode in trace.scan():
            episode.observations, episode.actions, episode.rewards
    if name == "20 batches of windows":
        batches = iter(trace.windows(8, 256, cache=None))
        for _ in range(20):
            next(batches)
    return trace

warm = gym_trace.open_trace(path + "-warm")  # the imports of the first access are not measured
len(warm), next(iter(warm.scan())).observations
before, begin = peak(), time.process_time()
found = run()
print(json.dumps({"cpu": time.process_time() - begin, "memory": peak() - before}))
"""


def record(directory: Path, steps: int, balances: bool) -> None:
    """Record 1,024 CartPoles with random actions, or with actions that balance them."""
    import gymnasium
    import numpy as np

    import gym_trace

    env = gymnasium.make_vec("CartPole-v1", 1024, vectorization_mode="vector_entry_point")
    envs, random = gym_trace.TraceRecordingVectorWrapper(env, directory), np.random.default_rng(0)
    observations, _ = envs.reset(seed=0)
    for _ in range(-(-steps // 1024)):
        angles = observations[:, 2] + 0.5 * observations[:, 3]
        observations, *_ = envs.step((angles > 0).astype(np.int64) if balances else random.integers(0, 2, 1024))
    envs.close()


def measured(operation: str, directory: Path) -> dict[str, float]:
    """Measure an operation in a new process."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", _MEASURE, operation, str(directory), str(Path(out, "new"))]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compare(sizes: list[float]) -> None:
    """Record traces of these numbers of steps, and print what operations take beside the predictions."""
    import gym_trace

    print("| | steps | steps per episode | CPU, s | predicted | memory, MB | predicted |\n" + "|---" * 7 + "|")
    with tempfile.TemporaryDirectory(prefix="gym-trace-scale-") as name:
        for size in sizes:
            for balances in (False, True):
                directory = Path(name, f"{size:.0e}-{balances}")
                record(Path(f"{directory}-warm"), 1 << 14, balances)
                record(directory, int(size), balances)
                trace = gym_trace.open_trace(directory)
                batches = len(list(directory.glob("*.gtb")))
                steps = int(trace.episodes["steps"].sum())
                one = Trace(steps, 1, steps / len(trace), batches * BATCH_SECONDS / 3600)
                for operation in ("open", "scan", WINDOWS, "check", "compact"):
                    found, expected = measured(operation, directory), predictions(one)[operation]
                    cpu = f"{found['cpu']:.2f} | {expected.cpu:.2f}"
                    memory = f"{found['memory'] / 1e6:.0f} | {expected.memory / 1e6:.0f}"
                    print(f"| {operation} | {steps:,} | {one.episode:.0f} | {cpu} | {memory} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=float, default=1e10)
    parser.add_argument("--writers", type=int, default=1000)
    parser.add_argument("--episode", type=float, default=500, help="steps of an episode, mean")
    parser.add_argument("--hours", type=float, default=24, help="how long each writer records")
    parser.add_argument("--parts", type=int, default=10, help="traces that the writers are divided into")
    parser.add_argument("--latency", type=float, default=30, help="milliseconds of a request")
    parser.add_argument("--bandwidth", type=float, default=1, help="gigabits per second")
    parser.add_argument("--measure", type=float, nargs="+", metavar="STEPS", help="record, measure and compare")
    given = parser.parse_args()
    if given.measure:
        compare(given.measure)
        return
    trace = Trace(given.steps, given.writers, given.episode, given.hours)
    part = trace.part(given.parts)
    shapes = {"as recorded": trace, "compacted": trace.compacted()}
    if given.parts > 1:
        shapes |= {f"one of {given.parts} parts": part, f"one of {given.parts} parts, compacted": part.compacted()}
    for title, one in shapes.items():
        print(f"{table(title, one, given.latency / 1e3, given.bandwidth * 125e6)}\n")


if __name__ == "__main__":
    main()
