"""Measure opening traces of very many episodes: CPU time and memory, each in a new process; revisions take turns.

    python benchmarks/opening.py [--against PATH] [--episodes 1000000] [--calls 12000] [--rounds 5]

PATH is another checkout of this repository, built in place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import workloads

ROOT = Path(__file__).resolve().parent.parent
LANES = workloads.WORKLOADS["cartpole-x1024"]
_MEASURE = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
import gym_trace

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1e3

for _ in range(2):  # the imports of the first access are not measured
    warm = gym_trace.open_trace(sys.argv[2])
    warm[0].rewards, len(warm.episodes)
before, begin = resident(), time.process_time()
trace = gym_trace.open_trace(sys.argv[3])
episodes = len(trace)
opened, memory = time.process_time(), resident()
trace[episodes // 2].rewards
read = time.process_time()
trace.episodes
table = time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(json.dumps({
    "episodes": episodes, "open, ms": 1e3 * (opened - begin), "first episode, ms": 1e3 * (read - opened),
    "table, ms": 1e3 * (table - read), "open, MB": memory - before, "peak, MB": peak - before,
}))
"""


def record(directory: Path, episodes: int) -> None:
    """Record episodes of one and two steps in turn."""
    import gym_trace

    env = gym_trace.TraceRecordingWrapper(workloads.BLINK.make(), directory)
    for _ in range(episodes):
        env.reset()
        while not env.step(0)[2]:
            pass
    env.close()


def record_lanes(directory: Path, calls: int) -> None:
    """Record 1,024 CartPoles."""
    import gym_trace

    envs = gym_trace.TraceRecordingVectorWrapper(LANES.make(), directory)
    envs.reset(seed=0)
    workloads.run_lanes(envs, LANES.actions(envs, calls * LANES.lanes))
    envs.close()


def measured(checkout: Path, small: Path, trace: Path) -> dict[str, float]:
    """Open a trace in a new process that has the package of this checkout."""
    command = [sys.executable, "-c", _MEASURE, checkout, small, trace]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=checkout).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--episodes", type=int, default=1_000_000, help="episodes of one environment")
    parser.add_argument("--calls", type=int, default=12_000, help="steps of each of 1,024 lanes")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each; the median is shown")
    given = parser.parse_args()
    sides = {"now": ROOT} | ({"before": given.against.resolve()} if given.against else {})
    with tempfile.TemporaryDirectory(prefix="gym-trace-opening-") as name:
        small, single, lanes = (Path(name, kind) for kind in ("small", "single", "lanes"))
        record(small, 20)
        record(single, given.episodes)
        record_lanes(lanes, given.calls)
        for title, trace in {"one environment": single, "1,024 lanes": lanes}.items():
            found = {side: [] for side in sides}
            for _ in range(given.rounds):
                for side, checkout in sides.items():
                    found[side].append(measured(checkout, small, trace))
            for side, runs in found.items():
                row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                print(f"{title}, {side}: " + "; ".join(f"{key} {value:,.0f}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
