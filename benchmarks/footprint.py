"""Measure what an installation costs in a fresh environment: packages, size on disk, and time of the first import.

    python benchmarks/footprint.py [--python PYTHON] [NAME ...]

NAME is a key of INSTALLED; without names, all of them (15 GB while it runs, 20 minutes). Prints a Markdown table.
Packages and size are those that pip added, with the library itself; the size includes the compiled .pyc files that pip
writes. The time is processor time of the import in a new process, less that of an empty process: the median of 9, after
one that warms the file cache.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
OPEN_TRACE = "from gym_trace import TraceRecordingWrapper, open_trace; TraceRecordingWrapper, open_trace"
OPEN_MINARI = "from minari import DataCollector, load_dataset"
OPEN_LEROBOT = "from lerobot.datasets.lerobot_dataset import LeRobotDataset"
# Requirements as they are shown, and the import that records and reads.
INSTALLED = {
    "gymnasium": "import gymnasium",
    "gym-trace": OPEN_TRACE,
    "gym-trace[view]": OPEN_TRACE,
    "gym-trace[view,sql,play]": OPEN_TRACE,
    "gym-trace[train]": OPEN_TRACE,
    "minari": OPEN_MINARI,
    "minari[create,hdf5]": OPEN_MINARI,
    "lerobot": "import lerobot",
    "lerobot[dataset]": OPEN_LEROBOT,
}
IMPORTS = 9
COUNT = """
import importlib.metadata, json
found = {each.metadata["Name"].lower(): each.version for each in importlib.metadata.distributions()}
print(json.dumps({name: version for name, version in found.items() if name not in ("pip", "setuptools")}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environments")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(INSTALLED))
    options = parser.parse_args()
    if unknown := set(options.names) - set(INSTALLED):
        parser.error(f"{', '.join(sorted(unknown))}: unknown; one of {', '.join(INSTALLED)}")
    print("| pip install | version | packages | MB | import, s |\n|---|---|---|---|---|")
    for name in options.names or INSTALLED:
        with tempfile.TemporaryDirectory(prefix="footprint-") as folder:
            print(row(name, Path(folder), options.python), flush=True)
    version = subprocess.run([options.python, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"\n{datetime.date.today()}, {version}, {platform.system()} {platform.machine()}")


def row(name: str, folder: Path, interpreter: str) -> str:
    """Install a requirement into an environment in this folder; return its row of the table."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    before = size_of(folder)
    library, bracket, extras = name.partition("[")
    wanted = f"{REPOSITORY}{bracket}{extras}" if library == "gym-trace" else name
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted]
    if (installed := subprocess.run(pip, capture_output=True, text=True)).returncode:
        return f"| {name} | not installed: {last_line(installed.stderr)} | | | |"
    found = json.loads(run(python, COUNT, folder))
    size = (size_of(folder) - before) / 1e6
    try:
        seconds = f"{import_seconds(python, INSTALLED[name], folder):.2f}"
    except subprocess.CalledProcessError as error:
        seconds = f"fails: {last_line(error.stderr)}"
    return f"| {name} | {found[library]} | {len(found)} | {size:,.0f} | {seconds} |"


def run(python: Path, source: str, folder: Path) -> str:
    """Run source in a process whose directory is not the checkout; return what it prints."""
    return subprocess.run([python, "-c", source], check=True, capture_output=True, text=True, cwd=folder).stdout


def import_seconds(python: Path, source: str, folder: Path) -> float:
    """Return the median processor time of an import, less that of an empty process measured in turns with it."""
    run(python, source, folder)
    times: dict[str, list[float]] = {source: [], "pass": []}
    for _ in range(IMPORTS):
        for each, seconds in times.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run(python, each, folder)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times[source]) - statistics.median(times["pass"])


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, without links."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    main()
