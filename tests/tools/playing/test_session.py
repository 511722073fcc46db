"""Sessions with a scripted keyboard: what is recorded, kept, discarded and annotated."""

import contextlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pygame = pytest.importorskip("pygame")

from person import Person, Watched, stepping  # noqa: E402

from gym_trace import open_trace, verify_trace  # noqa: E402
from gym_trace.errors import InvalidOption, RenderingError  # noqa: E402
from gym_trace.tools.playing.play import play  # noqa: E402
from gym_trace.tools.playing.report import PlayReport  # noqa: E402
from gym_trace.tools.playing.window import Window, check_display  # noqa: E402

KEYS = "[keys]\nleft = 0\nright = 1\n"


@pytest.fixture(autouse=True)
def _no_display(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys.toml").write_text(KEYS)
    return tmp_path / "keys.toml"


def _cartpole() -> Watched:
    return Watched(gymnasium.make("CartPole-v1", render_mode="rgb_array"))


def _play(env: Any, directory: Path, *acts: Any, **options: Any) -> PlayReport:
    person = Person(*acts)
    return play(env, directory, stop=person, **{"seed": 5, "fps": 500, "name": "CartPole-v1", **options})


def _outcomes(directory: Path) -> list[str]:
    return [episode.outcome for episode in open_trace(directory)]


def _verify(directory: Path, env_id: str = "CartPole-v1") -> None:
    made = verify_trace(directory, make_env=lambda: gymnasium.make(env_id))
    assert {verdict.verdict for verdict in made} == {"identical"}


def test_each_key_is_a_step_and_the_recording_verifies(tmp_path: Path, keys: Path) -> None:
    env, pressed = _cartpole(), ["left", "right", "right", "left", "right"]
    played = _play(env, tmp_path / "t", *stepping(env, *pressed), keys=keys)
    (episode,) = open_trace(tmp_path / "t")
    assert episode.actions.tolist() == [0, 1, 1, 0, 1]
    assert (played.episodes, played.steps, played.discarded) == (1, 5, [])
    _verify(tmp_path / "t")


def test_closing_the_window_keeps_the_unfinished_episode(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    _play(env, tmp_path / "t", *stepping(env, "left", "left"), "close", lambda: False, keys=keys)
    assert _outcomes(tmp_path / "t") == ["closed"]
    assert len(open_trace(tmp_path / "t")[0]) == 2


def test_a_discarded_episode_is_gone_and_the_others_stay(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    acts = [
        *stepping(env, "left"),
        "f9",
        *stepping(env, "right", "right"),
        "f8",
        "f8",
        *stepping(env, "left", "left", "left"),
    ]
    played = _play(env, tmp_path / "t", *acts, keys=keys)
    assert [len(episode) for episode in open_trace(tmp_path / "t")] == [1, 3]
    assert _outcomes(tmp_path / "t") == ["cut", "closed"]
    assert (played.discarded, played.left) == ([1], "")
    _verify(tmp_path / "t")


def test_discarding_asks_first(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    played = _play(env, tmp_path / "t", *stepping(env, "left"), "f8", "escape", *stepping(env, "right"), keys=keys)
    assert not played.discarded
    assert open_trace(tmp_path / "t")[0].actions.tolist() == [0, 1]


def test_a_session_in_which_all_is_discarded_leaves_nothing(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    played = _play(env, tmp_path / "t", *stepping(env, "left"), "f8", "f8", "f8", "f8", "f8", "f8", keys=keys)
    assert len(played.discarded) == 3
    assert [len(episode) for episode in open_trace(tmp_path / "t")] == [0]


def test_episodes_of_other_writers_survive_a_discard(tmp_path: Path, keys: Path) -> None:
    for _ in range(2):
        env = _cartpole()
        acts = [*stepping(env, "left", "left"), "f8", "f8", *stepping(env, "right")]
        _play(env, tmp_path / "t", *acts, keys=keys, on_exist="append")
    assert [episode.actions.tolist() for episode in open_trace(tmp_path / "t")] == [[1], [1]]


def test_episodes_that_cannot_be_removed_stay_and_the_command_is_named(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, other = _cartpole(), gymnasium.make("CartPole-v1")
    from gym_trace import TraceRecordingWrapper

    with TraceRecordingWrapper(other, tmp_path / "t") as recording:
        recording.reset(seed=0)
        acts = [*stepping(env, "left"), "f8", "f8", *stepping(env, "right")]
        played = _play(env, tmp_path / "t", *acts, keys=keys, on_exist="append")
    assert "gym-trace edit filter" in played.left
    assert "episode_id in [0]" in played.left
    assert len(open_trace(tmp_path / "t")) == 3


@pytest.mark.parametrize("kept", [0, 1])
def test_an_error_after_a_discard_says_which_discarded_episodes_stay(tmp_path: Path, keys: Path, kept: int) -> None:
    env, resets = _cartpole(), 0
    reset = env.reset

    def reset_or_raise(**options: Any) -> Any:
        nonlocal resets
        resets += 1
        if resets == 2 + kept:
            raise RuntimeError("no more episodes")
        return reset(**options)

    env.reset = reset_or_raise  # type: ignore[method-assign]
    acts = [*stepping(env, "left"), *["f9"] * kept, *stepping(env, "right"), "f8", "f8"]
    with contextlib.ExitStack() as told:
        told.enter_context(pytest.raises(RuntimeError, match="no more episodes"))
        if not kept:
            told.enter_context(pytest.warns(UserWarning, match="still in the trace: .*holds no other episodes"))
        _play(env, tmp_path / "t", *acts, keys=keys)
    assert len(open_trace(tmp_path / "t")) == 1
    assert open_trace(tmp_path / "t")[0].actions.tolist() == ([0] if kept else [0, 1])


def test_restarting_begins_again_from_the_same_seed(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    _play(
        env,
        tmp_path / "t",
        *stepping(env, "left"),
        "f5",
        *stepping(env, "right"),
        "f9",
        *stepping(env, "right"),
        keys=keys,
    )
    first, again, another = open_trace(tmp_path / "t")
    assert first.outcome == "cut"
    assert first.seed == again.seed != another.seed
    np.testing.assert_array_equal(first.observations[0], again.observations[0])


def test_marks_are_columns_of_the_trace(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    acts = [
        *stepping(env, "left"),
        "g",
        *stepping(env, "left"),
        *stepping(env, "left"),
        "b",
        "g",
        *stepping(env, "right"),
    ]
    _play(env, tmp_path / "t", *acts, keys=keys, marks={"g": "good", "b": "bad"})
    annotations = open_trace(tmp_path / "t")[0].annotations
    assert annotations["good"].tolist() == [False, True, False, True]
    assert annotations["bad"].tolist() == [False, False, False, True]
    assert open_trace(tmp_path / "t").find_steps("annotations.good").tolist() == [[0, 1], [0, 3]]


def test_nothing_moves_while_paused_or_in_the_help(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("rest = 0\n" + KEYS)
    env = _cartpole()
    loops = iter(range(10**6))

    def some_loops() -> bool:
        return next(loops) % 20 == 19

    seen: list[int] = []
    acts: list[Any] = [lambda: env.steps > 2]
    for key in ("f2", "f1"):
        acts += [key, some_loops, lambda: seen.append(env.steps) or True, some_loops]
        acts += [lambda: seen.append(env.steps) or True, key, lambda: env.steps > seen[-1]]
    _play(env, tmp_path / "t", *acts, keys=tmp_path / "keys.toml")
    assert seen[0] == seen[1]
    assert seen[2] == seen[3] > seen[1]


def test_without_a_key_the_environment_rests_or_waits(tmp_path: Path, keys: Path) -> None:
    env = _cartpole()
    loops = iter(range(30))
    played = _play(env, tmp_path / "waits", lambda: next(loops, None) is None, keys=keys)
    assert played.steps == 0
    (tmp_path / "rests.toml").write_text("rest = 1\n" + KEYS)
    env = _cartpole()
    _play(env, tmp_path / "rests", lambda: env.steps > 3, keys=tmp_path / "rests.toml")
    assert set(open_trace(tmp_path / "rests")[0].actions.tolist()) == {1}


def test_a_session_ends_after_its_episodes(tmp_path: Path) -> None:
    (tmp_path / "keys.toml").write_text("rest = 0\n" + KEYS)
    env = _cartpole()
    person = Person(lambda: env.ended == 1, "return", lambda: env.ended == 2, "return", lambda: False)
    played = play(env, tmp_path / "t", seed=0, fps=900, keys=tmp_path / "keys.toml", episodes=2, stop=person)
    assert len(played.kept) == 2
    assert _outcomes(tmp_path / "t") == ["terminated", "terminated"]


def test_steps_before_an_error_of_the_environment_are_kept(tmp_path: Path, keys: Path) -> None:
    class Broken(Watched):
        def step(self, action: Any) -> Any:
            if self.steps == 2:
                raise ZeroDivisionError("the simulator broke")
            return super().step(action)

    env = Broken(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    with pytest.raises(ZeroDivisionError, match="the simulator broke"):
        _play(env, tmp_path / "t", *stepping(env, "left", "left", "left"), keys=keys)
    assert len(open_trace(tmp_path / "t")[0]) == 2


def test_the_fps_reached_are_those_of_a_slow_environment(tmp_path: Path) -> None:
    import time

    class Slow(Watched):
        def step(self, action: Any) -> Any:
            time.sleep(0.02)
            return super().step(action)

    (tmp_path / "keys.toml").write_text("rest = 0\n" + KEYS)
    env = Slow(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    played = _play(env, tmp_path / "t", lambda: env.steps >= 8, keys=tmp_path / "keys.toml", fps=500)
    assert played.fps is not None
    assert played.fps < 60


# -- keys that the person is asked for --------------------------------------------------------------------------------


def test_keys_are_asked_for_once_and_kept(tmp_path: Path) -> None:
    env = _cartpole()
    _play(env, tmp_path / "one", "a", "a", "f1", "backspace", "k", "d", *stepping(env, "d", "k"))
    assert open_trace(tmp_path / "one")[0].actions.tolist() == [1, 0]
    (kept,) = (tmp_path / "config" / "gym-trace" / "keys").iterdir()
    assert kept.read_text().endswith('[keys]\n"k" = 0\n"d" = 1\n')
    env = _cartpole()
    _play(env, tmp_path / "two", *stepping(env, "d"))
    assert open_trace(tmp_path / "two")[0].actions.tolist() == [1]
    env = _cartpole()
    _play(env, tmp_path / "three", "x", "y", *stepping(env, "y"), asks_again=True)
    assert open_trace(tmp_path / "three")[0].actions.tolist() == [1]


def test_enter_makes_an_action_the_one_at_rest(tmp_path: Path) -> None:
    env = _cartpole()
    _play(env, tmp_path / "t", "return", "d", lambda: env.steps > 2)
    assert set(open_trace(tmp_path / "t")[0].actions.tolist()) == {0}


@pytest.mark.parametrize("act", ["escape", "close"])
def test_giving_up_the_questions_records_nothing(tmp_path: Path, act: str) -> None:
    played = _play(_cartpole(), tmp_path / "t", "a", act, lambda: False)
    assert played.episodes == 0
    assert not (tmp_path / "t").exists()


# -- other environments -----------------------------------------------------------------------------------------------


def test_the_environments_own_keys_are_used(tmp_path: Path) -> None:
    env = Watched(gymnasium.make("MountainCar-v0", render_mode="rgb_array"))
    acts = [lambda: env.steps > 1, "+right", lambda: env.steps > 30, "-right", lambda: env.steps > 40]
    play(env, tmp_path / "t", seed=0, fps=500, stop=Person(*acts))
    actions = open_trace(tmp_path / "t")[0].actions
    assert set(actions[:2].tolist()) == {1}
    assert np.count_nonzero(actions == 2) > 10
    assert not np.count_nonzero(actions == 0)


def _some_steps(env: Watched) -> Any:
    """Return an act that is done after eight steps."""
    seen: list[int] = []

    def act() -> bool:
        seen.append(env.steps)
        return env.steps >= seen[0] + 8 and not seen.clear()

    return act


def test_buttons_and_axes_of_a_game_pad_are_keys_until_unplugged(tmp_path: Path) -> None:
    env = Watched(gymnasium.make("MountainCar-v0", render_mode="rgb_array"))
    (tmp_path / "keys.toml").write_text('rest = 1\n[keys]\n"pad button 3" = 0\n"pad up" = 2\n"pad left" = 0\n')

    def pad(kind: int, **values: Any) -> Any:
        return lambda: pygame.event.post(pygame.event.Event(kind, values)) or True

    some_steps, acts = _some_steps(env), []
    for event in (
        pad(pygame.JOYBUTTONDOWN, button=3),
        pad(pygame.JOYBUTTONUP, button=3),
        pad(pygame.JOYHATMOTION, value=(0, 1)),
        pad(pygame.JOYHATMOTION, value=(0, 0)),
        pad(pygame.JOYAXISMOTION, axis=0, value=-0.9),
        pad(pygame.JOYDEVICEREMOVED, instance_id=0),
    ):
        acts += [some_steps, event]
    play(env, tmp_path / "t", seed=0, fps=500, keys=tmp_path / "keys.toml", stop=Person(*acts, some_steps))
    actions = open_trace(tmp_path / "t")[0].actions
    assert [actions[0], *actions[1:][actions[1:] != actions[:-1]]] == [1, 0, 1, 2, 1, 0, 1]
    _verify(tmp_path / "t", "MountainCar-v0")


def test_continuous_actions_have_arrows_the_mouse_and_a_game_pad(tmp_path: Path) -> None:
    env = Watched(gymnasium.make("Pendulum-v1", render_mode="rgb_array"))
    some_steps = _some_steps(env)

    def pad(value: float) -> Any:
        return lambda: pygame.event.post(pygame.event.Event(pygame.JOYAXISMOTION, axis=0, value=value)) or True

    def mouse(kind: int) -> Any:
        event = pygame.event.Event(kind, button=1, pos=(0, 0))
        return lambda: pygame.event.post(event) or True

    acts = [some_steps, "+right", some_steps, "-right", some_steps, pad(-0.5), some_steps, pad(0.0), some_steps]
    acts += [mouse(pygame.MOUSEBUTTONDOWN), some_steps, mouse(pygame.MOUSEBUTTONUP), some_steps]
    play(env, tmp_path / "t", seed=0, fps=500, stop=Person(*acts))
    actions = open_trace(tmp_path / "t")[0].actions[:, 0]
    changes = [actions[0], *actions[1:][actions[1:] != actions[:-1]]]
    assert changes == [0, 2, 0, -1, 0, -2, 0]
    _verify(tmp_path / "t", "Pendulum-v1")


def test_an_environment_that_renders_text_is_played_in_it(tmp_path: Path) -> None:
    env = Watched(gymnasium.make("FrozenLake-v1", render_mode="ansi"))
    (tmp_path / "keys.toml").write_text("[keys]\nleft = 0\ndown = 1\n")
    play(env, tmp_path / "t", seed=0, fps=500, keys=tmp_path / "keys.toml", stop=Person(*stepping(env, "down", "left")))
    assert open_trace(tmp_path / "t")[0].actions.tolist() == [1, 0]


# -- what cannot be played --------------------------------------------------------------------------------------------


def test_without_a_display_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(RenderingError, match="xvfb-run gym-trace play"):
        check_display()


def test_a_display_that_does_not_answer_is_named(tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "x11")
    monkeypatch.setenv("DISPLAY", ":4711")
    with pytest.raises(RenderingError, match=r"no display: .*; play at a desktop"):
        _play(_cartpole(), tmp_path / "t", keys=keys)
    assert not (tmp_path / "t").exists()


def test_invalid_requests_raise_before_anything_is_recorded(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(InvalidOption, match="render_mode is None"):
        _play(Watched(gymnasium.make("CartPole-v1")), tmp_path / "t", keys=keys)
    with pytest.raises(InvalidOption, match="f8 is used by gym-trace"):
        _play(_cartpole(), tmp_path / "t", keys=keys, marks={"f8": "good"})
    with pytest.raises(InvalidOption, match="key left: used by gym-trace"):
        _play(_cartpole(), tmp_path / "t", keys=keys, marks={"left": "good"})
    assert not (tmp_path / "t").exists()


def test_a_copy_shows_what_an_action_does_before_its_key_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[Any, list[str]]] = []
    draw = Window.show

    def show(self: Window, picture: Any, lines: Any, *more: Any) -> None:
        shown.append((picture, [*lines]))
        draw(self, picture, lines, *more)

    monkeypatch.setattr(Window, "show", show)
    env = _cartpole()
    _play(env, tmp_path / "t", "a", "d", *stepping(env, "d"))
    asked = [picture for picture, lines in shown if "press the key for: action 0" in lines[0]]
    assert asked
    assert all(picture.shape == (400, 600, 3) for picture in asked)
    assert "a: action 0   d: action 1" in shown[-1][1][1]
    assert open_trace(tmp_path / "t")[0].actions.tolist() == [1]
    assert all(picture is not None or lines == ["CartPole-v1: starting"] for picture, lines in shown)
