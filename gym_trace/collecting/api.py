"""gym_trace.collect: episodes recorded by several processes."""

from __future__ import annotations

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

from gym_trace.collecting.policies import policy_maker
from gym_trace.collecting.resuming import await_writers, check_same, finished, settings_of
from gym_trace.collecting.rollout import directory_bytes, new_root_seed
from gym_trace.collecting.supervisor import Collected, Limits, Supervisor
from gym_trace.collecting.worker import Setup
from gym_trace.errors import InvalidOption
from gym_trace.format.directory import new_writer_id
from gym_trace.format.facts import add_facts, checked
from gym_trace.processes.backend import Backend
from gym_trace.processes.local import LocalProcesses, end_if_unguarded, portable
from gym_trace.processes.run_log import Events, machine, take_in
from gym_trace.recording.options import opened_directory
from gym_trace.recording.provenance import provenance_of
from gym_trace.storage.local import LocalStorage, refuse_url


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
    """Records episodes of an environment with several processes into one trace.

    Episode k has the seed that ``seed`` and k give, whoever records it: the same episodes come of any number of
    workers, also of such as are killed and of a run that is interrupted and resumed. What a dead worker has not saved
    whole is recorded again by another one. Of its open episode the trace keeps what there is, as "lost", in sealed
    batches once the run is over.

    Processes are started afresh, so a script that calls this needs ``if __name__ == "__main__":`` around it.

    Args:
        make_env: makes an environment in a worker; a function of a module, or anything that cloudpickle can carry
            there, such as a lambda.
        policy: see policies.policy_maker. None: random actions.
        directory: where the trace goes; None: a fresh directory under the system's temporary one.
        episodes: complete ones to record. steps, seconds, bytes: end soon after so many. The first limit that is
            met ends the run; one is needed.
        workers: how many processes.
        num_envs: environments that each worker steps side by side, each with a policy of its own; None: one.
        seed: 0 or more; None takes one from the system's entropy.
        resume: go on with a run that was interrupted in this directory.
        on_exist: if the directory holds a trace and this does not resume: "error", "append" or "replace".
        stall_timeout: seconds without a sign of life, after which a worker is killed and started again; one that is
            starting has 60 at least, whatever it imports.
        max_restarts: of all workers together. After that a worker that dies is given up; and so is one that dies again
            and again before it has finished an episode.
        cpus: processors to keep the workers to, one each, in turn.
        niceness: added to that of this process.
        on_progress: called twice a second with what there is; a truthy result ends the run.
        backend: where workers run; None: processes of this machine.
        describe: plain data that says what make_env makes; a run is only resumed with the same.
        command: the name of who collects, which the trace says under provenance, with that of the policy.
        argv: whether it says the whole command line, too. git_diff: whether it has the uncommitted changes of the git
            repository that this is run in. Both may hold what is not to be published.
        facts: what the trace is to say of itself (see Trace.facts), beside what it says already.
        recording: other arguments of TraceRecordingWrapper, but for filters, videos and uid. metadata has "seed" and
            "run" besides; one that is no map, or has such keys itself, is under "given" there.

    Raises:
        InvalidOption, TraceExists
    """
    end_if_unguarded()
    limits = Limits(episodes, steps, seconds, bytes)
    if limits == Limits():
        raise InvalidOption("collect needs a limit: pass episodes=, steps=, seconds= or bytes=")
    for name, limit in asdict(limits).items():
        if limit is not None and not limit >= 0:
            raise InvalidOption(f"{name}={limit!r}: pass 0 or more")
    for name, count in (("workers", workers), ("num_envs", num_envs)):
        if count is not None and count < 1:
            raise InvalidOption(f"{name}={count!r}: pass 1 or more")
    if num_envs is not None and not hasattr(vector, "AutoresetMode"):
        raise InvalidOption(f"num_envs={num_envs!r} needs gymnasium 1.1 or newer: pip install -U gymnasium")
    if refused := sorted({"episode_filter", "frame_filter", "reward_classes", "uid", "video"} & set(recording)):
        raise InvalidOption(f"{refused[0]}: not with collect, which records all of every episode, each of them once")
    facts = checked(facts or {})
    if directory is not None:
        refuse_url(directory)
        directory = Path(directory).absolute()
    before = settings_of(directory) if resume and directory is not None else None
    if resume and before is None:
        raise InvalidOption(f"{directory}: there is no run to resume; start one without resume")
    if seed is None:
        seed = new_root_seed() if before is None else int(before["seed"])
    run = secrets.token_hex(8) if before is None else str(before["run"])
    make_policy = policy_maker(policy)
    settings = _plain(
        {"run": run, "seed": seed, "policy": make_policy.name, "environment": describe, "recording": recording}
    )
    carried = portable("make_env", make_env), portable("policy", make_policy)
    if before is not None:
        check_same(before, settings)
    with opened_directory(directory, "append" if resume else on_exist) as place:
        place.mkdir(parents=True, exist_ok=True)
        events = Events(place)
    try:
        add_facts(LocalStorage(place), facts)
        if resume:
            await_writers(place, run)
        done = finished(place, run, seed) if resume else {}
        origin = provenance_of(command, make_policy.name, argv, git_diff, make_env)
        about = {"provenance": origin, **machine()}
        events("start", settings=settings, limits=asdict(limits), workers=workers, resumed=len(done), **about)
        metadata = {**_by_name(recording.pop("metadata", None)), "seed": seed, "run": run}
        setup = Setup(
            *carried,
            os.fspath(place),
            "",
            seed,
            recording={**recording, "metadata": metadata},
            num_envs=num_envs,
            provenance=origin,
        )
        supervisor = Supervisor(
            LocalProcesses() if backend is None else backend,
            setup,
            workers,
            limits,
            done,
            new_uid=lambda number: f"{new_writer_id()}-w{number}",
            on_disk=lambda uid: finished(place, run, seed, uid),
            bytes_on_disk=lambda: directory_bytes(place) - events.size(),
            event=events,
            stall_timeout=stall_timeout,
            max_restarts=max_restarts,
            cpus=None if cpus is None else list(cpus),
            niceness=niceness,
        )
        try:
            result = supervisor.run(partial(_report, events, on_progress))
        finally:
            take_in(place, events)
        events("end", **_facts(result), failed={str(k): why for k, why in result.failed.items()})
        return result
    finally:
        events.close()


def _report(events: Events, on_progress: Callable[[Collected], Any] | None, progress: Collected) -> Any:
    events("report", **_facts(progress))
    return None if on_progress is None else on_progress(progress)


def _by_name(given: Any) -> dict[str, Any]:
    """The metadata that somebody gave, as keys of a map that has "seed" and "run" as well; otherwise under "given"."""
    if given is None:
        return {}
    plain = isinstance(given, dict) and not {"seed", "run"} & set(given)
    return given if plain else {"given": given}


def _facts(progress: Collected) -> dict[str, Any]:
    names = ("episodes", "steps", "new_episodes", "new_steps", "seconds", "bytes", "speeds", "returns", "restarts")
    return {name: getattr(progress, name) for name in (*names, "stopped")}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back. Raises InvalidOption."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings))
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"collect takes options that JSON has, so that a run can be resumed: {error}") from error
    return plain
