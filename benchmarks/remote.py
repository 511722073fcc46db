"""Reading a trace at a URL beside its directory: bytes fetched, and random windows with a cold and a warm cache.

    python benchmarks/remote.py TRACE [--episodes 10] [--windows 2000] [--length 8] [--latency 20]

Serves the trace from memory on 127.0.0.1, waiting --latency milliseconds before each answer, and prints

- what "the rewards of N episodes", spread over the trace, fetch, including all that opening needs;
- random windows (observations, actions and rewards of --length steps) a second: of the directory, of the URL with a
  warm cache on disk, in turns, by CPU time and by the clock; and with an empty cache, by the clock.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import gym_trace

_TURNS = 5


def windows(trace: gym_trace.Trace, count: int, length: int, seed: int) -> None:
    """Read random windows, each by itself."""
    random = np.random.default_rng(seed)
    steps = trace.episodes["steps"]
    usable = np.flatnonzero(steps >= length)
    for index in random.choice(usable, count).tolist():
        begin = int(random.integers(0, steps[index] - length + 1))
        window = trace[index][begin : begin + length]
        assert len(window.rewards) == length
        assert len(window.actions) == length
        assert len(window.observations) == length + 1


def timed(call: Any) -> tuple[float, float]:
    clock, cpu = time.perf_counter(), time.thread_time()
    call()
    return time.perf_counter() - clock, time.thread_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--windows", type=int, default=2000)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--latency", type=float, default=20.0)
    given = parser.parse_args()
    total = sum(path.stat().st_size for path in given.trace.iterdir())
    local = gym_trace.open_trace(given.trace)
    chosen = np.linspace(0, len(local) - 1, given.episodes).astype(int).tolist()
    print(f"{given.trace.name}: {total / 1e6:.1f} MB, {len(local)} episodes, {given.latency:g} ms before each answer")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from faulty_server import serving

    with serving(given.latency / 1e3) as web, tempfile.TemporaryDirectory() as folder:
        url = f"{web.url}/trace"
        web.files = {f"/trace/{path.name}": path.read_bytes() for path in given.trace.iterdir()}
        begin = time.perf_counter()
        trace = gym_trace.open_trace(url)
        opened, opening, requests = time.perf_counter() - begin, web.sent, len(web.requests)
        rewards = [episode.rewards for episode in trace[chosen].scan(columns=["rewards"])]
        seconds = time.perf_counter() - begin
        assert all(np.array_equal(a, local[index].rewards) for a, index in zip(rewards, chosen))
        print(f"open: {opening / 1e6:.2f} MB in {requests} requests, {opened:.2f} s")
        print(
            f"rewards of {given.episodes} episodes, with opening: {web.sent / 1e6:.2f} MB in {len(web.requests)} "
            f"requests, {seconds:.2f} s: {100 * web.sent / total:.2f} % of the trace"
        )
        cached = gym_trace.open_trace(url, cache=folder)
        before = web.sent
        cold, _ = timed(lambda: windows(cached, given.windows, given.length, 0))
        fetched = web.sent - before
        ratios = []
        for turn in range(_TURNS):
            ours, theirs = (
                timed(partial(windows, opened, given.windows, given.length, 0))
                for opened in (gym_trace.open_trace(url, cache=folder), gym_trace.open_trace(given.trace))
            )
            if turn:  # the first one warms up
                ratios.append((theirs[0] / ours[0], theirs[1] / ours[1], ours[0], theirs[0]))
        clock, cpu, ours_s, theirs_s = np.median(ratios, axis=0)
        print(f"random windows, directory: {given.windows / theirs_s:.0f}/s")
        rate = f"{given.windows / ours_s:.0f}/s"
        print(f"random windows, warm cache: {rate}: {clock:.2f} of the directory ({cpu:.2f} by CPU)")
        print(f"random windows, cold cache: {given.windows / cold:.0f}/s, {fetched / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
