"""Figures and columns of the viewer that come from the annotations of an agent."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from viewer_requests import arrays_of, asked, viewed

from gym_trace import TraceRecordingWrapper, edit, open_trace, targets
from gym_trace.tools.viewer.answers import Refused
from gym_trace.tools.viewer.microscope import Figures, returns_to_go

GAMMA = 0.9


class Paid(gymnasium.Env[Any, Any]):
    """Rewards of 1, 2, 3 … in two parts, and the end after five steps; with option "long", no end."""

    observation_space, action_space = Box(-9, 9, (1,)), Discrete(3, start=1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.now, self.is_long = 0, bool(options)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        is_last = self.now == 5
        parts = {"reward_forward": 2.0 * self.now, "reward_ctrl": -1.0 * self.now, "speed": 3.0}
        return np.zeros(1, np.float32), float(self.now), is_last and not self.is_long, is_last and self.is_long, parts


def play(env: TraceRecordingWrapper, version: int, value: float, truncated: bool = False) -> None:
    env.reset(options={"long": 1} if truncated else None)
    for _ in range(5):
        env.annotate(value=np.array([value]), version=version, logprob=np.log(0.25), entropy=1.0 / version)
        env.step(1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes of versions 1, 2, 2 and 3; the value of version 2 is far away, and one of its episodes is truncated."""
    directory = tmp_path_factory.mktemp("microscope") / "trace"
    with TraceRecordingWrapper(Paid(), directory, record_infos=True) as env:
        for version, value, truncated in ((1, 9.0, False), (2, 50.0, False), (2, 50.0, True), (3, 10.0, False)):
            play(env, version, value, truncated)
    edit.annotate(directory, {"gamma": GAMMA})
    return directory


def to_go(last: float = 0.0) -> Any:
    found = []
    for reward in (5.0, 4.0, 3.0, 2.0, 1.0):
        last = reward + GAMMA * last
        found.insert(0, last)
    return np.array(found)


@pytest.mark.parametrize("gamma", [0.0, 0.97, 1.0])
def test_returns_to_go_of_many_episodes_are_those_of_each(gamma: float) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 200, 64, 3]
    rewards, values = rng.normal(size=(2, sum(lengths)))
    ends = np.cumsum(lengths)
    found = returns_to_go(rewards, values, ends, np.ones(5, bool), gamma)
    for begin, end in zip(ends - lengths, ends):
        flags = np.zeros((2, 1, end - begin), bool)
        alone = targets.returns_to_go(rewards[None, begin:end], *flags, gamma=gamma)
        np.testing.assert_allclose(found[begin:end], alone[0])


def test_the_last_value_stands_for_what_follows_a_truncated_episode() -> None:
    found = returns_to_go(np.ones(3), np.full(3, 8.0), np.array([3]), np.array([False]), 0.5)
    assert found.tolist() == [1 + 0.5 * (1 + 0.5 * 8), 1 + 0.5 * 8, 8]


def test_the_player_has_values_returns_to_go_and_advantages(trained: Path) -> None:
    answers = viewed(trained)
    columns = {one["name"]: one for one in asked(answers, "/api/episode?episode=1")["columns"]}
    assert columns["value, return to go"]["labels"] == ["value", "return to go"]
    assert columns["value, return to go"]["note"] == "discount 0.9"
    both = arrays_of(answers, "/api/plot?episode=1&column=value,%20return%20to%20go")["y"]
    np.testing.assert_allclose(both, [np.full(5, 50.0), to_go()])
    advantage = arrays_of(answers, "/api/plot?episode=1&column=advantage&from=2&to=4")
    np.testing.assert_allclose(advantage["y"], [to_go()[2:4] - 50])
    assert asked(answers, "/api/plot?episode=1&column=advantage")[0]["peak"] == 4
    chance = arrays_of(answers, "/api/plot?episode=1&column=probability%20of%20the%20action")["y"]
    np.testing.assert_allclose(chance, np.full((1, 5), 0.25))


def test_the_discount_is_that_of_the_run_beside_the_trace(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Paid(), tmp_path / "trace") as env:
        play(env, 1, 9.0)

    def note() -> str:
        columns = asked(viewed(tmp_path / "trace"), "/api/episode?episode=0")["columns"]
        return next(str(one["note"]) for one in columns if "note" in one)

    assert note() == "no discount: none is known"
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"gamma": 0.5}}))
    assert note() == "discount 0.5, that of the run"
    (tmp_path / "run.json").write_text("[" * 100_000)
    assert note() == "no discount: none is known"


