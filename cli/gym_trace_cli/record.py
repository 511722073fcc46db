"""gym-trace record"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from gym_trace.errors import InvalidOption
from gym_trace_cli.completion import environment_ids, policies
from gym_trace_cli.environments import NamedEnvironment, import_modules
from gym_trace_cli.help import headed, option, section
from gym_trace_cli.options import (
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SECONDS,
    EnvArg,
    FactoryName,
    NamedCallable,
    environment_options,
    look_in_current_directory,
    provenance_options,
    quiet_option,
)
from gym_trace_cli.record_config import config_options, drop_overruled, write_config
from gym_trace_cli.recording import COMMAND, record_here, record_with_workers
from gym_trace_cli.stopping import spared_children

_DEFAULT_EPISODES = 10
_OWN_METADATA = ("seed", "run")
_FACTS = "For search and the card (tag: repeatable)."


class PolicyName(FactoryName):
    """MODULE:CALLABLE; or random, sb3:PATH, onnx:PATH, run:DIR."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if _is_name(value) else super().convert(value, param, ctx)


class ScheduleName(FactoryName):
    """cubic, every:N, or MODULE:FUNCTION of the number of an episode."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from gym_trace.video.schedules import schedule_of

        if value == "cubic" or str(value).startswith("every:"):
            try:
                schedule_of(value)
            except InvalidOption as error:
                self.fail(str(error), param, ctx)
            return value
        return super().convert(value, param, ctx)


@headed("record")
@click.argument("env_id", required=False, shell_complete=environment_ids)
@section(
    "Output",
    option("-o, --output DIR", "Trace directory. Default: traces/ENV_ID.", PATH),
    option(
        "--on-exist MODE",
        "Old trace: error, append, replace. Default: error.",
        click.Choice(["error", "append", "replace"]),
        default="error",
    ),
    option("--split NAME", "Split of the episodes. Default: train.", default="train"),
    option("--infos", "Record infos."),
    option("--video S", "Film episodes: cubic, every:N or MODULE:FUNCTION.", ScheduleName()),
    option("--tensorboard DIR", "Write TensorBoard scalars.", PATH),
    option("--level N", "zstd level, -7 to 22. Default: 1.", click.IntRange(-7, 22), default=1),
    quiet_option,
    option("--json", "Print the summary as one JSON object.", name="as_json"),
    *config_options,
)
@section(
    "Limits",
    option("--episodes N", "Complete episodes. Default: 10 if no limit is given.", POSITIVE),
    option("--steps N", "Steps.", POSITIVE),
    option("--seconds S", "Seconds.", SECONDS),
    option("--bytes N", "Bytes on disk, approximately.", POSITIVE),
)
@section(
    "Environment and policy",
    *environment_options,
    option(
        "--policy P",
        "M:CALLABLE, run:DIR, sb3:PATH, onnx:PATH, or random.",
        PolicyName(),
        default="random",
        shell_complete=policies,
    ),
    option("--seed N", "Make episode k the same in every run.", NOT_NEGATIVE),
)
@section(
    "Several environments or processes",
    option("--num-envs N", "Record a vector environment with N lanes.", POSITIVE),
    option(
        "--vectorization-mode M",
        "sync, async, vector_entry_point. Default: sync.",
        click.Choice(["sync", "async", "vector_entry_point"]),
        name="vectorization",
    ),
    option(
        "--autoreset MODE",
        "next-step, same-step, disabled. Default: next-step.",
        click.Choice(["next-step", "same-step", "disabled"]),
    ),
    option("-j, --workers N", "Record with N processes.", POSITIVE),
    option("--resume", "Resume an interrupted run of -j."),
    option("--stall-timeout S", "Restart a worker silent for S seconds. Default: 120.", SECONDS),
    option("--max-restarts N", "Restarts allowed, all workers. Default: 100.", NOT_NEGATIVE),
    option("--nice N", "Niceness of workers, 0 to 19.", click.IntRange(0, 19), name="niceness"),
)
@section(
    "Metadata",
    option("--author TEXT", _FACTS),
    option("--licence, --license ID", _FACTS, name="license"),
    option("--description TEXT", _FACTS),
    option("--tag WORD", _FACTS, name="tags", multiple=True),
    option("--metadata K=V", "Extra metadata, JSON or text (repeatable).", EnvArg(), multiple=True),
    *provenance_options,
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    env_id: str | None,
    output: str | None,
    episodes: int | None,
    steps: int | None,
    seconds: float | None,
    bytes: int | None,
    seed: int | None,
    policy: str,
    factory: str | None,
    env_args: Sequence[tuple[str, Any]],
    imports: Sequence[str],
    wrappers: Sequence[str],
    max_episode_steps: int | None,
    num_envs: int | None,
    vectorization: str | None,
    autoreset: str | None,
    workers: int | None,
    resume: bool,
    stall_timeout: float | None,
    max_restarts: int | None,
    niceness: int | None,
    author: str | None,
    license: str | None,
    description: str | None,
    tags: Sequence[str],
    metadata: Sequence[tuple[str, Any]],
    argv: bool,
    git_diff: bool,
    infos: bool,
    video: str | None,
    tensorboard: str | None,
    quiet: bool,
    as_json: bool,
    new_config: str | None,
    **recording: Any,
) -> None:
    """Record episodes of a Gymnasium environment until the first limit.
    Ctrl-C stops after the current step and keeps everything.

    \b
    gym-trace record CartPole-v1 -o traces/cartpole --episodes 100 --seed 0
    gym-trace record CartPole-v1 -o traces/night --episodes 2000 -j 2
    """
    env_id, factory = drop_overruled(ctx, env_id=env_id, factory=factory)
    if (env_id is None) == (factory is None):
        raise click.UsageError("pass an environment: ENV_ID, or --make MODULE:FUNCTION")
    limits = {"episodes": episodes, "steps": steps, "seconds": seconds, "bytes": bytes}
    if all(limit is None for limit in limits.values()):
        limits["episodes"] = _DEFAULT_EPISODES
    name = (env_id or factory or "").replace("/", "-").replace(":", "-")
    directory = Path(output or f"traces/{name}")
    given = dict(metadata)
    if taken := sorted(set(_OWN_METADATA) & set(given)):
        raise click.UsageError(f"--metadata {taken[0]}=…: reserved; choose another name")
    facts = {"author": author, "license": license, "description": description, "tags": list(tags)}
    facts = {key: value for key, value in facts.items() if value}
    of_workers = {
        "resume": resume or None,
        "stall_timeout": stall_timeout,
        "max_restarts": max_restarts,
        "niceness": niceness,
    }
    of_workers = {name: value for name, value in of_workers.items() if value is not None}
    if workers is None and of_workers:
        raise click.UsageError(f"--{next(iter(of_workers)).replace('_', '-').replace('niceness', 'nice')} needs -j")
    if workers is None and num_envs is not None and str(policy).startswith(("onnx:", "run:")):
        workers = 1  # these act in single environments; workers have one policy per lane
    if workers is not None and (vectorization or autoreset):
        raise click.UsageError("-j, and a policy that acts in single environments, exclude --vectorization-mode and "
                               "--autoreset")  # fmt: skip
    if num_envs is None and (vectorization or autoreset):
        raise click.UsageError("--vectorization-mode and --autoreset need --num-envs")
    if video is not None and (workers is not None or num_envs is not None):
        raise click.UsageError("--video: needs a single environment; omit -j and --num-envs, or film episodes "
                               "afterwards with gym-trace render")  # fmt: skip
    arguments = dict(env_args)
    if video is not None and factory is None:
        arguments.setdefault("render_mode", "rgb_array")
    named = NamedEnvironment(env_id, factory, arguments, tuple(imports), tuple(wrappers), max_episode_steps)
    seed = _seed(seed, directory, resume)
    if new_config is not None:
        write_config(ctx, new_config, seed)
    acting = policy if _is_name(policy) else NamedCallable().convert(policy, None, None)
    if str(policy).startswith("run:") and "trust" in str(policy).partition("?")[2]:
        look_in_current_directory()  # may have its model
    recording |= {"record_infos": infos}
    run, private = {"seed": seed, **limits}, {"argv": argv, "git_diff": git_diff}
    if workers is not None:
        recording |= {"metadata": given} if given else {}
        about = {"command": COMMAND, "facts": facts, **private}
        options = {"workers": workers, "num_envs": num_envs, **run, **of_workers, **about, **recording}
        record_with_workers(named, directory, acting, quiet, as_json, tensorboard, **options)
        return
    recording |= {"metadata": {**given, "seed": seed}}
    if video is not None:
        named_schedule = video == "cubic" or video.startswith("every:")
        recording["video"] = video if named_schedule else NamedCallable().convert(video, None, None)
    import_modules(imports)
    with spared_children() if vectorization == "async" else nullcontext():
        env = named(num_envs, vectorization, autoreset)
    private["diff"] = private.pop("git_diff")
    record_here(env, named, acting, directory, quiet, as_json, tensorboard, facts, private, run, recording)


def _is_name(policy: Any) -> bool:
    return policy == "random" or str(policy).startswith(("sb3:", "onnx:", "run:"))


def _seed(given: int | None, directory: Path, resume: bool) -> int:
    """Return the given seed, that of the resumed run, or a new one."""
    from gym_trace.collecting.resuming import settings_of
    from gym_trace.collecting.rollout import new_root_seed

    if given is not None:
        return given
    before = settings_of(directory) if resume else None
    return new_root_seed() if before is None else int(before["seed"])
