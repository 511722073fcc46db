"""Measure the server of the viewer: a million episodes, long plots, pictures, and memory on a large trace.

    python benchmarks/viewing.py [--only episodes steps pictures memory scrubbing tab] [--seconds 600] [--gigabytes 2]

starts `gym-trace view` on traces that it records, asks what the page asks, and prints times and the server's memory.
scrubbing and tab drive the page in the installed Chromium (the extra [dev] has selenium), and skip without one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace import TraceRecordingWrapper
from gym_trace.tools.viewer.container import unpacked

PICTURE = (84, 84)


class Short(gymnasium.Env[Any, Any]):
    """Episodes of two steps."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.seen, self.steps = np.zeros(4, np.float32), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.seen[0] += 1
        return self.seen, float(self.seen[0] % 100), self.steps == 2, False, {}


class Long(gymnasium.Env[Any, Any]):
    """One endless episode with observations like those of HalfCheetah, or pictures of noise."""

    action_space = spaces.Box(-1, 1, (6,), np.float32)

    def __init__(self, pictures: bool = False) -> None:
        space = spaces.Box(0, 255, PICTURE, np.uint8) if pictures else spaces.Box(-np.inf, np.inf, (17,), np.float64)
        self.observation_space: Any = space
        random = np.random.default_rng(0)
        rows = random.integers(0, 256, (512, *PICTURE), np.uint8) if pictures else random.standard_normal((4096, 17))
        self.rows, self.at = rows, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.rows[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        row = self.rows[self.at % len(self.rows)]
        return np.roll(row, self.at // len(self.rows)), 1.0, False, False, {}


def record(env: Any, directory: Path, steps: int, action: Any = 0, most: float = np.inf) -> None:
    """Record steps, or until the trace has a number of bytes."""
    with TraceRecordingWrapper(env, directory) as recorder:
        recorder.reset(seed=0)
        for step in range(steps):
            _, _, terminated, truncated, _ = recorder.step(action)
            if terminated or truncated:
                recorder.reset()
            if step % 1000 == 0 and sum(path.stat().st_size for path in directory.glob("*.gtb*")) > most:
                break


class Client:
    """Asks a server, and measures its memory."""

    def __init__(self, directory: Path):
        begin = time.perf_counter()
        command = [sys.executable, "-m", "gym_trace", "view", str(directory), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = address = self.process.stdout.readline().strip()
        self.start = time.perf_counter() - begin
        port, _, token = address.partition("127.0.0.1:")[2].partition("/?token=")
        self._connection = http.client.HTTPConnection("127.0.0.1", int(port))
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, path: str) -> bytes:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, body
        return body

    def timed(self, path: str) -> float:
        begin = time.perf_counter()
        self.ask(path)
        return time.perf_counter() - begin

    @property
    def megabytes(self) -> float:
        """Memory of its own: what it shares with the page cache does not count."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")) / 1000

    def close(self) -> None:
        self._connection.close()
        self.process.terminate()
        self.process.communicate()


@contextmanager
def viewing(directory: Path) -> Iterator[Client]:
    client = Client(directory)
    try:
        yield client
    finally:
        client.close()


def tell(label: str, value: str) -> None:
    print(f"{label:60} {value}", flush=True)


def quantiles(seconds: list[float]) -> str:
    return quantiles_of([1000 * one for one in seconds])


def quantiles_of(milliseconds: list[float]) -> str:
    middle, late = np.quantile(milliseconds, [0.5, 0.99])
    return f"median {middle:.1f} ms, 99 % {late:.1f} ms"


def episodes(directory: Path, options: argparse.Namespace) -> None:
    record(Short(), directory, 2 * options.episodes)
    with viewing(directory) as client:
        tell(f"{options.episodes:,} episodes: server up after", f"{client.start:.2f} s")
        first = ["/api/traces", "/api/histograms?trace=0", "/api/episodes?trace=0&limit=200"]
        first += ["/api/episode?trace=0&episode=7", "/api/plot?trace=0&episode=7&column=observations"]
        times = [client.timed(path) for path in first]
        tell("  list, histograms and first plot, after it is up", f"{sum(times):.2f} s")
        tell(
            "  --where on returns, sorted", f"{client.timed('/api/episodes?where=return%20>%2050&sort=-return'):.2f} s"
        )
        tell(
            "  another part of that",
            f"{client.timed('/api/episodes?where=return%20>%2050&sort=-return&offset=9999'):.3f} s",
        )
        tell("  memory of the server", f"{client.megabytes:.0f} MB")


def steps(directory: Path, options: argparse.Namespace) -> None:
    record(Long(), directory, options.steps, np.zeros(6, np.float32))
    with viewing(directory) as client:
        column = "/api/plot?trace=0&episode=0&column=observations&pixels=1200"
        tell(f"1 episode of {options.steps:,} steps, 17 numbers: whole plot", f"{client.timed(column):.2f} s")
        random = np.random.default_rng(0)
        times = []
        for _ in range(200):
            width = int(options.steps * 10 ** random.uniform(-4, 0))
            begin = int(random.integers(0, max(1, options.steps - width)))
            times.append(client.timed(f"{column}&from={begin}&to={begin + width}"))
        tell("  zooming and panning, all 17 in one request", quantiles(times))
        tell("  memory of the server", f"{client.megabytes:.0f} MB")


def pictures(directory: Path, options: argparse.Namespace) -> None:
    import ale_py

    gymnasium.register_envs(ale_py)
    record(gymnasium.make("ALE/Pong-v5"), directory, 3000, 0)
    with viewing(directory) as client:
        path = "/api/frames?trace=0&episode=0&column=observations&count=16&from={}"
        blocks = range(0, 700, 16)
        begin = time.perf_counter()
        frames = sum(len(unpacked(client.ask(path.format(at)))[1]) for at in blocks)
        tell("Pong: frames per second, from front to back", f"{frames / (time.perf_counter() - begin):,.0f}")
        random = np.random.default_rng(0)
        times = [client.timed(path.format(16 * int(at))) for at in random.integers(0, 44, 500)]
        tell("  scrubbing: a block of 16 frames", quantiles(times))
        times = [
            client.timed(path.format(int(at)).replace("count=16", "count=1")) for at in random.integers(0, 700, 500)
        ]
        tell("  scrubbing: a single frame", quantiles(times))
        tell("  memory of the server", f"{client.megabytes:.0f} MB")


def memory(directory: Path, options: argparse.Namespace) -> None:
    record(Long(pictures=True), directory, 10**9, np.zeros(6, np.float32), options.gigabytes * 1e9)
    size = sum(path.stat().st_size for path in directory.iterdir())
    with viewing(directory) as client:
        total = json.loads(client.ask("/api/traces"))[0]["steps"]
        random, used, times = np.random.default_rng(0), [], []
        begin, tenth = time.perf_counter(), 1
        while (now := time.perf_counter() - begin) < options.seconds:
            at = int(random.integers(0, total // 16)) * 16
            times.append(client.timed(f"/api/frames?trace=0&episode=0&column=observations&from={at}&count=16"))
            client.ask(f"/api/steps?trace=0&episode=0&from={at // 32 * 32}&count=32")
            client.ask(f"/api/plot?trace=0&episode=0&column=return&from={at}&to={at + 5000}&pixels=1200")
            if now > tenth * options.seconds / 10:
                used.append(round(client.megabytes))
                tenth += 1
        tell(f"trace of {size / 1e9:.1f} GB, {total:,} noisy pictures: 16 at random", quantiles(times))
        tell(f"  memory of the server in each tenth of {options.seconds} s", f"{' '.join(map(str, used))} MB")


# Moves the scrubber to each row, every 16 ms at most, and returns the milliseconds until its picture is on the canvas.
_SCRUB = """
const [rows, done] = arguments;
const slider = document.querySelector('.scrubber'), canvas = document.querySelector('.picture canvas');
const shown = row => new Promise(resolve => {
  const observer = new MutationObserver(() => {
    if (canvas.dataset.step === String(row)) { observer.disconnect(); resolve(); }
  });
  observer.observe(canvas, {attributes: true});
  slider.value = row;
  slider.dispatchEvent(new Event('input'));
  if (canvas.dataset.step === String(row)) { observer.disconnect(); resolve(); }
});
(async () => {
  const times = [];
  for (const row of rows) {
    const begin = performance.now();
    await shown(row);
    times.push(performance.now() - begin);
    await new Promise(resolve => setTimeout(resolve, Math.max(0, 16 - times.at(-1))));
  }
  done(times);
})();
"""


@contextmanager
def tab(client: Client) -> Iterator[Any]:
    """A browser that shows the first episode of a server, once its first picture is there. None without Chromium."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    import browser

    if reason := browser.missing():
        tell("the page in a browser", f"skipped: {reason}")
        yield None
        return
    with tempfile.TemporaryDirectory() as profile, browser.browser(Path(profile)) as driver:
        driver.set_script_timeout(120)
        driver.get(client.address)
        driver.get("about:blank")
        driver.get(client.address.partition("?")[0] + "#trace=0&episode=0")
        end = time.monotonic() + 60
        while not driver.execute_script("return document.querySelector('.picture canvas[data-step]')"):
            if time.monotonic() > end:
                raise TimeoutError("the page shows no picture after 60 s")
            time.sleep(0.1)
        yield driver


def tab_megabytes(driver: Any) -> float:
    """Memory of the process that renders the page, as RssAnon: of all that render, the one that has worked most."""
    found = []
    for number in descendants(driver.service.process.pid):
        process = Path(f"/proc/{number}")
        try:
            if b"--type=renderer" not in (process / "cmdline").read_bytes():
                continue
            status = (process / "status").read_text()
            user, system = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        found.append((int(user) + int(system), memory))
    return max(found)[1] / 1000


def descendants(root: int) -> set[int]:
    """The process of this number, and those that it has started."""
    family, grown = {root}, True
    while grown:
        grown = False
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                number, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent in family and number not in family:
                family.add(number)
                grown = True
    return family


def scrubbing(directory: Path, options: argparse.Namespace) -> None:
    import ale_py

    gymnasium.register_envs(ale_py)
    record(gymnasium.make("ALE/Pong-v5"), directory, 3000, 0)
    with viewing(directory) as client, tab(client) as driver:
        if driver is None:
            return
        random = np.random.default_rng(0)
        jumps = random.integers(0, 700, 300).tolist()
        tell("Pong in Chromium: jumping to any step", quantiles_of(driver.execute_async_script(_SCRUB, jumps)))
        dragged = [int(row) for row in 350 + 340 * np.sin(np.linspace(0, 12, 800))]
        tell("  dragging the scrubber", quantiles_of(driver.execute_async_script(_SCRUB, dragged)))


def tab_memory(directory: Path, options: argparse.Namespace) -> None:
    record(Long(pictures=True), directory, 10**9, np.zeros(6, np.float32), options.gigabytes * 1e9)
    with viewing(directory) as client, tab(client) as driver:
        if driver is None:
            return
        total = json.loads(client.ask("/api/traces"))[0]["steps"]
        random, used, times = np.random.default_rng(0), [], []
        begin, tenth = time.perf_counter(), 1
        while (now := time.perf_counter() - begin) < options.seconds:
            first = int(random.integers(0, total - 200))
            times += driver.execute_async_script(_SCRUB, list(range(first, first + 200, 4)))
            if now > tenth * options.seconds / 10:
                used.append(round(client.megabytes + tab_megabytes(driver)))
                tenth += 1
        tell(f"scrubbing {total:,} noisy pictures in Chromium", quantiles_of(times))
        tell(f"  memory of server and tab in each tenth of {options.seconds} s", f"{' '.join(map(str, used))} MB")


PARTS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "episodes": episodes,
    "steps": steps,
    "pictures": pictures,
    "memory": memory,
    "scrubbing": scrubbing,
    "tab": tab_memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--episodes", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="viewing-") as directory:
            PARTS[name](Path(directory) / "trace", options)


if __name__ == "__main__":
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    main()
