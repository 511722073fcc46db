"""Measures this checkout and another commit of it in turns, and prints what recording and reading cost in both.

    python benchmarks/against.py REV [--rounds 7] [--only cartpole,pong]

make bench-against REV=... does it in the environment of make bench. Each round measures both, in an order that changes;
ratios are those of a round, so that they hold when the machine's speed drifts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import workloads
from peers import HERE, Worker

_SIDES = ("before", "now")
_WORKLOADS = "cartpole,halfcheetah,pong,minigrid,cartpole-x1024,cartpole-x16,frames-x64"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps-scale", type=float, default=1.0)
    parser.add_argument("--only", default=_WORKLOADS, help="workloads, separated by commas")
    return parser.parse_args()


def measured(worker: Worker, workload: workloads.Workload, scale: float, repeat: int) -> dict[str, float]:
    """Microseconds a step: of the loop, of what recording adds to it (wall, and processor), of reading; and bytes."""
    steps = max(workload.lanes, 20, int(workload.steps * scale))
    with tempfile.TemporaryDirectory(prefix="gym-trace-against-") as directory:
        task: dict[str, Any] = {"workload": workload.name, "seconds": 0.2, "floors": False, "repeat": repeat}
        recorded = worker.do("record", directory, steps=steps, **task)
        read = worker.do("read", directory, **task)
    for result in (recorded, read):
        if "error" in result:
            raise SystemExit(f"{workload.name}: {result['error']}")
    count = recorded["steps"] / 1e6
    return {
        "loop": recorded["raw"]["wall"] / count,
        "added": (recorded["recorded"]["wall"] - recorded["raw"]["wall"]) / count,
        "added cpu": (recorded["recorded"]["cpu"] - recorded["raw"]["cpu"]) / count,
        "recorded loop": recorded["recorded"]["wall"] / count,
        "reading": read["again"] / count,
        "bytes": recorded["bytes"] / recorded["steps"],
    }


def compare(workload: workloads.Workload, workers: dict[str, Worker], rounds: int, scale: float) -> None:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in _SIDES}
    for repeat in range(rounds):
        for side in _SIDES if repeat % 2 else _SIDES[::-1]:
            found[side].append(measured(workers[side], workload, scale, repeat))
    print(f"\n{workload.title} (microseconds a step, medians of {rounds})")
    print(f"{'':16}{'before':>10}{'now':>10}{'ratio':>9}{'least':>9}{'most':>9}")
    for key in found["now"][0]:
        before, now = ([figures[key] for figures in found[side]] for side in _SIDES)
        ratios = [b / a if a > 0 else float("nan") for a, b in zip(before, now)]
        medians = "".join(f"{statistics.median(values):10.3f}" for values in (before, now))
        print(f"{key:16}{medians}{statistics.median(ratios):9.3f}{min(ratios):9.3f}{max(ratios):9.3f}", flush=True)


def main() -> None:
    given = arguments()
    chosen = [workloads.WORKLOADS[name] for name in given.only.split(",")]
    with tempfile.TemporaryDirectory(prefix="gym-trace-before-") as folder:
        before = Path(folder) / "checkout"
        subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE.parent), str(before)], check=True)
        subprocess.run(["git", "-C", str(before), "checkout", "--quiet", given.rev], check=True)
        roots = dict(zip(_SIDES, (before, HERE.parent)))
        workers = {
            side: Worker("gym-trace", sys.executable, sys.stderr, str(root), root / "benchmarks")
            for side, root in roots.items()
        }
        for workload in chosen:
            compare(workload, workers, given.rounds, given.steps_scale)
        for worker in workers.values():
            worker.close()


if __name__ == "__main__":
    main()
