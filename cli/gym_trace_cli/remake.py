"""gym-trace remake: the same episodes through a changed environment"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import NamedEnvironment, RecordedEnvironment, recorded_environment_options
from gym_trace_cli.exit_codes import DIFFERS, FINE, UNVERIFIABLE
from gym_trace_cli.help import headed, opt, options_of, shared
from gym_trace_cli.options import (
    PATH,
    comparison_options,
    json_option,
    named_callable,
    quiet_option,
    trace_argument,
)
from gym_trace_cli.progress import ProgressLine
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.verify import plain_difference

if TYPE_CHECKING:
    from gym_trace.results import RemakeReport

_LISTED = 10  # episodes


@dataclass(frozen=True, kw_only=True)
class RemakeOptions:
    """Options of gym-trace remake."""

    output: str = opt("-o, --output NEW", "Directory of the new trace.", PATH, required=True, under="Output")
    quiet: bool = shared(quiet_option)
    as_json: bool = shared(json_option)
    selection: Selection = shared(selection_options)
    wrappers: tuple[Any, ...] = opt(
        "--wrapper M:C", "Add a wrapper, innermost first (repeatable).", named_callable, under="Environment"
    )
    start: str = opt(
        "--from START",
        "Start of each step: replay, after the one before (default), or states, as recorded.",
        ["replay", "states"],
        default="replay",
    )
    recorded: RecordedEnvironment = shared(recorded_environment_options)
    comparison: dict[str, Any] = shared(comparison_options)


@headed("remake")
@trace_argument
@options_of(RemakeOptions)
def command(directory: str, options: RemakeOptions) -> int:
    """Record the same episodes in a changed environment: camera, sensor, reward.
    All that should not change is compared. Exit code 3 if something differs.

    \b
    gym-trace remake traces/cartpole -o traces/seen --env-arg render_mode=rgb_array \\
        --wrapper gymnasium.wrappers:AddRenderObservation
    """
    trace, recorded = gym_trace.open_trace(directory), options.recorded
    chosen = options.selection.view_or_error(trace).indices.tolist()
    making = recorded.arguments()
    if "make_env" in making:  # which the new trace names
        named = recorded.env_id, recorded.factory, dict(recorded.env_args), tuple(recorded.imports)
        making["make_env"] = NamedEnvironment(*named)
    with ProgressLine(quiet=options.quiet) as line:
        report = gym_trace.remake(
            trace,
            options.output,
            wrappers=options.wrappers,
            episodes=chosen,
            start=options.start,
            on_progress=line.counting("episode"),
            command="gym-trace remake",
            **making,
            **options.comparison,
        )
    if options.as_json:
        show.json_line(_plain(report))
    elif not options.quiet:
        _print(report)
    if any(episode.differences for episode in report.episodes):
        return DIFFERS
    return FINE if report.same == len(report.episodes) else UNVERIFIABLE


def _print(report: RemakeReport) -> None:
    others = [episode for episode in report.episodes if not episode.is_same]
    for episode in others[:_LISTED]:
        click.echo(show.printable(episode))
    if len(others) > _LISTED:
        click.echo(f"… and {show.count(len(others) - _LISTED, 'more episode')}")
    if report.uncompared:
        click.echo(show.printable(f"not compared, as dtype or shape changed: {', '.join(report.uncompared)}"))
    if report.running:
        click.echo(f"skipped: {show.count(report.running, 'running episode')}")
    different = sum(bool(episode.differences) for episode in report.episodes)
    words = [f"{show.count(number)} {word}" for number, word in (
        (report.same, "same"), (different, "different"), (len(others) - different, "that cannot be made"),
    ) if number]  # fmt: skip
    click.echo(
        show.printable(f"{show.count(len(report.episodes), 'episode')} in {report.destination}: {', '.join(words)}")
    )


def _plain(report: RemakeReport) -> dict[str, Any]:
    episodes = [
        {**vars(episode), "differences": list(map(plain_difference, episode.differences))}
        for episode in report.episodes
    ]
    return {**vars(report), "destination": str(report.destination), "same": report.same, "episodes": episodes}
