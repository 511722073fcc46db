"""TraceRecordingWrapper records everything and changes nothing."""

import copy
import dataclasses
import decimal
import fractions
import inspect
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, RecordEpisodeStatistics, TimeLimit
from runs import acted, outcomes, play, recorded, warned
from scripted_env import CountingEnv, Lazy, OddSpace, Result, ScriptedEnv, bits, scripted
from vector_wrapper import TraceRecordingVectorWrapper

from gym_trace import TraceRecordingWrapper, TraceWriter, open_trace
from gym_trace.errors import InvalidOption
from gym_trace.recording.options import RecordingKeywords, RecordingOptions

# -- a wrapped run is the unwrapped run --------------------------------------------------------------------------------


@pytest.mark.parametrize("record_infos", [False, True])
def test_a_wrapped_run_returns_the_same_as_an_unwrapped_run(tmp_path: Path, record_infos: bool) -> None:
    expected = play(gymnasium.make("CartPole-v1"), 8)
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, record_infos=record_infos)
    assert bits(play(env, 8)) == bits(expected)
    env.close()


def test_unseeded_resets_use_the_generator_as_without_the_wrapper(tmp_path: Path) -> None:
    def states(env: Any) -> list[Any]:
        env.reset(seed=3)
        found = []
        for _ in range(3):
            env.reset()
            found.append(env.unwrapped.np_random.bit_generator.state)
        return found

    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    assert states(env) == states(gymnasium.make("CartPole-v1"))
    env.close()


def test_the_environment_is_called_as_often_as_without_the_wrapper(tmp_path: Path) -> None:
    bare, inner = CountingEnv(), CountingEnv()
    env = TraceRecordingWrapper(inner, tmp_path, record_infos=True, frame_filter=lambda step: step % 2 == 0)
    play(bare, 3)
    play(env, 3)
    env.flush()
    assert inner.calls == bare.calls
    env.close()
    assert inner.calls == [*bare.calls, "close"]


