"""Write RESULTS.md and the charts from the results of a run.

    python benchmarks/report.py [FOLDER]

rewrites them from the results.json of a folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import charts
import tables
from aims import aims
from contestants import TITLES
from figures import ELSEWHERE, Figures

LEGEND = """
All contestants are measured on the same machine in the same run. In each repetition they take turns, each in a new
process, which runs the unwrapped loop, the recorded one, and the unwrapped one again, with the same actions and seed.
**added** is the difference. It includes the time *from the last step until everything is readable*, because some
contestants defer all work to the end. It excludes creating and seeding the environment. Figures are medians over
{repeats} repetitions, with min and max in brackets. Slow peers record fewer steps: about one second (less for the
smaller workloads).

- **CPU**: CPU time of all threads of the process. **of the loop**: added time over the time of the unwrapped loop.
- **bytes**: bytes of all files per step. **readable after**: seconds from the last step.
- **memory**: peak of the process minus its peak before (after the unwrapped loop, or before reading), in MB.
- **all episodes**: observations, actions and rewards of every episode as NumPy arrays. *first*: first time in the
  process, which must get its memory from the system (slow on virtual machines). *again*: median of up to five more
  times. The time of gym-trace and gym_recording includes opening the trace. **GB/s**: decoded observations, *again*.
  All files are in the page cache.
- **one episode**: observations, actions and rewards of up to {episodes} random episodes, as many as fit in the time,
  with a new reader. **µs per step** and **GB/s**: of these episodes; contestants have recorded episodes of different
  lengths. **256 windows**: random windows of {window} steps (fewer at the end of an episode), extrapolated if
  time runs out. **rewards**: of all episodes, without other columns if the format supports that.
- The last rows are lower bounds. *Ring*: a wrapper that only copies each row into preallocated memory of up to 1,024
  rows or 64 MiB. The ring and the empty wrapper are measured around an environment that repeats the same 16 rows,
  because the noise of the real loop would hide them. *gym-trace, on the repeated rows* is the recorder around the same
  environment, until everything is readable. *Copying the same episodes in memory*: into reused memory; readers return
  new memory.
  *zstd*: decompressing the same stored columns from memory into reused memory. *and filters*: also undoing the column
  filters. *zstd -19* and *xz -9*: the same columns, each in one piece.
""".strip()


def write(results: dict[str, Any], folder: Path) -> None:
    figures = Figures(results)
    (folder / "RESULTS.md").write_text("\n\n".join(_sections(figures)) + "\n")
    charts.recording(figures, folder / "recording.svg")
    if figures.growth:
        charts.growth(figures, folder / "growth.svg")


def _sections(figures: Figures) -> Iterator[str]:
    results = figures.results
    yield "# Comparison of gym-trace and its peers"
    yield _machine(results)
    yield "## Aims"
    yield tables.table(["aim", "measured", "holds"], aims(figures))
    yield "## How to read the tables"
    yield LEGEND.format(repeats=results["repeats"], episodes=200, window=64)
    yield "## Recording"
    if any(name in results["recording"] for name in charts.SHOWN):
        yield "![µs added per step, and bytes per step](recording.svg)"
    for name in results["recording"]:
        yield from tables.recording(figures, name)
    yield "## Playback"
    for name in results["reading"]:
        yield from tables.playback(figures, name)
    yield "## Killed"
    yield (
        "Recording CartPole, killed with `kill -9` two seconds after the first step. Lost: the steps that the "
        "contestant's own reader cannot return, in seconds of recording."
    )
    yield tables.killed(figures)
    if figures.growth:
        yield "## Growth"
        yield "Episodes of one and two steps in turn, from an environment with almost no computation."
        yield "![growth](growth.svg)"
        yield tables.growth(figures)
        yield "Sealing a batch, including the sync to disk:"
        yield tables.batches(figures)
    yield "Opening such episodes, until the length of each is known, in ms:"
    yield tables.opening(figures)
    if results.get("startup"):
        yield "## Start of the command line"
        yield tables.table(["command", "ms"], [[f"`{c}`", f"{1e3 * s:.0f}"] for c, s in results["startup"].items()])
    if results.get("collect"):
        yield "## Several processes\n\nSteps per second."
        yield str(results["collect"]).strip()
    yield "## Contestants"
    yield tables.table(["contestant", "versions", "notes"], list(_contestants(results)))


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory']} GB, {machine['system']}",
        f"- {results['date']}, `{results['command']}`, {results['seconds'] / 60:.0f} minutes",
    ]
    if spent := results.get("sections"):
        lines.append("- seconds: " + ", ".join(f"{name} {seconds}" for name, seconds in spent.items()))
    if results["scale"] != 1:
        lines.append(f"- **partial run**: {results['scale']} times the steps and seconds")
    return "\n".join(lines)


def _contestants(results: dict[str, Any]) -> Iterator[list[str]]:
    notes: list[str] = []
    for name, title in TITLES.items():
        if name in results["versions"]:
            versions = ", ".join(f"{package} {version}" for package, version in results["versions"][name].items())
            note = results["notes"][name]
            yield [title, versions, "as above" if note and note in notes else note]
            notes.append(note)
        elif name == "gym-recording":
            elsewhere = (
                f"{ELSEWHERE['added']} µs added, {ELSEWHERE['bytes']:.0f} bytes and {1 / ELSEWHERE['read']:.2f} µs of "
                "reading per step: measured on another machine of this kind"
            )
            yield [title, "not measured here", f"{results['missing'].get(name, 'not requested')}; {elsewhere}"]
        else:
            yield [title, "not measured here", results["missing"].get(name, "not requested")]


if __name__ == "__main__":
    _folder = Path(sys.argv[1] if len(sys.argv) > 1 else __file__)
    _folder = _folder if _folder.is_dir() else _folder.parent
    write(json.loads((_folder / "results.json").read_text()), _folder)
