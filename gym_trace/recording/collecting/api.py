"""gym_trace.collect: record episodes with several processes."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium import vector

from gym_trace.errors import InvalidOption
from gym_trace.format.facts import add_facts, checked
from gym_trace.recording.collecting.policies import policy_maker
from gym_trace.recording.collecting.resuming import (
    Shard,
    await_writers,
    check_same,
    events_name,
    finished,
    join_shards,
    own_writers,
    publish_unpublished,
    run_settings,
)
from gym_trace.recording.collecting.rollout import metadata_by_name, new_root_seed
from gym_trace.recording.collecting.supervisor import Collected, Limits, Supervisor
from gym_trace.recording.collecting.worker import Setup
from gym_trace.recording.options import opened_directory
from gym_trace.recording.processes.fleet import Backend, Cluster
from gym_trace.recording.processes.local import LocalProcesses, end_if_unguarded, portable
from gym_trace.recording.processes.run_log import Events, machine, rings_taken_in
from gym_trace.recording.provenance import provenance_of
from gym_trace.recording.publishing.spool import publish_facts, published, recording_path
from gym_trace.storage.local import LocalStorage
from gym_trace.storage.remote.address import local_path, url_of


def collect(
    make_env: Callable[[], gymnasium.Env[Any, Any]],
    policy: str | Callable[..., Any] | None = None,
    directory: str | os.PathLike[str] | None = None,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    bytes: int | None = None,
    workers: int = 1,
    num_envs: int | None = None,
    seed: int | None = None,
    shard: tuple[int, int] | None = None,
    resume: bool = False,
    on_exist: str = "error",
    stall_timeout: float = 120.0,
    max_restarts: int = 100,
    cpus: Sequence[int] | None = None,
    niceness: int = 0,
    on_progress: Callable[[Collected], Any] | None = None,
    backend: Backend | None = None,
    describe: dict[str, Any] | None = None,
    command: str = "gym_trace.collect",
    argv: bool = False,
    git_diff: bool = False,
    facts: Mapping[str, Any] | None = None,
    **recording: Any,
) -> Collected:
    """Record episodes of an environment with several processes into one trace.

    The seed of episode k depends on ``seed`` and k alone: any number of workers records the same episodes, also if some
    are killed, or the run is interrupted and resumed. Another worker repeats the unsaved episodes of a dead worker
    completely. The open episode of a dead worker stays in the trace as "lost", in sealed batches once the run has
    ended.

    Workers import the script that starts them, so it needs ``if __name__ == "__main__":`` around this call.

    Args:
        make_env: makes an environment in a worker; a module-level function, or anything that cloudpickle can pickle,
            such as a lambda.
        policy: see gym_trace.record(). None: random actions.
        directory: directory of the trace, or a URL; None: a new temporary directory.
        episodes: number of complete episodes. steps, seconds, bytes: limits that end the run soon after. The first
            limit that is met ends the run; one is needed.
        workers: number of processes. 0: this process records alone, for a debugger; errors are raised as they are.
        num_envs: environments that each worker steps side by side, each with its own policy; None: one.
        seed: 0 or more; None takes one from the system's entropy.
        shard: (i, n) records episode k only if k % n == i; n runs on any machines then record all episodes into one
            directory. Needs a seed, the same in all shards. ``episodes`` counts those of all shards, ``bytes`` the
            whole directory; steps and seconds are limits of this shard. A shard that is started again continues.
        resume: continue an interrupted run in this directory.
        on_exist: if the directory has a trace and resume is False: "error", "append" or "replace".
        stall_timeout: seconds of silence before a worker is killed and restarted; at least 60 while it starts.
        max_restarts: of all workers together; then dead workers are abandoned, as is a worker that dies repeatedly
            without finishing an episode.
        cpus: processors to pin the workers to, one each, in turn. niceness: added to that of this process.
        on_progress: called twice a second with the progress; a truthy result ends the run.
        backend: where workers run; None: processes of this machine.
        describe: plain data that describes make_env; a run is resumed only with the same.
        command: name of the caller, stored under provenance with the name of the policy.
        argv: store the full command line. git_diff: store the uncommitted changes of the current git repository.
            Both may contain secrets.
        facts: metadata of the trace (see Trace.facts), added to existing facts.
        recording: other arguments of TraceRecordingWrapper, except filters, keep_bytes, keep_if, lanes, video and uid.
            metadata also gets "seed" and "run"; metadata that has these keys, or is not a dict, is stored under
            "given".

    Raises:
        InvalidOption, TraceExists

    Examples:
        >>> from functools import partial
        >>> make_env = partial(gymnasium.make, "CartPole-v1")
        >>> done = gym_trace.collect(make_env, directory="traces/collected", episodes=100, workers=4)  # doctest: +SKIP
    """
    end_if_unguarded()
    limits = Limits(episodes, steps, seconds, bytes)
    if limits == Limits():
        raise InvalidOption("collect needs a limit: pass episodes=, steps=, seconds= or bytes=")
    for name, limit in asdict(limits).items():
        if limit is not None and not limit >= 0:
            raise InvalidOption(f"{name}={limit!r}: pass 0 or more")
    for name, count, least in (("workers", workers, 0), ("num_envs", num_envs, 1)):
        if count is not None and count < least:
            raise InvalidOption(f"{name}={count!r}: pass {least} or more")
    if num_envs is not None and not hasattr(vector, "AutoresetMode"):
        raise InvalidOption(f"num_envs={num_envs!r} needs gymnasium 1.1 or newer: pip install -U gymnasium")
    if unsupported := sorted(
        {"episode_filter", "frame_filter", "keep_bytes", "keep_if", "lanes", "reward_classes", "uid", "video"}
        & set(recording)
    ):
        raise InvalidOption(f"{unsupported[0]}: not supported by collect; omit it")
    facts = checked(facts or {})
    local = None if directory is None else local_path(directory)
    url = url_of(directory) if directory is not None and local is None else None
    if local is not None:
        directory = Path(local).absolute()
    elif url is not None and bytes is not None:
        raise InvalidOption(
            f"bytes={bytes!r}: not supported for URLs; omit it, or record into a directory and push that"
        )
    share = _checked_shard(shard, seed, directory, on_exist)
    log = events_name(share)
    earlier = run_settings(directory, log) if (resume or share) and directory is not None else None
    # An empty log means that the run was killed at its start.
    if resume and earlier is None and share is None and not (directory and (recording_path(directory) / log).exists()):
        where = "" if url is None else " of this machine"
        raise InvalidOption(f"{directory}: no run{where} to resume; start one without resume")
    if seed is None:
        seed = new_root_seed() if earlier is None else int(earlier["seed"])
    run = secrets.token_hex(8) if earlier is None else str(earlier["run"])
    make_policy = policy_maker(policy)
    settings = _plain(
        {"run": run, "seed": seed, "policy": make_policy.name, "environment": describe, "recording": recording}
    )
    if share is not None:
        settings["shards"] = share.of
        if earlier is None:  # the same in all shards
            same = {name: value for name, value in settings.items() if name != "run"}
            run = hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]
            settings["run"] = run
    makers = make_env, make_policy
    if workers:
        makers = portable("make_env", make_env), portable("policy", make_policy)
    if earlier is not None:
        check_same(earlier, settings)
    provenance = provenance_of(command, make_policy.name, argv, git_diff, make_env)
    with opened_directory(directory, "append" if resume or share else on_exist) as local_directory:
        local_directory.mkdir(parents=True, exist_ok=True)
        if share is not None:
            join_shards(local_directory, url, settings, on_exist)
        about = {"provenance": provenance, **machine()}
        events = Events(local_directory, log)
        events("start", settings=settings, limits=asdict(limits), workers=workers, **about)
    written = os.fspath(local_directory) if url is None else url
    cluster = backend if isinstance(backend, Cluster) and url and workers else None  # its machines have spools
    publish_rest = partial(publish_unpublished, written, run, seed, share)
    try:
        add_facts(LocalStorage(local_directory), facts)
        finished_steps: dict[int, int] = {}
        if earlier is not None or (share is not None and url is not None):
            await_writers(local_directory, run, share)
            if cluster is not None:
                publish_rest()
                cluster.everywhere(publish_rest)
            finished_steps = finished(local_directory if cluster is None else written, run, seed, own_writers(share))
            events("resume", resumed=len(finished_steps))
        metadata = {**metadata_by_name(recording.pop("metadata", None)), "seed": seed, "run": run}
        options = {**recording, "metadata": metadata}
        setup = Setup(*makers, written, "", seed, cluster is not None, options, num_envs, provenance)
        supervisor = Supervisor(
            LocalProcesses() if backend is None else backend,
            setup,
            run,
            workers,
            limits,
            finished_steps,
            events,
            stall_timeout=stall_timeout,
            max_restarts=max_restarts,
            cpus=None if cpus is None else list(cpus),
            niceness=niceness,
            shard=share,
            local_directory=local_directory,
        )
        if cluster is not None:
            result = supervisor.run(partial(_log_progress, events, on_progress))
            cluster.everywhere(publish_rest)
            publish_facts(local_directory, written)
        else:
            with rings_taken_in(local_directory, events) if url is None else published(local_directory, url):
                result = supervisor.run(partial(_log_progress, events, on_progress))
        events("end", **_progress_facts(result), failed={str(k): why for k, why in result.failed.items()})
        return result
    finally:
        events.close()


def _checked_shard(
    shard: tuple[int, int] | None, seed: int | None, directory: str | os.PathLike[str] | None, on_exist: str
) -> Shard | None:
    """Return the shard of the argument. Raises InvalidOption."""
    if shard is None:
        return None
    if not 0 <= shard[0] < shard[1]:
        raise InvalidOption(f"shard={shard!r}: pass (i, n) with 0 <= i < n")
    if seed is None or directory is None or on_exist == "replace":
        why = "a seed" if seed is None else "a directory" if directory is None else 'on_exist="error" or "append"'
        raise InvalidOption(f"shard={shard!r}: needs {why}, the same in all shards")
    return Shard(*shard)


def _log_progress(events: Events, on_progress: Callable[[Collected], Any] | None, progress: Collected) -> Any:
    events("report", **_progress_facts(progress))
    return None if on_progress is None else on_progress(progress)


def _progress_facts(progress: Collected) -> dict[str, Any]:
    names = ("episodes", "steps", "new_episodes", "new_steps", "seconds", "bytes", "speeds", "returns", "restarts")
    return {name: getattr(progress, name) for name in (*names, "stopped")}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings as JSON restores them. Raises InvalidOption."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings))
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"recording options: not JSON: {error}; pass plain values") from error
    return plain
