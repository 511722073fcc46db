"""A game of TextArena, recorded by the example of the documents."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("textarena")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from record_textarena import main

from gym_trace import open_trace


def test_the_trace_has_every_text_of_the_game(tmp_path: Path) -> None:
    games = main("TicTacToe-v0", str(tmp_path / "trace"), games=10)
    trace = open_trace(tmp_path / "trace")
    assert len(trace) == len(games)
    for episode, (turns, rewards) in zip(trace, games):
        assert episode.annotations["player"].tolist() == [player for player, _, _ in turns]
        assert list(episode.observations[:-1]) == [observation for _, observation, _ in turns]
        assert list(episode.actions) == [action for _, _, action in turns]
        assert episode.annotations["rewards"][-1].tolist() == rewards
        assert episode.outcome == "terminated"
