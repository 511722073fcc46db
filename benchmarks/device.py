"""Measure what recording environments of PyTorch and JAX costs on a GPU, and write device.json next to this file.

    python benchmarks/device.py [--device cpu] [--only PyTorch,JAX] [--output DIR]

Needs PyTorch or JAX that see a GPU, gymnasium and gym-trace, and less than five minutes. Every way of stepping runs in
turns of 32 steps in one process, on the same actions. --device cpu tries the script with small sizes, and stores
results only in --output.

bare: the environment alone. packed copy: the rows of all leaves side by side, by one copy that each step waits for.
side stream: the same, eight steps at a time, while later steps run (JAX: asynchronously, eight steps behind).
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from stored import machine, rounded

import gym_trace
from gym_trace import TraceRecordingVectorWrapper, TraceWriter, open_trace
from gym_trace.recording.core import CORE

HERE = Path(__file__).parent
LIBRARIES = {"PyTorch": ("torch", "device_torch"), "JAX": ("jax", "device_jax")}
WAYS = {"bare": "bare", "packed": "packed copy", "side": "side stream", "recorded": "recorded", "lag": "with lag"}
_LAG, _STEPS, _TURNS = 8, 32, 8
_SECONDS = 8.0  # per workload, so that all take less than five minutes


class Workload(NamedTuple):
    """Lanes of an environment, and how many of them are recorded."""

    lanes: int
    recorded: int
    options: dict[str, int]  # layers and width, or pixels

    @property
    def step(self) -> str:
        if "pixels" in self.options:
            return "pictures of {pixels} x {pixels} x 3".format(**self.options)
        return "{layers} layers of {width:,}".format(**self.options) if self.options else "light"

    def small(self) -> Workload:
        options = {name: min(value, 16) for name, value in self.options.items()}
        return Workload(self.lanes // 64, -(-self.recorded // 64), options)


_MEDIUM, _HEAVY = {"layers": 8, "width": 512}, {"layers": 16, "width": 2048}
WORKLOADS = [
    *(Workload(4096, recorded, options) for options in ({}, _MEDIUM, _HEAVY) for recorded in (40, 4096)),
    *(Workload(16384, recorded, _MEDIUM) for recorded in (40, 16384)),
    Workload(256, 256, {"pixels": 84}),
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a trial of the script")
    parser.add_argument("--only", default="", help="comma-separated libraries")
    parser.add_argument("--output", type=Path, help="output directory (default on a GPU: benchmarks)")
    given = parser.parse_args()
    if given.output is None and given.device == "gpu":
        given.output = HERE
    return given


def sides(given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the chosen libraries that are installed and see the device; print why others are missing."""
    for name, (package, module) in LIBRARIES.items():
        if not given.only or name in given.only.split(","):
            try:
                yield name, importlib.import_module(module).Side(given.device)
            except ModuleNotFoundError as missing:
                if missing.name != package:
                    raise
                print(f"{name}: not installed", flush=True)
            except LookupError as error:
                print(f"{name}: {error}", flush=True)


# -- steps ------------------------------------------------------------------------------------------------------------


def us_per_step(side: Any, envs: Any, actions: list[Any]) -> float:
    begun = time.perf_counter()
    for action in actions:
        result = envs.step(action)
    side.wait(result)
    return (time.perf_counter() - begun) / len(actions) * 1e6