def test_the_wrapper_returns_the_objects_of_the_environment_unchanged(tmp_path: Path) -> None:
    class Remembering(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            self.last = super().reset(**kwargs)
            return self.last

        def step(self, action: Any) -> Any:
            self.seen = action
            self.last = super().step(action)
            return self.last

    inner = Remembering()
    env = TraceRecordingWrapper(inner, tmp_path, record_infos=True)
    assert env.reset() is inner.last
    action = np.int64(1)
    assert env.step(action) is inner.last
    assert inner.seen is action
    env.close()


def test_flags_of_other_types_are_stored_as_booleans(tmp_path: Path) -> None:
    steps = [Result(np.int64(0), 1.0, np.False_, 0), Result(np.int64(0), 1.0, np.True_, 1)]
    env = acted(TraceRecordingWrapper(scripted(steps), tmp_path), "reset")
    assert env.step(0)[2] is steps[0].terminated
    assert env.step(0)[3] is steps[1].truncated
    env.close()
    episode = open_trace(tmp_path)[0]
    assert episode.terminations.tolist() == [False, True]
    assert episode.truncations.tolist() == [False, True]
    assert episode.outcome == "terminated"


def test_the_recorder_does_not_consume_frames_of_a_render_list(tmp_path: Path) -> None:
    class Filming(CountingEnv):
        def __init__(self) -> None:
            super().__init__(render_mode="rgb_array_list")
            self.frames: list[int] = []

        def step(self, action: Any) -> Any:
            self.frames.append(len(self.frames))
            return super().step(action)

        def render(self) -> Any:
            frames, self.frames = self.frames, []
            return frames

    env = acted(TraceRecordingWrapper(Filming(), tmp_path), "reset", 0, 0, 0, "flush")
    assert env.render() == [0, 1, 2]
    env.close()


def test_step_without_reset_raises_what_gymnasium_raises(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset(seed=0)
    env.step(0)
    env.close()
    assert len(open_trace(tmp_path)[0]) == 1


# -- other people's wrappers -------------------------------------------------------------------------------------------


def test_wrappers_above_do_not_change_what_is_recorded(tmp_path: Path) -> None:
    inner = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env = RecordEpisodeStatistics(NormalizeObservation(TimeLimit(inner, 7)))
    said = play(env, 3)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace) == 3
    assert outcomes(tmp_path) == ["cut", "cut", "closed"]  # the recorder does not see the limit above it
    assert sum(map(len, trace)) == len(said) - 3
    assert trace[0].observations.dtype == np.float32


def test_wrappers_below_are_recorded_as_the_agent_sees_them(tmp_path: Path) -> None:
    inner = TimeLimit(gymnasium.make("CartPole-v1").unwrapped, 7)
    env = TraceRecordingWrapper(
        RecordEpisodeStatistics(NormalizeObservation(inner)), tmp_path, record_infos=["episode"]
    )
    said: list[Any] = []
    assert len(warned(lambda: said.extend(play(env, 3)), env.close)) <= 1
    got = [row for episode in open_trace(tmp_path) for row in episode.observations]
    assert [bits(row) for row in got] == [bits(result[0]) for result in said]
    assert set(outcomes(tmp_path)) == {"truncated"}
    assert open_trace(tmp_path)[0].infos[-1]["episode"]["l"] == 7


@pytest.mark.skipif(not hasattr(gymnasium.wrappers, "FrameStackObservation"), reason="since gymnasium 1.0")
def test_stacked_frames_are_recorded(tmp_path: Path) -> None:
    def wrapped(env: Any) -> Any:
        return gymnasium.wrappers.FrameStackObservation(env, 3)

    expected = play(wrapped(gymnasium.make("CartPole-v1")), 2)
    env = TraceRecordingWrapper(wrapped(gymnasium.make("CartPole-v1")), tmp_path)
    assert bits(play(env, 2)) == bits(expected)
    env.close()
    got = [row for episode in open_trace(tmp_path) for row in episode.observations]
    assert bits(got) == bits([said[0] for said in expected])


@pytest.mark.skipif(not hasattr(gymnasium.wrappers, "Autoreset"), reason="since gymnasium 1.0")
def test_autoreset_above_and_below(tmp_path: Path) -> None:
    above = gymnasium.wrappers.Autoreset(TraceRecordingWrapper(CountingEnv(length=3), tmp_path / "above"))
    below = TraceRecordingWrapper(gymnasium.wrappers.Autoreset(CountingEnv(length=3)), tmp_path / "below")
    for name, env in (("above", above), ("below", below)):
        acted(env, "reset", *[0] * 8, "close")
        assert [len(episode) for episode in open_trace(tmp_path / name)] == [3, 3, 0]


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_recorders_inside_a_vector_environment_share_a_directory(tmp_path: Path, kind: Any) -> None:
    def make() -> Any:
        return TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, on_exist="append")

    envs = kind([make] * 3)
    envs.reset(seed=[1, 2, 3])
    for _ in range(60):
        envs.step(np.array([0, 1, 0]))
    envs.close()
    trace = open_trace(tmp_path)
    assert trace.damage == []
    assert {episode.seed for episode in trace} == {1, 2, 3, None}
    assert len({episode.writer for episode in trace}) == 3
    assert all(outcome in ("terminated", "closed") for outcome in outcomes(tmp_path))
    for episode in trace.scan(episodes=np.flatnonzero(trace.episodes["seed"] == 1)):
        bare = gymnasium.make("CartPole-v1")
        expected = [bare.reset(seed=1)[0]]
        expected += [bare.step(int(action))[0] for action in episode.actions]
        assert bits(episode.observations) == bits(np.array(expected))


@pytest.mark.filterwarnings("ignore")
def test_the_human_player_of_gymnasium_can_be_recorded(tmp_path: Path) -> None:
    pygame = pytest.importorskip("pygame")
    from gymnasium.utils.play import play as play_by_hand

    frames = 0

    def stop_soon(*_: Any) -> None:
        nonlocal frames
        frames += 1
        if frames == 3:
            pygame.event.post(pygame.event.Event(pygame.QUIT))

    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1", render_mode="rgb_array"), tmp_path)
    play_by_hand(env, callback=stop_soon, keys_to_action={"a": 0}, noop=0, seed=0)
    env.close()
    assert len(open_trace(tmp_path)[-1]) == 3


