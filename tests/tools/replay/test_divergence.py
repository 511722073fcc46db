"""Divergences: where each leaf of a replay begins to differ, how far, and how fast."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text
from scripted_env import Result, ToyEnv
from shell import run

from gym_trace import TraceRecordingWrapper, verify_trace
from gym_trace.results import Divergence
from gym_trace.tools.replay.divergence import divergence_of

STEPS = np.arange(60)


class Chaos(ToyEnv):
    """The logistic map: errors double in each step, on average. Its name changes at step 7 with another offset."""

    observation_space = Dict({"x": Box(-9, 9, (3,), np.float64), "name": Text(9)})
    action_space = Discrete(2)
    offset = 0.0

    def result(self, action: Any) -> Result:
        if action is None:
            self.x = 0.1234567
        elif self.t < 5:
            self.x = 4 * self.x * (1 - self.x)
        else:
            self.x = 4 * self.x * (1 - self.x) + (self.offset if self.t == 5 else 0.0)
        name = "other" if self.t == 7 and self.offset else "same"
        return Result({"x": np.array([0.0, self.x, 1.0]), "name": name}, self.x)


def recorded(directory: Path) -> Path:
    with TraceRecordingWrapper(Chaos(), directory) as env:
        env.reset(seed=0)
        for _ in STEPS:
            env.step(0)
    return directory


class Perturbed(Chaos):
    offset = 1e-13


def test_verify_measures_where_each_leaf_diverges_and_how_fast(tmp_path: Path) -> None:
    (verdict,) = verify_trace(recorded(tmp_path), make_env=Perturbed)
    x, rewards, name = sorted(verdict.divergences, key=lambda one: str(one.step) + one.column)
    assert [one.column for one in (x, rewards, name)] == ["observations/x", "rewards", "observations/name"]
    assert (x.step, x.at, x.largest_at, rewards.step, rewards.at) == (4, (1,), (1,), 4, ())
    assert 0.3 < x.largest < 1.0 == x.steps / 56  # type: ignore[operator]
    assert x.growth == pytest.approx(2.0, rel=0.1) == rewards.growth
    assert name == Divergence("observations/name", 6, (), 1, None, 6, (), None)
    assert str(x).startswith("observations/x[1] differs at 56 steps, from step 4 on, by up to 0.")
    assert str(x).endswith(f"; the difference grows {x.growth:.3g} times a step")
    assert str(name) == "observations/name differs at 1 step, from step 6 on"


def test_verify_says_how_the_leaves_of_the_first_episodes_diverge(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    done = run("verify", tmp_path / "t", "--make", "test_divergence:Perturbed")
    assert "\n  observations/x[1] differs at 56 steps, from step 4 on, by up to 0." in done.stdout
    assert "grows 2" in done.stdout
    done = run("verify", tmp_path / "t", "--make", "test_divergence:Perturbed", "--json")
    assert '"column": "observations/x", "step": 4, "at": [1], "steps": 56' in done.stdout


@pytest.mark.parametrize(
    ("errors", "growth"),
    [
        (np.minimum(1e-12 * 3.0**STEPS, 1.0), 3.0),
        (1e-9 * 1.1**STEPS, 1.1),  # has not saturated
        (1e-6 * (STEPS + 1), None),  # a drift
        (1e-6 * (STEPS + 1) ** 2, None),
        (np.full(60, 0.5), None),
        (1e-3 * (1 + STEPS % 3), None),  # noise
        (np.minimum(1e-12 * 1e4**STEPS, 1.0), None),  # too fast to say
    ],
)
def test_only_exponential_growth_is_reported(errors: Any, growth: float | None) -> None:
    measured = divergence_of("observations", np.zeros((60, 2)), np.stack([0 * errors, errors], axis=1), first=-1)
    assert measured is not None
    assert (measured.step, measured.at, measured.steps, measured.largest) == (None, (1,), 60, errors.max())
    assert measured.growth == (None if growth is None else pytest.approx(growth, rel=0.01))


def test_values_that_are_not_finite_differ_without_a_growth() -> None:
    row = np.array([np.nan, np.inf, -0.0, 1.0])
    assert divergence_of("x", [row], [np.array([np.nan, np.inf, 0.0, 1.0])]) is None
    measured = divergence_of("x", [row, row], [row, np.array([np.nan, -np.inf, 0.0, np.nan])])
    assert measured == Divergence("x", 1, (1,), 1, np.inf, 1, (1,), None)
    assert divergence_of("x", ["a", {"b": 1}], ["a", {"b": 1}]) is None
    assert divergence_of("x", [np.int8(-100)], [np.int8(100)]) == Divergence("x", 0, (), 1, 200.0, 0, (), None)
    assert divergence_of("x", [np.zeros(2)], [np.zeros(3)]) == Divergence("x", 0, (), 1, None, 0, (), None)
