"""RESULTS.md and the charts, made of the results of a run.

    python benchmarks/report.py [FOLDER]

makes them again from the results.json of a folder.
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
Every contestant is measured on the same machine in the same run. The outer loop is the repetition; in it all
contestants take turns, each in a fresh process, which runs the unwrapped loop, the recorded one and the unwrapped one
again, with the same actions and the same seed. **added** is the difference, *from the last step until everything can
be read* included: otherwise who puts everything off to the end would be ahead. Making and seeding the environment is
not. Figures are medians over {repeats} repetitions, with the least and the largest in brackets. Peers that are slow
record fewer steps, but about a second of them (less of the smaller workloads).

- **CPU**: of the process, all its threads; **of the loop**: what is added, by what the unwrapped loop takes.
- **bytes**: of all files, a step. **readable after**: seconds from the last step.
- **memory**: peak of the process, less what it was before: after the unwrapped loop, or before reading. MB.
- **all episodes**: observations, actions and rewards of every episode as NumPy arrays; *first*: the first time in the
  process, which has to get its memory from the system (slow on virtual machines), *again*: the median of up to five
  more times. gym-trace and gym_recording open the trace in that time, the others have it open. **GB/s**: of decoded
  observations, *again*. Files are in the page cache throughout.
- **one episode**: observations, actions and rewards of random ones, up to {episodes}, as many as fit the time, each
  contestant with a new reader. **256 windows**: of {window} steps (fewer where the episode ends) at random;
  extrapolated where there is not time for all. **rewards**: of all episodes, and nothing else if the format can.
- The last rows are floors. *Ring*: a wrapper that copies each row into preallocated memory, up to 1,024 rows or 64 MiB
  of it, and does nothing else. It and the empty wrapper are measured around something that hands over the same 16 rows
  again and again, because they would drown in the noise of the real loop.
  *zstd*: decompressing the same stored columns, in memory already, into memory used again; *and filters*: undoing the
  column filters, too. *zstd -19* and *xz -9*: the same columns, each in one piece.
""".strip()


def write(results: dict[str, Any], folder: Path) -> None:
    figures = Figures(results)
    (folder / "RESULTS.md").write_text("\n\n".join(_sections(figures)) + "\n")
    charts.recording(figures, folder / "recording.svg")
    if figures.growth:
        charts.growth(figures, folder / "growth.svg")


def _sections(figures: Figures) -> Iterator[str]:
    results = figures.results
    yield "# gym-trace and its peers, side by side"
    yield _machine(results)
    yield "## Aims"
    yield tables.table(["aim", "measured", "holds"], aims(figures))
    yield "## How to read the tables"
    yield LEGEND.format(repeats=results["repeats"], episodes=200, window=64)
    yield "## Recording"
    if any(name in results["recording"] for name in charts.SHOWN):
        yield "![µs added a step, and bytes a step](recording.svg)"
    for name in results["recording"]:
        yield from tables.recording(figures, name)
    yield "## Playback"
    for name in results["reading"]:
        yield from tables.playback(figures, name)
    yield "## Killed"
    yield (
        "Recording CartPole, killed with `kill -9` two seconds after the first step. Lost: the seconds that those "
        "steps took which the contestant's own reader does not give back."
    )
    yield tables.killed(figures)
    if figures.growth:
        yield "## Growth"
        yield "Episodes of one and of two steps, in turn, from an environment that costs next to nothing."
        yield "![growth](growth.svg)"
        yield tables.growth(figures)
        yield "Sealing a batch, which includes waiting for the disk:"
        yield tables.batches(figures)
    yield "Opening that many such episodes, until it is known how long each is; ms:"
    yield tables.opening(figures)
    if results.get("startup"):
        yield "## Start of the command line"
        yield tables.table(["command", "ms"], [[f"`{c}`", f"{1e3 * s:.0f}"] for c, s in results["startup"].items()])
    if results.get("collect"):
        yield "## Several processes\n\nSteps a second."
        yield str(results["collect"]).strip()
    yield "## Contestants"
    yield tables.table(["contestant", "versions", "to know"], list(_contestants(results)))


def _machine(results: dict[str, Any]) -> str:
    machine = results["machine"]
    lines = [
        f"- {machine['cpu']}, {machine['cores']} cores, {machine['memory']} GB, {machine['system']}",
        f"- {results['date']}, `{results['command']}`, {results['seconds'] / 60:.0f} minutes",
    ]
    if results["scale"] != 1:
        lines.append(f"- **not a full run**: {results['scale']} of the steps and seconds")
    return "\n".join(lines)


def _contestants(results: dict[str, Any]) -> Iterator[list[str]]:
    notes: list[str] = []
    for name, title in TITLES.items():
        if name in results["versions"]:
            versions = ", ".join(f"{package} {version}" for package, version in results["versions"][name].items())
            note = results["notes"][name]
            yield [title, versions, "likewise" if note and note in notes else note]
            notes.append(note)
        elif name == "gym-recording":
            elsewhere = (
                f"{ELSEWHERE['added']} µs a step, {ELSEWHERE['bytes']:.0f} bytes a step and "
                f"{1 / ELSEWHERE['read']:.2f} µs a step read: measured elsewhere, on a machine like this one"
            )
            yield [title, "not measured here", f"{results['missing'].get(name, 'not asked for')}; {elsewhere}"]
        else:
            yield [title, "not measured here", results["missing"].get(name, "not asked for")]


if __name__ == "__main__":
    _folder = Path(sys.argv[1] if len(sys.argv) > 1 else __file__)
    _folder = _folder if _folder.is_dir() else _folder.parent
    write(json.loads((_folder / "results.json").read_text()), _folder)