# -- spaces and environments of all kinds ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8])
def test_observations_without_dimensions_may_be_arrays_or_scalars(tmp_path: Path, dtype: Any) -> None:
    space = spaces.Box(np.zeros((), dtype), np.ones((), dtype), dtype=dtype)
    steps = [Result(np.array(1, dtype)), Result(dtype(0)), Result(np.array(1, dtype))]
    wrapped = TraceRecordingWrapper(ScriptedEnv(space, space, [(np.array(0, dtype), steps)]), tmp_path)
    acted(wrapped, "reset", np.array(1, dtype), dtype(0), dtype(1), "close")
    episode = open_trace(tmp_path)[0]
    assert bits(episode.observations) == bits(np.array([0, 1, 0, 1], dtype))
    assert bits(episode.actions) == bits(np.array([1, 0, 1], dtype))


@pytest.mark.parametrize("shape", [(), (3,), (40, 40)])
def test_array_like_objects_are_recorded_as_arrays(tmp_path: Path, shape: tuple[int, ...]) -> None:
    class Special(np.ndarray):
        pass

    values = [np.full(shape, i, np.float32) for i in range(5)]
    steps = [
        Result(Lazy(values[1])),
        Result(values[2].view(Special)),
        Result(values[3]),
        Result(Lazy(values[4]), Lazy(2.5)),
    ]
    space = spaces.Box(-9, 9, shape)
    env = ScriptedEnv(space, space, [(Lazy(values[0]), steps)])
    wrapped = TraceRecordingWrapper(env, tmp_path, record_infos=True)
    wrapped.reset()
    for value in values[1:]:
        wrapped.annotate(logits=Lazy(value))
        assert wrapped.step(Lazy(value))[0] is not value
    wrapped.close()
    (episode,) = open_trace(tmp_path)
    assert bits(episode.observations) == bits(np.array(values))
    assert bits(episode.actions) == bits(np.array(values[1:]))
    assert bits(episode.annotations["logits"]) == bits(np.array(values[1:]))
    assert float(episode.rewards[-1]) == 2.5


@pytest.mark.skipif(not hasattr(gymnasium.wrappers, "FrameStack"), reason="gymnasium 0.29 only")
def test_lazily_stacked_frames_are_recorded(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.wrappers.FrameStack(gymnasium.make("CartPole-v1"), 3), tmp_path)
    seen = [np.array(env.reset(seed=0)[0])] + [np.array(env.step(0)[0]) for _ in range(5)]
    env.close()
    assert bits(open_trace(tmp_path)[0].observations) == bits(np.array(seen))


def test_an_environment_without_a_spec_is_recorded(tmp_path: Path) -> None:
    recorded(tmp_path)
    description = open_trace(tmp_path).env_spec
    assert description["id"] is None
    assert description["spec"] is None
    assert "no spec" in description["note"]
    assert description["class"] == "scripted_env.CountingEnv"


def test_a_spec_with_a_callable_is_stored_as_far_as_possible(tmp_path: Path) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Counting-v0", entry_point=CountingEnv, kwargs={"length": 2})
    acted(TraceRecordingWrapper(gymnasium.make(spec, disable_env_checker=True), tmp_path), "reset", "close")
    description = open_trace(tmp_path).env_spec
    assert description["id"] == "Counting-v0"
    assert description["note"]
    assert json.loads(description["spec"])["kwargs"] == {"length": 2}


def test_the_generator_of_a_custom_space_is_not_used(tmp_path: Path) -> None:
    space = OddSpace()
    space.seed(1)
    state = copy.deepcopy(space.np_random.bit_generator.state)
    env = ScriptedEnv(space, space, [({"cells": [1]}, [Result({"cells": []})])])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    wrapped.reset()
    wrapped.step({"x": (1,)})
    wrapped.close()
    assert space.np_random.bit_generator.state == state
    episode = open_trace(tmp_path)[0]
    assert episode.observations.tolist() == [{"cells": [1]}, {"cells": []}]
    assert episode.actions.tolist() == [{"x": (1,)}]


