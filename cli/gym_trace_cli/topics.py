"""gym-trace help: the help of a command, or of options that many commands share."""

from __future__ import annotations

import difflib
from typing import Any

import click

from gym_trace_cli.environments import recorded_environment_options
from gym_trace_cli.help import Headed, full_help, headed
from gym_trace_cli.options import comparison_options
from gym_trace_cli.selection import selection_options


class _Topic(Headed):
    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write none: a topic is not called."""


@click.command("select", cls=_Topic)
@selection_options
def _select(**_: Any) -> None:
    """Select episodes. Applied in this order: --episodes, --where, --sort, --limit.

    Columns of --where and --sort: index, steps, return, outcome, seed, split, writer,
    lane, start_time, end_time, duration, episode_id, first_step, flag,
    has_final_observation, metadata.KEY, options.KEY. Rewards of several numbers have
    return[0], return[1] ...

    --where knows and, or, not, in, is None, == != < <= > >=, + - * / %, abs, isnan,
    isinf. Times are UTC. An unknown value, such as a missing seed, is None.

    Sorted by return, complete episodes come first: terminated or truncated. Name
    outcome in --where to rank all alike. random:SEED repeats a shuffle.

    \b
    --sort -return --limit 3                             the three best
    --sort return --limit 3                              the three worst
    --sort random:0 --limit 10                           ten at random
    --where 'outcome == "lost"'                          those that a kill ended
    --where 'return > 100 and start_time > "2026-11-01"'
    --episodes -20: --where 'seed is not None'

    'gym-trace ls DIR' shows what a selection has. In Python: trace.select().
    """


@click.command("env", cls=_Topic)
@recorded_environment_options
def _env(**_: Any) -> None:
    """Rebuild the environment of a trace: by default as it was recorded.

    Nothing is imported or called only because a trace names it: errors say what it
    needs, and which option allows that.

    \b
    --import my_envs                             the module that registers it
    --trust                                      import and call what the trace names
    --env-arg g=9.8                              one argument more
    --env CartPole-v1                            another environment
    """


@click.command("tolerance", cls=_Topic)
@comparison_options
def _tolerance(**_: Any) -> None:
    """Compare with tolerances. By default every value is compared bit for bit.

    COLUMN is observations, actions, rewards, terminations, truncations, infos or a
    leaf, such as observations/position; for it X is absolute. NaN equals NaN.

    \b
    --tolerance rtol=1e-6                        relative, all columns
    --tolerance atol=1e-8                        absolute, all columns
    --tolerance rewards=1e-6 --ignore infos      absolute, one column; another skipped
    """


TOPICS: dict[str, click.Command] = {"select": _select, "env": _env, "tolerance": _tolerance}


@headed("help")
@click.argument("words", metavar="[COMMAND|TOPIC]", nargs=-1)
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...]) -> None:
    """Show the help of a command, or of a topic: select, env, tolerance.

    \b
    gym-trace help select
    gym-trace help edit filter
    """
    context = ctx.find_root()
    if len(words) == 1 and words[0] in TOPICS:
        topic = TOPICS[words[0]]
        click.echo(full_help(click.Context(topic, info_name=words[0], parent=context)))
        return
    for word in words:
        if not isinstance(context.command, click.Group):
            raise click.UsageError(f"{context.command_path} has no commands")
        near = difflib.get_close_matches(word, TOPICS, n=1)
        if near and len(words) == 1 and word not in context.command.list_commands(context):
            raise click.UsageError(f"no topic {word!r}; did you mean {near[0]!r}?")
        name, found, _ = context.command.resolve_command(context, [word])
        assert found is not None
        context = click.Context(found, info_name=name, parent=context)
    click.echo(context.get_help())
