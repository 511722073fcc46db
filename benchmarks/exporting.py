"""Compare export with the library's own writer of each format: the same trace, in turns, each in its own process.

    python benchmarks/exporting.py [--only minari,parquet] [--repeats 3] [--scale 0.01] [--lerobot-python PYTHON]

A million steps of CartPole in 45,000 short episodes, and 10,000 frames of Pong. Both writers read the trace; ours also
writes its metadata. Reports wall and CPU seconds without imports, the peak of added memory, and bytes written. Medians
are printed and written to exporting.json. Writers that would take hours are measured on a part of the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKLOADS = {"cartpole": ("CartPole-v1", 1_000_000), "pong": ("ALE/Pong-v5", 10_000)}
_PYTHONS = {"lerobot": "lerobot", "rlds": "tfds"}  # all others: main


# -- in a separate process --------------------------------------------------------------------------------------------


def record(workload: str, steps: int, directory: Path) -> None:
    import gymnasium

    from gym_trace import TraceRecordingWrapper

    name, _ = WORKLOADS[workload]
    if workload == "pong":
        import ale_py

        gymnasium.register_envs(ale_py)
    env = TraceRecordingWrapper(gymnasium.make(name), directory)
    env.action_space.seed(0)
    over, episodes = True, 0
    for _ in range(steps):
        if over:
            env.reset(seed=episodes)
            episodes += 1
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        over = terminated or truncated
    env.close()


def measure(name: str, which: str, workload: str, directory: Path, out: Path) -> dict[str, Any]:
    import numpy as np
    from own_writers import OURS, OWN

    import gym_trace

    whole = gym_trace.open_trace(directory)
    part = OWN[name].part.get(workload, 1.0) if which == "own" else 1.0
    most = part * whole.episodes["steps"].sum()
    trace = whole[np.cumsum(whole.episodes["steps"]) <= most] if part < 1 else whole
    trace = trace if len(trace) else whole[:1]
    form, options = OURS.get(name, (name, {}))

    def write(episodes: gym_trace.Trace, place: Path) -> None:
        if which == "ours":
            gym_trace.export(episodes, place, form, **options)
        else:
            OWN[name].write(episodes, place, workload)

    write(whole[:1], out.with_name("warm"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    write(trace, out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps = int(trace.episodes["steps"].sum())
    return {"steps": steps, "wall": wall, "cpu": cpu, "memory": (peak - before) * 1024, "bytes": size_of(out)}


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# -- in turns ---------------------------------------------------------------------------------------------------------


def in_process(python: str, *words: object) -> dict[str, Any]:
    quiet = {"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, str(HERE / "exporting.py"), "--one", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **quiet},
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [run for run in runs if "error" in run]
    return failed[0] if failed else {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def row(name: str, workload: str, which: str, found: dict[str, Any]) -> str:
    head = f"{name:16} {workload:9} {which:32}"
    if "error" in found:
        return f"{head} {found['error']:.150}"
    numbers = found["wall"], found["cpu"], found["cpu"] / found["steps"] * 1e6, found["bytes"] / found["steps"]
    return f"{head} {found['steps']:>9,.0f}" + "".join(f" {n:9.2f}" for n in (*numbers, found["memory"] / 1e6))


def main() -> None:
    from own_writers import OWN

    from gym_trace.exchange.formats.registry import exporters

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="formats and workloads, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of steps")
    parser.add_argument("--output", type=Path, default=HERE / "exporting.json")
    parser.add_argument("--traces", type=Path, help="directory of traces, kept for later runs")
    for kind in ("main", "lerobot", "tfds"):
        parser.add_argument(f"--{kind}-python", default=f".venv-interop-{kind}/bin/python")
    given = parser.parse_args()
    only = set(filter(None, given.only.split(",")))
    names = list(dict.fromkeys([*OWN, *exporters()]))
    names = [name for name in names if name in only] if only & set(names) else names
    workloads = [name for name in WORKLOADS if name in only] if only & set(WORKLOADS) else list(WORKLOADS)
    results: dict[str, Any] = {}
    titles = "".join(f"{title:>10}" for title in ("s", "CPU s", "us/step", "B/step", "MB more"))
    print(f"{'format':16} {'workload':9} {'writer':32} {'steps':>9}{titles}")
    with tempfile.TemporaryDirectory() as place:
        for workload in workloads:
            trace = (given.traces or Path(place)) / f"{workload}-{given.scale:g}"
            if not trace.exists():
                steps = int(WORKLOADS[workload][1] * given.scale)
                if error := in_process(given.main_python, "record", workload, steps, trace).get("error"):
                    parser.error(f"{workload}: {error}")
            for name in names:
                python = getattr(given, f"{_PYTHONS.get(name, 'main')}_python")
                kinds = ["ours", "own"] if name in OWN else ["ours"]
                runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
                for _ in range(given.repeats):
                    for kind in kinds:
                        with tempfile.TemporaryDirectory(dir=place) as scratch:
                            runs[kind].append(
                                in_process(python, "measure", name, kind, workload, trace, Path(scratch) / "out")
                            )
                for kind in kinds:
                    found = median(runs[kind])
                    results.setdefault(workload, {}).setdefault(name, {})[kind] = found
                    print(row(name, workload, "gym-trace" if kind == "ours" else OWN[name].title, found), flush=True)
                    given.output.write_text(json.dumps(results, indent=1) + "\n")
            if given.traces is None:
                shutil.rmtree(trace)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        task, *words = sys.argv[2:]
        if task == "record":
            record(words[0], int(words[1]), Path(words[2]))
            print("{}")
        else:
            print(json.dumps(measure(words[0], words[1], words[2], Path(words[3]), Path(words[4]))))
    else:
        main()
