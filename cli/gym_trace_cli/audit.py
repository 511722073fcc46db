"""gym-trace audit"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids
from gym_trace_cli.environments import (
    NamedEnvironment,
    RecordedEnvironment,
    environment_options,
    import_modules,
    is_trace,
    without_display,
)
from gym_trace_cli.exit_codes import DIFFERS, FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import NOT_NEGATIVE, POSITIVE, json_option

if TYPE_CHECKING:
    from gym_trace.results import Claim

_WIDTH = 18  # names of claims are padded to it
_COLOURS = {"yes": "green", "no": "red", "not tried": "yellow"}


@headed("audit")
@click.argument("env_id", metavar="[ENV|DIR]", required=False, shell_complete=environment_ids)
@section(
    "Audit",
    option("--episodes N", "Episodes to play. Default: 8.", POSITIVE, default=8),
    option("--steps N", "Most steps of an episode. Default: 200.", POSITIVE, default=200),
    option("--seed N", "Root of the seeds. Default: 0.", NOT_NEGATIVE, default=0),
    option("--require CLAIMS", "Exit with 3 unless these hold: seeded,lanes (repeatable)."),
)
@section("Environment", environment_options, option("--trust", "Allow imports, calls, files that the trace DIR names."))
@section("Output", json_option)
def command(
    named: NamedEnvironment,
    episodes: int,
    steps: int,
    seed: int,
    require: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Find out which promises an environment keeps, by playing the same episodes again in other ways:
    in a fresh process, alone, in reverse order, in lanes, after a saved state ...
    Exit code: 0; 3 if a claim of --require does not hold or was not tried.

    ENV is named as for 'gym-trace record'. DIR is a trace, whose environment,
    seeds and actions are used.

    \b
    gym-trace audit CartPole-v1 --require deterministic,seeded,stateless-reset
    """
    without_display()
    required = [name.strip() for names in require for name in names.split(",")]
    options: dict[str, Any] = {"episodes": episodes, "steps": steps, "seed": seed, "require": required}
    subject: Any
    if named.env_id is not None and is_trace(named.env_id):
        if named.wrappers or named.max_episode_steps is not None:
            raise click.UsageError("--wrapper and --max-episode-steps: not with a trace; name the environment itself")
        recorded = RecordedEnvironment(None, named.factory, tuple(named.env_args.items()), named.imports, trust)
        subject, options = named.env_id, options | recorded.arguments() | {"imports": named.imports}
    elif trust:
        raise click.UsageError("--trust: only for a trace, and DIR is none")
    elif (named.env_id is None) == (named.factory is None):
        raise click.UsageError("pass an environment: either ENV, --make MODULE:FUNCTION, or the directory of a trace")
    else:
        import_modules(named.imports)
        subject = replace(named, is_of_any_kind=True)
    report = gym_trace.audit(subject, on_claim=None if as_json else _print, **options)
    if as_json:
        show.json_line(report.to_json())
    for claim in report.failed:
        click.echo(show.printable(f"required: {claim.name} is {claim}"), err=True)
    return DIFFERS if report.failed else FINE


def _print(claim: Claim) -> None:
    verdict = click.style(claim.verdict, fg=_COLOURS[claim.verdict])
    click.echo(f"{claim.name:{_WIDTH}}  {verdict}: {show.printable(claim.text)}")
