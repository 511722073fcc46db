"""gym-trace diff"""

from __future__ import annotations

from typing import Any

import click

import gym_trace
from gym_trace.errors import TraceError
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory
from gym_trace_cli.exit_codes import DIFFERS, FINE
from gym_trace_cli.help import headed, section
from gym_trace_cli.options import json_option
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.verify import comparison_options, difference_as_json

_TOLD = 10  # differing episodes that are printed one by one


@headed("diff")
@click.argument("first", metavar="A", type=TraceDirectory())
@click.argument("second", metavar="B", type=TraceDirectory())
@selection_options
@section("Comparison", comparison_options)
@section("Output", json_option)
def command(first: str, second: str, selection: Selection, comparison: dict[str, Any], as_json: bool) -> int:
    """Compare the episodes of traces A and B, bit for bit.
    Exit code: 0 same, 3 different.

    If no episode matches, their statistics are shown side by side.

    \b
    gym-trace diff traces/before traces/after --ignore infos
    """
    a, b = selection.view(gym_trace.open_trace(first)), selection.view(gym_trace.open_trace(second))
    if not (selection.is_all or len(a) or len(b)):
        of = f"{show.count(len(a.whole))} in A and {show.count(len(b.whole))} in B"
        raise TraceError(f"no episode matches, of {of}")
    places = a.chosen.tolist()
    differing, same, both = [], 0, max(1, min(len(a), len(b)))
    with ProgressLine() as line:
        for number, found in enumerate(gym_trace.diff_traces(a, b, **comparison), 1):
            if found.difference is None:
                same += 1
            else:
                differing.append((places[found.index], found.difference))
            line.update_count(number, both, "episode")
    identical = same == len(a) == len(b)
    summaries = [] if identical or same else [gym_trace.summarize(trace) for trace in (a, b)]
    if as_json:
        told = [{"index": index, **difference_as_json(difference)} for index, difference in differing]
        said = {"identical": identical, "episodes": [len(a), len(b)], "same": same, "differing": told}
        show.json_line(said | ({"summaries": summaries} if summaries else {}))
    else:
        shown = differing[: 1 if summaries else _TOLD]
        for index, difference in shown:
            click.echo(show.printable(f"episode {index} differs {difference.told('A has', 'B has')}"))
        if len(differing) > len(shown):
            click.echo(f"… and {show.count(len(differing) - len(shown), 'more episode')}")
        if len(a) != len(b) or same + len(differing) < both:
            click.echo(f"A has {show.count(len(a), 'episode')}, B has {show.count(len(b))}")
        if summaries:
            _print_side_by_side(*summaries)
        else:
            verdict = "identical" if identical else f"of which {show.count(same)} are the same"
            click.echo(f"{show.count(max(len(a), len(b)), 'episode')}, {verdict}")
    return FINE if identical else DIFFERS


def _print_side_by_side(*summaries: dict[str, Any]) -> None:
    rows = [[name, *(show.count(summary[name]) for summary in summaries)] for name in ("episodes", "steps")]
    for what in ("return", "length"):
        for name in ("mean", "std", "min", "median", "max"):
            rows.append([f"{what} {name}", *(show.number((summary[what] or {}).get(name)) for summary in summaries)])
    for outcome in dict.fromkeys(name for summary in summaries for name in summary["outcomes"]):
        rows.append([outcome, *(show.count(summary["outcomes"].get(outcome, 0)) for summary in summaries)])
    click.echo("no episode is the same; as different runs:")
    show.table(["", "A", "B"], rows)
