"""The audit: it finds each defect and names the right reason, and has nothing against sound environments."""

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import defects
import gymnasium
import numpy as np
import pytest

import gym_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.results import AuditReport
from gym_trace.tools.audit import claims
from gym_trace.tools.audit.arranged import Arranged
from gym_trace.tools.audit.report import CLAIMS
from gym_trace.tools.audit.world import World

SIZE = {"episodes": 3, "steps": 40}
NEEDS_PROCESS = ("fresh-process",)
# By defect: claims that do not hold, each with a part of its text; then claims that the defect keeps from being tried.
UNTRIED = [*list(CLAIMS)[5:8], *list(CLAIMS)[9:]]
EXPECTED: dict[str, tuple[dict[str, str], list[str]]] = {
    "Walk": ({}, []),
    "FixedStart": ({}, []),
    "Fixed": ({}, []),
    "Endless": ({}, []),
    "StateOfNumbers": ({}, ["state"]),
    "FromPool": ({"seeded": "seeds are ignored", "stateless-reset": "alone, in a new environment; first seen in "
                  "episode 1 at the reset, observations[0]"}, ["state"]),
    "NoisyPool": ({"seeded": "the seed does not decide the start", "stateless-reset": "at the reset"}, ["state"]),
    "CountsResets": ({"stateless-reset": "alone, in a new environment"}, ["state"]),
    "GlobalNumPy": ({"deterministic": "see own-randomness", "own-randomness": "episode 0 at step 0"},
                    ["lanes", "state"]),
    "GlobalRandomStart": ({"seeded": "a reset without a seed after reset("}, []),
    "SeedsGlobals": ({"own-randomness": "at step 0"}, ["lanes", "state"]),
    "OwnGenerator": ({"deterministic": "perhaps an unseeded generator", "seeded": "reset(seed=0) starts differently"},
                     UNTRIED),
    "AtomicSums": ({"deterministic": "threads or a GPU"}, ["seeded", *UNTRIED]),
    "IgnoresSeed": ({"seeded": "seeds are ignored", "stateless-reset": "alone"}, ["state"]),
    "FirstSeedOnly": ({"seeded": "the second reset ignores its seed", "stateless-reset": "alone"}, ["state"]),
    "SeedZero": ({"seeded": "reset(seed=0) starts differently in two new environments"}, []),
    "Modulo": ({"seeded": "modulo 50: seeds 1 and 51 start alike"}, []),
    "LargeModulo": ({"seeded": "modulo 65536: seeds 1 and 65537 start alike"}, []),
    "RepeatsSeed": ({"seeded": "a reset without a seed repeats the start"}, []),
    "WarmStart": ({"stateless-reset": "episode 1 at step 0"}, ["state"]),
    "KeepsVelocity": ({"stateless-reset": "episode 1 at the reset, observations[1]"}, ["state"]),
    "ResetsAtTheEnd": ({"stateless-reset": "after an episode that was cut; first seen in episode 0 at step 0, rewards"},
                       ["state"]),
    "Drifts": ({"stateless-reset": "alone"}, ["state"]),
    "WallClock": ({"deterministic": "time-independent", "time-independent": "episode 0 at step 0"}, ["lanes", "state"]),
    "ChangesAction": ({"action-unchanged": "action[0]: given"}, []),
    "OneBuffer": ({"fresh-observations": "it changed the observation that reset had returned"}, ["lanes"]),
    "LeavesSpace": ({"in-space": "its space -2.0 to 2.0"}, ["lanes"]),
    "OtherDtype": ({"in-space": "observations is float64, its space float32"}, ["lanes"]),
    "NotFinite": ({"in-space": "the reward is nan"}, ["lanes"]),
    "RenderDraws": ({"render-pure": "episode 0 at step 0"}, []),
    "SharedGenerator": ({"lanes": "in lane 0 of 3, NextStep"}, ["state", "deepcopy"]),
    "CopySharesGenerator": ({"deepcopy": "first seen in episode 0 at step"}, []),
    "CopyForgets": ({"deepcopy": "first seen in episode 0 at step"}, []),
    "StateForgets": ({"state": "first seen in episode 0 at step"}, []),
    "Raises": ({"runs": "raised ZeroDivisionError: the end of the world"}, []),
}  # fmt: skip