def test_a_wrapper_of_the_recorder_reaches_its_methods(tmp_path: Path) -> None:
    env = RecordEpisodeStatistics(TraceRecordingWrapper(CountingEnv(length=2), tmp_path))
    assert isinstance(env.env, TraceRecordingWrapper)
    env.reset()
    env.env.annotate(value=1.0)
    acted(env, 0, "close")
    assert open_trace(tmp_path)[0].annotations["value"].tolist() == [1.0]


@pytest.mark.parametrize("kind", [TraceRecordingWrapper, TraceRecordingVectorWrapper])
@pytest.mark.parametrize(
    ("package", "way"),
    [
        ("stable_baselines3.common.vec_env", "make_vec_env.*wrapper_class=TraceRecordingWrapper"),
        ("pettingzoo.utils.env", "use gym_trace.pettingzoo.record"),
        ("dm_env", "use gym_trace.dm_env.record"),
        ("nowhere", "pass one"),
    ],
)
def test_an_environment_of_another_library_says_how_to_record_it(
    kind: Any, package: str, way: str, tmp_path: Path
) -> None:
    env = type("Theirs", (type("Base", (), {"__module__": package}),), {})()
    with pytest.raises(InvalidOption, match=f"Theirs: is not an? .*environment of Gymnasium; {way}"):
        kind(env, tmp_path / "trace")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on_error", ["raise", "warn"])
def test_an_unstorable_value_becomes_its_repr_with_one_warning(tmp_path: Path, on_error: str) -> None:
    good = np.ones(2, np.float32)
    steps = [Result(good), *[Result(fractions.Fraction(1, 3)) for _ in range(3)], Result(good)]
    wrapped = TraceRecordingWrapper(scripted(steps, spaces.Box(-1, 1, (2,)), good), tmp_path, on_error=on_error)
    acts = [act for action in (0, 1, decimal.Decimal(1), 1, 0) for act in (action, "flush")]
    assert sorted(warned(lambda: acted(wrapped, "reset", *acts, "close"))) == [
        "actions: a value of type decimal.Decimal cannot be stored; its repr is kept",
        "observations: a value of type fractions.Fraction cannot be stored; its repr is kept",
    ]
    (episode,) = open_trace(tmp_path)
    assert [getattr(seen, "text", "") for seen in episode.observations] == ["", "", *["Fraction(1, 3)"] * 3, ""]
    assert [getattr(action, "text", "") for action in episode.actions] == ["", "", "Decimal('1')", "", ""]
    assert bits(episode.observations[5]) == bits(good)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux lists its mappings")
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_a_closed_recorder_frees_its_ring_but_no_array_in_it(tmp_path: Path, kind: str) -> None:
    def is_mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    make = {
        "single": lambda: TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path),
        "vector": lambda: TraceRecordingVectorWrapper(SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")]), tmp_path),
    }
    env: Any = make[kind]()
    env.reset(seed=0)
    env.step(env.action_space.sample())
    slabs = env._recorder.ring.slabs
    slab = np.frombuffer(slabs[1 % len(slabs)], np.uint8)
    assert is_mapped()
    del slabs
    env.close()
    assert slab[0] == 1  # its sequence number
    del slab
    assert not is_mapped()


def test_signatures_of_recorders_have_the_options_and_their_defaults() -> None:
    """Type checkers read the same options in RecordingKeywords."""
    options = {field.name: field for field in dataclasses.fields(RecordingOptions)}
    typed = {name: annotation.__forward_arg__ for name, annotation in RecordingKeywords.__annotations__.items()}
    assert {"directory": options["directory"].type, **typed} == {name: field.type for name, field in options.items()}
    for recorder in (TraceRecordingWrapper, TraceWriter):
        parameters = inspect.signature(recorder).parameters
        assert {name: parameters[name].default for name in options} == {
            name: field.default for name, field in options.items()
        }
