"""Audit an environment or a trace of it."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from gym_trace.envs.agents import JointEnv, is_of_agents
from gym_trace.envs.make import call_factory
from gym_trace.envs.seeding import episode_seed
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, TraceError, raise_if_of_signal, warn
from gym_trace.playback.episode_index import index_of, whole_of
from gym_trace.playback.trace import Trace, TraceLike, as_trace
from gym_trace.printable import error_text
from gym_trace.recording.processes.local import end_if_unguarded, portable
from gym_trace.storage.remote.address import is_url
from gym_trace.tools.audit.arranged import InLane, Make
from gym_trace.tools.audit.claims import Audit
from gym_trace.tools.audit.reference import Script
from gym_trace.tools.audit.report import AuditReport, Claim, check_names
from gym_trace.tools.replay.compare import Comparison
from gym_trace.tools.replay.lanes import Lane, inseparable, lanes_of
from gym_trace.tools.replay.making import Making, made_env
from gym_trace.tools.replay.resimulate import LaneReplay


def audit(
    env: str | Make | TraceLike,
    *,
    episodes: int = 8,
    steps: int = 200,
    seed: int = 0,
    repeats: int = 2,
    make_env: Make | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    imports: Sequence[str] = (),
    trust: bool = False,
    require: Collection[str] = (),
    on_claim: Callable[[Claim], Any] | None = None,
) -> AuditReport:
    """Find out which promises an environment keeps: determinism, seeding, a reset that forgets, and more.

    Episodes are recorded once and played again in other arrangements: in a new environment, in a fresh process, alone
    from their seeds, in another order, after cut episodes, in a vector environment, after a saved state, and so on.
    Observations, rewards and flags are compared bit for bit; infos are not. The guide "Is my environment what it says?"
    explains each claim. During the audit the global generators of random, NumPy and PyTorch are seeded, and the modules
    of the environment see another clock; all is restored afterwards.

    Args:
        env: an environment id; a function that makes an environment, also of dm_env, PettingZoo, or a vector
            environment; or a trace, a view, or the directory of one, whose environment, seeds and actions are used.
        episodes: number of episodes.
        steps: most steps of an episode; a longer one is truncated.
        seed: root of the seeds of episodes with random actions.
        repeats: how often everything is played again for the claim "deterministic".
        make_env, env_kwargs, trust: for a trace, as for verify_trace(); env_kwargs also with an id.
        imports: modules to import first, such as modules that register environments.
        require: names of claims that must hold, such as "seeded": AuditReport.failed has those that do not, or that
            could not be tried.
        on_claim: called with each claim once it is known.

    Raises:
        EnvironmentUnavailable: the environment cannot be made; says why.
        InvalidOption, TraceNotFound, CorruptTrace
        RecordingError: the disk for temporary files is full.

    Examples:
        >>> report = gym_trace.audit("CartPole-v1")
        >>> report["deterministic"].verdict, report["stateless-reset"].verdict
        ('yes', 'yes')
    """
    check_names(require)
    for module in imports:
        importlib.import_module(module)
    name, make, scripts = _subject(env, episodes, steps, seed, make_env, env_kwargs or {}, trust)
    if min(episodes, steps, repeats) < 1:
        raise InvalidOption(f"episodes={episodes}, steps={steps}, repeats={repeats}: pass 1 or more")
    end_if_unguarded()
    single = Single(make, steps)
    carried: Make | str
    try:
        carried = portable("make_env", single)
    except InvalidOption as error:
        carried = str(error)
    claims = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="gym-trace-audit-") as directory:
        warnings.simplefilter("ignore")
        attempt = Audit(single, carried, scripts, steps, directory, repeats, imports)
        for claim in attempt.claims():
            claims.append(claim)
            if on_claim is not None:
                on_claim(claim)
    day = datetime.now(timezone.utc).date().isoformat()
    return AuditReport(name, day, attempt.versions, tuple(claims), tuple(require))


def _subject(
    env: Any,
    episodes: int,
    steps: int,
    seed: int,
    make_env: Make | None,
    env_kwargs: Mapping[str, Any],
    trust: bool,
) -> tuple[str, Make, list[Script]]:
    """Return the name of what is audited, a function that makes it, and what is played."""
    is_trace = isinstance(env, (Trace, os.PathLike)) or not (callable(env) or isinstance(env, str))
    if is_trace or (isinstance(env, str) and (os.path.isdir(env) or is_url(env))):
        return _of_trace(as_trace(env), episodes, steps, seed, Making(trust, env_kwargs, make_env))
    if make_env is not None or trust:
        raise InvalidOption("make_env and trust: only for a trace; pass the function itself")
    scripts = [Script(episode_seed(seed, number), steps) for number in range(episodes)]
    if isinstance(env, str):
        return env, partial(_made_by_id, env, dict(env_kwargs)), scripts
    if env_kwargs:
        raise InvalidOption("env_kwargs: only for an id or a trace; pass functools.partial(make_env, ...)")
    name = getattr(getattr(env, "func", env), "__name__", type(env).__name__)  # func: of a functools.partial
    return str(name), env, scripts


def _made_by_id(env_id: str, env_kwargs: dict[str, Any], **render_mode: Any) -> Any:
    try:
        return call_factory(gymnasium.make, {"id": env_id, **env_kwargs, **render_mode})
    except gymnasium.error.Error as error:
        raise EnvironmentUnavailable(f"{env_id}: {error}") from error


def _of_trace(trace: Trace, episodes: int, steps: int, seed: int, making: Making) -> tuple[str, Make, list[Script]]:
    chosen = set(index_of(trace).whole_indices.tolist())
    for lane in lanes_of(whole_of(trace)):
        whole = [i for i, index in enumerate(lane.indices) if index in chosen and _is_playable(whole_of(trace)[index])]
        if not whole:
            continue
        if making.make_env is None and (reason := inseparable(lane.writer)):
            raise EnvironmentUnavailable(reason)
        replay = LaneReplay(whole_of(trace), lane, partial(made_env, lane, making, None), Comparison(), making.trust)
        scripts = []
        for position in whole[:episodes]:
            episode = whole_of(trace)[lane.indices[position]]
            own_seed = episode_seed(seed, position) if episode.seed is None else episode.seed
            scripts.append(Script(own_seed, min(len(episode), steps), episode.actions, replay.options(episode)))
        for damage in trace.damage[:1]:
            warn(f"{damage.error()}; the audit plays episodes that are left")
        name = lane.writer.about.environment.get("id") or trace.directory.name
        return str(name), partial(_made_for, lane, making), scripts
    for damage in trace.damage:
        raise damage.error()
    raise EnvironmentUnavailable("the trace has no episode with steps from its reset on, none to play")


def _made_for(lane: Lane, making: Making, render_mode: str | None = None) -> Any:
    return made_env(lane, making, render_mode)


def _is_playable(episode: Any) -> bool:
    return len(episode) > 0 and not episode.first_step


@dataclass(frozen=True)
class Single:
    """Makes an environment as a single one: all agents, or one lane of a vector environment, with a limit of steps."""

    make: Make
    steps: int

    def __call__(self, salt: int = 0, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Make it. salt: seed of what other lanes do. Raises EnvironmentUnavailable."""
        try:
            env = call_factory(self.make, {}, render_mode)
        except TraceError:
            raise
        except (Exception, SystemExit) as error:  # the user's code
            raise_if_of_signal(error)
            raise EnvironmentUnavailable(f"it cannot be made: {error_text(error)}") from error
        if is_of_agents(env):
            env = JointEnv(env)
        elif isinstance(env, gymnasium.vector.VectorEnv):
            env = InLane(env, 0, salt)
        if render_mode not in (None, getattr(env, "render_mode", None)):
            env.close()
            raise EnvironmentUnavailable(f"the function that makes it takes no render_mode={render_mode!r}")
        return TimeLimit(env, self.steps)
