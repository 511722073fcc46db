"""Infos and annotations, and their warnings."""

import enum
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from runs import acted, play, recorded, warned
from scripted_env import CountingEnv, Result, ScriptedEnv, bits, scripted

from gym_trace import TraceRecordingWrapper, open_trace, verify_trace
from gym_trace.data.json_values import tagged, untagged
from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import EnumMember, unstored
from gym_trace.errors import UnstorableValue

# -- infos -------------------------------------------------------------------------------------------------------------


def record_steps(infos: list[Any], directory: Path, **options: Any) -> None:
    """Record one episode with these infos."""
    env = scripted([Result(np.int64(0), info=info) for info in infos])
    wrapped = TraceRecordingWrapper(env, directory, **options)
    wrapped.reset(seed=0)
    for _ in infos:
        wrapped.step(0)
        env.spoil()
    wrapped.close()


INFOS = [
    {},
    {"a": 1, "b": [1, 2.5, None, True], "c": {"d": np.arange(4)[::2], "é": "\ud800"}},
    {"big": 2**90, "tuple": (1, (2,)), "nan": float("nan"), "array": np.array(3, np.float16), "flag": np.True_},
    {"mixed": np.array([1, "x", None], object), "bytes": b"\0", "complex": 1j, "text": np.array(["a", "bc"])},
    {5: "a number for a key", "date": np.datetime64("2026-11-21"), "": ""},
]


def test_infos_round_trip(tmp_path: Path) -> None:
    record_steps(INFOS, tmp_path, record_infos=True)
    trace = open_trace(tmp_path)
    assert bits(trace[0].infos) == bits(INFOS)
    assert bits(next(iter(trace)).infos) == bits(INFOS)
    assert trace[0].reset_info == {}


def test_only_the_requested_info_keys_are_recorded(tmp_path: Path) -> None:
    record_steps([{"a": 1, "b": object()}, {"c": 2}, {"a": 3, "c": 4}], tmp_path, record_infos=["a", "c"])
    assert open_trace(tmp_path)[0].infos == [{"a": 1}, {"c": 2}, {"a": 3, "c": 4}]


def test_an_episode_without_steps_reads_the_same_in_any_chunk(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path, record_infos=["count"])
    acted(env, "reset", "flush")  # alone in its chunk
    acted(env, "reset", {"value": 1.5}, 0, "reset")  # next to an episode with infos and annotations
    acted(env, "reset", 0, "close")
    trace = open_trace(tmp_path)
    for episodes in ([trace[i] for i in range(4)], list(trace.scan()), list(trace.scan(on_damage="skip"))):
        alone, noted, beside, unnoted = episodes
        for empty in (alone, beside, noted[:0], noted[1:]):
            assert (empty.infos, empty.annotations) == ([], {})
            assert [(a.dtype, a.shape) for a in (empty.actions, empty.rewards)] == [
                (np.int64, (0,)),
                (np.float64, (0,)),
            ]
            assert [(a.dtype, a.shape) for a in (empty.terminations, empty.truncations)] == [(bool, (0,))] * 2
            assert empty.observations.shape == (1, 2)
        assert (noted.infos, list(noted.annotations)) == ([{"count": 1}], ["value"])
        assert unnoted.infos == [{"count": 1}]


class Position(enum.Enum):
    SHORT, LONG = 0, 1


class Trading(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, told: Any = lambda member: member):
        super().__init__(gymnasium.make("CartPole-v1"))
        self._told = told

    def step(self, action: Any) -> Any:
        *told, info = super().step(action)
        return *told, {**info, "position": self._told(Position.LONG), "past": [{"was": self._told(Position.SHORT)}]}


def record_trading(directory: Path, env: Trading) -> Any:
    recorder = TraceRecordingWrapper(env, directory, record_infos=True)
    play(recorder, 1)
    recorder.close()
    return open_trace(directory)


