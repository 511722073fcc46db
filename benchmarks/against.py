"""Compare this checkout with another commit, alternating in one process, to measure the cost of a change.

    python benchmarks/against.py REV [--seconds 60] [--only cartpole,pong]

make bench-against REV=... runs it in the environment of make bench. Three copies of an environment take the same
actions in turn, in blocks of a tenth of a second: one unrecorded, one recorded by the other commit (its package has
another name), one by this checkout. Noise of the machine affects all three alike. The range after a ratio is a 95 %
bootstrap interval over blocks.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import workloads
from contestants import disk_size
from peers import HERE

_OTHER = "gym_trace_before"
_SIDES = ("alone", "before", "now")
_WORKLOADS = "cartpole,halfcheetah,pong,minigrid,cartpole-x1024,cartpole-x16,frames-x64"
_BLOCK = 0.1  # seconds
_READINGS, _READING_SECONDS = 15, 20.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rev", help="commit to compare with")
    parser.add_argument("--seconds", type=float, default=60.0, help="recording time per workload")
    parser.add_argument("--only", default=_WORKLOADS, help="workloads, separated by commas")
    return parser.parse_args()


def other_package(rev: str, folder: Path) -> Any:
    """Import the library of another commit under another name."""
    checkout = folder / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", str(HERE.parent), str(checkout)], check=True)
    subprocess.run(["git", "-C", str(checkout), "checkout", "--quiet", rev], check=True)
    shutil.copytree(checkout / "gym_trace", folder / _OTHER)
    for source in (path for path in (folder / _OTHER).rglob("*") if path.suffix in (".py", ".c", ".h")):
        source.write_text(re.sub(r"\bgym_trace\b", _OTHER, source.read_text(encoding="utf-8")), encoding="utf-8")
    compile_core(checkout, folder / _OTHER)
    sys.path.insert(0, str(folder))
    return importlib.import_module(_OTHER)


def compile_core(checkout: Path, package: Path) -> None:
    """Compile the C core of a package, if it has one and this checkout uses its own."""
    sources = [path for path in package.rglob("*") if path.suffix in (".c", ".h")]
    if sources and importlib.import_module("gym_trace.recording.core").CORE == "compiled":
        for source in sources:
            shutil.copy(source, checkout / "gym_trace" / source.relative_to(package))
        build = [sys.executable, checkout / "hatch_build.py", package / "recording"]
        subprocess.run(build, check=True, stdout=sys.stderr)
        for kernels in (package / "recording").glob("_kernels*"):  # since there is a second module
            kernels.rename(package / "format" / kernels.name)


def taken(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def recorded(workload: workloads.Workload, packages: dict[str, Any], folder: Path, seconds: float) -> Any:
    """Return the seconds of each block of each side, the seconds of closing, and the steps per block."""
    envs = {side: workload.make() for side in _SIDES}
    name = "TraceRecordingVectorWrapper" if workload.lanes else "TraceRecordingWrapper"
    for side, package in packages.items():
        envs[side] = getattr(package, name)(envs[side], folder / side)
    run = workloads.run_lanes if workload.lanes else workloads.run
    lanes = max(1, workload.lanes)
    actions = workload.actions(envs["alone"], 64 * lanes)
    for env in envs.values():
        env.reset(seed=0)
        run(env, actions)  # warm up
    pilot = taken(lambda: run(envs["alone"], actions))
    run(envs["before"], actions)
    run(envs["now"], actions)
    actions = workload.actions(envs["alone"], max(16, int(_BLOCK / pilot * 64)) * lanes)
    blocks: dict[str, list[float]] = {side: [] for side in _SIDES}
    orders, begin = itertools.cycle(itertools.permutations(_SIDES)), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for side in next(orders):
            blocks[side].append(taken(lambda env=envs[side]: run(env, actions)))
    closing = {side: taken(envs[side].close) for side in packages}
    return {side: np.array(times) for side, times in blocks.items()}, closing, len(actions) * lanes


def read(packages: dict[str, Any], folder: Path) -> dict[str, list[float]]:
    """Return the seconds that each side takes to read everything it recorded; they take turns."""
    times: dict[str, list[float]] = {side: [] for side in packages}
    begin = time.perf_counter()
    for turn in range(_READINGS + 1):
        if turn > 3 and time.perf_counter() - begin > _READING_SECONDS:
            break
        for side in sorted(packages, reverse=bool(turn % 2)):
            scan = partial(packages[side].scan_recorded_traces, folder / side, lambda o, a, r: None)
            seconds = taken(scan)
            if turn:
                times[side].append(seconds)
    return times


def spread(ratio: Callable[[np.ndarray], float], count: int) -> str:
    """Format a ratio with its 95 % bootstrap interval over blocks."""
    random = np.random.default_rng(0)
    low, high = np.quantile([ratio(random.integers(0, count, count)) for _ in range(1000)], (0.025, 0.975))
    return f"{ratio(np.arange(count)):9.3f}   {low:.3f} to {high:.3f}"


def compare(workload: workloads.Workload, packages: dict[str, Any], seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="gym-trace-against-") as name:
        folder = Path(name)
        blocks, closing, steps = recorded(workload, packages, folder, seconds)
        size = {side: disk_size(str(folder / side)) for side in packages}
        reading = read(packages, folder)
    count = len(blocks["alone"])
    alone = blocks["alone"]
    # Spread the time of closing over all blocks.
    before, now = (blocks[side] + closing[side] / count for side in packages)
    each = 1e6 / steps
    print(f"\n{workload.title}: {count} blocks of {steps} steps, {alone.mean() * each:.3f} us per step alone")
    print(f"{'us per step':16}{'before':>10}{'now':>10}{'ratio':>9}")
    lines: list[tuple[str, float, float, Callable[[np.ndarray], float]]] = [
        ("recorded loop", before.mean(), now.mean(), lambda i: now[i].sum() / before[i].sum()),
        ("added", (before - alone).mean(), (now - alone).mean(),
         lambda i: (now - alone)[i].sum() / (before - alone)[i].sum()),
    ]  # fmt: skip
    for title, b, n, ratio in lines:
        print(f"{title:16}{b * each:10.3f}{n * each:10.3f}{spread(ratio, count)}")
    medians = {side: statistics.median(times) for side, times in reading.items()}
    pairs = np.array(reading["now"]) / np.array(reading["before"])
    total = each / count
    print(
        f"{'reading':16}{medians['before'] * total:10.3f}{medians['now'] * total:10.3f}"
        f"{spread(lambda i: float(np.median(pairs[i])), len(pairs))}"
    )
    print(f"{'bytes per step':16}{size['before'] / steps / count:10.2f}{size['now'] / steps / count:10.2f}", flush=True)


def main() -> None:
    given = arguments()
    workloads.preload()
    with tempfile.TemporaryDirectory(prefix="gym-trace-before-") as folder:
        packages = {"before": other_package(given.rev, Path(folder)), "now": importlib.import_module("gym_trace")}
        for name in given.only.split(","):
            compare(workloads.WORKLOADS[name], packages, given.seconds)


if __name__ == "__main__":
    main()
