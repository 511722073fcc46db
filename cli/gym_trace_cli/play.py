"""gym-trace play"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import TraceDirectory, environment_ids
from gym_trace_cli.environments import NamedEnvironment, RecordedEnvironment, environment_options
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import bundle, headed, option, section
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    TextOption,
    comparison_options,
    on_exist_option,
    quiet_option,
)
from gym_trace_cli.record import errors_name_options, fact_options, metadata_option
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.results import PlayReport

_COMMAND = "gym-trace play"


class Mark(TextOption):
    """KEY=NAME of an annotation."""

    name = "key=name"

    def parsed(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, name = value.rpartition("=")
        if not (key and equals and name.isidentifier()):
            self.fail(f"{value!r} is not of the form KEY=NAME, such as g=good", param, ctx)
        return key, name


class Source(NamedTuple):
    """The recorded step to go on from."""

    trace: str | None
    episode: int
    step: int
    trust: bool

    def made(self, named: NamedEnvironment, comparison: dict[str, Any]) -> Any:
        """Return the environment at that step. Raises the errors of env_at()."""
        from gym_trace.replay import Continued

        recorded = RecordedEnvironment(
            named.env_id, named.factory, tuple(named.env_args.items()), named.imports, self.trust
        )
        trace = gym_trace.open_trace(str(self.trace))
        try:
            return Continued(trace, self.episode, self.step, **recorded.arguments(), **comparison)
        except IndexError as error:
            episodes = show.count(len(trace), "episode")
            raise click.UsageError(f"--episode {self.episode}: the trace has {episodes}") from error


@headed("play")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@section(
    "Output",
    option("-o, --output DIR", "Trace directory. Default: traces/ENV_ID.", PATH),
    on_exist_option,
    option("--split NAME", "Split of the episodes. Default: train.", default="train"),
    option("--infos", "Record infos.", name="record_infos"),
    quiet_option,
    option("--json", "Print the summary as one JSON object.", name="as_json"),
)
@section(
    "Playing",
    option("--keys FILE", "Key map (TOML). Default: the environment's, or questions.", click.Path(dir_okay=False)),
    option("--ask", "Ask for the keys again.", name="asks_again"),
    option("--mark KEY=NAME", "Key of an annotation (repeatable). Default: f6=mark.", Mark(), name="marks"),
    option("--fps N", "Steps per second. Default: from the environment, else 30.", click.FloatRange(0.1, 1000)),
    option("--episodes N", "Stop after N complete episodes.", POSITIVE),
    option("--seed N", "Make the start of episode k the same in every session.", NOT_NEGATIVE),
)
@section(
    "Going on from a recorded step",
    bundle(
        "source",
        Source,
        option("--from TRACE", "Trace with the episode.", TraceDirectory(), name="trace"),
        option("--episode N", "Its index. Default: 0.", click.INT, default=0),
        option("--step N", "Steps that are taken as recorded. Default: 0.", NOT_NEGATIVE, default=0),
        option("--trust", "Allow imports, calls, files only the trace names."),
    ),
)
@comparison_options
@section("Environment", environment_options)
@section("Metadata", fact_options, metadata_option)
def command(
    named: NamedEnvironment,
    source: Source,
    comparison: dict[str, Any],
    output: str | None,
    seed: int | None,
    keys: str | None,
    marks: Sequence[tuple[str, str]],
    facts: dict[str, Any],
    metadata: Sequence[tuple[str, Any]],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Play an environment in a window, and record every step.

    F1 shows all keys: pause, restart from the seed, discard, save, annotate.
    Escape, closing the window and Ctrl-C keep everything.

    \b
    gym-trace play CartPole-v1 -o traces/by-hand
    gym-trace play --from traces/cartpole --episode 7 --step 12 -o traces/by-hand
    """
    if source.trace is None and (named.env_id is None) == (named.factory is None):
        raise click.UsageError("pass an environment: either ENV_ID or --make MODULE:FUNCTION")
    if source.trace is None and any(comparison.values()):
        raise click.UsageError("--atol, --rtol, --tolerance and --ignore need --from")
    if source.trace is not None and output is None:
        raise click.UsageError("--from: pass -o DIR, too")
    if source.trace is not None and (named.wrappers or named.max_episode_steps is not None):
        raise click.UsageError("--from: excludes --wrapper and --max-episode-steps; the recorded ones are used")
    directory = Path(output or f"traces/{named.file_name}")
    if named.factory is None and source.trace is None:
        named.env_args.setdefault("render_mode", "rgb_array")
    facts = {key: list(value) if key == "tags" else value for key, value in facts.items() if value}
    if marks:
        options["marks"] = dict(marks)
    with StopSignals() as stop, errors_name_options():
        played = gym_trace.play(
            named() if source.trace is None else source.made(named, comparison),
            directory,
            seed=seed,
            name=named.env_id or "",
            keys=None if keys is None else Path(keys),
            facts=facts,
            metadata=dict(metadata),
            make_env=named,
            command=_COMMAND,
            stop=lambda: bool(stop.received),
            **options,
        )
    _summarize(played, directory, named.replaying(), quiet, as_json)
    if not stop.received:
        return FINE
    click.echo(f"{stop.what_happened}; every step up to here is saved", err=True)
    return stop.exit_code


def _summarize(played: PlayReport, directory: Path, environment: Sequence[str], quiet: bool, as_json: bool) -> None:
    if played.left:
        click.echo(f"warning: discarded episodes are still in the trace: {show.printable(played.left)}", err=True)
    if as_json:
        show.json_line(
            {
                "directory": str(directory),
                "seed": played.seed,
                "episodes": played.episodes - len(played.discarded),
                "complete": len(played.kept),
                "discarded": len(played.discarded),
                "steps": played.steps,
                "fps": played.fps,
            }
        )
    elif not quiet and not played.episodes:
        click.echo("nothing was played, and nothing recorded")
    elif not quiet:
        kept = show.count(played.episodes - len(played.discarded), "episode")
        discarded = f", {show.count(len(played.discarded))} discarded" if played.discarded else ""
        speed = f", {show.number(played.fps)} per second" if played.fps else ""
        click.echo(f"{kept} kept{discarded}; {show.count(played.steps, 'step')} played{speed}")
        click.echo(f"{show.printable(directory)}: seed {played.seed}\n")
        show.next_commands(directory, environment)
