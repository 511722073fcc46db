"""Pytest fixtures: golden_trace records once, then verifies bit for bit in every run; audit audits an environment."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # pytest loads this module in every project, so the library is imported on first use
    import gymnasium

    from gym_trace.playback.trace import Trace
    from gym_trace.results import AuditReport
    from gym_trace.tools.replay.resimulate import Verdict

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
_FOLDER = "golden"  # next to the test file
_MAX_DESCRIBED = 3  # differing episodes in the message of a failure
_REQUESTED = "golden"  # metadata key: the settings that the test requested
_UNKNOWN = "an unknown value"
_WRITER = "golden"  # constant writer id: a new recording has the same file names

__all__ = ["GoldenTrace", "audited"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gym-trace")
    group.addoption("--golden-update", action="store_true", help="Record golden traces again.")


@pytest.fixture
def golden_trace(request: pytest.FixtureRequest) -> GoldenTrace:
    """Record an environment once, and verify it against this recording afterwards; see GoldenTrace.__call__."""
    folder = Path(request.path).parent / _FOLDER
    return GoldenTrace(folder, bool(request.config.getoption("--golden-update")))


@pytest.fixture
def audit() -> Callable[..., AuditReport]:
    """Audit an environment, and fail the test if it does not keep its promises; see audited()."""
    return audited


def audited(
    make_env: MakeEnv | str,
    *,
    require: Collection[str] | None = None,
    episodes: int = 3,
    steps: int = 50,
    seed: int = 0,
) -> AuditReport:
    """Audit an environment; the fixture audit calls this. Fails the test if claims do not hold, and names them.

    Args:
        make_env: function that makes the environment, or an environment id.
        require: names of claims that must hold and must have been tried; None: whatever can be tried must hold.
        episodes, steps, seed: see gym_trace.audit().

    Examples:
        >>> def test_my_environment(audit):  # the fixture is this function
        ...     audit("CartPole-v1", episodes=3, require=["deterministic"])
    """
    __tracebackhide__ = True
    from gym_trace import audit

    report = audit(make_env, episodes=episodes, steps=steps, seed=seed, require=require or ())
    failed = report.failed if require is not None else [claim for claim in report.claims if claim.verdict == "no"]
    if failed:
        lines = [f"{claim.name}: {claim}" for claim in failed]
        pytest.fail("\n".join([f"audit of {report.environment}", *lines]), pytrace=False)
    return report


class GoldenTrace:
    """Checks environments against the golden traces of one folder.

    Examples:
        >>> def test_cartpole(golden_trace):
        ...     golden_trace("cartpole", "CartPole-v1", episodes=3)
    """

    def __init__(self, folder: Path, update: bool):
        self._folder, self._update = folder, update

    def __call__(
        self,
        name: str,
        make_env: MakeEnv | str,
        policy: Callable[[Any], Any] | None = None,
        *,
        episodes: int = 3,
        steps: int | None = None,
        seed: int = 0,
        atol: float = 0.0,
        rtol: float = 0.0,
        tolerances: Mapping[str, float] | None = None,
        ignore: Collection[str] = (),
        record_infos: bool = False,
    ) -> Trace:
        """Verify an environment against the trace golden/NAME next to the test file; return that trace.

        Fails the test if the environment or the policy differs from the recording; reports the first difference of
        each episode and the drift of each column. Also fails if the trace was recorded with another action space or
        other settings than the test requests. `pytest --golden-update` records the trace.

        Args:
            name: name of the directory.
            make_env: function that makes the environment, or an environment id.
            policy: function of an observation that returns an action; must act as recorded. None: random actions,
                chosen when recording.
            episodes, steps, seed: limits and seed of the recording; steps also ends the last episode early.
            atol, rtol, tolerances, ignore: see gym_trace.verify_trace().
            record_infos: also record and compare infos.
        """
        __tracebackhide__ = True
        from gym_trace import open_trace, verify_trace

        if name in ("", ".", "..") or Path(name).name != name:
            pytest.fail(f"golden trace {name!r}: not a directory name", pytrace=False)
        if (episodes if steps is None else steps) < 1:
            pytest.fail(f"golden trace {name!r}: nothing to record; pass 1 episode or step, or more", pytrace=False)
        make = _maker(make_env)
        target = self._folder / name
        limits = {"episodes": None if steps is not None else episodes, "steps": steps, "seed": seed}
        requested = {**limits, "record_infos": record_infos}
        if self._update:
            self._record(target, make, policy, limits, requested)
        elif not target.is_dir():
            pytest.fail(f"{target}: no golden trace; record it with pytest --golden-update", pytrace=False)
        trace = open_trace(target)
        if differences := list(_differing_settings(trace, requested, make)):
            hint = "if intended, record it again: pytest --golden-update"
            pytest.fail(
                "\n".join([f"{target}: recorded with other settings than the test requests", *differences, hint]),
                pytrace=False,
            )
        settings: Any = {"atol": atol, "rtol": rtol, "tolerances": tolerances, "ignore": ignore}
        verdicts = list(verify_trace(trace, make_env=make, **settings))
        wrong = [verdict for verdict in verdicts if not verdict.matches]
        if wrong:
            pytest.fail("\n".join(_report(trace, wrong)), pytrace=False)
        if policy is not None and not self._update:
            with tempfile.TemporaryDirectory() as directory:
                again = Path(directory) / name
                self._record(again, make, policy, limits, requested)
                if problems := list(_differing_actions(trace, open_trace(again))):
                    pytest.fail("\n".join([f"{target}: the policy acts differently", *problems]), pytrace=False)
        return trace

    def _record(self, target: Path, make: MakeEnv, policy: Any, limits: Mapping[str, Any], requested: Any) -> None:
        from gym_trace import TraceRecordingWrapper, record_episodes
        from gym_trace.storage.staging import replaced_directory

        options: Any = {"record_infos": requested["record_infos"], "metadata": {_REQUESTED: requested}}
        with replaced_directory(target) as fresh:
            env = TraceRecordingWrapper(make(), fresh, uid=_WRITER, **options)
            try:
                record_episodes(env, policy=policy, **limits)
            finally:
                env.close()


def _maker(make_env: MakeEnv | str) -> MakeEnv:
    if callable(make_env):
        return make_env
    import gymnasium

    return lambda: gymnasium.make(make_env)


def _differing_settings(trace: Trace, requested: Mapping[str, Any], make: MakeEnv) -> Iterator[str]:
    """Yield a line for each setting, or the action space, that differs between the recording and the test."""
    import numpy as np

    from gym_trace.envs.seeding import episode_seed
    from gym_trace.envs.spaces import describe, restore
    from gym_trace.playback.episode_index import index_of

    metadata = trace.metadata
    recorded_settings = metadata.get(_REQUESTED, {}) if isinstance(metadata, dict) else {}
    for name, value in requested.items():
        if recorded_settings.get(name, _UNKNOWN) != value:
            yield f"{name}: recorded with {recorded_settings.get(name, _UNKNOWN)}, the test requests {value}"
    table = trace.episodes
    counts = {"episodes": len(table), "steps": int(table["steps"].sum())}
    for name, number in counts.items():
        if requested[name] not in (None, number):
            yield f"{name}: the trace has {number}, the test requests {requested[name]}"
    outcomes = table["outcome"] if requested["steps"] is None else table["outcome"][:-1]
    for index in np.flatnonzero(~np.isin(outcomes, ("terminated", "truncated"))).tolist():
        yield f"episode {index}: incomplete"
    if table["seed"].tolist() != [episode_seed(requested["seed"], number) for number in range(len(table))]:
        yield f"seed: the recorded seeds do not follow from {requested['seed']}"
    env = make()
    try:
        here, recorded = describe(env.action_space), index_of(trace).readers[0].schema["action_space"]
    finally:
        env.close()
    if here != recorded:
        spaces = [restore(plain, stand_in=True) for plain in (recorded, here)]
        yield "action space: recorded {}, is {}".format(*spaces)


def _report(trace: Trace, wrong: list[Verdict]) -> Iterator[str]:
    """Yield the lines of a failure: the first difference of each episode, and the divergence of each leaf."""
    yield f"{trace.directory}: {len(wrong)} of {len(trace)} episodes differ from the recording"
    for verdict in wrong[:_MAX_DESCRIBED]:
        yield f"episode {verdict.index} {verdict.difference or verdict.reason or verdict.verdict}"
        yield from (f"    {divergence}" for divergence in verdict.divergences)
    if len(wrong) > _MAX_DESCRIBED:
        yield f"and {len(wrong) - _MAX_DESCRIBED} more episodes"
    yield "if intended, record them again: pytest --golden-update"


def _differing_actions(recorded: Trace, again: Trace) -> Iterator[str]:
    from gym_trace import diff_traces

    others = ("observations", "rewards", "terminations", "truncations", "infos", "annotations", "outcome")
    for found in diff_traces(recorded, again, ignore=others):
        if found.difference is not None:
            yield f"episode {found.index} {found.difference}"