def test_members_of_enums_keep_class_name_and_value(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = record_trading(tmp_path, Trading())
    info = trace[0].infos[-1]
    name = f"{__name__}.Position"
    assert info["position"] == EnumMember(name, "LONG", 1)
    assert info["past"] == [{"was": EnumMember(name, "SHORT", 0)}]
    assert unpack(pack(info)) == info
    assert untagged(tagged(info)) == info
    assert [verdict.verdict for verdict in verify_trace(trace, make_env=Trading)] == ["identical"]


def test_enum_members_stored_by_repr_in_older_versions_still_match(tmp_path: Path) -> None:
    trace = record_trading(tmp_path, Trading(unstored))
    assert type(trace[0].infos[-1]["position"]).__name__ == "Unstored"
    assert [verdict.verdict for verdict in verify_trace(trace, make_env=Trading)] == ["identical"]


def test_reading_infos_that_were_not_recorded_raises(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(Exception, match="record_infos"):
        _ = open_trace(tmp_path)[0].infos


def test_an_info_that_cannot_be_stored_is_replaced_with_one_warning(tmp_path: Path) -> None:
    class Thing:
        def __repr__(self) -> str:
            return "<a thing>"

    infos = [{"thing": Thing(), "set": {1}, "a": 1}, {"nested": [{"deep": Thing()}]}, {"a": 2}]
    (said,) = warned(lambda: record_steps(infos, tmp_path, record_infos=True))
    assert "infos" in said
    got = open_trace(tmp_path)[0].infos
    assert got[0]["a"] == 1
    assert got[0]["thing"].text == "<a thing>"
    assert got[0]["thing"].class_name.endswith("Thing")
    assert got[1]["nested"][0]["deep"].text == "<a thing>"
    assert got[2] == {"a": 2}


def test_an_info_whose_repr_raises_does_not_stop_the_run(tmp_path: Path) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    loop: dict[str, Any] = {}
    loop["self"] = loop
    env = scripted([])
    env.reset = lambda **_: (np.int64(0), {"thing": Broken()})  # type: ignore[method-assign]
    env.step = lambda action: (np.int64(1), 1.0, False, False, loop)  # type: ignore[method-assign,assignment,return-value]
    warned(lambda: acted(TraceRecordingWrapper(env, tmp_path, record_infos=True), "reset", 0, "close"))
    assert len(open_trace(tmp_path)[0]) == 1


def test_odd_values_give_one_warning_per_column(tmp_path: Path) -> None:
    steps = [Result({"x": "text", "y": np.zeros(3, np.float64)}) for _ in range(50)]
    space = spaces.Dict({"x": spaces.Discrete(3), "y": spaces.Box(0, 1, (3,))})
    env = ScriptedEnv(space, spaces.Discrete(2), [({"x": 1, "y": np.zeros(3, np.float32)}, steps)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = TraceRecordingWrapper(env, tmp_path)
        wrapped.reset()
        for i in range(50):
            wrapped.step(np.int64(1))
            if i % 10 == 0:
                wrapped.flush()
        wrapped.close()
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 2
    assert "observations/x" in messages[0]
    assert "observations/y" in messages[1]
    assert "float64" in messages[1]
    assert "float32" in messages[1]
    assert all(warning.filename == __file__ for warning in caught)


# -- annotations -------------------------------------------------------------------------------------------------------


def test_annotations_become_typed_columns(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    env.reset()
    logits = np.zeros(2, np.float32)
    for i in range(3):
        logits[:] = i
        env.annotate(logprob=-float(i) / 2, logits=logits, greedy=i == 0)
        env.annotate(count=np.uint8(i))
        env.step(0)
        logits[:] = 99
    env.close()
    for episode in (open_trace(tmp_path)[0], next(iter(open_trace(tmp_path)))):
        notes = episode.annotations
        assert bits(notes["logprob"]) == bits(np.array([-0.0, -0.5, -1.0]))
        assert bits(notes["logits"]) == bits(np.array([[0, 0], [1, 1], [2, 2]], np.float32))
        assert bits(notes["count"]) == bits(np.arange(3, dtype=np.uint8))
        assert notes["greedy"].tolist() == [True, False, False]


def test_rows_without_an_annotation_hold_none(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=4), tmp_path)
    acted(env, "reset", 0, 0, {"value": 1.5}, 0, 0, "reset", 0, "close")
    first, second = open_trace(tmp_path)
    assert first.annotations["value"].tolist() == [None, None, 1.5, None]
    assert second.annotations.get("value", np.array([None])).tolist() == [None]


@pytest.mark.parametrize("every", [1, 7, 511, 512, 513])
def test_annotations_stay_with_their_steps_across_blocks_and_chunks(tmp_path: Path, every: int) -> None:
    length = 3000
    env = TraceRecordingWrapper(CountingEnv(length), tmp_path, flush_seconds=0.02)
    env.reset()
    for i in range(length):
        if i % every == 0:
            env.annotate(step=i, vector=np.full(2, i, np.int16))
        env.step(0)
        if i % 700 == 699:
            env.flush()
    env.close()
    for episode in (open_trace(tmp_path)[0], next(iter(open_trace(tmp_path)))):
        steps = episode.annotations["step"]
        assert len(steps) == length
        for i in range(length):
            assert steps[i] == (i if i % every == 0 else None)
        assert episode.annotations["vector"][every].tolist() == [every, every]


def test_an_annotation_without_a_following_step_is_dropped(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    env.annotate(value=0)  # before any reset
    acted(env, *["reset", 0, {"value": 1}] * 2, "reset", 0, {"value": 2}, "close", {"value": 3})
    for episode in open_trace(tmp_path):
        assert episode.annotations.get("value", np.array([None])).tolist() == [None]


def test_an_unstorable_annotation_raises_at_once_and_recording_continues(tmp_path: Path) -> None:
    env = acted(TraceRecordingWrapper(CountingEnv(length=3), tmp_path), "reset")
    with pytest.raises(UnstorableValue):
        env.annotate(model=object())
    acted(env, 0, 0, 0, "close")
    assert len(open_trace(tmp_path)[0]) == 3


@pytest.mark.parametrize("given", [lambda t: t >= 2047, lambda t: t < 300, lambda t: t % 500 == 7])
def test_large_annotations_may_be_given_with_some_steps_only(tmp_path, given):
    env = TraceRecordingWrapper(CountingEnv(length=10**6), tmp_path, flush_seconds=1000)
    env.reset()
    for t in range(2700):
        if given(t):
            env.annotate(features=np.full(1024, t, np.float32))
        env.step(0)
    env.close()
    (episode,) = open_trace(tmp_path)
    for t, value in enumerate(episode.annotations["features"]):
        assert (isinstance(value, np.ndarray) and value.tolist() == [t] * 1024) == bool(given(t))