def test_versions_that_were_proved_are_those_of_the_file_beside_the_run(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Paid(), tmp_path / "ppo") as env:
        play(env, 1, 9.0)
    (tmp_path / "ppo.proof").mkdir()
    url, file = "/api/learning?x=version", tmp_path / "ppo.proof" / "verified.json"
    assert "proved" not in asked(viewed(tmp_path / "ppo"), url)[0]
    file.write_text(json.dumps({"versions": 3, "of": 5, "differs": "version 4 differs", "proved": []}))
    proved = asked(viewed(tmp_path / "ppo"), url)[0]["proved"]
    assert proved == {"versions": 3, "of": 5, "differs": "version 4 differs"}
    file.write_text('{"versions": "3", "of": 5, "differs": ""}')
    assert "proved" not in asked(viewed(tmp_path / "ppo"), url)[0]


def test_the_list_has_versions_and_value_errors_and_is_sorted_by_them(trained: Path) -> None:
    answers = viewed(trained)
    head, arrays = asked(answers, "/api/episodes?sort=-value%20error")
    assert [one["name"] for one in head["columns"]][-2:] == ["version", "value error"]
    assert arrays["episode"].tolist() == [1, 2, 0, 3]
    errors = [np.abs(50 - to_go()).mean(), np.abs(9 - to_go()).mean(), np.abs(10 - to_go()).mean()]
    np.testing.assert_allclose(arrays["value error"][[0, 2, 3]], errors)
    assert arrays["version"].tolist() == [2, 2, 1, 3]
    assert asked(answers, "/api/episode?episode=3")["figures"] == [
        ["version", "3"],
        ["value error", f"{errors[2]:.4g}"],
    ]


def test_the_curve_can_be_that_of_value_errors_or_entropy(trained: Path) -> None:
    answers = viewed(trained)
    head, arrays = asked(answers, "/api/learning?y=entropy&x=version")
    assert (head["ys"], head["axes"][-1]) == (["return", "value error", "entropy"], "version")
    np.testing.assert_allclose(arrays["entropy"], [1, 1 / 2, 1 / 2, 1 / 3])
    assert arrays["version"].tolist() == [1, 2, 2, 3]
    with pytest.raises(Refused, match="y='speed': pass one of return, version, value error, entropy"):
        asked(answers, "/api/learning?y=speed")


def test_figures_of_a_growing_trace_are_those_of_the_whole(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Paid(), tmp_path) as env:
        play(env, 1, 9.0)
        before = Figures(open_trace(tmp_path))
        env.reset()
        env.annotate(value=np.array([1.0]), version=2, logprob=0.0, entropy=1.0)
        env.step(1)
        running = Figures(open_trace(tmp_path), before)
        play(env, 3, 2.0)
        now = Figures(open_trace(tmp_path), running)
    whole = Figures(open_trace(tmp_path))
    for name, values in whole.columns.items():
        np.testing.assert_array_equal(now.columns[name], values)
    assert len(running.columns["version"]) == 2


def test_parts_of_rewards_and_probabilities_of_actions_are_stacked(trained: Path, tmp_path: Path) -> None:
    answers = viewed(trained)
    columns = {one["name"]: one for one in asked(answers, "/api/episode?episode=0")["columns"]}
    assert (columns["parts of the reward"]["labels"], columns["parts of the reward"]["stacked"]) == (
        ["forward", "ctrl"],
        True,
    )
    parts = arrays_of(answers, "/api/plot?episode=0&column=parts%20of%20the%20reward")["y"]
    assert parts.tolist() == [[2, 4, 6, 8, 10], [-1, -2, -3, -4, -5]]
    with TraceRecordingWrapper(Paid(), tmp_path) as env:
        env.reset()
        env.annotate(probabilities=np.array([0.5, 0.25, 0.25], np.float32))
        env.step(1)
    columns = {one["name"]: one for one in asked(viewed(tmp_path), "/api/episode?episode=0")["columns"]}
    assert columns["annotations.probabilities"]["labels"] == ["1", "2", "3"]
    assert columns["annotations.probabilities"]["stacked"] is True
