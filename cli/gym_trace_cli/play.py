"""gym-trace play"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.completion import environment_ids
from gym_trace_cli.environments import NamedEnvironment, RecordedEnvironment, environment_options, is_trace
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, opt, options_of, shared
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    comparison_options,
    on_exist_option,
    quiet_option,
)
from gym_trace_cli.record import errors_name_options, fact_option, metadata_option
from gym_trace_cli.selection import episode_index
from gym_trace_cli.stopping import StopSignals

if TYPE_CHECKING:
    from gym_trace.results import PlayReport

_COMMAND = "gym-trace play"


def _mark(value: str) -> tuple[str, str]:
    """Parse --mark: a key and the name of its annotation."""
    key, equals, name = value.rpartition("=")
    if not (key and equals and name.isidentifier()):
        raise click.BadParameter(f"{value!r} is not of the form KEY=NAME, such as g=good")
    return key, name


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Options of gym-trace play."""

    output: str | None = opt("-o, --output DIR", "Trace directory. Default: traces/ENV_ID.", PATH, under="Output")
    on_exist: str = shared(on_exist_option)
    split: str = opt("--split NAME", "Split of the episodes. Default: train.", default="train")
    record_infos: bool = opt("--infos", "Record infos.")
    quiet: bool = shared(quiet_option)
    as_json: bool = opt("--json", "Print the summary as one JSON object.")
    keys: str | None = opt(
        "--keys FILE",
        "Key map (TOML). Default: the environment's, or ask.",
        click.Path(dir_okay=False),
        under="Playing",
    )
    asks_again: bool = opt("--ask", "Ask for the keys again.", hidden=True)
    marks: Sequence[tuple[str, str]] = opt(
        "--mark KEY=NAME", "Key of an annotation (repeatable). Default: f6=mark.", _mark
    )
    fps: float | None = opt(
        "--fps N", "Steps per second. Default: the environment's, or 30.", click.FloatRange(0.1, 1000)
    )
    episodes: int | None = opt("--episodes N", "Stop after N complete episodes.", POSITIVE)
    seed: int | None = opt("--seed N", "Seed: episode k starts the same in every session.", NOT_NEGATIVE)
    episode: int = opt(
        "--episode N", "Index of the episode. Default: 0.", click.INT, default=0, under="With DIR: from a recorded step"
    )
    step: int = opt("--step N", "Replay up to this step, then play. Default: 0.", NOT_NEGATIVE, default=0)
    trust: bool = opt("--trust", "Allow imports, calls, files that the trace names.")
    comparison: dict[str, Any] = shared(comparison_options)
    named: NamedEnvironment = shared(environment_options, under="Environment")
    facts: Sequence[tuple[str, Any]] = shared(fact_option, under="Metadata")
    metadata: Sequence[tuple[str, Any]] = shared(metadata_option)


def _continued(directory: str, options: PlayOptions) -> Any:
    """Return the environment at the recorded step. Raises the errors of env_at()."""
    from gym_trace.replay import Continued

    named = options.named
    recorded = RecordedEnvironment(None, named.factory, tuple(named.env_args.items()), named.imports, options.trust)
    trace = gym_trace.open_trace(directory)
    episode = episode_index(trace, options.episode)
    return Continued(trace, episode, options.step, **recorded.arguments(), **options.comparison)


@headed("play")
@click.argument("env_id", metavar="[ENV|DIR]", required=False, shell_complete=environment_ids)
@options_of(PlayOptions)
def command(options: PlayOptions) -> int:
    """Play an environment in a window, and record every step.
    With the DIR of a trace, play on from a recorded step.

    F1 shows all keys: pause, restart from the seed, discard, save, annotate.
    Escape, Ctrl-C or closing the window ends the session; all steps are saved.

    \b
    gym-trace play CartPole-v1 -o traces/by-hand
    gym-trace play traces/cartpole --episode 7 --step 12 -o traces/by-hand
    """
    named = options.named
    trace = named.env_id if named.env_id is not None and is_trace(named.env_id) else None
    if trace is None and (named.env_id is None) == (named.factory is None):
        raise click.UsageError("pass an environment: either ENV, --make MODULE:FUNCTION, or the directory of a trace")
    if trace is None and any(options.comparison.values()):
        raise click.UsageError("--tolerance and --ignore: only for a trace, and DIR is none")
    if trace is not None and options.output is None:
        raise click.UsageError("a trace needs -o DIR, another directory")
    if trace is not None and (named.wrappers or named.max_episode_steps is not None):
        raise click.UsageError("--wrapper and --max-episode-steps: not with a trace; the recorded ones are used")
    directory = Path(options.output or f"traces/{named.file_name}")
    if named.factory is None and trace is None:
        named.env_args.setdefault("render_mode", "rgb_array")
    with StopSignals() as stop, errors_name_options():
        played = gym_trace.play(
            named() if trace is None else _continued(trace, options),
            directory,
            seed=options.seed,
            name=named.env_id if trace is None and named.env_id else "",
            keys=None if options.keys is None else Path(options.keys),
            asks_again=options.asks_again,
            fps=options.fps,
            episodes=options.episodes,
            facts=dict(options.facts),
            metadata=dict(options.metadata),
            make_env=named,
            command=_COMMAND,
            stop=lambda: bool(stop.received),
            on_exist=options.on_exist,
            split=options.split,
            record_infos=options.record_infos,
            **({"marks": dict(options.marks)} if options.marks else {}),
        )
    _summarize(played, directory, named.replaying(), options.quiet, options.as_json)
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
        click.echo("no step played, nothing recorded")
    elif not quiet:
        kept = show.count(played.episodes - len(played.discarded), "episode")
        discarded = f", {show.count(len(played.discarded))} discarded" if played.discarded else ""
        speed = f", {show.number(played.fps)} per second" if played.fps else ""
        click.echo(f"{kept} kept{discarded}; {show.count(played.steps, 'step')} played{speed}")
        click.echo(f"{show.printable(directory)}: seed {played.seed}\n")
        show.next_commands(directory, environment)
