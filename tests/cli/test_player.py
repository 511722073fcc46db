"""Episodes played in a terminal: the shown steps, the keys, and numbers where no environment renders."""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gym_trace_cli.player.player import Player
from gymnasium import spaces
from rendered_env import make_rendered
from scripted_env import Result, ToyEnv
from terminals import Scripted

from gym_trace import Trace, TraceRecordingWrapper, open_trace
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable
from gym_trace.tools.replay.making import Making
from gym_trace.tools.replay.resimulate import Verdict
from gym_trace.tools.video import frames
from gym_trace.tools.video.frames import view_observed, view_rendered


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")


def record(path: Path, env: Any, episodes: int = 1, **options: Any) -> Trace:
    with TraceRecordingWrapper(env, path, **options) as recorder:
        recorder.action_space.seed(0)
        for episode in range(episodes):
            recorder.reset(seed=episode)
            while not any(recorder.step(recorder.action_space.sample())[2:4]):
                pass
    return open_trace(path)


def played(
    trace: Trace, keys: Iterable[str | None] = (), source: str | None = None, paused: bool = True, **options: Any
) -> tuple[Player, Scripted]:
    scripted = Scripted(keys, **options)
    player = Player(trace, list(range(len(trace))), source, 1000.0, paused)
    player.run(scripted, Making())  # type: ignore[arg-type]
    return player, scripted


def steps(scripted: Scripted) -> list[tuple[int, int]]:
    """Return the shown episode and step at each key."""
    found = [re.search(r"episode (\d+).*^step (\d+)", screen, re.S | re.M) for screen in scripted.screens]
    return [(int(match[1]), int(match[2])) for match in found if match is not None]


class Script:
    """A viewer that shows the given steps, in this order."""

    class Over(Exception):
        pass

    def __init__(self, order: Iterable[int]):
        self._order = iter(order)
        self.seen: list[tuple[int, Any]] = []
        self.verdicts: list[str] = []
        self.fps, self.waited = 0.0, 0
        self.step = next(self._order)

    def see(self, frame: Any) -> None:
        self.seen.append((self.step, frame))
        step = next(self._order, None)
        if step is None:
            raise self.Over
        self.step = step

    def show_verdict(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict.verdict)

    def wait(self) -> None:
        self.waited += 1


@pytest.mark.parametrize("kept", [1, 1 << 20], ids=["one frame is kept", "all are kept"])
def test_steps_that_are_rendered_can_be_looked_at_in_any_order(
    tmp_path: Path, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "_MOST_BYTES", kept)
    order = [0, 1, 4, 2, 2, 6, 0, 5, 6]
    script = Script(order)
    with pytest.raises(Script.Over):
        view_rendered(record(tmp_path, make_rendered(), 2), 1, script, Making())
    assert script.seen == [(step, f"step {step}\n\x1b[41m@\x1b[0m{'.' * step}\n") for step in order]
    assert set(script.verdicts) == {"identical"}
    assert script.fps == 20


def test_pictures_that_are_rendered_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = record(tmp_path, make_rendered())
    monkeypatch.setattr("rendered_env.RenderedEnv.metadata", {"render_modes": ["rgb_array"], "render_fps": 20})
    script = Script([3, 0])
    with pytest.raises(Script.Over):
        view_rendered(trace, 0, script, Making())
    picture: Any = make_rendered().unwrapped
    assert [(frame == picture.picture(step)).all() for step, frame in script.seen] == [True, True]


def test_observations_can_be_seeked_in_any_order(tmp_path: Path) -> None:
    trace = record(tmp_path / "a", make_rendered(pictures=True))
    script = Script([5, 0, 6, 1])
    with pytest.raises(Script.Over):
        view_observed(trace, 0, script)
    assert all((frame == trace[0].observations[step]).all() for step, frame in script.seen)
    script = Script([2, 0])
    with pytest.raises(Script.Over):
        view_observed(record(tmp_path / "b", make_rendered()), 0, script)
    assert [[(name, value.tolist()) for name, value in frame] for _, frame in script.seen] == [
        [("observation", [2, 2])],
        [("observation", [0, 0])],
    ]