def stepped(side: Any, workload: Workload, is_small: bool) -> dict[str, Any]:
    """Return the microseconds per step of each way, by turn."""
    lanes = None if workload.recorded == workload.lanes else workload.recorded
    numbers = None if lanes is None else [i * workload.lanes // lanes for i in range(lanes)]
    recorders: list[Any] = []
    with tempfile.TemporaryDirectory(dir=scratch()) as directory:

        def recorder(**options: Any) -> Any:
            path = f"{directory}/{len(recorders)}"
            recorders.append(TraceRecordingVectorWrapper(made(), path, lanes=lanes, **options))
            return recorders[-1]

        def made() -> Any:
            return side.envs(workload.lanes, **workload.options)

        ways = {
            "bare": made(),
            "packed": side.packed(made(), numbers),
            "side": side.packed(made(), numbers, _LAG),
            "recorded": recorder(),
            "lag": recorder(device_lag=_LAG),
        }
        actions = side.actions(workload.lanes, 4 if is_small else _STEPS)
        found: dict[str, list[float]] = {name: [] for name in ways}
        for envs in ways.values():
            envs.reset()
            us_per_step(side, envs, actions)
        end = time.monotonic() + _SECONDS
        for turn in range(2 if is_small else _TURNS):
            if turn < 3 or time.monotonic() < end:
                for name, envs in ways.items():
                    found[name].append(us_per_step(side, envs, actions))
        for envs in recorders:
            envs.close()
    return {"lanes": workload.lanes, "recorded": workload.recorded, "step": workload.step, "us": found}


def scratch() -> str | None:
    """Return a directory in memory, so that no disk is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def checked(side: Any, lanes: int, steps: int) -> dict[str, int]:
    """Record with and without lag, and compare the traces with logs of what step() returned."""
    episodes = wrong = 0
    for options in ({}, {"lanes": lanes // 8}, {"device_lag": _LAG}):
        with tempfile.TemporaryDirectory(dir=scratch()) as directory:
            envs = TraceRecordingVectorWrapper(side.envs(lanes, horizon=9), f"{directory}/trace", **options)
            seen, acted, results = [side.array(envs.reset()[0])], [], []
            for action in side.actions(lanes, steps):
                observation, *result, _ = envs.step(action)
                seen.append(side.array(observation))
                acted.append(side.array(action))
                results.append([side.array(value) for value in result])
            envs.close()
            log = np.array(seen), np.array(acted), *map(np.array, zip(*results))
            found = compared(f"{directory}/trace", *log)
            episodes, wrong = episodes + found[0], wrong + found[1]
    return {"episodes": episodes, "wrong": wrong}


def compared(directory: str, seen: Any, acted: Any, rewards: Any, terminated: Any, truncated: Any) -> tuple[int, int]:
    """Return the number of episodes, and of those that differ from the log. Each ends before an ignored step."""
    begins: dict[int, int] = {}
    episodes = wrong = 0
    for episode in sorted(open_trace(directory), key=lambda one: one.episode_id):
        lane, begin = episode.lane, begins.get(episode.lane, 0)
        end = begin + len(episode)
        columns = {
            "observations": (episode.observations, seen[begin : end + 1, lane]),
            "actions": (episode.actions, acted[begin:end, lane]),
            "rewards": (episode.rewards.astype(rewards.dtype), rewards[begin:end, lane]),
            "terminations": (episode.terminations, terminated[begin:end, lane]),
            "truncations": (episode.truncations, truncated[begin:end, lane]),
        }
        begins[lane], episodes = end + 1, episodes + 1
        wrong += any(ours.tobytes() != theirs.tobytes() for ours, theirs in columns.values())
    return episodes, wrong


# -- rollouts ---------------------------------------------------------------------------------------------------------


def rolled(side: Any, lanes: int, steps: int, calls: int) -> dict[str, Any]:
    """Return the seconds of collecting a rollout, of copying it, of writing it, and of closing the writer."""
    collect = side.rollouts(lanes, steps)
    found: dict[str, list[float]] = {"collect": [], "copy": [], "write": [], "close": []}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = work()
        side.wait(result)
        found[name].append(time.perf_counter() - begun)
        return result

    with tempfile.TemporaryDirectory(dir=scratch()) as directory:
        writer = TraceWriter(f"{directory}/trace", environment={"id": "rollouts"})
        side.wait(collect())  # JAX compiles
        for _ in range(calls):
            arrays = timed("collect", collect)
            timed("copy", side.copied(arrays))
            timed("write", functools.partial(writer.rollouts, *arrays))
        timed("close", writer.close)
    moved = sum(array.nbytes for array in arrays)
    sustained = calls * moved / 1e9 / (sum(found["write"]) + sum(found["close"]))
    return {"steps": steps, "lanes": lanes, "bytes": moved, "seconds": found, "sustained": sustained}


def batches(side: Any, length: int) -> dict[str, float]:
    """Return GB/s of training batches of a trace of noise to the device, by way."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=scratch()) as directory:
        with TraceWriter(f"{directory}/trace", environment={"id": "noise"}) as writer:
            shape = (length, 256)
            over = np.zeros(shape, bool)
            writer.rollouts(
                random.standard_normal((length + 1, 256, 64), np.float32), random.random((*shape, 8), np.float32),
                random.random(shape), over, over,
            )  # fmt: skip
        found: dict[str, float] = side.batches(f"{directory}/trace", 0.2 if length < 512 else 4.0)
    return found


# -- the report -------------------------------------------------------------------------------------------------------


def report(results: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    about = results["versions"]
    versions = ", ".join(f"{name} {version}" for name, version in about.items())
    cpu = results["machine"]
    parts = [
        f"Measured on {results['date']} on {results['card']} with {cpu['cores']} cores ({cpu['cpu']}; {versions}). "
        f"Microseconds per step, medians of turns of {_STEPS} steps:"
    ]
    head = ["", "step", "lanes recorded", *WAYS.values()]
    rows = [
        [row["library"], row["step"], f"{row['recorded']:,} of {row['lanes']:,}",
         *(f"{statistics.median(row['us'][way]):,.0f}" if way in row["us"] else "–" for way in WAYS)]
        for row in results["steps"]
    ]  # fmt: skip
    parts.append(table(head, rows))
    head = ["rollouts", "MB", "collect, ms", "copy, ms", "`writer.rollouts`, ms", "GB/s, sustained"]
    rows = [
        [f"{row['library']}, {row['steps']} x {row['lanes']:,}", f"{row['bytes'] / 1e6:,.0f}",
         *(f"{statistics.median(row['seconds'][name]) * 1e3:,.1f}" for name in ("collect", "copy", "write")),
         f"{row['sustained']:.2f}"]
        for row in results["rollouts"]
    ]  # fmt: skip
    parts.append(table(head, rows))
    if results["batches"]:
        parts.append(table(["batches to the device", "GB/s"], [[k, f"{v:.1f}"] for k, v in results["batches"].items()]))
    checks = ", ".join(f"{row['wrong']} of {row['episodes']:,} ({row['library']})" for row in results["checked"])
    parts.append(f"Episodes that differ from a log of what `step()` returned: {checks}.")
    return "\n\n".join(parts) + "\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def main() -> None:
    given, begun = arguments(), time.monotonic()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to PyTorch
    is_small = given.device == "cpu"
    results: dict[str, Any] = {"steps": [], "rollouts": [], "batches": {}, "checked": []}
    versions = {"Python": platform.python_version()}
    for name, side in sides(given):
        results.setdefault("card", side.card)
        versions[name] = importlib.import_module(LIBRARIES[name][0]).__version__
        results["checked"].append({"library": name, **checked(side, *((16, 20) if is_small else (512, 60)))})
        for workload in WORKLOADS:
            if "pixels" not in workload.options or name == "PyTorch":
                print(f"{name}: {workload.recorded:,} of {workload.lanes:,} lanes, {workload.step}", flush=True)
                sized = workload.small() if is_small else workload
                results["steps"].append({"library": name, **stepped(side, sized, is_small)})
        results["rollouts"].append({"library": name, **rolled(side, *((64, 8, 2) if is_small else (4096, 128, 6)))})
        if hasattr(side, "batches"):
            results["batches"] = batches(side, 64 if is_small else 2048)
    if not results["steps"]:
        sys.exit("no library sees a GPU; make bench-device BENCH='--device cpu' tries the script on the CPU")
    without = "" if CORE == "compiled" else " without its C core"
    versions |= {"Gymnasium": gymnasium.__version__, "gym-trace": gym_trace.__version__ + without}
    about = {"machine": machine(), "date": time.strftime("%Y-%m-%d"), "versions": versions}
    results = {**about, "seconds": round(time.monotonic() - begun), **results}
    print(report(results))
    if given.output is not None:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "device.json").write_text(json.dumps(rounded(results)).replace("}}, {", "}},\n{") + "\n")


if __name__ == "__main__":
    main()
