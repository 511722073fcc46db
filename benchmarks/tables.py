"""Tables of RESULTS.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from contestants import FLOORS, TITLES
from figures import ELSEWHERE, Figures, Read, Recorded, Spread, why_not
from workloads import WORKLOADS

NOTHING = "–"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def number(value: float) -> str:
    """Format a number with two or three digits, without an exponent."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    for least, digits in ((10, 1), (0.1, 2), (0.01, 3), (0.001, 4)):
        if size >= least:
            return f"{value:.{digits}f}"
    return f"{value:.1g}" if size >= 1e-4 else "0"


def between(spread: Spread | None, unit: float = 1.0) -> str:
    if spread is None:
        return NOTHING
    return f"{number(spread.median * unit)} ({number(spread.least * unit)} – {number(spread.most * unit)})"


def median(spread: Spread | None, unit: float = 1.0) -> str:
    return NOTHING if spread is None else number(spread.median * unit)


# -- recording --------------------------------------------------------------------------------------------------------


def recording(figures: Figures, workload: str) -> Iterator[str]:
    made = WORKLOADS[workload]
    unit, name = (1e3, "ns per step of a lane") if made.lanes else (1.0, "µs")
    # One line at the end instead of a row for each peer without vector environments.
    left_out = [c for c in TITLES if made.lanes and figures.recorded[workload].get(c, Recorded([])).added is None]
    rows = [_recording_row(figures, workload, contestant, unit) for contestant in TITLES if contestant not in left_out]
    ours = figures.recorded[workload].get("gym-trace")
    if ours and ours.added:
        rows += [[f"*{FLOORS[floor]}*", between(found, unit), *[NOTHING] * 7] for floor, found in ours.floors.items()]
    for kind, size in figures.sizes.get(workload, {}).items():
        rows.append([f"*{kind}*", *[NOTHING] * 3, number(size), *[NOTHING] * 4])
    yield f"### {made.title}"
    head = [
        "", f"added, {name}", f"CPU added, {name}", "of the loop", "bytes", "readable after, s", "memory, MB",
        f"unwrapped loop, {name}", "steps",
    ]  # fmt: skip
    yield table(head, rows)
    if left_out:
        yield "Not supported by: " + "; ".join(TITLES[contestant] for contestant in left_out) + "."


def _recording_row(figures: Figures, workload: str, contestant: str, unit: float) -> list[str]:
    title = TITLES[contestant]
    runs = figures.results["recording"][workload].get(contestant)
    if runs is None:
        return _missing(
            figures, workload, contestant, f"{ELSEWHERE['added']}, measured elsewhere", 3, ELSEWHERE["bytes"]
        )
    found = Recorded(runs)
    if found.added is None:
        return [title, why_not(runs), *[NOTHING] * 7]
    share = NOTHING if found.share is None else f"{100 * found.share.median:,.1f} %"
    return [
        f"**{title}**" if contestant == "gym-trace" else title,
        between(found.added, unit), median(found.cpu, unit), share, median(found.bytes), median(found.finish),
        median(found.memory), median(found.loop, unit), f"{found.steps.median:,.0f}" if found.steps else NOTHING,
    ]  # fmt: skip


def _missing(figures: Figures, workload: str, contestant: str, figure: str, gap: int, after: float | None) -> list[str]:
    """Return the row of a contestant that was not measured here."""
    if contestant == "gym-recording" and workload == "cartpole":
        cells = [figure, *[NOTHING] * (gap - 1)] if after is not None else [figure]
        cells += [] if after is None else [number(after)]
        return [TITLES[contestant], *cells, *[NOTHING] * (8 - len(cells))]
    return [TITLES[contestant], "not measured: see below", *[NOTHING] * 7]


# -- playback ---------------------------------------------------------------------------------------------------------


