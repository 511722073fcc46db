"""Rewards of several numbers (objectives, as MO-Gymnasium has them): recorded, summed up, shown and chosen by."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from scripted_env import Result, ToyEnv
from shell import in_directory, ok, run
from worker_episodes import whole_episodes

from gym_trace import TraceRecordingWrapper, collect, open_trace, record_episodes, summarize
from gym_trace.data.returns import LaneReturns
from gym_trace.errors import InvalidOption
from gym_trace.recording.processes.run_log import EVENTS

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from in_directory(tmp_path, monkeypatch)


class Objectives(ToyEnv):
    """Two objectives: minus one per step, and a treasure that is larger the longer the episode."""

    observation_space = spaces.Box(0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)
    unwrapped_reward_space = spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, kind: Any = np.array):
        self._kind = kind

    def result(self, action: Any) -> Result:
        if action is None:
            self._length = int(self.np_random.integers(2, 6))
        over = self.t == self._length
        reward = self._kind([-1.0, 10.0 * self._length if over else 0.0])
        return Result(np.full(1, self.t, np.float32), reward, over)


def totals_of(directory: Path) -> Any:
    return np.array([episode.rewards.sum(axis=0) for episode in open_trace(directory)])


def recorded(directory: Path, episodes: int = 8, kind: Any = np.array) -> Any:
    with TraceRecordingWrapper(Objectives(kind), directory) as env:
        return record_episodes(env, episodes=episodes, seed=3)


def test_a_run_tells_the_mean_of_each_objective(tmp_path: Path) -> None:
    done = recorded(tmp_path)
    totals = totals_of(tmp_path)
    assert done.mean_return == pytest.approx(tuple(totals.mean(axis=0)))
    assert (done.min_return, done.max_return) == (tuple(totals.min(axis=0)), tuple(totals.max(axis=0)))


@pytest.mark.parametrize("kind", [list, tuple, str, lambda values: None])
def test_non_numeric_rewards_do_not_end_a_run(tmp_path: Path, kind: Any) -> None:
    done = recorded(tmp_path, kind=kind)
    assert done.episodes == 8
    assert np.isnan(done.mean_return)


def test_the_total_reward_is_that_of_each_objective(tmp_path: Path) -> None:
    recorded(tmp_path)
    trace = open_trace(tmp_path)
    for episode, total in zip(trace, totals_of(tmp_path)):
        np.testing.assert_array_equal(episode.total_reward, total)
        np.testing.assert_array_equal(episode[1:].total_reward, episode.rewards[1:].sum(axis=0))
        assert "return" not in repr(episode)
    assert np.isnan(trace.episodes["return"]).all()


def test_a_summary_has_a_return_for_each_objective(tmp_path: Path) -> None:
    recorded(tmp_path)
    summary = summarize(open_trace(tmp_path), columns=True, by="split")
    totals = totals_of(tmp_path)
    for described in (summary, summary["groups"]["train"]):
        assert described["return"]["count"] == 0
        for objective, values in zip(described["objectives"], totals.T, strict=True):
            assert objective["count"] == 8
            assert [objective[name] for name in ("mean", "min", "max")] == [values.mean(), values.min(), values.max()]
    rewards = np.concatenate([episode.rewards for episode in open_trace(tmp_path)])
    for known, values in zip(summary["rewards"]["objectives"], rewards.T, strict=True):
        assert known["mean"] == pytest.approx(values.mean())
    assert summary["rewards"]["misfits"] == 0
    json.dumps(summary, allow_nan=False)


def test_objectives_and_plain_rewards_are_summarized_separately(tmp_path: Path) -> None:
    recorded(tmp_path)
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, on_exist="append") as env:
        record_episodes(env, episodes=5, seed=0)
    summary = summarize(open_trace(tmp_path))
    assert summary["return"]["count"] == 5
    assert [objective["count"] for objective in summary["objectives"]] == [8, 8]
    assert [objective["nan"] for objective in [summary["return"], *summary["objectives"]]] == [0, 0, 0]


def test_sorting_by_several_objectives_is_refused_with_the_way_out(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(InvalidOption, match=r"several numbers each.*return\[0\]"):
        open_trace(tmp_path).select(sort="-return")


def test_lanes_add_up_objectives_each_by_itself() -> None:
    returns, all_lanes = LaneReturns(3), np.ones(3, bool)
    returns.add(np.arange(6.0).reshape(3, 2), all_lanes)
    returns.add(np.ones((3, 2)), np.array([True, False, True]))
    assert returns.take(np.array([True, True, False])) == [(1.0, 2.0), (2.0, 3.0)]
    returns.add(np.ones((3, 2)), all_lanes)
    assert returns.take(all_lanes) == [(1.0, 1.0), (1.0, 1.0), (6.0, 7.0)]


def test_workers_record_objectives(tmp_path: Path) -> None:
    done = collect(Objectives, None, tmp_path, episodes=6, seed=3)
    assert done.returns is not None
    assert done.returns[0] == pytest.approx(tuple(totals_of(tmp_path).mean(axis=0)))
    assert len(whole_episodes(tmp_path, 3)) == 6
    assert json.loads((tmp_path / EVENTS).read_text().splitlines()[-1])["returns"][0] == pytest.approx(done.returns[0])


def test_the_command_line_records_and_shows_objectives(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Objectives-v0", Objectives, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, "Objectives-v0", spec)
    printed = ok("record", "Objectives-v0", "-o", "t", "--episodes", 4, "--seed", 1).output
    assert "return of complete episodes: [-" in printed
    shown = ok("stats", "t", "--columns").output
    assert "return[0]" in shown
    assert "return[1]" in shown
    assert "rewards[1]" in shown
    assert "NaN" not in shown
    refused = run("render", "t", "--sort", "-return", "-o", "x.mp4")
    assert refused.exit_code == 2
    assert "the rewards here are several numbers each" in refused.output