@pytest.fixture(autouse=True)
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests need no fresh processes, which are slow."""

    def none(*_: object) -> None:
        raise EnvironmentUnavailable("no processes in this test")

    if "forked_workers" not in request.fixturenames:
        monkeypatch.setattr(claims, "in_fresh_process", none)


def verdicts(report: AuditReport, verdict: str) -> dict[str, str]:
    return {claim.name: claim.text for claim in report.claims if claim.verdict == verdict}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_defect_is_found_for_the_right_reason(name: str) -> None:
    false, untried = EXPECTED[name]
    report = gym_trace.audit(getattr(defects, name), **SIZE)
    found = verdicts(report, "no")
    assert list(found) == list(false)
    for claim, text in false.items():
        assert text in found[claim]
    assert sorted(verdicts(report, "not tried")) == sorted({*untried, *NEEDS_PROCESS})


@pytest.mark.usefixtures("forked_workers")
def test_shared_state_of_instances_is_not_called_chance() -> None:
    report = gym_trace.audit(defects.SharesDefault, **SIZE)
    found = verdicts(report, "no")
    assert list(found) == ["deterministic", "lanes"]
    assert "two fresh processes agree, so instances in one process share state" in found["deterministic"]
    assert "in a second environment of this process" in found["lanes"]


@pytest.mark.parametrize("seed", [0, 4])  # in a row without a seed, or of other seeds, its starts are equal
def test_few_kinds_of_starts_are_not_taken_for_ignored_seeds(seed: int) -> None:
    assert not verdicts(gym_trace.audit(defects.RareStart, seed=seed, episodes=1, steps=5), "no")


def test_a_cache_that_seeds_share_shows_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def fresh(_: int, work: Callable[..., Any], make: Any, modules: object, *paths: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(defects.CachesStarts, "cache", {})
            return work(Arranged(make, World()), *paths)

    monkeypatch.setattr(claims, "in_fresh_process", fresh)
    found = verdicts(gym_trace.audit(defects.CachesStarts, episodes=6, steps=5), "no")
    assert list(found) == ["stateless-reset"]
    assert found["stateless-reset"].startswith("in reverse order, in a fresh process; first seen in episode")


@pytest.mark.usefixtures("forked_workers")
def test_a_lambda_is_compared_with_a_fresh_process() -> None:
    report = gym_trace.audit(lambda: defects.Walk(), episodes=1, steps=5)
    assert str(report["fresh-process"]) == "yes: 1 episode, 5 steps"


@pytest.mark.usefixtures("forked_workers")
def test_the_order_of_a_set_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order(hash_seed: int, work: Callable[..., Any], make: Any, _: object, *paths: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(defects.SetOrder, "names", [f"node {hash_seed}"])
            return work(Arranged(make, World()), *paths)

    monkeypatch.setattr(defects.SetOrder, "names", ["node 0"])
    monkeypatch.setattr(claims, "in_fresh_process", other_order)
    report = gym_trace.audit(defects.SetOrder, **SIZE)
    assert list(found := verdicts(report, "no")) == ["fresh-process"]
    assert "PYTHONHASHSEED decides it" in found["fresh-process"]


def test_the_growth_of_a_difference_is_named() -> None:
    class Chaos(defects.Walk):
        def step(self, action: Any) -> Any:
            self.x = float(4 * abs(self.x) % 1.9 + 1e-9 * self.drawn_globally())
            return self.observation(), 0.0, False, False, {}

        def drawn_globally(self) -> float:
            return float(np.random.normal())

        def observation(self) -> Any:
            return np.array([self.x, 0.0])

        observation_space = gymnasium.spaces.Box(-50, 50, (2,), np.float64)

    report = gym_trace.audit(Chaos, **SIZE)
    growth = report["own-randomness"].divergences[0].growth
    assert growth is not None
    assert 3 < growth < 5
    assert f"grows {growth:.3g} times a step" in report["own-randomness"].text


def test_options_that_stay_are_found_in_a_trace(tmp_path: Path) -> None:
    env = gym_trace.TraceRecordingWrapper(defects.KeepsOptions(), tmp_path)
    for seed, options in enumerate([None, {"shift": 0.5}, None]):
        env.reset(seed=seed, options=options)
        for _ in range(5):
            env.step(np.zeros(1, np.float32))
    env.close()
    report = gym_trace.audit(tmp_path, make_env=defects.KeepsOptions)
    assert list(found := verdicts(report, "no")) == ["stateless-reset"]
    assert "episode 2 at the reset" in found["stateless-reset"]
    assert report["runs"].text == "3 episodes, 15 steps; 3 cut"


def test_a_trace_is_audited_with_its_environment_seeds_and_actions(tmp_path: Path) -> None:
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path) as env:
        gym_trace.record_episodes(env, episodes=3, seed=5)
    trace = gym_trace.open_trace(tmp_path)
    report = gym_trace.audit(trace[:2])
    assert report.environment == "CartPole-v1"
    assert report["runs"].steps == trace.episodes["steps"][:2].sum()
    assert not verdicts(report, "no")


def test_a_lane_of_a_vector_environment_must_not_depend_on_the_others() -> None:
    class Coupled(gymnasium.vector.SyncVectorEnv):
        """Adds the mean action of all lanes to each reward."""

        def step(self, actions: Any) -> Any:
            observations, rewards, *rest = super().step(actions)
            return observations, rewards + np.mean(actions), *rest

    report = gym_trace.audit(lambda: Coupled([defects.Walk] * 3), **SIZE)
    assert list(found := verdicts(report, "no")) == ["lanes"]
    assert "with other actions in the other lanes; first seen in episode 0 at step 0, rewards" in found["lanes"]


def test_generators_clocks_and_files_are_restored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).random()
    claimed = []

    def interrupt(claim: Any) -> None:
        claimed.append(claim)
        if claim.name == "deterministic":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gym_trace.audit(defects.WallClock, on_claim=interrupt, **SIZE)
    assert (random.random(), np.random.random()) == expected
    assert defects.time is time
    assert not list(tmp_path.iterdir())


def test_environments_that_cannot_play_say_so() -> None:
    def broken() -> Any:
        raise RuntimeError("no display")

    with pytest.raises(EnvironmentUnavailable, match="cannot be made: RuntimeError: no display"):
        gym_trace.audit(broken)
    with pytest.raises(EnvironmentUnavailable, match="NoSuch"):
        gym_trace.audit("NoSuch-v0")
    with pytest.raises(InvalidOption, match="episodes=0"):
        gym_trace.audit(defects.Walk, episodes=0)

    class NoReset(defects.Walk):
        def reset(self, **_: Any) -> Any:
            raise RuntimeError("out of memory")

    report = gym_trace.audit(NoReset, **SIZE)
    assert str(report["runs"]) == "no: reset of episode 0 raised RuntimeError: out of memory"
    assert {str(claim) for claim in report.claims[1:]} == {"not tried: no step could be played"}


def test_an_environment_that_fails_to_close_does_not_run() -> None:
    class FailsToClose(defects.Walk):
        def close(self) -> None:
            raise RuntimeError("no connection")

    assert str(gym_trace.audit(FailsToClose, **SIZE)["runs"]) == "no: close() raised RuntimeError: no connection"


@pytest.mark.parametrize("instance", [1, 2])  # in the reference, and in a claim
def test_an_exit_of_a_signal_handler_ends_the_audit(instance: int) -> None:
    made: list[object] = []

    class Terminated(defects.Walk):
        def reset(self, **seed: Any) -> Any:
            made.append(self)
            if len({id(env) for env in made}) == instance:
                signal.raise_signal(signal.SIGTERM)
            return super().reset(**seed)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    try:
        with pytest.raises(SystemExit):
            gym_trace.audit(Terminated, **SIZE)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_failure_to_make_a_second_environment_leaves_claims_untried() -> None:
    made: list[object] = []

    class Once(defects.Walk):
        def __init__(self) -> None:
            made.append(self)
            if len(made) > 1:
                raise RuntimeError("one simulator per process")
            super().__init__()

    report = gym_trace.audit(Once, **SIZE)
    assert not verdicts(report, "no")
    assert "one simulator per process" in report["deterministic"].text


def test_a_report_names_what_failed_and_becomes_json() -> None:
    report = gym_trace.audit(defects.Modulo, require=["runs", "seeded", "fresh-process"], **SIZE)
    assert [claim.name for claim in report.failed] == ["seeded", "fresh-process"]
    with pytest.raises(InvalidOption, match="'sound' is not a claim"):
        gym_trace.audit(defects.Modulo, require=["sound"])
    plain = report.to_json()
    assert plain["environment"] == "Modulo"
    assert [claim["name"] for claim in plain["claims"]] == list(CLAIMS)
    assert plain["claims"][8]["verdict"] == "no"


def test_the_fixture_fails_a_test_with_the_claims_that_do_not_hold(audit: Callable[..., AuditReport]) -> None:
    assert audit(defects.Walk, episodes=1, steps=5).environment == "Walk"
    with pytest.raises(pytest.fail.Exception, match=r"^audit of Modulo\nseeded: no: seeds are taken modulo 50"):
        audit(defects.Modulo, episodes=1, steps=5)
    with pytest.raises(pytest.fail.Exception, match=r"^audit of Modulo\nfresh-process: not tried"):
        audit(defects.Modulo, require=["runs", "fresh-process"], episodes=1, steps=5)
