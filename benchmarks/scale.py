"""Measure work on ten million steps, and on the traces of a thousand killed processes; revisions take turns.

    python benchmarks/scale.py [--against PATH] [--steps 10000000] [--rounds 3] [--only mean,diff]

PATH is another checkout of this repository, built in place. Each side reads traces that it recorded itself: of 1,000
CartPoles of one vectorized environment, a compacted copy, a Parquet export, which DuckDB queries beside, and the traces
of the killed processes. Each measurement is a process of its own. Prints medians: CPU seconds of all threads, and the
peak of memory; both without imports, except for commands.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import stored

ROOT = Path(__file__).resolve().parent.parent
_SAMPLE = ROOT / "sample_traces" / "format-1.3" / "batches"

_RECORD = """
import os, numpy as np, gymnasium
make = lambda: gymnasium.make_vec("CartPole-v1", num_envs=1000, vectorization_mode="vector_entry_point")
with gym_trace.TraceRecordingVectorWrapper(make(), place / "lanes") as envs:
    envs.reset(seed=0)
    random = np.random.default_rng(0)
    for _ in range(int(sys.argv[3]) // 1000):
        envs.step(random.integers(0, 2, 1000))
gym_trace.edit.compact(place / "lanes", place / "compacted")
gym_trace.export(place / "lanes", place / "parquet", "parquet")
for _ in range(1000):
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    else:
        env = gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), place / "killed", on_exist="append")
        env.reset(seed=0)
        for _ in range(30):
            if env.step(env.action_space.sample())[2]:
                env.reset()
        os._exit(9)
"""

# Statements of Python by name, with a title: those before the line "--" are not measured. Lists are commands.
_MEAN = "SELECT action, avg(reward) FROM steps GROUP BY action"
_WHERE = "SELECT count(*), avg(reward) FROM steps WHERE observation[3] > 1.5"
_WARM = "gym_trace.open_trace(sample)\n--\n"
_OPEN = "trace = gym_trace.open_trace(place / 'lanes')\n--\n"
_DUCKDB = "import duckdb\nduckdb.sql('SELECT 1').fetchall()\n--\n"
_ROWS = "FROM read_parquet('{place}/parquet/steps/*.parquet')"


def _beside(query: str) -> str:
    return f"{_DUCKDB}duckdb.sql({query.replace('FROM steps', _ROWS)!r}.format(place=place)).fetchall()"


WORK = {
    "open": ("open_trace", _WARM + "gym_trace.open_trace(place / 'lanes')"),
    "scan": ("scan, all arrays", _OPEN + "for e in trace.scan(): e.observations, e.actions, e.rewards"),
    "skim": ("scan, nothing read", _OPEN + "for e in trace.scan(): pass"),
    "callback": ("scan_recorded_traces", _OPEN + "gym_trace.scan_recorded_traces(trace, lambda *arrays: None)"),
    "arrow": ("to_arrow, two columns", f"import pyarrow\n{_OPEN}trace.to_arrow(['action', 'reward']).read_all()"),
    "windows": (
        "20 batches of 32 windows of 256 steps",
        _OPEN + "batches = iter(trace.windows(256, 32, strict_length=False))\nfor _ in range(20): next(batches)",
    ),
    "diff": ("diff with the compacted copy", ["diff", "{place}/lanes", "{place}/compacted"]),
    "mean": ("sql, mean by action", ["sql", "{place}/lanes", _MEAN]),
    "mean-duckdb": ("DuckDB on the Parquet export, the same", _beside(_MEAN)),
    "where": ("sql, where on an element of the observation", ["sql", "{place}/lanes", _WHERE]),
    "where-duckdb": ("DuckDB on the Parquet export, the same", _beside(_WHERE)),
    "export": ("export to Parquet", ["export", "{place}/lanes", "--to", "parquet", "-o", "{new}"]),
    "export-pyarrow": (
        "pyarrow, the same table from memory",
        "import pyarrow.parquet as parquet\n"
        "table = parquet.read_table(place / 'parquet' / 'steps')\n"
        "--\nparquet.write_table(table, new, compression='zstd')",
    ),
    "killed": ("open 1,000 killed processes of 30 steps", _WARM + "gym_trace.open_trace(place / 'killed')"),
    "refresh": (
        "refresh of these",
        "trace = gym_trace.open_trace(place / 'killed')\ntrace.refresh()\n--\ntrace.refresh()",
    ),
    "ls": ("ls of a small trace", ["ls", str(_SAMPLE)]),
    "info": ("info of a small trace", ["info", str(_SAMPLE)]),
}  # fmt: skip

_RUN = """
import json, resource, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/cli"]
from pathlib import Path
import gym_trace
place, sample, new = Path(sys.argv[2]), Path(sys.argv[4]), Path(sys.argv[5])
names = globals()
before, _, work = sys.argv[6].rpartition("--\\n")
exec(before, names)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.process_time()
exec(work, names)
spent = time.process_time() - begun
print(json.dumps([spent, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1e3]))
"""


def run(checkout: Path, place: Path, steps: int, work: str | list[str]) -> tuple[float, float]:
    """Return CPU seconds and the added peak of memory in MB, of a process with the package of this checkout."""
    with tempfile.TemporaryDirectory(dir=place) as name:
        new = Path(name, "new")
        if isinstance(work, str):
            command = [sys.executable, "-c", _RUN, checkout, place, str(steps), _SAMPLE, new, work]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=place)
            spent, peak = json.loads(done.stdout.splitlines()[-1])
            return spent, peak
        words = [word.format(place=place, new=new) for word in work]
        environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'cli'}"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # pip compiles what it installs
        process = subprocess.Popen(
            [sys.executable, "-m", "gym_trace", *words], env=environment, cwd=place, stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode not in (0, 1):  # 1: a difference was found
            sys.exit(f"{' '.join(words)} ended with {process.returncode}")
        return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3


def disk_size(directory: Path) -> int:
    """Return the bytes of blocks that the files of a directory take on disk."""
    return sum(512 * path.stat().st_blocks for path in directory.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout to compare with")
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the median is shown")
    parser.add_argument("--only", help=f"some of {', '.join(WORK)}")
    given = parser.parse_args()
    chosen = [name for name in WORK if given.only is None or name in given.only.split(",")]
    sides = ({"before": given.against.resolve()} if given.against else {}) | {"now": ROOT}
    with tempfile.TemporaryDirectory(prefix="gym-trace-scale-") as name:
        places = {side: Path(name, side) for side in sides}
        for side, checkout in sides.items():
            places[side].mkdir()
            run(checkout, places[side], given.steps, _RECORD)
            sizes = {kind: disk_size(places[side] / kind) for kind in ("lanes", "compacted", "parquet", "killed")}
            print(f"{side}: " + ", ".join(f"{kind} {size / 1e6:,.1f} MB" for kind, size in sizes.items()), flush=True)
        print(f"\n| {given.steps:,} steps | " + " | ".join(f"{side}, CPU s | MB" for side in sides) + " |")
        print("|" + "---|" * (1 + 2 * len(sides)))
        for name in chosen:
            title, work = WORK[name]
            found = {side: [] for side in sides}
            for _ in range(given.rounds):
                for side, checkout in sides.items():
                    found[side].append(run(checkout, places[side], given.steps, work))
            cells = [
                f"{statistics.median(values):,.{digits}f}"
                for runs in found.values()
                for values, digits in zip(zip(*runs), (3, 0))
            ]
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps(stored.machine()))


if __name__ == "__main__":
    main()
