"""Learner and worker that take turns in one process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest

pytest.importorskip("torch")

from gym_trace.errors import InvalidOption
from gym_trace.training import Run, train, verify_run
from gym_trace.training.processes.cell import Turns

SMALL: dict[str, Any] = {"num_envs": 4, "rollout": 8, "epochs": 1, "minibatches": 2, "hidden": (8,), "rnn_size": 8}


@pytest.mark.parametrize("given", [{"lag": 0}, {"lag": 1, "splits": 2}, {"lag": "any", "rnn": "gru"}])
def test_one_process_learns_what_several_would(tmp_path: Path, given: dict[str, Any]) -> None:
    pid = os.getpid()

    def make() -> Any:
        assert os.getpid() == pid
        return gymnasium.make("CartPole-v1")

    train(make, tmp_path / "here", steps=200, seed=3, workers=0, **SMALL, **given)
    assert verify_run(tmp_path / "here").differs == ""
    if given["lag"] == 1:
        train(
            partial(gymnasium.make, "CartPole-v1"), tmp_path / "there", steps=200, seed=3, workers=1, **SMALL, **given
        )
        one, two = ([update.digest for update in Run(tmp_path / name).updates()] for name in ("here", "there"))
        assert one == two


def test_what_is_raised_in_one_process_is_raised_as_it_is_and_leaves_a_run_to_go_on_with(tmp_path: Path) -> None:
    count = 0

    class Falling(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            nonlocal count
            count += 1
            if count == 100:
                raise KeyError("floor")
            return super().step(action)

    def make() -> Any:
        return Falling(gymnasium.make("CartPole-v1"))

    with pytest.raises(KeyError, match="floor"):
        train(make, tmp_path, steps=200, seed=3, workers=0, **SMALL)
    assert len(list(Run(tmp_path).updates())) == 4
    assert train(partial(gymnasium.make, "CartPole-v1"), tmp_path, resume=True).steps == 224


def test_experience_that_is_too_old_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = Turns.poll

    def eager(cell: Turns, seconds: float) -> Any:
        """Two rollouts for each update that takes one."""
        next(cell._rollouts)
        return poll(cell, seconds)

    monkeypatch.setattr(Turns, "poll", eager)
    options = {**SMALL, "workers": 0, "lag": "any", "max_lag": 0}
    done = train(partial(gymnasium.make, "CartPole-v1"), tmp_path, steps=320, seed=3, **options)
    assert done.dropped in (8, 9, 10)
    assert all(o.version == update.version - 1 for update in Run(tmp_path).updates() for o in update.rollouts)
    assert verify_run(tmp_path).differs == ""


def test_a_server_needs_a_process(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="inference='actor'"):
        train(partial(gymnasium.make, "CartPole-v1"), tmp_path, steps=200, workers=0, inference="server")
