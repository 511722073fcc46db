"""Measurements, each of which runs in its own process."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import workloads
from contestants import Contestant, disk_size

WINDOW = 64
WINDOWS = 256
EPISODES = 200
REPEATS = 5
LONGEST = 3  # seconds of reading everything again
_FEWEST = 4  # calls of step that are measured, however slow they are


# -- recording --------------------------------------------------------------------------------------------------------


def record(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Measure the unwrapped loop, the recorded one, and the unwrapped one again; and the floors on request.

    If task["steps"] is None, the number of steps is chosen so that the recorded loop takes about task["seconds"].
    """
    workload = workloads.WORKLOADS[task["workload"]]
    if refusal := contestant.refuses(workload):
        return {"refused": refusal}
    steps = task["steps"] or _steps_in(contestant, workload, task["seconds"], os.path.join(task["directory"], "pilot"))
    env = contestant.make(workload)
    actions = contestant.actions(workload, env, steps)
    contestant.start(env)
    contestant.run(workload, env, actions[: max(1, len(actions) // 20)])  # warm up
    directory = os.path.join(task["directory"], "recording")
    os.makedirs(directory)
    raw = [_loop(contestant, workload, env, actions)]
    wrapped = contestant.wrap(contestant.make(workload), directory)
    result = _loop(contestant, workload, wrapped, actions, contestant.finish)
    result["memory"] = max(0, result["peak"] - raw[0]["peak"])
    canned = os.path.join(task["directory"], "canned")
    floors = contestant.recording_floors(workload, canned, task.get("scale", 1.0)) if task["floors"] else {}
    raw.append(_loop(contestant, workload, env, actions))
    base = {key: (raw[0][key] + raw[1][key]) / 2 for key in ("wall", "cpu")}
    count = len(actions) * max(1, workload.lanes)
    return {"steps": count, "raw": base, "recorded": result, "floors": floors, "bytes": disk_size(directory)}


def _steps_in(contestant: Contestant, workload: workloads.Workload, seconds: float, directory: str) -> int:
    """Estimate the number of steps recorded in `seconds`, with a run of a quarter of that time."""
    os.makedirs(directory)
    env = contestant.wrap(contestant.make(workload), directory)
    actions = contestant.actions(workload, env, min(workload.steps, 2_000))
    count, begin = 0, 0.0

    def some() -> Iterator[Any]:
        nonlocal count, begin
        begin = time.perf_counter()
        for action in itertools.cycle(actions):
            if time.perf_counter() - begin > seconds / 4:
                return
            count += 1
            yield action

    contestant.start(env)
    contestant.run(workload, env, some())
    contestant.finish(env)  # many contestants write most data here
    lanes = max(1, workload.lanes)
    rate = count * lanes / (time.perf_counter() - begin)
    return min(workload.steps, max(_FEWEST * lanes, int(rate * seconds)))


def _loop(
    contestant: Contestant,
    workload: workloads.Workload,
    env: Any,
    actions: list[Any],
    finish: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """Return the seconds of the loop, and until everything is readable after it."""
    contestant.start(env)
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    contestant.run(workload, env, actions)
    last_step = time.perf_counter()
    if finish is not None:
        finish(env)
    end = time.perf_counter()
    return {
        "wall": end - wall, "cpu": time.process_time() - cpu, "finish": end - last_step, "peak": _peak()
    }  # fmt: skip


def _peak() -> float:
    """Return the peak memory of the process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


# -- reading ----------------------------------------------------------------------------------------------------------


def read(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Read everything, first and again; then single episodes, windows and rewards, each with a new reader.

    Contestants that read rewards only by reading everything reuse that time. task["brief"]: skip windows and rewards.
    """
    directory = os.path.join(task["directory"], "recording")
    before = _peak()
    opening, reader = timed(lambda: contestant.open(directory))
    first, (steps, size) = timed(lambda: contestant.scan(reader))
    memory = _peak() - before
    again = []
    floors = contestant.reading_floors(directory) if task["floors"] else {}
    floor_times: dict[str, list[float]] = {name: [] for name in floors}
    for _ in range(REPEATS):
        if again and sum(again) > (LONGEST if floors else task["seconds"]):
            break
        reader = contestant.open(directory)
        again.append(timed(lambda r=reader: contestant.scan(r))[0])
        for name, floor in floors.items():
            floor_times[name].append(floor())
    floors.clear()
    lengths = np.asarray(contestant.lengths(reader))
    random = np.random.default_rng(task["repeat"])
    longer = 4 * task["seconds"]  # the first ones decode what later ones find decoded
    found = {
        "open": opening, "steps": steps, "size": size, "first": first, "again": float(np.median(again)),
        "memory": memory, "floors": {name: float(np.median(times)) for name, times in floor_times.items()},
        "episodes": _random_episodes(contestant, directory, lengths, random, longer),
    }  # fmt: skip
    if not task.get("brief"):
        found["window"] = _random_windows(contestant, directory, lengths, random, longer)
        found["rewards"] = _rewards(contestant, contestant.open(directory), found["again"])
    return found


def _rewards(contestant: Contestant, reader: Any, everything: float) -> float:
    if type(contestant).rewards is Contestant.rewards:
        return everything
    return timed(lambda: contestant.rewards(reader))[0]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def _random_episodes(
    contestant: Contestant, directory: str, lengths: np.ndarray, random: Any, seconds: float
) -> dict[str, float]:
    """Read random episodes, as many as fit in `seconds`, and copy the arrays of each into reused memory.

    Returns:
        p50, p99: seconds per episode. count, steps, bytes: what was read. seconds, copied: time of reading and copying.
    """
    reader = contestant.open(directory)
    times: list[float] = []
    steps = size = 0
    copied = 0.0
    room = np.ones(0, np.uint8)
    for index in random.integers(0, len(lengths), EPISODES).tolist():
        spent, columns = timed(lambda i=index: contestant.episode(reader, i))
        times.append(spent)
        arrays = list(arrays_in(columns))
        if (largest := max((array.nbytes for array in arrays), default=0)) > len(room):
            room = np.ones(largest, np.uint8)
        for array in arrays:
            target = room[: array.nbytes].view(array.dtype).reshape(array.shape)
            copied += timed(lambda a=array, t=target: np.copyto(t, a))[0]
        steps += int(lengths[index])
        size += sum(array.nbytes for array in arrays)
        if sum(times) > seconds:
            break
    p50, p99 = np.percentile(times, [50, 99]).tolist()
    return {
        "p50": p50, "p99": p99, "count": len(times), "steps": steps, "bytes": size, "seconds": sum(times),
        "copied": copied,
    }  # fmt: skip


def arrays_in(tree: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of numbers in dicts, lists and tuples."""
    if isinstance(tree, np.ndarray) and tree.dtype != object:
        yield tree
    elif isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from arrays_in(part)


def _random_windows(contestant: Contestant, directory: str, lengths: np.ndarray, random: Any, seconds: float) -> float:
    """Return the seconds for 256 windows, extrapolated if time runs out. Windows end with their episode."""
    reader = contestant.open(directory)
    ends = np.cumsum(lengths)
    total, done = 0.0, 0
    for step in random.integers(0, ends[-1], WINDOWS).tolist():
        index = int(np.searchsorted(ends, step, side="right"))
        start = step - int(ends[index] - lengths[index])
        stop = min(start + WINDOW, int(lengths[index]))
        total += timed(lambda i=index, a=start, b=stop: contestant.window(reader, i, a, b))[0]
        done += 1
        if total > seconds:
            break
    return total / done * WINDOWS


def open_trace(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds until a reader has returned the length of each episode."""
    directory = os.path.join(task["directory"], "recording")
    seconds, lengths = timed(lambda: contestant.lengths(contestant.open(directory)))
    return {"seconds": seconds, "episodes": len(lengths)}


# -- killing ----------------------------------------------------------------------------------------------------------


def kill(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    """Kill a recording process some seconds after its first step, and count its steps."""
    workload = workloads.WORKLOADS[task["workload"]]
    if refusal := contestant.refuses(workload):
        return {"refused": refusal}
    progress = mmap.mmap(-1, 16)
    os.makedirs(os.path.join(task["directory"], "recording"))
    pid = os.fork()
    if pid == 0:
        _record_for_ever(contestant, workload, os.path.join(task["directory"], "recording"), progress)
    while not struct.unpack("q", progress[:8])[0]:
        time.sleep(0.001)
        if os.waitpid(pid, os.WNOHANG)[0]:
            raise RuntimeError("the recording process ended before it was killed")
    begin = time.perf_counter()
    time.sleep(task["seconds"])
    os.kill(pid, signal.SIGKILL)
    seconds = time.perf_counter() - begin
    os.waitpid(pid, 0)
    return {"stepped": struct.unpack("q", progress[:8])[0], "seconds": seconds}


def _record_for_ever(contestant: Contestant, workload: workloads.Workload, directory: str, progress: mmap.mmap) -> None:
    def counted() -> Iterator[Any]:
        for count, action in enumerate(itertools.cycle(actions)):
            progress[:8] = struct.pack("q", count)
            yield action

    try:
        env = contestant.wrap(contestant.make(workload), directory)
        actions = contestant.actions(workload, env, 5_000)
        contestant.start(env)
        contestant.run(workload, env, counted())
    finally:
        os._exit(1)


def count_readable(contestant: Contestant, task: dict[str, Any]) -> dict[str, Any]:
    return {"readable": contestant.readable(os.path.join(task["directory"], "recording"))}


TASKS = {"record": record, "read": read, "open": open_trace, "kill": kill, "count": count_readable}
