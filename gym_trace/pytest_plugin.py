"""Pytest fixture golden_trace: record once, then verify bit for bit in every run of the tests."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:  # pytest loads this module in every project, so it imports the library when it is used
    import gymnasium

    from gym_trace.data.values import Array
    from gym_trace.playback.trace import Trace
    from gym_trace.tools.replay.resimulate import Verdict

MakeEnv = Callable[[], "gymnasium.Env[Any, Any]"]
_FOLDER = "golden"  # next to the test file
_TOLD = 3  # differing episodes that a failure describes
_ASKED = "golden"  # in the metadata: what the test asked for
_UNKNOWN = "an unknown value"
_WRITER = "golden"  # id of the writer: files keep their names from one recording to the next

__all__ = ["GoldenTrace"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gym-trace")
    group.addoption("--golden-update", action="store_true", help="Record golden traces again.")


@pytest.fixture
def golden_trace(request: pytest.FixtureRequest) -> GoldenTrace:
    """Record an environment once, and verify it against this recording afterwards; see GoldenTrace.__call__."""
    folder = Path(request.path).parent / _FOLDER
    return GoldenTrace(folder, bool(request.config.getoption("--golden-update")))


class GoldenTrace:
    """Checks environments against the golden traces of one folder."""

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
        """Verify an environment against the trace golden/NAME beside the test; return that trace.

        Fails the test if the environment or the policy does anything else than recorded, and names the first
        difference of each episode and the drift of each column. It also fails if the trace was recorded with another
        action space, or with other settings than the test asks for. `pytest --golden-update` records the trace.

        Args:
            name: of the directory.
            make_env: makes the environment, or its id.
            policy: called with an observation, returns an action; it has to act as recorded. None: random actions,
                which are recorded once.
            episodes, steps, seed: what to record; steps also ends the last episode early.
            atol, rtol, tolerances, ignore: see gym_trace.verify_trace().
            record_infos: record and compare infos, too.
        """
        __tracebackhide__ = True
        from gym_trace import open_trace, verify_trace

        if name in ("", ".", "..") or Path(name).name != name:
            pytest.fail(f"golden trace {name!r}: not a name of a directory", pytrace=False)
        if (episodes if steps is None else steps) < 1:
            pytest.fail(f"golden trace {name!r}: nothing to record; pass 1 episode or step, or more", pytrace=False)
        make = _maker(make_env)
        target = self._folder / name
        limits = {"episodes": None if steps is not None else episodes, "steps": steps, "seed": seed}
        asked = {**limits, "record_infos": record_infos}
        if self._update:
            self._record(target, make, policy, limits, asked)
        elif not target.is_dir():
            pytest.fail(f"{target}: no golden trace; record it with pytest --golden-update", pytrace=False)
        trace = open_trace(target)
        if others := list(_asked_otherwise(trace, asked, make)):
            hint = "if this is meant: pytest --golden-update records it again"
            pytest.fail("\n".join([f"{target}: does not prove what the test asks for", *others, hint]), pytrace=False)
        settings: Any = {"atol": atol, "rtol": rtol, "tolerances": tolerances, "ignore": ignore}
        verdicts = list(verify_trace(trace, make_env=make, **settings))
        wrong = [verdict for verdict in verdicts if not verdict.matches]
        if wrong:
            pytest.fail("\n".join(_report(trace, wrong, make)), pytrace=False)
        if policy is not None and not self._update:
            with tempfile.TemporaryDirectory() as place:
                again = Path(place) / name
                self._record(again, make, policy, limits, asked)
                if problems := list(_differing_actions(trace, open_trace(again))):
                    pytest.fail("\n".join([f"{target}: the policy acts otherwise", *problems]), pytrace=False)
        return trace

    def _record(self, target: Path, make: MakeEnv, policy: Any, limits: Mapping[str, Any], asked: Any) -> None:
        from gym_trace import TraceRecordingWrapper, record_episodes
        from gym_trace.storage.staging import replaced_directory

        options: Any = {"record_infos": asked["record_infos"], "metadata": {_ASKED: asked}}
        with replaced_directory(target) as fresh:
            env = TraceRecordingWrapper(make(), fresh, uid=_WRITER, **options)
            try:
                record_episodes(env, policy=policy, **limits)
            finally:
                env.close()


class _Drift(NamedTuple):
    """Differences of one column in an episode."""

    column: str
    steps: int  # number of steps that differ
    first: int
    largest: float  # NaN for values that are not numbers


def _maker(make_env: MakeEnv | str) -> MakeEnv:
    if callable(make_env):
        return make_env
    import gymnasium

    return lambda: gymnasium.make(make_env)


def _asked_otherwise(trace: Trace, asked: Mapping[str, Any], make: MakeEnv) -> Iterator[str]:
    """Yield a line for each setting of the recording that is not the one asked for, and for another action space."""
    import numpy as np

    from gym_trace.envs.seeding import episode_seed
    from gym_trace.envs.spaces import describe, restore

    metadata = trace.metadata
    before = metadata.get(_ASKED, {}) if isinstance(metadata, dict) else {}
    for name, value in asked.items():
        if before.get(name, _UNKNOWN) != value:
            yield f"{name}: recorded with {before.get(name, _UNKNOWN)}, the test asks for {value}"
    table = trace.episodes
    there = {"episodes": len(table), "steps": int(table["steps"].sum())}
    for name, number in there.items():
        if asked[name] not in (None, number):
            yield f"{name}: the trace has {number}, the test asks for {asked[name]}"
    whole = table["outcome"] if asked["steps"] is None else table["outcome"][:-1]
    for index in np.flatnonzero(~np.isin(whole, ("terminated", "truncated"))).tolist():
        yield f"episode {index}: is not whole"
    if table["seed"].tolist() != [episode_seed(asked["seed"], number) for number in range(len(table))]:
        yield f"seed: the episodes have others than those of {asked['seed']}"
    env = make()
    try:
        here, recorded = describe(env.action_space), trace.readers[0].schema["action_space"]
    finally:
        env.close()
    if here != recorded:
        spaces = [restore(plain, stand_in=True) for plain in (recorded, here)]
        yield "action space: recorded {}, is {}".format(*spaces)


def _report(trace: Trace, wrong: list[Verdict], make: MakeEnv) -> Iterator[str]:
    """Yield the lines of a failure: the first difference of each episode, and the drift of its columns."""
    yield f"{trace.directory}: {len(wrong)} of {len(trace)} episodes are not as recorded"
    for verdict in wrong[:_TOLD]:
        yield f"episode {verdict.index} {verdict.difference or verdict.reason or verdict.verdict}"
        for drift in _drifts(trace, verdict.index, make) if verdict.difference is not None else ():
            far = "" if drift.largest != drift.largest else f", by up to {drift.largest:.3g}"
            yield f"    {drift.column}: differs at {drift.steps} steps, from step {drift.first} on{far}"
    if len(wrong) > _TOLD:
        yield f"and {len(wrong) - _TOLD} more episodes"
    yield "if this is meant: pytest --golden-update records them again"


def _drifts(trace: Trace, index: int, make: MakeEnv) -> list[_Drift]:
    """Play the actions of an episode again; compare all of it, by column. [] if the environment raises an error."""
    import numpy as np

    from gym_trace.data.values import row_of

    episode = trace[index]
    layout = trace.writer_of(index).layouts.observations
    rows: dict[str, list[Any]] = {"rewards": []}
    names = ["/".join(map(str, leaf.path)) for leaf in layout.leaves()]
    env = make()
    try:
        observation, _ = env.reset(seed=episode.seed, options=episode.options)
        told = [observation]
        for step in range(len(episode)):
            observation, reward, terminated, truncated, _ = env.step(row_of(episode.actions, step))
            told.append(observation)
            rows["rewards"].append(reward)
            if terminated or truncated:
                break
        for observation in told:
            for name, value in zip(names, layout.split(observation)):
                rows.setdefault(name, []).append(value)
    except Exception:  # an error of the environment, which verify_trace has reported
        return []
    finally:
        env.close()
    recorded = {"rewards": episode.rewards, **dict(zip(names, layout.split(episode.observations)))}
    found = []
    for name, seen in rows.items():
        first = -1 if name.startswith("observations") else 0
        drift = _drift(name, first, recorded[name][: len(seen)], [np.asarray(value) for value in seen])
        if drift is not None:
            found.append(drift)
    return found


def _drift(name: str, first: int, recorded: Array, seen: list[Array]) -> _Drift | None:
    import numpy as np

    steps, largest = [], 0.0
    for step, (one, other) in enumerate(zip(recorded, seen), first):
        one = np.asarray(one)
        if one.shape == other.shape and one.astype(other.dtype).tobytes() == other.tobytes():
            continue
        steps.append(step)
        if one.shape == other.shape and one.dtype.kind in "biuf" and other.dtype.kind in "biuf":
            far = np.abs(one.astype(float) - other.astype(float))
            largest = max(largest, float(far[np.isfinite(far)].max(initial=0.0)))
        else:
            largest = float("nan")
    return _Drift(name, len(steps), steps[0], largest) if steps else None


def _differing_actions(recorded: Trace, again: Trace) -> Iterator[str]:
    from gym_trace import diff_traces

    others = ("observations", "rewards", "terminations", "truncations", "infos", "annotations", "outcome")
    for found in diff_traces(recorded, again, ignore=others):
        if found.difference is not None:
            yield f"episode {found.index} {found.difference}"