def test_keys_go_through_steps_and_episodes(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(), 3)
    keys = ["next", "right", "end", "right", "home", "left", "down", "next", "up", "up", "down", "down", "down", "quit"]
    player, scripted = played(trace, keys)
    assert steps(scripted) == [
        *[(0, 0), (0, 1), (0, 2), (0, 6), (0, 6), (0, 0), (0, 0)],
        *[(1, 0), (1, 1), (0, 0), (0, 0), (1, 0), (2, 0), (2, 0)],
    ]
    assert not player.damages
    assert player.played == {0, 1, 2}


def test_next_goes_on_behind_the_end_of_an_episode_and_ends_with_the_last(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(length=1), 2)
    _, scripted = played(trace, ["next"] * 10)
    assert steps(scripted) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_without_keys_all_is_played_to_the_end(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(), 2)
    player, scripted = played(trace, itertools.repeat(None), paused=False)
    assert player.played == {0, 1}
    assert "episode 1 (2 of 2)" in scripted.drawn.text
    assert "step 6 " in scripted.drawn.text
    assert "6/6" in scripted.drawn.text


def test_speed_and_pauses_are_shown(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered())
    _, scripted = played(trace, ["slower", "slower", "pause", "faster", "pause", "quit"])
    titles = [screen.split("\n")[0] for screen in scripted.screens]
    assert ["paused" in title for title in titles] == [True, True, True, False, False, True]
    assert "250x" in titles[3]
    assert "500x" in titles[4]


def test_words_say_return_reward_and_action_at_any_step(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered())
    _, scripted = played(trace, ["next", "next", "left"])
    told = [screen.split("\n")[-4:-2] for screen in scripted.screens]
    actions = trace[0].actions.tolist()
    assert told == [
        ["step 0   return 0", "reset"],
        ["step 1   return 0.5", f"reward 0.5   action {actions[0]}"],
        ["step 2   return 1", f"reward 0.5   action {actions[1]}"],
        ["step 1   return 0.5", f"reward 0.5   action {actions[0]}"],
    ]


def test_pictures_that_were_observed_need_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(tmp_path, make_rendered(pictures=True))
    monkeypatch.setattr("gym_trace.tools.replay.making.make_environment", None)
    _, scripted = played(trace, ["end"])
    assert "▀" in scripted.drawn.text


def test_numbers_are_shown_where_nothing_renders_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(tmp_path, make_rendered(), 2)
    made: list[Any] = []

    def fails(*args: Any) -> None:
        made.append(args)
        raise EnvironmentUnavailable("no \x1b[2J such thing")

    monkeypatch.setattr("gym_trace.tools.video.frames.replays", fails)
    player, scripted = played(trace, ["next", "next", "next", "down", "next"])
    assert "as numbers: no \\x1b[2J such thing" in scripted.screens[0]
    assert re.search(r"^observation +2 +2$", scripted.screens[2], re.M)
    assert "rewards " in scripted.screens[3]
    assert len(made) == 1  # made once per writer, not per episode
    assert list(player.fallbacks) == ["as numbers: no \\x1b[2J such thing"]
    with pytest.raises(EnvironmentUnavailable):
        played(trace, ["next"], source="auto")


def test_a_renderer_that_breaks_in_the_midst_leaves_numbers_from_there_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = record(tmp_path, make_rendered(breaks_at=3))
    _, scripted = played(trace, ["next"] * 4)
    assert ["observation" in screen for screen in scripted.screens] == [False, False, False, True, True]
    assert "the screen is broken" in scripted.screens[3]
    assert [step for _, step in steps(scripted)] == [0, 1, 2, 3, 4]


def test_parts_of_episodes_are_shown_as_numbers_with_the_steps_they_have(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(), frame_filter=lambda step: step > 3)
    _, scripted = played(trace, ["next"])
    assert "earlier steps were filtered out" in scripted.screens[0].replace("\n", " ")
    assert [step for _, step in steps(scripted)] == [trace[0].first_step, trace[0].first_step + 1]


