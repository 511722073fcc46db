"""gym-trace shell: a Python prompt with an environment at a recorded step"""

from __future__ import annotations

import code
import importlib.util
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

import gym_trace
from gym_trace_cli import show
from gym_trace_cli.environments import RecordedEnvironment, recorded_environment_options
from gym_trace_cli.exit_codes import FINE
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import comparison_options, start_option, trace_argument
from gym_trace_cli.selection import episode_index
from gym_trace_cli.stopping import Ended

if TYPE_CHECKING:
    from gym_trace.results import Verdict


@headed("shell")
@trace_argument
@section(
    "Step",
    option("--episode N", "Index of the episode; -1 is the last. Default: 0.", click.INT, default=0),
    option("--step N", "Stand just before this step. Default: 0, after the reset.", click.INT, default=0),
    start_option,
)
@recorded_environment_options
@comparison_options
def command(
    directory: str,
    episode: int,
    step: int,
    start: str,
    recorded: RecordedEnvironment,
    comparison: dict[str, Any],
) -> int:
    """Open a Python prompt with the environment at a recorded step.
    Every step up to there is replayed and compared, bit for bit; --from states
    sets the environment to its recorded state.
    The prompt has trace, episode, step and env; IPython if installed. The environment
    is headless, unless you pass --env-arg render_mode=human.
    Exit code 3 if the replay differs.

    \b
    gym-trace shell traces/cartpole --episode 7 --step 120
    """
    trace = gym_trace.open_trace(directory)
    episode = episode_index(trace, episode)
    env_args = dict(recorded.env_args)
    render_mode = env_args.pop("render_mode", None)
    making = {**recorded._replace(env_args=tuple(env_args.items())).arguments(), **comparison, "start": start}
    env = gym_trace.env_at(trace, episode, step, render_mode=render_mode, **making)
    try:
        names: dict[str, Any] = {"trace": trace, "episode": trace[episode], "step": step, "env": env}
        _prompt(names, _banner(trace, episode, step, env.replay_start, env.replay_verdict))  # type: ignore[attr-defined]
    finally:
        env.close()
    return FINE


def _banner(trace: gym_trace.Trace, index: int, step: int, begin: int, verdict: Verdict) -> str:
    recorded = trace[index]
    name = trace[[index]].env_spec.get("id") or "the environment"
    next_step = f"env.step(episode.actions[{step}]) repeats the recorded step"
    if step == len(recorded):
        next_step = "the recorded episode ends here"
    compared = f"started from the state before step {begin}, steps since match" if begin else "all steps so far match"
    if verdict.from_states and begin == step:
        compared = "set to its recorded state"
    lines = (
        f"env: {name} before step {step} of {len(recorded)} of episode {index}; {compared}",
        f"also trace, episode, step; {next_step}",
    )
    return "\n".join(map(show.printable, lines))


def _prompt(names: dict[str, Any], banner: str) -> None:
    if importlib.util.find_spec("IPython") is not None:
        from IPython.terminal.embed import InteractiveShellEmbed

        InteractiveShellEmbed(banner1=banner, user_ns=names, user_module=None)()
        return
    with suppress(ImportError):  # not in every Python
        import readline  # noqa: F401 - gives the prompt history and editing
    try:
        code.interact(banner, local=names, exitmsg="")
    except Ended:
        raise
    except SystemExit as exit:  # exit() at the prompt
        raise click.exceptions.Exit(exit.code if isinstance(exit.code, int) else int(exit.code is not None)) from None
