"""Environments of PettingZoo and MPE2, AEC and parallel: recorded, compared, verified, replayed."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pettingzoo")

from agents_log import assert_played_back, check, chooser, play_aec, play_parallel, same

from gym_trace import check_trace, open_trace, verify_trace
from gym_trace.pettingzoo import record, replay

EPISODES = 20
# Turns or steps of an episode: those of slow environments, and of games that random moves do not end, are cut.
MOST = {"chess": 60, "go": 60, "pistonball": 12, "knights_archers_zombies": 100, "cooperative_pong": 30, "pursuit": 20,
        "multiwalker": 40}  # fmt: skip


def _modules() -> list[str]:
    found = []
    for package in ("pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl", "mpe2"):
        try:
            home = importlib.import_module(package)
        except ImportError:
            continue
        found += [f"{package}.{each.name}" for each in pkgutil.iter_modules(home.__path__) if "_v" in each.name]
    return found


def _made(module: str, function: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = getattr(importlib.import_module(module), function, None)
            return None if found is None else found()
        except ImportError as error:
            pytest.skip(f"{module}: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", ["env", "parallel_env"])
@pytest.mark.parametrize("module", _modules())
def test_all_agents(tmp_path: Path, module: str, function: str) -> None:
    bare = _made(module, function)
    if bare is None:
        pytest.skip(f"{module} has no {function}")
    play = play_aec if function == "env" else play_parallel
    most = next((most for name, most in MOST.items() if name in module), 300)
    alone = [play(bare, episode, chooser(episode), most) for episode in range(2)]
    bare.close()
    env = record(_made(module, function), tmp_path / "trace", record_infos=True)
    kept = [play(env, episode, chooser(episode), most) for episode in range(EPISODES)]
    env.close()
    assert all(map(same, alone, kept)), "recording changes the run"
    trace = open_trace(tmp_path / "trace")
    assert len(trace) == EPISODES
    for episode, own in zip(trace, kept):
        check(episode, own)
    assert not check_trace(tmp_path / "trace").damages
    verdicts = list(verify_trace(tmp_path / "trace", trust=module.startswith("mpe2")))
    assert not [verdict for verdict in verdicts if verdict.verdict != "identical"]
    played = replay(tmp_path / "trace", on_divergence="raise")
    for episode in range(3):
        again = play(played, episode, chooser(episode), most)
        assert_played_back(again, kept[episode])
