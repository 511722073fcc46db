"""Recorded states of a simulator that is not deterministic: frames, environments and branches from them."""

import struct
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import TimeLimit
from PIL import Image
from scripted_env import Result, ToyEnv
from shell import ok, run

from gym_trace import TraceRecordingWrapper, branch, env_at, open_trace, record_episodes, render, verify_trace
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.replay import Making
from gym_trace.tools.replay.making import replays
from gym_trace.tools.video.simulate import play_for_humans
from gym_trace.tools.viewer import rendering


class Noisy(ToyEnv):
    """A walk, whose place its picture shows. No seed brings its noise back; `noise` scales it."""

    observation_space = Box(0, 255, (1,), np.int64)
    action_space = Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    spec = None
    entropy = np.random.default_rng(0)

    def __init__(self, noise: int = 1, render_mode: str | None = None):
        self.noise, self.render_mode, self.place = noise, render_mode, 0

    def result(self, action: Any) -> Result:
        drawn = int(self.noise * Noisy.entropy.integers(0, 5))
        self.place = drawn if action is None else self.place + int(action) + drawn
        return Result(np.array([self.place]), float(self.place))

    def get_state(self) -> bytes:
        return struct.pack("<q", self.place)

    def set_state(self, state: bytes) -> None:
        (self.place,) = struct.unpack("<q", state)

    def render(self) -> Any:
        return np.full((8, 8, 3), self.place, np.uint8)


