"""gym-trace beside Lance, zarr and Parquet on an object store: requests, bytes, CPU and wall seconds.

    make bench-remote [BENCH="--quick --latency 30 --rate 125 --turns 3"]

Stores the same steps in each format: 10^6 steps of HalfCheetah's shapes, in episodes of 1,000, and 5,000 frames of
84 x 84 x 3 that do not compress. Serves them as a bucket of S3 on 127.0.0.1, waiting --latency milliseconds before each
answer, and sending --rate MB/s at most. Each figure is the median of --turns new processes with empty caches, all
formats in turns, from before the data is opened; packages are imported before that. Sums of what was read must agree.
--write puts the tables into docs/reference/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import gym_trace

HERE = Path(__file__).parent
COLUMNS = ("observations", "actions", "rewards")
WINDOWS, LENGTH, BATCHES = 64, 16, 20
KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "hush",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
WORK = {
    "open": "opened",
    "first": "first batch",
    "batches": f"{BATCHES} batches",
    "scan": "scan",
    "rewards": "rewards only",
    "episode": "one episode",
}
_MARK = re.compile("(<!-- bench-remote -->\n).*(<!-- end of bench-remote -->)", re.DOTALL)


# -- data -------------------------------------------------------------------------------------------------------------


class Cheetah(gymnasium.Env[Any, Any]):
    """Correlated noise in the shapes of HalfCheetah.

    rows: number of rows in a chunk of zarr, and in a row group of Parquet.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (17,), np.float64)
    action_space = spaces.Box(-1, 1, (6,), np.float32)
    steps, length, rows = 1_000_000, 1000, (1000, 1000)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_number, self.state = 0, self.np_random.normal(size=17)
        return self.state, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        self.state = 0.9 * self.state + 0.4 * self.np_random.normal(size=17)
        return self.state, float(self.state[0]), False, self.step_number == self.length, {}


class Frames(Cheetah):
    """Frames of noise."""

    observation_space = spaces.Box(0, 255, (84, 84, 3), np.uint8)
    action_space = spaces.Discrete(6)
    steps, length, rows = 5000, 500, (16, 50)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        gymnasium.Env.reset(self, seed=seed)
        self.step_number = 0
        return self._frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        return self._frame(), float(self.step_number % 7), False, self.step_number == self.length, {}

    def _frame(self) -> Any:
        return self.np_random.integers(0, 256, (84, 84, 3), np.uint8)


DATA: dict[str, type[Cheetah]] = {"cheetah": Cheetah, "frames": Frames}


def record(directory: Path, env: Cheetah, share: float) -> dict[str, Any]:
    """Record a trace, and return its columns, one row per step."""
    random = np.random.default_rng(0)
    with gym_trace.TraceRecordingWrapper(env, directory) as recorder:
        for seed in range(max(2, int(share * env.steps / env.length))):
            recorder.reset(seed=seed)
            for _ in range(env.length):
                is_box = isinstance(env.action_space, spaces.Box)
                recorder.step(random.uniform(-1, 1, 6).astype(np.float32) if is_box else int(random.integers(6)))
    episodes = list(gym_trace.open_trace(directory).scan(COLUMNS))
    found = {name: np.concatenate([getattr(episode, name)[: env.length] for episode in episodes]) for name in COLUMNS}
    return {**found, "rewards": found["rewards"].astype(np.float64)}


def total(array: Any) -> float:
    """Return the sum of the first elements of rows, which is cheap, and the same in all formats."""
    return float(array.reshape(len(array), -1)[:, 0].sum(dtype=np.float64)) if len(array) else 0.0


# -- formats ----------------------------------------------------------------------------------------------------------


