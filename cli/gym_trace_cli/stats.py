"""gym-trace stats"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.column_tables import (
    MOST_ROWS,
    OVER_TIME,
    Table,
    index,
    moments_table,
    omissions,
    print_tables,
    rows_of,
    varied_row,
)
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import json_option, trace_argument
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.reports import plot_file
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.show import number

Summary = dict[str, Any]
_SPREAD = ("mean", "std", "min", "5 %", "25 %", "median", "75 %", "95 %", "max")
_MOMENTS = ("count", "mean", "std", "min", "max")
_BAR, _CHART = 20, 40  # characters


@headed("stats")
@trace_argument
@selection_options
@section(
    "Statistics",
    option("--by NAME", "Also group by split, writer or outcome.", ["split", "writer", "outcome"]),
    option("--columns", "Also actions, observations and rewards (slow)."),
)
@section(
    "Output", option("--plot FILE", "Also draw returns, lengths and outcomes: .svg or .png.", plot_file), json_option
)
def command(
    directory: str, selection: Selection, by: str | None, columns: bool, plot: Path | None, as_json: bool
) -> None:
    """Summarize episodes, returns, lengths, outcomes, throughput and bytes per column.

    Returns and lengths count complete episodes: terminated or truncated, with at
    least one step. Only --columns reads the recorded steps.

    \b
    gym-trace stats traces/cartpole --by split
    gym-trace stats traces/cartpole --plot cartpole.svg
    """
    plot_episodes = None if plot is None else gym_trace.plot_episodes  # a missing extra fails before the work
    whole = gym_trace.open_trace(directory)
    trace = selection.view_or_note(whole)
    with ProgressLine(quiet=not columns) as progress:
        summary = gym_trace.summarize(trace, by=by, columns=columns, on_progress=progress.counting("step"))
    if plot is not None and plot_episodes is not None:
        plot_episodes(trace, plot, by=by)
    if as_json:
        show.json_line(summary, indent=2, allow_nan=False)
    else:
        if not selection.is_all:
            summary["chosen"] = f"{show.count(len(trace))} of {show.count(len(whole), 'episode')}"
        _print_summary(summary)
        if plot is not None:
            click.echo(f"\nplot: {show.printable(plot)}")


def _print_summary(summary: Summary) -> None:
    show.fields(_fields(summary))
    click.echo()
    _print_spreads(summary)
    if summary.get("groups"):
        _print_groups(summary)
    if summary["storage"] is not None:
        show.title("bytes per column")
        _print_storage(summary["storage"])
    for name, described in _groups_with_columns(summary):
        _print_columns(described, f" of {name}" if name else "")


def _fields(summary: Summary) -> Iterator[tuple[str, str]]:
    storage, duration = summary["storage"], summary["duration"]
    yield "trace", show.printable(summary["directory"])
    yield "chosen", summary.get("chosen", "")
    episodes = show.count(summary["episodes"])
    if summary["filtered"] or summary["parts"] > summary["episodes"]:
        episodes += f" in {show.count(summary['parts'])} parts"
    yield "episodes", episodes
    yield "outcomes", _outcomes(summary["outcomes"])
    if summary["complete"] < summary["episodes"]:
        yield "complete", f"{show.count(summary['complete'])}: return and length count only these; see --by outcome"
    repeated = f", plus {show.count(summary['repeated_steps'])} that branches repeat"
    yield "steps", show.count(summary["steps"]) + (repeated if summary["repeated_steps"] else "")
    if duration["wall"] is not None:
        yield "recorded in", show.duration(duration["wall"])
    if summary["steps_per_second"] is not None:
        running = show.duration(duration["running"])
        yield "speed", f"{number(summary['steps_per_second'])} steps/s over {running} of running episodes"
    if storage is not None:
        raw = f" for {show.size(storage['raw_bytes'])} of values, {number(storage['compression_ratio'])} : 1"
        yield "stored", show.size(storage["bytes"]) + (raw if storage["raw_bytes"] else "")
    if summary["filtered"]:
        yield "filtered", "some steps were not recorded; return and length count recorded ones"
    if summary["damage"]:
        places = show.count(len(summary["damage"]), "damaged place")
        yield "damage", f"{places} skipped; see gym-trace check"


def _outcomes(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{name} {show.count(count)}" for name, count in outcomes.items())


def _print_spreads(summary: Summary) -> None:
    spreads = dict(_spreads(summary))
    show.table(("", *_SPREAD), [(name, *_cells(spread)) for name, spread in spreads.items()])
    for name, spread in spreads.items():
        if spread["nan"] or spread["inf"]:
            found = [(spread["nan"], "with NaN"), (spread["inf"], "with an infinity")]
            skipped = [f"{show.count(number, 'episode')} {what}" for number, what in found if number]
            click.echo(f"{name}: skipped {' and '.join(skipped)}")
    if show.can_chart() and summary["episodes"] > 1:
        click.echo()
        show.fields(_charts(summary))


def _spreads(summary: Summary) -> Iterator[tuple[str, Summary]]:
    """Yield names and spreads: of the return, or of each objective; of the return of each agent; of the length."""
    objectives = summary["objectives"]
    if summary["return"]["count"] or not objectives:
        yield "return", summary["return"]
    yield from ((f"return[{i}]", spread) for i, spread in enumerate(objectives))
    yield from ((f"return[{show.printable(json.dumps(name))}]", spread) for name, spread in summary["agents"].items())
    yield "length", summary["length"]


def _cells(spread: Summary) -> list[str]:
    quantiles = spread["quantiles"]
    first = (spread["mean"], spread["std"], spread["min"], quantiles["5"], quantiles["25"])
    return [number(value) for value in (*first, spread["median"], quantiles["75"], quantiles["95"], spread["max"])]


def _charts(summary: Summary) -> Iterator[tuple[str, str]]:
    charts = []
    for name, spread in _spreads(summary):
        if (histogram := spread["histogram"]) and len(histogram["counts"]) > 1:
            ends = spread["min"], spread["max"]
            charts.append((name, *ends, show.histogram(histogram["counts"], _CHART)))
    curve = [value for value in summary["return_curve"] if value is not None]
    if len(curve) > 1:
        charts.append(("return over time", min(curve), max(curve), show.curve(curve, _CHART)))
    indent = max((len(number(least)) for _, least, _, _ in charts), default=0)
    for name, least, largest, chart in charts:
        yield name, f"{number(least).rjust(indent)} ▕{chart}▏ {number(largest)}"


def _print_groups(summary: Summary) -> None:
    groups = {show.printable(name): group for name, group in summary["groups"].items()}
    by = summary["by"]
    show.title(f"by {by}")
    counted = [
        [name, show.count(group["episodes"]), show.count(group["steps"]), number(group["steps_per_second"]),
         show.size(group["storage"]["bytes"]) if group["storage"] else "-", _outcomes(group["outcomes"])]
        for name, group in groups.items()
    ]  # fmt: skip
    show.table((by, "episodes", "steps", "steps/s", "bytes", "outcomes"), counted)
    spreads_by_group = {name: dict(_spreads(group)) for name, group in groups.items()}
    for what in dict.fromkeys(what for spreads in spreads_by_group.values() for what in spreads):
        click.echo()
        rows = [(name, *_cells(spreads[what])) for name, spreads in spreads_by_group.items() if what in spreads]
        show.table((what, *_SPREAD), rows)


def _print_storage(storage: Summary) -> None:
    whole, columns = storage["bytes"], storage["columns"]
    rows = []
    for name, column in sorted(columns.items(), key=lambda item: -item[1]["stored_bytes"]):
        raw, stored = column["raw_bytes"], column["stored_bytes"]
        ratio = number(raw / stored if stored else None)
        rows.append((name, show.size(raw), show.size(stored), ratio, show.share(stored, whole)))
    rest = whole - sum(column["stored_bytes"] for column in columns.values())
    rows.append(("(index, framing)", "-", show.size(rest), "-", show.share(rest, whole)))
    show.table(("column", "raw", "stored", "ratio", "share"), rows)


# -- columns ----------------------------------------------------------------------------------------------------------


def _groups_with_columns(summary: Summary) -> Iterator[tuple[str, Summary]]:
    if "rewards" in summary:
        yield "", summary
        groups = summary.get("groups", {})
        for name, group in groups.items() if len(groups) > 1 else ():
            yield show.printable(name), group


def _print_columns(described: Summary, of_group: str) -> None:
    rewards = described["rewards"]
    show.title(f"rewards{of_group}")
    objectives = [(f"rewards{index(stats['index'])}", stats) for stats in rewards["objectives"]]
    single = [("rewards", rewards)] if rewards["count"] or not objectives else []
    print_tables(table for table in (moments_table(single + objectives, _MOMENTS), _counts_table(single)) if table[1])
    if rewards["misfits"]:
        click.echo(f"rewards: {show.count(rewards['misfits'])} skipped, not numbers")
    for name in ("actions", "observations"):
        if described[name]:
            show.title(f"{name}{of_group}")
            _print_leaves(described[name])


def _print_leaves(leaves: Sequence[Summary]) -> None:
    measured: list[tuple[str, Summary]] = []
    counted: list[tuple[str, Summary]] = []
    varied: list[list[str]] = []
    omitted = []
    for leaf in leaves:
        path = show.printable("/".join(map(str, leaf["path"])))
        if "distinct" in leaf:
            varied.append(varied_row(path, leaf))
        else:
            for label, stats in rows_of(path, leaf):
                (measured if "mean" in stats else counted).append((label, stats))
        omitted += omissions(path, leaf)
    tables = moments_table(measured, _MOMENTS), _counts_table(counted), (["", "distinct", "examples"], varied)
    print_tables(table for table in tables if table[1])
    for line in omitted:
        click.echo(line)


def _counts_table(counted: list[tuple[str, Summary]]) -> Table:
    headings, rows = ["", "value", "count", "share", ""], []
    # The table of moments already has the curves of columns with a mean.
    has_curves = show.can_chart() and any("mean" not in tally for _, tally in counted)
    for label, tally in counted:
        curves = chain([show.curve(tally["curve"], _BAR)], repeat("")) if has_curves else repeat("")
        rows += [[label, *cells, curve] for cells, curve in zip(_tally(tally), curves)]
    return [*headings, OVER_TIME if has_curves else ""], rows


def _tally(tally: Summary) -> Iterator[tuple[str, str, str, str]]:
    """Yield value, count, share and bar of the most frequent values, or of the bins of a histogram."""
    if "histogram" in tally:
        counts = _fewer_bins(**tally["histogram"])
        others: list[int] = []
    else:
        ranked = sorted(tally["values"], key=lambda pair: -pair[1])
        listed = sorted(ranked) if len(ranked) <= MOST_ROWS else ranked[:MOST_ROWS]
        counts = [(f"{value:.6g}" if isinstance(value, float) else str(value), count) for value, count in listed]
        others = [count for _, count in ranked[MOST_ROWS:]]
    total = sum(count for _, count in counts) + sum(others)
    highest = max((count for _, count in counts), default=1)
    for value, count in counts:
        bar = "█" * round(_BAR * count / highest) if show.can_chart() else ""
        yield value, show.count(count), show.share(count, total), bar
    if others:
        yield f"{show.count(len(others))} others", show.count(sum(others)), show.share(sum(others), total), ""


def _fewer_bins(edges: list[float], counts: list[int]) -> list[tuple[str, int]]:
    bins_per_row, bins = -(-len(counts) // MOST_ROWS), []
    for start in range(0, len(counts), bins_per_row):
        end = min(start + bins_per_row, len(counts))
        bins.append((f"{number(edges[start])} to {number(edges[end])}", sum(counts[start:end])))
    return bins
