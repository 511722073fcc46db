"""Sessions that go on from a step of a recorded episode."""

from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from scripted_env import Result, ToyEnv
from shell import run

pytest.importorskip("pygame")

from person import Person

from gym_trace import TraceRecordingWrapper, open_trace, record_episodes, verify_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.tools.playing.continued import Continued
from gym_trace.tools.playing.play import play

KEYS = "rest = 0\n[keys]\nright = 1\n"


@pytest.fixture(autouse=True)
def _no_display(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "keys.toml").write_text(KEYS)


@pytest.fixture
def poles(tmp_path: Path) -> Path:
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "poles", record_infos=True) as env:
        record_episodes(env, episodes=3, seed=1)
    return tmp_path / "poles"


def _steps(directory: Path) -> int:
    return int(open_trace(directory).episodes["steps"].sum())


def _go_on(trace: Path, episode: int, step: int, to: Path, *acts: Any, **options: Any) -> None:
    play(
        Continued(trace, episode, step),
        to,
        seed=0,
        fps=500,
        keys=to.parent / "keys.toml",
        stop=Person(*acts),
        **options,
    )


@pytest.mark.parametrize("infos", [False, True], ids=["without infos", "with infos"])
def test_the_episode_has_the_recorded_steps_and_those_played_and_verifies(
    tmp_path: Path, poles: Path, infos: bool
) -> None:
    to = tmp_path / "t"
    acts = [lambda: _steps(to) >= 7, "f5", lambda: _steps(to) >= 15]
    _go_on(poles, 1, 5, to, *acts, record_infos=infos)
    source = open_trace(poles)[1]
    first, again = open_trace(to)
    for episode in (first, again):
        assert episode.seed == source.seed
        assert episode.actions[:5].tolist() == source.actions[:5].tolist()
        np.testing.assert_array_equal(episode.observations[:6], source.observations[:6])
        played = episode.annotations["played"].tolist()
        assert played == [False] * 5 + [True] * (len(episode) - 5)
        assert episode.annotations["mark"].tolist() == [False] * len(episode)
    assert [verdict.verdict for verdict in verify_trace(to)] == ["identical"] * 2


def test_an_unseeded_start_is_recorded_as_it_was(tmp_path: Path) -> None:
    with TraceRecordingWrapper(gymnasium.make("FrozenLake-v1"), tmp_path / "lake") as env:
        for _ in range(2):
            env.reset()
            while not any(env.step(2)[2:4]):
                pass
    step = len(open_trace(tmp_path / "lake")[1]) - 1
    to = tmp_path / "t"
    _go_on(tmp_path / "lake", 1, step, to, lambda: _steps(to) > step)
    (episode,) = open_trace(to)
    assert episode.seed is None
    assert episode.rng_state is not None
    assert [verdict.verdict for verdict in verify_trace(to)] == ["identical"]


@pytest.mark.skipif(not hasattr(gymnasium.vector, "AutoresetMode"), reason="needs gymnasium 1.1")
def test_a_continued_episode_after_an_autoreset_of_a_lane_verifies(tmp_path: Path) -> None:
    from gym_trace import TraceRecordingVectorWrapper

    with closing(TraceRecordingVectorWrapper(gymnasium.make_vec("CartPole-v1", 2, "sync"), tmp_path / "lanes")) as envs:
        record_episodes(envs, steps=200, seed=0)
    (index, *_) = [number for number, episode in enumerate(open_trace(tmp_path / "lanes")) if episode.seed is None]
    to = tmp_path / "t"
    _go_on(tmp_path / "lanes", index, 5, to, lambda: _steps(to) >= 7)
    assert [verdict.verdict for verdict in verify_trace(to)] == ["identical"]


def test_step_0_is_the_recorded_start(tmp_path: Path, poles: Path) -> None:
    to = tmp_path / "t"
    _go_on(poles, 0, 0, to, lambda: _steps(to) >= 2)
    assert open_trace(to)[0].seed == open_trace(poles)[0].seed
    assert [verdict.verdict for verdict in verify_trace(to)] == ["identical"]


def test_a_step_that_cannot_be_played_from_raises(tmp_path: Path, poles: Path) -> None:
    steps = len(open_trace(poles)[0])
    with pytest.raises(InvalidOption, match=f"step {steps}: episode 0 is over there; pass 0 to {steps - 1}"):
        Continued(poles, 0, steps)
    with pytest.raises(InvalidOption, match="pass 0 to"):
        Continued(poles, 0, steps + 1)
    with TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path / "bare") as env:
        record_episodes(env, episodes=1, seed=1)
    with pytest.raises(InvalidOption, match="has none; omit --infos"):
        _go_on(tmp_path / "bare", 0, 2, tmp_path / "t", record_infos=True)
    assert not (tmp_path / "t").exists()


def test_an_environment_that_needs_trust_is_not_made(tmp_path: Path) -> None:
    class Own(ToyEnv):
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def result(self, action: Any) -> Result:
            return Result(0, 0.0)

    with TraceRecordingWrapper(Own(), tmp_path / "own") as env:
        env.reset(seed=0)
        env.step(0)
    with pytest.raises(EnvironmentUnavailable):
        Continued(tmp_path / "own", 0, 1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--episode", "9", "-o", "t"], "the trace has 3 episodes"),
        ([], "needs -o DIR"),
        (["-o", "t", "--max-episode-steps", "3"], "not with a trace"),
        (["-o", "t", "--step", "100000"], "pass 0 to"),
    ],
)
def test_wrong_options_are_usage_errors(
    poles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("play", poles, *options)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert not (tmp_path / "t").exists()