class Trace:
    """gym-trace. Its windows have the observation after the last step, too."""

    title, package = "gym-trace", "gym-trace"

    def open(self, url: str) -> None:
        self._trace = gym_trace.open_trace(url)

    def count(self) -> int:
        return int(self._trace.episodes["steps"].sum())

    def batches(self, count: int) -> None:
        windows = iter(self._trace.windows(LENGTH, WINDOWS, columns=COLUMNS, seed=0))
        for _ in range(count):
            assert next(windows)["rewards"].shape == (WINDOWS, LENGTH)

    def scan(self, columns: tuple[str, ...]) -> float:
        return sum(self._total(episode, columns) for episode in self._trace.scan(columns))

    def episode(self, begin: int, end: int) -> float:
        return self._total(self._trace[begin // (end - begin)], COLUMNS)

    @staticmethod
    def _total(episode: Any, columns: tuple[str, ...]) -> float:
        return sum(total(np.asarray(getattr(episode, name))[: len(episode)]) for name in columns)


class Rows(ABC):
    """A format with one row per step. A batch is the rows of its windows."""

    title: str
    package: str

    def batches(self, count: int) -> None:
        random = np.random.default_rng(0)
        for _ in range(count):
            self.windows(random.integers(self.count() - LENGTH, size=WINDOWS))

    @abstractmethod
    def count(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def windows(self, starts: Any) -> None:
        """Read the rows of windows."""


def rows_of(starts: Any) -> Any:
    """Return the rows of windows, each once."""
    return np.unique(starts[:, None] + np.arange(LENGTH))


class Lance(Rows):
    title, package = "Lance", "pylance"

    def __init__(self) -> None:
        import lance

        self._lance = lance

    def write(self, path: Path, columns: dict[str, Any], env: Cheetah) -> None:
        self._lance.write_dataset(arrow_table(columns), str(path))

    def open(self, url: str) -> None:
        self._table = self._lance.dataset(url)

    def count(self) -> int:
        return int(self._table.count_rows())

    def windows(self, starts: Any) -> None:
        rows = rows_of(starts)
        assert all(len(array) == len(rows) for array in arrays_of(self._table.take(rows, list(COLUMNS))))

    def scan(self, columns: tuple[str, ...]) -> float:
        return sum(sum(map(total, arrays_of(batch))) for batch in self._table.to_batches(columns=list(columns)))

    def episode(self, begin: int, end: int) -> float:
        return sum(map(total, arrays_of(self._table.to_table(list(COLUMNS), offset=begin, limit=end - begin))))


class Zarr(Rows):
    """zarr v3 with obstore: Zstandard, and shards of 100 chunks."""

    title, package = "zarr", "zarr"

    def __init__(self) -> None:
        import zarr

        self._zarr = zarr

    def write(self, path: Path, columns: dict[str, Any], env: Cheetah) -> None:
        group, rows = self._zarr.create_group(str(path)), env.rows[0]
        for name, column in columns.items():
            shape = column.shape[1:]
            array = group.create_array(
                name, shape=column.shape, dtype=column.dtype, chunks=(rows, *shape), shards=(100 * rows, *shape)
            )
            array[:] = column

    def open(self, url: str) -> None:
        from obstore.store import S3Store
        from zarr.storage import ObjectStore

        self._group = self._zarr.open_group(ObjectStore(S3Store.from_url(url), read_only=True), mode="r")
        self._arrays = {name: self._group[name] for name in COLUMNS}

    def count(self) -> int:
        return int(self._arrays["rewards"].shape[0])

    def windows(self, starts: Any) -> None:
        """Threads read one slice per window and array, because oindex of all rows takes minutes."""
        slices = [(array, start) for start in starts.tolist() for array in self._arrays.values()]
        with ThreadPoolExecutor(32) as pool:
            assert all(len(rows) == LENGTH for rows in pool.map(lambda it: it[0][it[1] : it[1] + LENGTH], slices))

    def scan(self, columns: tuple[str, ...]) -> float:
        return sum(total(self._arrays[name][:]) for name in columns)

    def episode(self, begin: int, end: int) -> float:
        return sum(total(array[begin:end]) for array in self._arrays.values())


class Parquet(Rows):
    """Parquet with pyarrow: Zstandard, row groups of 1,000 steps or 50 frames, whose column chunks are prefetched."""

    title, package = "Parquet", "pyarrow"

    def __init__(self) -> None:
        import pyarrow.fs
        import pyarrow.parquet

        self._parquet, self._fs = pyarrow.parquet, pyarrow.fs

    def write(self, path: Path, columns: dict[str, Any], env: Cheetah) -> None:
        path.mkdir()
        table = arrow_table(columns)
        self._parquet.write_table(table, path / "steps.parquet", compression="zstd", row_group_size=env.rows[1])

    def open(self, url: str) -> None:
        endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
        files = self._fs.S3FileSystem(endpoint_override=endpoint, scheme="http", region=KEYS["AWS_REGION"])
        file = files.open_input_file(url.removeprefix("s3://") + "/steps.parquet")
        self._file = self._parquet.ParquetFile(file, pre_buffer=True)

    def count(self) -> int:
        return int(self._file.metadata.num_rows)

    def windows(self, starts: Any) -> None:
        rows = rows_of(starts)
        assert all(len(array) == len(rows) for array in self._take(rows))

    def _take(self, rows: Any) -> list[Any]:
        size = self._file.metadata.row_group(0).num_rows
        groups = np.unique(rows // size)
        first = np.concatenate([[0], np.cumsum([self._file.metadata.row_group(group).num_rows for group in groups])])
        found = arrays_of(self._file.read_row_groups(groups.tolist(), list(COLUMNS)))
        within = first[np.searchsorted(groups, rows // size)] + rows % size
        return [array[within] for array in found]

    def scan(self, columns: tuple[str, ...]) -> float:
        return sum(sum(map(total, arrays_of(batch))) for batch in self._file.iter_batches(columns=list(columns)))

    def episode(self, begin: int, end: int) -> float:
        return sum(total(array) for array in self._take(np.arange(begin, end)))


FORMATS: dict[str, type[Any]] = {"trace": Trace, "lance": Lance, "zarr": Zarr, "parquet": Parquet}


def arrow_table(columns: dict[str, Any]) -> Any:
    import pyarrow as pa

    def arrow(column: Any) -> Any:
        if column.ndim == 1:
            return pa.array(column)
        return pa.FixedSizeListArray.from_arrays(pa.array(column.reshape(-1)), int(np.prod(column.shape[1:])))

    return pa.table({name: arrow(column) for name, column in columns.items()})


def arrays_of(table: Any) -> list[Any]:
    """Return the columns of a table or batch of Arrow as arrays, one row per step."""
    found = []
    for column in table.columns:
        whole = column.combine_chunks() if hasattr(column, "combine_chunks") else column
        is_list = hasattr(whole.type, "list_size")
        found.append(whole.flatten().to_numpy().reshape(len(whole), -1) if is_list else whole.to_numpy())
    return found


# -- measuring --------------------------------------------------------------------------------------------------------


def work(kind: str, name: str, task: str, url: str) -> None:
    """Do one task in this process, and print its wall and CPU seconds and a sum."""
    env, reader = DATA[kind], FORMATS[name]()
    begin, cpu = time.perf_counter(), time.process_time()
    reader.open(url)
    if task in ("first", "batches"):
        reader.batches(1 if task == "first" else BATCHES)
    steps = reader.count()
    found: float = steps
    if task in ("scan", "rewards"):
        found = reader.scan(COLUMNS if task == "scan" else ("rewards",))
    elif task == "episode":
        first = steps // env.length // 2 * env.length
        found = reader.episode(first, first + env.length)
    print(json.dumps([time.perf_counter() - begin, time.process_time() - cpu, found]))


def serve(folder: str, latency: float, rate: float) -> None:
    """Serve a folder as the bucket "b"; answer each line of stdin with the requests and bytes since the last one."""
    sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
    from faulty_server import serving

    with serving(latency, rate) as web:
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        web.files = {f"/b/{path.relative_to(folder)}": path.read_bytes() for path in paths}
        print(web.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps([len(web.requests), web.sent]), flush=True)
            web.requests.clear()
            web.sent = 0


def measured(folder: Path, kind: str, given: argparse.Namespace) -> dict[tuple[str, str], list[Any]]:
    """Return the medians by task and format: requests, MB, CPU seconds, wall seconds."""
    this = [sys.executable, str(Path(__file__).resolve())]
    runs: dict[tuple[str, str], list[Any]] = {}
    command = [*this, "serve", str(folder), str(given.latency / 1e3), str(given.rate * 1e6)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        environment = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": server.stdout.readline().strip()}
        for _ in range(given.turns):
            for task, name in itertools.product(WORK, FORMATS):
                print(f"{kind}: {task}, {name}", file=sys.stderr, flush=True)
                url = f"s3://b/{kind}/{name}"
                done = subprocess.run(
                    [*this, "work", kind, name, task, url], env=environment, stdout=subprocess.PIPE, check=True
                )
                server.stdin.write("\n")
                server.stdin.flush()
                requests, sent = json.loads(server.stdout.readline())
                wall, cpu, found = json.loads(done.stdout)
                runs.setdefault((task, name), []).append((requests, sent / 1e6, cpu, wall, found))
        server.stdin.close()
    for task in WORK:
        sums = {run[-1] for name in FORMATS for run in runs[task, name]}
        assert np.ptp(list(sums)) <= 1e-6 * max(map(abs, sums)), (kind, task, sums)
    return {key: [statistics.median(column) for column in zip(*turns)][:4] for key, turns in runs.items()}


def report(kind: str, sizes: dict[str, float], found: dict[tuple[str, str], list[Any]]) -> Iterator[str]:
    yield f"| {kind} | {' | '.join(form.title for form in FORMATS.values())} |"
    yield "|---" * (1 + len(FORMATS)) + "|"
    yield f"| stored, MB | {' | '.join(f'{sizes[name]:.0f}' for name in FORMATS)} |"
    for task, title in WORK.items():
        cells = ["{:.0f} / {:.2f} / {:.2f} / {:.2f}".format(*found[task, name]) for name in FORMATS]
        yield f"| {title} | {' | '.join(cells)} |"


def main() -> None:
    if sys.argv[1:2] == ["work"]:
        return work(*sys.argv[2:])
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[2], *map(float, sys.argv[3:]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=30.0, help="milliseconds")
    parser.add_argument("--rate", type=float, default=125.0, help="MB per second")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the data, one turn")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reference/benchmarks.md")
    given = parser.parse_args()
    given.turns = 1 if given.quick else given.turns
    turns = "one turn" if given.turns == 1 else f"median of {given.turns} turns"
    versions = ", ".join(f"{form.package} {importlib.metadata.version(form.package)}" for form in FORMATS.values())
    lines = [
        f"{datetime.date.today()}, {os.cpu_count()} cores, Python {sys.version.split()[0]}, {versions}, obstore "
        f"{importlib.metadata.version('obstore')}; {given.latency:g} ms, {given.rate:g} MB/s, {turns}."
    ]
    with tempfile.TemporaryDirectory() as folder:
        for kind, env in DATA.items():
            columns = record(Path(folder, kind, "trace"), env(), 0.05 if given.quick else 1)
            for name, form in FORMATS.items():
                if name != "trace":
                    form().write(Path(folder, kind, name), columns, env())
            files = {name: Path(folder, kind, name).rglob("*") for name in FORMATS}
            sizes = {name: sum(p.stat().st_size for p in paths if p.is_file()) / 1e6 for name, paths in files.items()}
            lines += ["", *report(kind, sizes, measured(Path(folder), kind, given))]
    print("\n".join(lines))
    if given.write:
        document = HERE.parent / "docs" / "reference" / "benchmarks.md"
        text = "\n".join(lines)
        document.write_text(_MARK.sub(lambda mark: f"{mark[1]}{text}\n{mark[2]}", document.read_text()))


if __name__ == "__main__":
    main()