def playback(figures: Figures, workload: str) -> Iterator[str]:
    by_contestant = figures.results["reading"][workload]
    if not any(by_contestant.values()):
        return
    rows = [_playback_row(figures, workload, contestant) for contestant in TITLES]
    ours = figures.read[workload].get("gym-trace")
    names = {"decompress": "zstd of the same columns", "decode": "zstd of the same columns, and filters"}
    for floor, (speed, bandwidth) in (ours.floors if ours else {}).items():
        rows.append([f"*{names[floor]}*", NOTHING, between(speed, 1e3), median(bandwidth), *[NOTHING] * 8])
    if ours and ours.copy:
        rows.append(["*copying the same episodes in memory*", *[NOTHING] * 6, median(ours.copy), *[NOTHING] * 4])
    yield f"### {WORKLOADS[workload].title}"
    head = [
        "", "all episodes, thousand steps/s: first", "again", "GB/s", "one episode, ms: p50", "p99", "µs per step",
        "GB/s", "256 windows, s", "rewards, thousand steps/s", "opening, ms", "memory, MB",
    ]  # fmt: skip
    yield table(head, [row for row in rows if row is not None])


def _playback_row(figures: Figures, workload: str, contestant: str) -> list[str] | None:
    runs = figures.results["reading"][workload].get(contestant)
    if runs is None:
        if contestant == "gym-recording" and workload == "cartpole":
            return [
                TITLES[contestant],
                NOTHING,
                f"{number(1e3 * ELSEWHERE['read'])}, measured elsewhere",
                *[NOTHING] * 9,
            ]
        return None
    if not runs:  # not recorded: the other table has the reason
        return None
    found = Read(runs)
    if found.first is None:
        return [TITLES[contestant], why_not(runs), *[NOTHING] * 10]
    return [
        f"**{TITLES[contestant]}**" if contestant == "gym-trace" else TITLES[contestant],
        median(found.first, 1e3), between(found.again, 1e3), median(found.bandwidth), median(found.p50, 1e3),
        median(found.p99, 1e3), median(found.per_step, 1e6), median(found.access), median(found.window),
        median(found.rewards, 1e3), median(found.open, 1e3),
        median(found.memory),
    ]  # fmt: skip


# -- the rest ---------------------------------------------------------------------------------------------------------


def killed(figures: Figures) -> str:
    rows = []
    for name, title in TITLES.items():
        found = figures.killed.get(name)
        if found is None or found.lost is None:
            if name not in figures.results["versions"]:
                rows.append([title, "not measured: see below", ""])
            continue
        says = ""
        if found.none_readable:
            says = "everything: " + (_short(found.problem) or "nothing was written")
        rows.append([f"**{title}**" if name == "gym-trace" else title, between(found.lost), says])
    return table(["", "lost, s", ""], rows)


def _short(problem: str) -> str:
    return problem if len(problem) < 80 else problem[:77] + "…"


def growth(figures: Figures) -> str:
    rows = []
    for count, (recorded, read) in sorted(figures.growth.items()):
        cells = [between(recorded.added), median(recorded.added, 1.5), median(recorded.finish, 1e3)]
        cells += [median(recorded.memory), median(recorded.bytes), between(read.open, 1e3)]
        cells += [median(read.open, 1e6 / count), median(read.p50, 1e3), median(read.p99, 1e3), median(read.again, 1e3)]
        rows.append([f"{count:,}", *cells])
    head = ["episodes", "added, µs per step", "µs per episode", "readable after, ms", "memory, MB", "bytes per step"]
    head += ["opening, ms", "opening, µs an episode", "one episode, ms: p50", "p99", "all episodes, thousand steps/s"]
    return table(head, rows)


def batches(figures: Figures) -> str:
    rows = [[f"{first} – {last}", f"{1e3 * seconds:.2f}"] for first, last, seconds in figures.seal_times()]
    return table(["batches", "ms (median)"], rows)


def opening(figures: Figures) -> str:
    found = figures.results["opening"]
    ours = {str(count): read.open for count, (_, read) in figures.growth.items()}
    counts = sorted({*map(int, ours), *(int(count) for by in found.values() for count in by)})
    rows = [["**gym-trace**", *(between(ours.get(str(count)), 1e3) for count in counts)]] if ours else []
    for name, by_count in found.items():
        rows.append([TITLES[name], *(_opened(by_count.get(str(count), [])) for count in counts)])
    return table(["episodes", *(f"{count:,}" for count in counts)], rows)


def _opened(runs: list[dict[str, float]]) -> str:
    times = sorted(run["seconds"] for run in runs if "seconds" in run)
    return number(1e3 * times[len(times) // 2]) if times else NOTHING if not runs else "failed"
