"""gym-trace replay"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import making_arguments
from gym_trace_cli.episode_lines import print_as_json, print_episodes
from gym_trace_cli.options import NamedCallable
from gym_trace_cli.selection import Selection, selection_options
from gym_trace_cli.verify import verification_options, verify

if TYPE_CHECKING:
    from gym_trace import Trace

# Where the name is another one.
_OPTIONS = {"env_id": "--env", "env_args": "--env-arg", "imports": "--import", "factory": "--make"}


@click.command("replay", short_help="Play episodes back.")
@click.argument("directory", metavar="DIR", type=click.Path())
@selection_options
@click.option(
    "--callback",
    type=NamedCallable(),
    metavar="F",
    help="MODULE:FUNCTION, called as FUNCTION(observations, actions, rewards) with the arrays of each episode, until "
    "it returns something truthy.",
)
@click.option("--json", "as_json", is_flag=True, help="Print an episode as a line of JSON.")
@click.option("--verify", "verified", is_flag=True, help="Play them again in their environment, and compare.")
@verification_options
@click.option("--human", is_flag=True, help="Play them in a window, at the speed of the environment.")
@click.option("--speed", type=click.FloatRange(0.001, 1000), metavar="X", help="With --human: times that speed.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    directory: str,
    selection: Selection,
    callback: Callable[[Any, Any, Any], Any] | None,
    as_json: bool,
    verified: bool,
    human: bool,
    speed: float | None,
    **verification: Any,
) -> None:
    """Play the episodes of the trace in DIR back to a function, or without one print a line an episode.

    --verify is the command gym-trace verify, whose options it takes.
    """
    if callback is not None and as_json:
        raise click.UsageError("--callback and --json exclude each other")
    trace = gym_trace.open_trace(directory)
    chosen = selection.of(trace).tolist()
    ways = {"--callback": callback is not None, "--verify": verified, "--human": human}
    if sum(ways.values()) > 1:
        raise click.UsageError(" and ".join(name for name, given in ways.items() if given) + " exclude each other")
    if human:
        return _show_to_humans(trace, chosen, 1.0 if speed is None else speed, **verification)
    if speed is not None:
        raise click.UsageError("--speed needs --human")
    if verified:
        ctx.exit(verify(trace, chosen, as_json, **verification))
    if given := [name for name in verification if ctx.get_parameter_source(name) != ParameterSource.DEFAULT]:
        raise click.UsageError(f"{_OPTIONS.get(given[0], '--' + given[0].replace('_', '-'))} needs --verify")
    if callback is not None:
        _call_back(trace, chosen, callback)
    elif as_json:
        print_as_json(trace, chosen)
    else:
        print_episodes(trace, chosen)


def _show_to_humans(
    trace: Trace,
    chosen: list[int],
    speed: float,
    env_id: str | None,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    trust: bool,
    **_: Any,
) -> None:
    from gym_trace.video.window import play_for_humans

    making = making_arguments(env_id, factory, env_args, imports)
    for verdict in play_for_humans(trace, chosen, speed=speed, trust=trust, **making):
        click.echo(f"episode {verdict.index}: {show.count(verdict.steps, 'step')}, {verdict.verdict}")


def _call_back(trace: Trace, chosen: list[int], callback: Callable[[Any, Any, Any], Any]) -> None:
    begin, played, steps = time.monotonic(), 0, 0
    for episode in trace.scan(columns=("observations", "actions", "rewards"), episodes=chosen):
        played, steps = played + 1, steps + len(episode)
        if callback(episode.observations, episode.actions, episode.rewards):
            break
    took = show.duration(time.monotonic() - begin)
    click.echo(f"played {show.count(played, 'episode')}, {show.count(steps, 'step')} in {took}", err=True)
