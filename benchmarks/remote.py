"""Reading a trace at a URL beside its directory: bytes fetched, and random windows with a cold and a warm cache.

    python benchmarks/remote.py TRACE [--episodes 10] [--windows 2000] [--length 8] [--latency 20]

Serves the trace on 127.0.0.1 with byte ranges and ETags, waiting --latency milliseconds before each answer, and prints

- what "the rewards of N episodes", spread over the trace, fetch, including all that opening needs;
- random windows (observations, actions and rewards of --length steps) a second: of the directory, of the URL with a
  warm cache on disk, in turns, by CPU time and by the clock; and with an empty cache, by the clock.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

import gym_trace

_TURNS = 5


class Served:
    """url: of the directory. bytes, requests: answered so far."""

    def __init__(self) -> None:
        self.url, self.bytes, self.requests = "", 0, 0


@contextlib.contextmanager
def serving(directory: Path, latency: float) -> Iterator[Served]:
    served = Served()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            time.sleep(latency)
            name = self.path.rpartition("/")[2]
            path = directory / name
            if name == "names.txt":
                body, tag, status = "\n".join(os.listdir(directory)).encode(), '"names"', 200
            elif path.is_file():
                body, status = self._part(path)
                about = path.stat()
                tag = f'"{about.st_size}-{about.st_mtime_ns}"'
            else:
                body, tag, status = b"", '""', 404
            size = path.stat().st_size if self.command == "HEAD" and path.is_file() else len(body)
            self.send_response(status)
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
                served.bytes += len(body)
            served.requests += 1

        def _part(self, path: Path) -> tuple[bytes, int]:
            if self.command == "HEAD":
                return b"", 200
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            with open(path, "rb") as file:
                if found is None:
                    return file.read(), 200
                file.seek(int(found[1]))
                return file.read(int(found[2]) - int(found[1]) + 1), 206

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}/trace"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


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
    with serving(given.trace, given.latency / 1e3) as served, tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        trace = gym_trace.open_trace(served.url)
        opened, opening, requests = time.perf_counter() - begin, served.bytes, served.requests
        rewards = [episode.rewards for episode in trace[chosen].scan(columns=["rewards"])]
        seconds = time.perf_counter() - begin
        assert all(np.array_equal(a, local[index].rewards) for a, index in zip(rewards, chosen))
        print(f"open: {opening / 1e6:.2f} MB in {requests} requests, {opened:.2f} s")
        print(
            f"rewards of {given.episodes} episodes, with opening: {served.bytes / 1e6:.2f} MB in {served.requests} "
            f"requests, {seconds:.2f} s: {100 * served.bytes / total:.2f} % of the trace"
        )
        cached = gym_trace.open_trace(served.url, cache=folder)
        before = served.bytes
        cold, _ = timed(lambda: windows(cached, given.windows, given.length, 0))
        fetched = served.bytes - before
        ratios = []
        for turn in range(_TURNS):
            ours, theirs = (
                timed(partial(windows, opened, given.windows, given.length, 0))
                for opened in (gym_trace.open_trace(served.url, cache=folder), gym_trace.open_trace(given.trace))
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