def test_a_replay_that_differs_is_said_to(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(offset=1))
    scripted = Scripted(["next"])
    making = Making(env_kwargs={"offset": 0})
    Player(trace, [0], None, 1.0, True).run(scripted, making)  # type: ignore[arg-type]
    assert "replayed, differs: differs at step 2" in scripted.screens[0]


def test_an_episode_that_is_damaged_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = record(tmp_path, make_rendered(pictures=True), 3)

    def broken(self: Any, number: int, *args: Any) -> Any:
        raise CorruptTrace("checksum mismatch")

    monkeypatch.setattr("gym_trace.tools.video.frames.ObservationRows", broken)
    player, _ = played(trace, ["next"])
    assert list(player.damages) == [f"episode {index}: checksum mismatch" for index in range(3)]


def test_an_empty_episode_is_one_frame(tmp_path: Path) -> None:
    with TraceRecordingWrapper(make_rendered(), tmp_path) as env:
        env.reset(seed=1)
    _, scripted = played(open_trace(tmp_path), ["end", "home", "left", "next", "next"])
    assert steps(scripted) == [(0, 0)] * 4


class Odd(ToyEnv):
    """An environment with odd observations."""

    observation_space = spaces.Dict(
        {"words": spaces.Text(20), "view": spaces.Box(0, 255, (20, 20), np.uint8), "wide": spaces.Box(-1, 1, (500,))}
    )
    action_space = spaces.Text(30)

    def result(self, action: Any) -> Result:
        view: Any = (np.zeros((20, 20), np.uint8), np.zeros((3, 3)), "no picture", np.zeros((3, 3)))[min(self.t, 3)]
        words, wide = ("\u202e", np.inf) if self.t else ("\x1b[2J\n", np.nan)
        return Result({"words": words, "view": view, "wide": np.full(500, wide, np.float32)}, [1, 2])


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_odd_observations_rewards_and_actions_are_shown_and_steer_nothing(tmp_path: Path) -> None:
    with TraceRecordingWrapper(Odd(), tmp_path) as env:
        env.reset()
        for action in ("\x1b]0;x\x07", "\n" * 9, "\ud800"):
            env.step(action)
    for source in (None, "observations"):
        _, scripted = played(open_trace(tmp_path), ["next"] * 3, source, size=(60, 12))
        assert [step for _, step in steps(scripted)] == [0, 1, 2, 3]
        assert "more" in scripted.drawn.text  # wide columns are cut


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (20, 6), (5, 3), (1, 1)], ids=str)
def test_every_size_of_terminal_is_large_enough(tmp_path: Path, size: tuple[int, int]) -> None:
    for name, env in (("text", make_rendered()), ("picture", make_rendered(pictures=True))):
        trace = record(tmp_path / name, env)
        for source in (None, "observations"):
            _, scripted = played(trace, ["next", "next"], source, size=size)
            assert all(len(line) <= size[0] for line in scripted.drawn.lines)
            assert len(scripted.screens) == 3


def test_episodes_of_a_view_are_those_of_the_view(tmp_path: Path) -> None:
    trace = record(tmp_path, make_rendered(), 4)
    _, scripted = played(trace[[3, 1]], ["down"])
    assert "seed 3" in scripted.screens[0]
    assert "seed 1" in scripted.screens[1]


def test_keys_that_leave_are_heard_while_an_episode_is_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_trace_cli.player.player._LOOK_SECONDS", 0.0)
    trace = record(tmp_path, make_rendered(length=40), 3)
    told: list[Any] = []
    monkeypatch.setattr(Player, "show_verdict", lambda self, verdict: told.append(verdict.index))
    _, scripted = played(trace, [], unasked=[*[None] * 9, "right", None, "down", None, None, None, "quit"])
    assert "episode 0" in scripted.screens[0]
    assert "replaying" in scripted.screens[0]
    assert "episode 1" in scripted.screens[-1]
    assert told == []  # neither episode was played to its end
