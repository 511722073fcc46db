"""Choosing rules, setting thresholds, and rules of other packages."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from planted import EPISODES, STEPS, Script

from gym_trace import Trace, lint_trace
from gym_trace.errors import InvalidOption
from gym_trace.playback.scan import StepRuns
from gym_trace.tools.linting import rules
from gym_trace.tools.linting.findings import Kind, Sighting


class SlowRule:
    """Finds steps with small rewards, as a rule of another package would."""

    kinds: ClassVar[Sequence[Kind]] = (Kind("ACME1", "warning", "slow steps"),)
    columns: ClassVar[Collection[str]] = ("rewards",)
    thresholds: ClassVar[Mapping[str, float]] = {"slow_reward": 2.5}

    def __init__(self, trace: Trace, thresholds: Mapping[str, float]):
        self._limit, self._steps = thresholds["slow_reward"], 0

    def add(self, block: StepRuns) -> None:
        self._steps += int(np.count_nonzero(block.columns["rewards",] < self._limit))

    def findings(self) -> Iterator[Sighting]:
        if self._steps:
            yield Sighting(self.kinds[0], "slow", self._steps)


def installed(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    monkeypatch.setattr(SlowRule, "other", rule, raising=False)
    entry = EntryPoint("slow", f"{__name__}:SlowRule.other", "gym_trace.lint_rules")
    monkeypatch.setattr(rules, "entry_points", lambda group: [entry] if group == entry.group else [])


def codes(directory: Path, **options: Any) -> list[str]:
    return [finding.code for finding in lint_trace(directory, **options)]


@pytest.fixture
def defective(tmp_path: Path) -> Path:
    script = Script()
    script.rewards = [np.ones(STEPS) for _ in range(EPISODES)]
    script.observations[1][5, 0] = np.nan
    script.cut[-1] = True
    return script.record(tmp_path / "trace")


def test_select_and_ignore_take_codes_and_their_beginnings(defective: Path) -> None:
    assert codes(defective) == ["T101", "T402"]
    assert codes(defective, notes=True) == ["T101", "T402", "T301", "T403"]
    assert codes(defective, select=["T1", "T301"]) == ["T101", "T301"]
    assert codes(defective, ignore=["T4"]) == ["T101"]


@pytest.mark.parametrize("options", [{"select": ["T9"]}, {"ignore": [""]}, {"thresholds": {"frozen": 3}}])
def test_unknown_codes_and_thresholds_raise(defective: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        lint_trace(defective, **options)


@pytest.mark.parametrize("value", [-1, True, "9", float("nan")])
def test_an_invalid_threshold_raises(defective: Path, value: Any) -> None:
    with pytest.raises(InvalidOption, match="pass a number of 0 or more"):
        lint_trace(defective, thresholds={"frozen_steps": value})


def test_a_threshold_changes_what_is_found(tmp_path: Path) -> None:
    script = Script()
    script.observations[2][20:30] = script.observations[2][20]
    recorded = script.record(tmp_path / "trace")
    assert codes(recorded) == []
    assert codes(recorded, thresholds={"frozen_steps": 8}) == ["T201"]


def test_a_rule_of_another_package_is_used_and_has_thresholds(defective: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, SlowRule)
    (finding,) = lint_trace(defective, select=["ACME"])
    assert (finding.code, finding.count) == ("ACME1", EPISODES * STEPS)
    assert codes(defective, select=["ACME"], thresholds={"slow_reward": 0.5}) == []


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        (None, "cannot be loaded"),
        (type("Taken", (SlowRule,), {"kinds": (Kind("T101", "error", "mine"),)}), "gym-trace has this code"),
        (type("Odd", (SlowRule,), {"kinds": (Kind("ACME1", "fatal", "mine"),)}), "invalid code or severity"),
        (type("Same", (SlowRule,), {"thresholds": {"frozen_steps": 1}}), "threshold frozen_steps: exists"),
    ],
)
def test_an_invalid_rule_of_another_package_raises(
    rule: Any, problem: str, defective: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, rule)
    with pytest.raises(InvalidOption, match=problem):
        lint_trace(defective)