def make(noise: int = 1, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    return TimeLimit(Noisy(noise, render_mode), 40)


calm = partial(make, 0)


def recorded(directory: Path, every: int | None = 1, made: Any = make, episodes: int = 2) -> Any:
    Noisy.entropy = np.random.default_rng(7)
    with TraceRecordingWrapper(made(), directory, states=every) as recorder:
        record_episodes(recorder, episodes=episodes, seed=3)
    return open_trace(directory)


def shown(trace: Any, path: Path, episode: int = 1, **options: Any) -> list[int]:
    """Render an episode, and return the places in its frames."""
    (made,) = render(trace, path, [episode], form="png", make_env=make, **{"trust": True, **options})
    return [int(np.asarray(Image.open(frame))[0, 0, 0]) for frame in sorted(made.path.iterdir())]


def test_each_frame_shows_the_recorded_state(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t")
    places = trace[1].observations[:, 0].tolist()
    with pytest.warns(UserWarning, match="episode 1: the replay differs .*shows the recorded states"):
        assert shown(trace, tmp_path / "auto") == places
    assert shown(trace, tmp_path / "states", start="states") == places
    with pytest.warns(UserWarning, match="shows the replay"):
        assert shown(trace, tmp_path / "replay", start="replay")[:40] != places[:40]
    with pytest.warns(UserWarning, match=r"; if you trust it, pass --trust .*shows the replay"):
        shown(trace, tmp_path / "untrusted", trust=False)
    with pytest.raises(InvalidOption, match="start='film': unknown; pass one of auto, replay, states"):
        shown(trace, tmp_path / "film", start="film")


def test_frames_between_states_are_stepped_from_the_last_one_and_compared(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", every=10)
    places = trace[1].observations[:, 0].tolist()
    with pytest.warns(UserWarning, match="steps without a recorded state differ, at step 2, obs"):
        frames = shown(trace, tmp_path / "v", start="states")
    assert frames[::10] == places[::10]
    steady = recorded(tmp_path / "steady", every=10, made=calm)
    (made,) = render(steady, tmp_path / "w", [1], form="png", make_env=calm, trust=True, start="states")
    assert (made.verdict.verdict, made.verdict.from_states) == ("identical", 5)  # type: ignore[union-attr]


def test_a_trace_without_states_has_no_frames_of_them(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", every=None)
    with pytest.raises(EnvironmentUnavailable, match="no states of it were recorded; record them with states=1"):
        shown(trace, tmp_path / "v", start="states")


def test_the_environment_at_a_step_has_its_recorded_state(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t")
    at = partial(env_at, trace, 1, 20, make_env=make)
    place = int(trace[1].observations[20, 0])
    with pytest.warns(UserWarning, match="differs .*; it is set to the recorded state before step 20"):
        env: Any = at(trust=True)
    assert (env.unwrapped.place, env.replay_start, env.replay_verdict.from_states) == (place, 20, 1)
    env = at(trust=True, start="states")
    assert env.unwrapped.place == place
    assert (env.replay_verdict.verdict, env._elapsed_steps) == ("unverifiable", 20)
    with pytest.raises(ReplayDiverged, match=r"differs from the recording, at .*pass --trust \(trust=True in Python\)"):
        at()
    with pytest.raises(ReplayDiverged, match="differs from the recording"):
        at(trust=True, start="replay")
    with pytest.raises(InvalidOption, match="start='now'"):
        at(start="now")


def test_steps_after_the_last_state_are_compared(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", every=10)
    for step in (0, 10, 30, 40):
        env_at(trace, 1, step, make_env=make, trust=True, start="states").close()
    with pytest.raises(ReplayDiverged, match=r"at step 2[0-2], obs.*, after the recorded state before step 20"):
        env_at(trace, 1, 25, make_env=make, trust=True, start="states")
    steady = recorded(tmp_path / "steady", every=10, made=calm)
    env: Any = env_at(steady, 1, 25, make_env=calm, trust=True, start="states")
    assert (env.replay_verdict.verdict, env.replay_start) == ("identical", 20)


def test_branches_begin_with_the_recorded_steps_and_go_on_from_the_state(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t")
    go = partial(branch, trace, 1, 20, lambda _: 0, make_env=make, episodes=3, trust=True)
    with pytest.raises(ReplayDiverged):
        go(directory=tmp_path / "a", start="replay")
    with pytest.warns(UserWarning, match="at .*; the new episodes go on from its recorded state"):
        go(directory=tmp_path / "b")
    go(directory=tmp_path / "c", start="states", prefix=False)
    places = trace[1].observations[:21, 0].tolist()
    for episode in open_trace(tmp_path / "b"):
        assert episode.observations[:21, 0].tolist() == places
        assert 0 <= int(episode.observations[21, 0]) - places[20] < 5
        assert (episode.prefix, len(episode)) == (20, 40)
    for episode in open_trace(tmp_path / "c"):
        assert (int(episode.observations[0, 0]), episode.first_step, len(episode)) == (places[20], 20, 20)
    with pytest.raises(InvalidOption, match="states: not supported by a branch from recorded states"):
        go(directory=tmp_path / "d", start="states", states=5)


def test_errors_of_single_steps_do_not_add_up(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t")
    (first, second) = verify_trace(trace, make_env=make, trust=True, one_step=True)
    for verdict in (first, second):
        assert (verdict.verdict, verdict.from_states) == ("differs", 40)
        observations, rewards = verdict.divergences
        assert 0 < observations.largest < 5 < observations.steps == rewards.steps  # type: ignore[operator]
        assert observations.growth is None
    steady = recorded(tmp_path / "steady", every=10, made=calm)
    found = verify_trace(steady, make_env=calm, trust=True, one_step=True)
    assert [(verdict.verdict, verdict.from_states, verdict.divergences) for verdict in found] == [
        ("identical", 4, ())
    ] * 2


def test_verify_one_step_on_the_command_line(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    made = ("--make", "test_from_states:make", "--one-step")
    done = run("verify", tmp_path / "t", *made, "--trust")
    assert done.exit_code == 3
    last = next(line for line in done.stdout.splitlines() if "replayed" in line)
    assert last.startswith("2 episodes replayed: 2 different; 80 steps from recorded states: largest one-step error 4 ")
    assert "(observations[0] at step " in last
    done = run(
        "verify",
        tmp_path / "t",
        *made,
        "--trust",
        "--tolerance",
        "rewards=20",
        "--tolerance",
        "atol=20",
        "--episodes",
        "0",
    )
    assert done.exit_code in (0, 3)
    done = run("verify", tmp_path / "t", *made)
    assert (done.exit_code, "pass --trust" in done.stdout) == (4, True)
    recorded(tmp_path / "none", every=None)
    done = run("verify", tmp_path / "none", *made, "--trust")
    assert done.exit_code == 4
    assert "episode 0 cannot be verified: no states of it were recorded; record them with states=1" in done.stdout


def test_windows_and_the_viewer_show_the_recorded_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Noisy.metadata, "render_modes", ["rgb_array", "human"])
    trace = recorded(tmp_path / "t")
    making = {"make_env": make, "trust": True}
    with pytest.warns(UserWarning, match="the window shows the recorded states"):
        (verdict,) = play_for_humans(trace, [1], speed=1000, **making)  # type: ignore[arg-type]
    assert verdict.from_states == 41
    sent: list[Any] = []

    class Connection:
        send = sent.append

    rendering._rendered(Connection(), trace, 1, rendering.Recipe(Making(**making)), 0)  # type: ignore[arg-type]
    assert sent[-1][0] == "done"
    assert sent[-1][1].endswith("; shown: the recorded states")


def test_commands_take_the_source(tmp_path: Path) -> None:
    recorded(tmp_path / "t")
    made = (tmp_path / "t", "--make", "test_from_states:make", "--trust", "--episode", "1", "--step", "20")
    assert ok("branch", *made, "--episodes", "1", "--from", "states", "-o", tmp_path / "b", "--policy", "random")
    assert run("branch", *made, "--episodes", "1", "--from", "replay", "-o", tmp_path / "c").exit_code == 3
    done = run("shell", *made, "--from", "states")
    assert "before step 20 of 40 of episode 1; set to its recorded state" in done.output


def test_an_episode_that_replays_is_not_shown_from_states(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "t", made=calm)
    for played in replays(trace, [0, 1], Making(make_env=calm, trust=True), None):
        places: list[int] = []
        verdict = played.replay.film(played.position, lambda env, step: places.append(env.unwrapped.place))  # noqa: B023
        assert (verdict.verdict, verdict.from_states) == ("identical", 0)
        assert places == trace[played.index].observations[:, 0].tolist()
