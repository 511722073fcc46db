"""gym-trace audit: output, exit codes, and what can be audited."""

from pathlib import Path

import gymnasium
import pytest
from shell import ok, run, strict_json

import gym_trace
from gym_trace.errors import EnvironmentUnavailable
from gym_trace.tools.audit import claims
from gym_trace.tools.audit.report import CLAIMS

LIMITS = ("--episodes", 1, "--steps", 5)


@pytest.fixture(autouse=True)
def processes(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise EnvironmentUnavailable("no processes in this test")

    monkeypatch.setattr(claims, "in_fresh_process", none)


def test_the_table_has_a_line_for_each_claim() -> None:
    lines = ok("audit", "CartPole-v1", *LIMITS).stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(CLAIMS)
    assert lines[4] == "deterministic       yes: 2 episodes, 10 steps"
    assert lines[7] == "fresh-process       not tried: no processes in this test"


def test_a_required_claim_that_was_not_tried_exits_with_3() -> None:
    done = run("audit", "CartPole-v1", *LIMITS, "--require", "seeded,state")
    assert done.exit_code == 3
    assert done.stderr.startswith("required: state is not tried: it offers no state")
    assert ok("audit", "CartPole-v1", *LIMITS, "--require", "seeded", "--require", "deterministic")


def test_json_is_one_object_with_all_claims() -> None:
    report = strict_json(ok("audit", "CartPole-v1", *LIMITS, "--json").stdout)
    assert report["environment"] == "CartPole-v1"
    assert [claim["name"] for claim in report["claims"]] == list(CLAIMS)


def test_functions_and_traces_are_audited() -> None:
    line = ok("audit", "--make", "clicks:Clock", "--env-arg", "length=3", *LIMITS).stdout.splitlines()[0]
    assert line == "runs                yes: 1 episode, 3 steps; 1 terminated"
    with gym_trace.TraceRecordingWrapper(gymnasium.make("CartPole-v1"), "traces") as env:
        gym_trace.record_episodes(env, episodes=2, seed=0)
    steps = gym_trace.open_trace("traces").episodes["steps"]
    line = ok("audit", "traces").stdout.splitlines()[0]
    assert line == f"runs                yes: 2 episodes, {steps.sum()} steps; 2 terminated"


def test_sys_exit_of_an_environment_is_an_error_like_others() -> None:
    words = ("--make", "clicks:Clock", "--env-arg", "fail_at=2", "--env-arg", "failure=SystemExit")
    lines = ok("audit", *words, *LIMITS).stdout.splitlines()
    assert lines[0] == "runs                no: step 1 of episode 0 raised SystemExit: the simulator broke"
    assert len(lines) == len(CLAIMS)
    done = run("record", *words, "-o", "t")
    assert (done.exit_code, "error: SystemExit: the simulator broke (" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "pass an environment: either ENV"),
        (["CartPole-v1", "--require", "sound"], "'sound' is not a claim; choose from runs"),
        (["CartPole-v1", "--trust"], "--trust: only for a trace"),
        ([".", "--wrapper", "clicks:Clock"], "not with a trace"),
    ],
)
def test_wrong_usage_exits_with_2(words: list[str], text: str) -> None:
    done = run("audit", *words)
    assert done.exit_code == 2
    assert text in done.stderr
