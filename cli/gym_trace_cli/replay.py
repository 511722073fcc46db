"""gym-trace replay"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options, without_display
from gym_trace_cli.exit_codes import DAMAGED, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.ls import print_as_json, print_episodes
from gym_trace_cli.options import comparison_options, json_lines_option, named_callable, source_option, trace_argument
from gym_trace_cli.selection import Selection, selection_options

if TYPE_CHECKING:
    from gym_trace import Trace
    from gym_trace.replay import Making


@headed("replay")
@trace_argument
@selection_options
@section(
    "Playback",
    option("--speed X", "Speed factor. Default: 1.", click.FloatRange(0.001, 1000)),
    option("--paused", "Begin paused; Enter shows the next step."),
    source_option(),
    option("--human", "Play in a window."),
    option("--callback M:F", "Call F(observations, actions, rewards) per episode.", named_callable),
    json_lines_option,
)
@recorded_environment_options
@comparison_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    directory: str,
    selection: Selection,
    callback: Callable[[Any, Any, Any], Any] | None,
    as_json: bool,
    human: bool,
    speed: float | None,
    paused: bool,
    source: str | None,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
) -> int:
    """Play recorded episodes in the terminal or a window, or pass them to a function.

    Keys: space pauses, left/right seek, Enter steps, up/down change episode,
    +/- change speed, q quits. Without a terminal, prints one line per episode.

    \b
    gym-trace replay traces/cartpole --episodes 10:20
    """
    if callback is not None and as_json:
        raise click.UsageError("--callback and --json exclude each other")
    trace = gym_trace.open_trace(directory)
    chosen = selection.view_or_note(trace).indices.tolist()
    if callback is not None and human:
        raise click.UsageError("--callback and --human exclude each other")
    in_terminal = not (callback or human or as_json) and show.is_terminal(sys.stdin) and show.is_terminal(sys.stdout)
    for name, given in {"--paused": paused, "--from": source is not None, "--speed": speed is not None}.items():
        if given and not (in_terminal or (human and name != "--paused")):
            raise click.UsageError(f"{name} needs a terminal" + (" or --human" if name != "--paused" else ""))
    if human and source == "observations":
        raise click.UsageError("--from observations: needs a terminal")
    for param in ctx.command.params if not (in_terminal or human) else ():
        given = ctx.get_parameter_source(str(param.name)) != ParameterSource.DEFAULT
        if given and getattr(param, "heading", "") in ("Environment", "Comparison"):
            raise click.UsageError(f"{param.opts[-1]} needs a terminal or --human; 'gym-trace verify' compares")
    if human:
        from gym_trace.replay import play_for_humans

        making = {**recorded.arguments(), **comparison, "start": source or "auto"}
        for verdict in play_for_humans(trace, chosen, speed=speed or 1.0, **making):
            states = f"from {show.count(verdict.from_states, 'recorded state')}"
            shown = states if verdict.from_states else verdict.verdict
            click.echo(f"episode {verdict.index}: {show.count(verdict.steps, 'step')}, {shown}")
    elif in_terminal and chosen:
        from gym_trace.replay import Making

        settings = Making(**recorded.arguments(), **comparison)
        if source not in (None, "observations"):
            settings = settings._replace(start=source)
        return _play(trace, chosen, source, speed or 1.0, paused, settings)
    elif callback is not None:
        _call_back(trace, chosen, callback)
    elif as_json:
        print_as_json(trace[chosen])
    else:
        print_episodes(trace[chosen], trace)
    return FINE


def _play(trace: Trace, chosen: list[int], source: str | None, speed: float, paused: bool, making: Making) -> int:
    from gym_trace_cli.player.player import Player
    from gym_trace_cli.player.terminal import Terminal

    without_display()
    player = Player(trace, chosen, source, speed, paused)
    with Terminal() as terminal:
        player.run(terminal, making)
    for note in player.fallbacks:
        click.echo(show.printable(f"note: {note}"), err=True)
    for damage in player.damages:
        click.echo(f"error: {show.printable(damage)}", err=True)
    click.echo(f"played {show.count(len(player.played))} of {show.count(len(chosen), 'episode')}")
    return DAMAGED if player.damages else FINE


def _call_back(trace: Trace, chosen: list[int], callback: Callable[[Any, Any, Any], Any]) -> None:
    begin, played, steps = time.monotonic(), 0, 0
    for episode in trace.scan(columns=("observations", "actions", "rewards"), episodes=chosen):
        played, steps = played + 1, steps + len(episode)
        if callback(episode.observations, episode.actions, episode.rewards):
            break
    duration = show.duration(time.monotonic() - begin)
    click.echo(f"played {show.count(played, 'episode')}, {show.count(steps, 'step')} in {duration}", err=True)
