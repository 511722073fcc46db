"""Population-based training: who goes on from whom, and with which settings."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("torch")

from gym_trace import open_trace, verify_trace
from gym_trace.errors import InvalidOption, TrainingFailed
from gym_trace.training import Trained, train, verify_run
from gym_trace.training.population import Exchange, Population, first_settings, mutated, policy_seed
from gym_trace.training.run import Run, runs_in
from gym_trace.training.settings import Settings


class Member:
    """Fake driver with given returns; it records its messages."""

    def __init__(self, run: Run, mean: float | None):
        self.run, self.mean, self.saved = run, mean, None
        self.told: list[Any] = []
        self.cleared = False
        self.progress = SimpleNamespace(steps=0)
        self.processes = SimpleNamespace(tell=self.tell, shape_rewards=lambda shaping: None, stopping=False)

    def tell(self, message: Any) -> None:
        self.told.append(message)
        if message[0] == "save":
            self.run.checkpoints.mkdir(parents=True, exist_ok=True)
            self.run.checkpoint(7).write_bytes(b"weights of a policy")
            self.saved = 7

    def objective(self, name: str) -> float | None:
        return self.mean

    def clear_returns(self) -> None:
        self.cleared = True


def population(tmp_path: Path, means: list[float | None], **options: Any) -> tuple[Population, list[Member], list[Any]]:
    runs = [Run(tmp_path / f"policy-{number}") for number in range(len(means))]
    for run in runs:
        run.checkpoints.mkdir(parents=True)
    members = [Member(run, mean) for run, mean in zip(runs, means)]
    events: list[Any] = []
    settings = [Settings(learning_rate=10.0**-number) for number in range(len(means))]
    exchange = Exchange(period=100, **options)
    made = Population(members, runs, settings, exchange, 0, lambda kind, **facts: events.append((kind, facts)))  # type: ignore[arg-type]
    return made, members, events


def after(made: Population, members: list[Member], steps: int, number: int) -> None:
    members[number].progress.steps = steps
    made.turn()
    made.turn()


def test_the_worst_goes_on_from_the_best_with_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    made, members, events = population(tmp_path, [10.0, 500.0, 20.0, 480.0], mutated=0.0)
    after(made, members, 100, 0)
    ((kind, told),) = members[0].told
    assert kind == "adopt"
    assert told["settings"]["learning_rate"] in (0.1, 0.001)  # policy 0 takes over settings, too
    copy = members[0].run.checkpoints / told["checkpoint"]
    assert copy.read_bytes() == b"weights of a policy"
    assert members[0].cleared
    assert [kind for kind, _ in events] == ["exchange"]


def test_a_policy_that_is_hardly_better_is_not_taken_over(tmp_path: Path) -> None:
    made, members, _ = population(tmp_path, [10.0, 10.0, 10.0, 10.0], mutated=0.0)
    for number in range(4):
        after(made, members, 100, number)
    assert not any(member.told for member in members)


def test_a_policy_that_has_played_too_little_is_left_alone(tmp_path: Path) -> None:
    made, members, _ = population(tmp_path, [None, 500.0, 20.0], mutated=1.0)
    after(made, members, 100, 0)
    assert members[0].told == []


def test_negative_returns_are_compared_as_positive_ones_are(tmp_path: Path) -> None:
    made, members, _ = population(tmp_path, [-500.0, -90.0, -100.0, -95.0], mutated=0.0)
    after(made, members, 100, 0)
    assert [kind for kind, _ in members[0].told] == ["adopt"]


def test_policy_0_keeps_its_settings_and_those_in_the_middle_change_theirs(tmp_path: Path) -> None:
    made, members, _ = population(tmp_path, [100.0, 200.0, 50.0, 150.0, 160.0], mutated=1.0, replaced=0.2)
    for number in range(5):
        after(made, members, 100, number)
    assert members[0].told == []  # neither best nor worst
    assert "checkpoint" not in members[3].told[0][1]
    assert members[3].told[0][1]["settings"]["learning_rate"] != 1e-3
    assert [kind for kind, _ in members[1].told] == ["save"]  # the best stays as it is, and gives


def test_a_comparison_comes_once_a_period(tmp_path: Path) -> None:
    made, members, events = population(tmp_path, [10.0, 500.0, 20.0, 480.0], mutated=0.0, start=250)
    for steps in (50, 100, 200, 249):
        after(made, members, steps, 0)
    assert events == []
    for steps in (260, 270, 299, 301):
        after(made, members, steps, 0)
    assert len(events) == 2


def test_mutated_settings_stay_settings() -> None:
    generator = np.random.default_rng(0)
    settings = Settings(learning_rate=1e-7, gamma=0.999)
    for _ in range(500):
        settings = mutated(settings, Exchange(mutated=0.5), generator)
        assert 1e-7 <= settings.learning_rate <= 0.1
        assert 0.0 <= settings.gamma < 1.0


def test_the_seed_decides_the_initial_settings_of_each_policy() -> None:
    found = first_settings(Settings(), 4, Exchange(), seed=3)
    assert found[0] == Settings()
    assert len({settings.learning_rate for settings in found}) == 4
    assert found == first_settings(Settings(), 4, Exchange(), seed=3)
    rates = [{"learning_rate": 1e-6}, {"learning_rate": 1e-2}]
    assert [one.learning_rate for one in first_settings(Settings(), rates, Exchange(), 0)] == [1e-6, 1e-2]
    assert len({policy_seed(5, number) for number in range(100)}) == 100


def test_policies_whose_networks_differ_cannot_take_over_from_each_other() -> None:
    with pytest.raises(InvalidOption, match="hidden"):
        first_settings(Settings(), [{}, {"hidden": (32,)}], Exchange(), 0)


def test_a_population_trains_is_resumed_and_comes_out_again(tmp_path: Path) -> None:
    rates = [{"learning_rate": 1e-6}, {"learning_rate": 3e-3}]
    options: dict[str, Any] = {"workers": 1, "num_envs": 4, "rollout": 32, "stall_timeout": 300.0}
    exchange = Exchange(period=256, gap=0.0, replaced=0.5)
    make = partial(gymnasium.make, "CartPole-v1")
    calls = 0

    def interrupts(progress: Trained) -> bool:
        nonlocal calls
        calls += progress.version > 3
        return calls > 0

    train(make, tmp_path, steps=4000, seed=2, policies=rates, exchange=exchange, on_progress=interrupts, **options)
    done = train(make, tmp_path, resume=True, stall_timeout=300.0)
    assert done.stopped == "done"
    assert [policy.steps for policy in (done, *done.others)] == [4096, 4096]
    found = verify_run(tmp_path)
    assert found.differs == ""
    updates = [list(run.updates()) for run in runs_in(tmp_path)]
    assert found.versions == sum(map(len, updates))
    taken = [update.changed for log in updates for update in log if "checkpoint" in update.changed]
    assert taken  # at least one exchange in sixteen periods


class Weighed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Rewards are what the options of a reset weigh a step with; the last info has how many steps there were."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._weight, self._steps = (options or {})["reward_shaping"]["step"], 0
        return self.env.reset(seed=seed)

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, _ = self.env.step(action)
        self._steps += 1
        return observation, self._weight, terminated, truncated, {"stood": self._steps}


def weighed() -> Weighed:
    return Weighed(gymnasium.make("CartPole-v1"))


def test_each_episode_stores_the_reward_weights_of_its_population(tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 1, "num_envs": 4, "rollout": 32, "stall_timeout": 300.0}
    exchange = Exchange(period=256, mutated=1.0, objective="stood")
    train(weighed, tmp_path, steps=2000, seed=2, policies=2, exchange=exchange, reward_shaping={"step": 1.0}, **options)
    assert not verify_run(tmp_path).differs
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    chosen = [{settings["reward_shaping"]["step"]} for settings in events[0]["settings"]]
    for event in events:
        if event["event"] == "exchange" and "reward_shaping" in event["changed"]:
            chosen[event["policy"]].add(event["changed"]["reward_shaping"]["step"])
    assert chosen[0] != chosen[1]
    for run, weights in zip(runs_in(tmp_path), chosen):
        for episode in open_trace(run.trace):
            weight = episode.options["reward_shaping"]["step"]
            assert (episode.rewards == weight).all()
            assert weight in weights
        found = {verdict.verdict for verdict in verify_trace(run.trace, make_env=weighed)}
        assert found <= {"identical", "unverifiable"}


def test_an_objective_that_is_missing_in_the_last_info_raises(tmp_path: Path) -> None:
    exchange, options = Exchange(objective="luck"), {"workers": 1, "num_envs": 2, "reward_shaping": {"step": 1.0}}
    with pytest.raises(TrainingFailed, match=r"objective=.luck.*which has stood"):
        train(weighed, tmp_path, steps=2000, seed=2, policies=2, exchange=exchange, **options)


@pytest.mark.parametrize("wrong", [{"replaced": 0.6}, {"period": 0}, {"factor_least": 1.0}, {"objective": ""}])
def test_an_invalid_exchange_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Exchange(**wrong)
