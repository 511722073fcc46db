"""TraceRecordingWrapper: it records everything, and changes nothing."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from gymnasium.wrappers import (
    NormalizeObservation,
    RecordEpisodeStatistics,
    TimeLimit,
)
from hypothesis import given
from hypothesis import strategies as st
from zoo import CountingEnv, ImageEnv, OddSpace, ScriptedEnv, Told, bits, small_blocks

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import InvalidOption, RecordingError, TraceExists, UnstorableValue
from gym_trace.format.writer import TraceWriter


def play(env: Any, episodes: int, seed: int | None = 0) -> list[Any]:
    """Everything an environment says in some episodes with the same actions each time."""
    random = np.random.default_rng(5)
    said: list[Any] = []
    for number in range(episodes):
        said.append(copy.deepcopy(env.reset(seed=seed if number == 0 else None)))
        over = False
        while not over:
            result = env.step(int(random.integers(0, 2)))
            said.append(copy.deepcopy(result))
            over = result[2] or result[3]
    return said


def manifest_entries(directory: Path) -> list[dict[str, Any]]:
    """The lines of all manifests of a trace."""
    paths = sorted(directory.glob("*.manifest.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def outcomes(directory: Path) -> list[str]:
    return [str(outcome) for outcome in open_trace(directory).episodes["outcome"]]


# -- a wrapped run is the unwrapped run -------------------------------------------------------------------------------


@pytest.mark.parametrize("record_infos", [False, True])
def test_a_wrapped_run_says_what_the_unwrapped_run_says(tmp_path: Path, record_infos: bool) -> None:
    expected = play(gymnasium.make("CartPole-v1"), 8)
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, record_infos=record_infos)
    assert bits(play(env, 8)) == bits(expected)
    env.close()


def test_unseeded_resets_go_on_with_the_generator_as_without_the_wrapper(tmp_path: Path) -> None:
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


def test_the_very_objects_of_the_environment_are_handed_on_untouched(tmp_path: Path) -> None:
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


def test_flags_that_are_not_plain_booleans_are_handed_on_and_stored_as_booleans(tmp_path: Path) -> None:
    steps = [Told(np.int64(0), 1.0, np.False_, 0), Told(np.int64(0), 1.0, np.True_, 1)]
    env = TraceRecordingWrapper(
        ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), [(np.int64(0), steps)]), tmp_path
    )  # fmt: skip
    env.reset()
    assert env.step(0)[2] is steps[0].terminated
    assert env.step(0)[3] is steps[1].truncated
    env.close()
    episode = open_trace(tmp_path)[0]
    assert episode.terminations.tolist() == [False, True]
    assert episode.truncations.tolist() == [False, True]
    assert episode.outcome == "terminated"


def test_frames_that_wait_in_a_list_are_not_taken_by_the_recorder(tmp_path: Path) -> None:
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

    env = TraceRecordingWrapper(Filming(), tmp_path)
    env.reset()
    for _ in range(3):
        env.step(0)
    env.flush()
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


# -- where it records -------------------------------------------------------------------------------------------------


def test_without_a_directory_a_fresh_one_is_made_and_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with caplog.at_level(logging.INFO, "gym_trace"):
        first, second = TraceRecordingWrapper(CountingEnv()), TraceRecordingWrapper(CountingEnv())
    assert first.directory != second.directory
    assert first.directory.parent == tmp_path
    assert str(first.directory) in caplog.text
    play(first, 2)
    first.close()
    second.close()
    assert len(open_trace(first.directory)) == 2


def test_the_directory_is_made_with_its_parents(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path / "a" / "b")
    env.close()
    assert (tmp_path / "a" / "b").is_dir()


def recorded(directory: Path, episodes: int = 1, **options: Any) -> None:
    env = TraceRecordingWrapper(CountingEnv(), directory, **options)
    play(env, episodes)
    env.close()


def test_a_trace_that_exists_is_named_and_left_alone(tmp_path: Path) -> None:
    for number in range(7):
        recorded(tmp_path, on_exist="append", uid=f"run-{number}")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TraceExists) as caught:
        TraceRecordingWrapper(CountingEnv(), tmp_path)
    message = str(caught.value)
    assert "run-0" in message
    assert "run-4" in message
    assert "run-5" not in message
    assert "2 more" in message
    assert 'on_exist="append"' in message
    assert 'on_exist="replace"' in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_append_records_beside_what_is_there(tmp_path: Path) -> None:
    recorded(tmp_path, 2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    recorded(tmp_path, 3, on_exist="append")
    trace = open_trace(tmp_path)
    assert len(trace) == 5
    assert len(trace.writers) == 2
    assert len({(episode.writer, episode.episode_id) for episode in trace}) == 5
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())


def test_replace_deletes_our_files_and_nothing_else(tmp_path: Path) -> None:
    recorded(tmp_path, 2, uid="ours")
    recorded(tmp_path, 2, uid="ours2", on_exist="append")
    torn = tmp_path / "ours.000001.gtb.part"  # as a killed writer leaves it
    torn.write_bytes((tmp_path / "ours.000000.gtb").read_bytes()[:500])
    foreign = {
        "notes.txt": b"mine",
        "ours.gtb": b"no number",
        "ours.00.gtb": b"short number",
        "theirs.000000.gtb": b"not a batch at all",
        "empty.000000.gtb": b"",
        "theirs.manifest.jsonl": b'{"type": "something else"}\n',
        "renamed.manifest.jsonl": (tmp_path / "ours.manifest.jsonl").read_bytes(),
        "ours.000000.gtb.bak": b"a copy",
        ".ours.000000.gtb": b"hidden",
    }
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.000000.gtb").mkdir()
    (tmp_path / "folder.000000.gtb" / "inside").write_text("kept")
    recorded(tmp_path, 1, uid="new", on_exist="replace")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*foreign, "folder.000000.gtb", "new.manifest.jsonl", "new.000000.gtb"}
    assert all((tmp_path / name).read_bytes() == content for name, content in foreign.items())


def test_replace_does_not_follow_links_out_of_the_directory(tmp_path: Path) -> None:
    recorded(tmp_path / "elsewhere", uid="ours")
    here = tmp_path / "here"
    here.mkdir()
    for path in (tmp_path / "elsewhere").iterdir():
        (here / path.name).symlink_to(path)
    recorded(here, uid="new", on_exist="replace")
    assert len(open_trace(tmp_path / "elsewhere")) == 1


def test_a_trace_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    play(env, 1)
    with pytest.raises(TraceExists, match="writing"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, on_exist="replace")
    env.close()
    assert len(open_trace(tmp_path)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"on_exist": "ask"},
        {"flush_seconds": -1},
        {"flush_seconds": float("nan")},
        {"level": 99},
        {"on_error": "ignore"},
        {"record_infos": "lives"},
        {"reward_classes": [0.0], "frame_filter": bool},
        {"reward_classes": []},
        {"reward_classes": [float("nan")]},
        {"uid": "../escape"},
        {"uid": ".hidden"},
        {"uid": "a/b"},
        {"uid": "x.000000.gtb"},
        {"uid": "x" * 200},
    ],
    ids=repr,
)
def test_an_option_that_makes_no_sense_is_refused_before_anything_is_written(tmp_path: Path, options: Any) -> None:
    directory = tmp_path / "trace"
    with pytest.raises(InvalidOption) as caught:
        TraceRecordingWrapper(CountingEnv(), directory, **options)
    assert "\n" not in str(caught.value)
    assert not directory.exists() or not list(directory.iterdir())


def test_a_writer_id_that_is_taken_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path, uid="a")
    with pytest.raises(InvalidOption, match="taken"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, uid="a", on_exist="append")
    assert len(open_trace(tmp_path)) == 1


def test_metadata_comes_back_as_it_was_given(tmp_path: Path) -> None:
    metadata = {"name": "é", "table": np.arange(3, dtype=np.int8), "big": 2**100, "pair": (1, None), 3: b"\0"}
    recorded(tmp_path, metadata=metadata)
    assert bits(open_trace(tmp_path).metadata) == bits(metadata)


def test_metadata_that_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnstorableValue):
        TraceRecordingWrapper(CountingEnv(), tmp_path / "trace", metadata={"what": object()})
    assert not (tmp_path / "trace").exists()


# -- infos ------------------------------------------------------------------------------------------------------------


def info_episodes(infos: list[Any]) -> ScriptedEnv:
    steps = [Told(np.int64(0), info=info) for info in infos]
    return ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), [(np.int64(0), steps)])


def record_steps(env: ScriptedEnv, directory: Path, count: int, **options: Any) -> TraceRecordingWrapper:
    wrapped = TraceRecordingWrapper(env, directory, **options)
    wrapped.reset(seed=0)
    for _ in range(count):
        wrapped.step(0)
        env.spoil()
    return wrapped


INFOS = [
    {},
    {"a": 1, "b": [1, 2.5, None, True], "c": {"d": np.arange(4)[::2], "é": "\ud800"}},
    {"big": 2**90, "tuple": (1, (2,)), "nan": float("nan"), "array": np.array(3, np.float16), "flag": np.True_},
    {"mixed": np.array([1, "x", None], object), "bytes": b"\0", "complex": 1j, "text": np.array(["a", "bc"])},
    {5: "a number for a key", "date": np.datetime64("2026-11-21"), "": ""},
]


def test_infos_come_back_exactly(tmp_path: Path) -> None:
    record_steps(info_episodes(INFOS), tmp_path, len(INFOS), record_infos=True).close()
    trace = open_trace(tmp_path)
    assert bits(trace[0].infos) == bits(INFOS)
    assert bits(next(iter(trace)).infos) == bits(INFOS)
    assert trace[0].reset_info == {}


def test_only_the_infos_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    infos = [{"a": 1, "b": object()}, {"c": 2}, {"a": 3, "c": 4}]
    record_steps(info_episodes(infos), tmp_path, 3, record_infos=["a", "c"]).close()
    assert open_trace(tmp_path)[0].infos == [{"a": 1}, {"c": 2}, {"a": 3, "c": 4}]


def test_infos_that_were_not_recorded_are_asked_for_in_vain(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(Exception, match="record_infos"):
        _ = open_trace(tmp_path)[0].infos


def test_an_info_that_cannot_be_stored_is_replaced_with_one_warning(tmp_path: Path) -> None:
    class Thing:
        def __repr__(self) -> str:
            return "<a thing>"

    infos = [{"thing": Thing(), "set": {1}, "a": 1}, {"nested": [{"deep": Thing()}]}, {"a": 2}]
    env = info_episodes(infos)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record_steps(env, tmp_path, 3, record_infos=True).close()
    assert len([w for w in caught if "infos" in str(w.message)]) == 1
    assert len(caught) == 1
    got = open_trace(tmp_path)[0].infos
    assert got[0]["a"] == 1
    assert got[0]["thing"].text == "<a thing>"
    assert got[0]["thing"].class_name.endswith("Thing")
    assert got[1]["nested"][0]["deep"].text == "<a thing>"
    assert got[2] == {"a": 2}


def test_an_info_that_cannot_even_be_shown_does_not_stop_the_run(tmp_path: Path) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    loop: dict[str, Any] = {}
    loop["self"] = loop
    env = ScriptedEnv(spaces.Discrete(2), spaces.Discrete(2), [])
    env.reset = lambda **_: (np.int64(0), {"thing": Broken()})  # type: ignore[method-assign]
    env.step = lambda action: (np.int64(1), 1.0, False, False, loop)  # type: ignore[method-assign,assignment,return-value]
    wrapped = TraceRecordingWrapper(env, tmp_path, record_infos=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.reset()
        wrapped.step(0)
        wrapped.close()
    assert len(open_trace(tmp_path)[0]) == 1


def test_odd_values_are_warned_of_once_a_column(tmp_path: Path) -> None:
    steps = [Told({"x": "text", "y": np.zeros(3, np.float64)}) for _ in range(50)]
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


# -- annotations ------------------------------------------------------------------------------------------------------


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
    env.reset()
    for i in range(4):
        if i == 2:
            env.annotate(value=1.5)
        env.step(0)
    env.reset()
    env.step(0)
    env.close()
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


def test_an_annotation_for_a_step_that_never_comes_is_dropped(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    env.annotate(value=0)  # before any reset
    for _ in range(2):
        env.reset()
        env.step(0)
        env.annotate(value=1)
    env.reset()
    env.step(0)
    env.annotate(value=2)
    env.close()
    env.annotate(value=3)
    for episode in open_trace(tmp_path):
        assert episode.annotations.get("value", np.array([None])).tolist() == [None]


def test_an_annotation_that_cannot_be_stored_is_refused_at_once_and_recording_goes_on(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    env.reset()
    with pytest.raises(UnstorableValue):
        env.annotate(model=object())
    for _ in range(3):
        env.step(0)
    env.close()
    assert len(open_trace(tmp_path)[0]) == 3


# -- how episodes end -------------------------------------------------------------------------------------------------


def test_reset_mid_episode_keeps_the_partial_episode_as_cut(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    env.reset()
    env.step(1)
    env.step(2)
    env.reset()
    env.reset()
    env.step(3)
    env.close()
    trace = open_trace(tmp_path)
    assert outcomes(tmp_path) == ["cut", "cut", "closed"]
    assert [episode.actions.tolist() for episode in trace] == [[1, 2], [], [3]]
    assert [len(episode.observations) for episode in trace] == [3, 1, 2]
    assert not trace[0].terminations.any()


def test_steps_after_the_end_are_kept_as_further_parts(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=2), tmp_path)
    env.reset(seed=1)
    for action in (0, 1, 2, 3):
        env.step(action)
    env.reset()
    env.step(0)
    env.close()
    trace = open_trace(tmp_path)
    assert [(e.episode_id, e.first_step, len(e)) for e in trace] == [(0, 0, 2), (0, 2, 1), (0, 3, 1), (1, 0, 1)]
    assert [e.observations[:, 0].tolist() for e in trace] == [[0, 1, 2], [2, 3], [3, 4], [0, 1]]
    assert [e.actions.tolist() for e in trace] == [[0, 1], [2], [3], [0]]
    assert [e.seed for e in trace] == [1, 1, 1, None]
    assert all(trace[i].terminations[-1] for i in range(3))


def test_steps_after_the_end_keep_their_images(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(ImageEnv(length=2), tmp_path)
    bare = ImageEnv(length=2)
    images = [bare.reset()[0].copy()] + [bare.step(0)[0].copy() for _ in range(5)]
    env.reset()
    for i in range(5):
        env.step(0)
        if i == 2:
            env.flush()
    env.close()
    parts = list(open_trace(tmp_path))
    assert [part.first_step for part in parts] == [0, 2, 3, 4]
    for part in parts:
        expected = images[part.first_step : part.first_step + len(part) + 1]
        assert bits(part.observations) == bits(np.array(expected))


def test_episodes_longer_than_a_block_of_images_come_back(tmp_path: Path) -> None:
    length = 1500  # a block holds about 1,090 of these images
    env = TraceRecordingWrapper(ImageEnv(length), tmp_path)
    env.reset()
    for _ in range(length):
        env.step(0)
    env.close()
    bare = ImageEnv(length)
    (episode,) = open_trace(tmp_path)
    assert (episode.observations[0] == bare.reset()[0]).all()
    for i in range(1, length + 1):
        assert (episode.observations[i] == bare.step(0)[0]).all(), i


def test_an_environment_that_raises_loses_nothing_recorded_before(tmp_path: Path) -> None:
    class Failing(CountingEnv):
        def reset(self, **kwargs: Any) -> Any:
            if self.calls.count("reset") == 1:
                self.calls.append("reset")
                raise OSError("the simulator is gone")
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            if action == 3:
                raise ValueError("no such action")
            return super().step(action)

    env = TraceRecordingWrapper(Failing(), tmp_path)
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match="no such action"):
        env.step(3)
    env.step(1)
    with pytest.raises(OSError, match="simulator"):
        env.reset()
    env.step(2)  # of no episode that is known of
    env.reset()
    env.step(2)
    env.close()
    assert [episode.actions.tolist() for episode in open_trace(tmp_path)] == [[0, 1], [2]]
    assert outcomes(tmp_path) == ["cut", "closed"]


def test_seeds_options_and_generator_states_are_kept(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset(seed=12)
    options = {"low": -0.01, "high": 0.01}
    state = copy.deepcopy(env.unwrapped.np_random.bit_generator.state)
    env.reset(options=options)
    env.step(0)
    options["low"] = 5.0
    env.reset(seed=2**70)
    env.close()
    first, second, third = open_trace(tmp_path)
    assert (first.seed, first.options, first.rng_state) == (12, None, None)
    assert (second.seed, second.options) == (None, {"low": -0.01, "high": 0.01})
    assert second.rng_state == state
    assert third.seed == 2**70


def test_the_state_kept_of_a_generator_makes_the_same_reset_again(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env.reset()
    env.reset()
    env.close()
    again = gymnasium.make("CartPole-v1").unwrapped
    for episode in open_trace(tmp_path):
        again.np_random.bit_generator.state = episode.rng_state
        assert bits(again.reset()[0]) == bits(episode.observations[0])


@pytest.mark.parametrize("kind", ["MT19937", "Philox", "SFC64", "PCG64DXSM"])
def test_the_state_of_any_generator_of_numpy_is_kept(tmp_path: Path, kind: str) -> None:
    inner = CountingEnv()
    inner.np_random = np.random.Generator(getattr(np.random, kind)(3))
    state = inner.np_random.bit_generator.state
    env = TraceRecordingWrapper(inner, tmp_path)
    env.reset()
    env.close()
    assert bits(open_trace(tmp_path)[0].rng_state) == bits(state)


def test_a_generator_of_an_unknown_kind_does_not_stop_the_recording(tmp_path: Path) -> None:
    class Bits:
        state = {"bit_generator": "Mine", "state": object()}  # noqa: RUF012

    class Random:
        bit_generator = Bits()

    inner = CountingEnv()
    inner.np_random = Random()  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = TraceRecordingWrapper(inner, tmp_path)
        play(env, 2, seed=None)
        env.close()
    assert len(open_trace(tmp_path)) == 2


def test_times_of_episodes_are_in_order(tmp_path: Path) -> None:
    recorded(tmp_path, 3)
    trace = open_trace(tmp_path)
    for episode in trace:
        assert episode.start_time <= episode.end_time
        assert episode.start_monotonic <= episode.end_monotonic
    starts = trace.episodes["start_time"]
    assert (starts[1:] >= starts[:-1]).all()


# -- closing ----------------------------------------------------------------------------------------------------------


def test_the_trace_is_safe_before_the_environment_is_closed(tmp_path: Path) -> None:
    class Exploding(CountingEnv):
        def close(self) -> None:
            self.calls.append("close")
            self.entries = manifest_entries(tmp_path)
            self.outcomes = outcomes(tmp_path)
            raise OSError("the simulator does not want to go")

    inner = Exploding()
    env = TraceRecordingWrapper(inner, tmp_path)
    env.reset()
    env.step(0)
    with pytest.raises(OSError, match="does not want"):
        env.close()
    assert [entry["type"] for entry in inner.entries] == ["writer", "batch", "closed"]
    assert inner.outcomes == ["closed"]


def test_closing_twice_is_fine(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    play(env, 1)
    env.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    env.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_after_closing_the_environment_goes_on_unrecorded_with_one_warning(tmp_path: Path) -> None:
    for options in ({}, {"frame_filter": lambda step: True}):
        inner = CountingEnv()
        env = TraceRecordingWrapper(inner, tmp_path, on_exist="append", **options)  # type: ignore[arg-type]
        env.reset()
        env.step(0)
        env.close()
        assert env.step(0)[1] == 2.0
        with pytest.warns(UserWarning, match="closed") as caught:
            env.reset()
            env.step(0)
            env.reset()
        assert len(caught) == 1
        assert inner.calls.count("step") == 3
        env.close()
    assert [len(episode) for episode in open_trace(tmp_path)] == [1, 1]


def test_leaving_a_with_block_saves(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path) as env:
        env.reset()
        env.step(0)
    assert outcomes(tmp_path) == ["closed"]


def test_a_recorder_that_is_forgotten_saves(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    env.reset()
    env.step(0)
    del env
    gc.collect()
    assert [entry["type"] for entry in manifest_entries(tmp_path)] == ["writer", "batch", "closed"]
    assert outcomes(tmp_path) == ["closed"]


@pytest.mark.parametrize("ending", ["", "raise ValueError('no close')", "sys.exit(3)", "signal.raise_signal(15)"])
def test_a_process_that_ends_in_an_orderly_way_saves(tmp_path: Path, ending: str) -> None:
    script = f"""
import signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from zoo import CountingEnv
from gym_trace import TraceRecordingWrapper
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
env = TraceRecordingWrapper(CountingEnv(), {str(tmp_path)!r}, flush_seconds=100)
env.reset()
for _ in range(3):
    env.step(0)
{ending}
"""
    subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert [entry["type"] for entry in manifest_entries(tmp_path)] == ["writer", "batch", "closed"]
    assert len(open_trace(tmp_path)[0]) == 3


def test_a_recorder_that_took_no_step_leaves_a_trace_without_episodes(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    trace = open_trace(tmp_path)
    assert len(trace) == 0
    assert list(trace) == []
    assert trace.observation_space == CountingEnv().observation_space


def test_flush_lets_others_read_all_steps_so_far(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=1000)
    play(env, 2)
    env.flush()
    assert len(open_trace(tmp_path)) == 2
    env.flush()
    env.close()


def test_what_is_recorded_is_flushed_without_being_asked(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, flush_seconds=0.01)
    play(env, 1)
    trace = open_trace(tmp_path)
    waited = threading.Event()
    for _ in range(1000):
        if len(trace):
            break
        waited.wait(0.01)
        trace.refresh()
    assert len(trace) == 1
    env.close()


# -- specs and copies -------------------------------------------------------------------------------------------------


def test_an_environment_made_from_the_spec_records_beside_the_first(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path, split="eval", level=3)
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert isinstance(again, TraceRecordingWrapper)
    play(env, 1)
    play(again, 2)
    env.close()
    again.close()
    trace = open_trace(tmp_path)
    assert len(trace) == 3
    assert len(trace.writers) == 2
    assert {episode.split for episode in trace} == {"eval"}


def test_a_copy_goes_on_mid_episode_with_a_writer_of_its_own(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=6), tmp_path, uid="a-first")
    env.reset(seed=4)
    env.step(1)
    env.step(2)
    for copier in (copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))):
        twin = copier(env)
        twin.step(3)
        twin.step(0)
        twin.reset()
        twin.step(0)
        twin.close()
    env.step(0)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace.writers) == 3
    found = {writer: [e for e in trace if e.writer == writer] for writer in trace.writers}
    (original,) = found.pop("a-first")
    assert (original.first_step, original.observations[:, 0].tolist()) == (0, [0, 1, 2, 3])
    for first, second in found.values():
        assert (first.first_step, first.seed, first.actions.tolist()) == (2, 4, [3, 0])
        assert first.observations[:, 0].tolist() == [2, 3, 4]
        assert first.outcome == "cut"
        assert (second.first_step, second.observations[:, 0].tolist()) == (0, [0, 1])


def test_a_copy_of_an_environment_with_images_starts_with_the_right_one(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(ImageEnv(length=9), tmp_path, uid="first")
    env.reset()
    for _ in range(3):
        env.step(0)
    twin = copy.deepcopy(env)
    env.step(1)
    twin.step(2)
    twin.close()
    env.close()
    (part,) = (episode for episode in open_trace(tmp_path) if episode.writer != "first")
    bare = ImageEnv(length=9)
    images = [bare.reset()[0].copy()] + [bare.step(0)[0].copy() for _ in range(4)]
    assert part.first_step == 3
    assert bits(part.observations) == bits(np.array(images[3:5]))


def test_a_copy_that_takes_no_step_writes_nothing(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    env.reset()
    env.step(0)
    before = sorted(path.name for path in tmp_path.iterdir())
    twin = copy.deepcopy(env)
    twin.flush()
    second = copy.deepcopy(twin)
    twin.close()
    assert sorted(path.name for path in tmp_path.iterdir() if "manifest" in path.name) == [
        name for name in before if "manifest" in name
    ]
    second.step(0)
    second.close()
    env.close()
    assert sorted(e.first_step for e in open_trace(tmp_path)) == [0, 1]


def test_a_copy_of_a_closed_recorder_records_its_next_episode(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path)
    play(env, 1)
    env.close()
    twin = copy.deepcopy(env)
    play(twin, 2)
    twin.close()
    assert len(open_trace(tmp_path)) == 3


def test_a_copy_between_filtered_steps_goes_on_filtering(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=9), tmp_path, uid="first", frame_filter=is_third)
    env.reset()
    for _ in range(2):
        env.step(0)
    twin = copy.deepcopy(env)
    for _ in range(3):
        twin.step(0)
    twin.close()
    env.close()
    parts = [e for e in open_trace(tmp_path) if e.writer != "first"]
    assert [(p.first_step, p.observations[:, 0].tolist()) for p in parts] == [(3, [3, 4])]


class Model:
    """What a recorder should have recorded of a CountingEnv or ImageEnv, part by part."""

    def __init__(self, env: Any):
        self.env = env
        self.parts: list[dict[str, Any]] = []
        self.count: int | None = None  # steps since the last reset
        self.is_open = False  # whether a further step would be recorded
        self.is_over = False  # whether the last step has ended the episode
        self.continues = False  # whether a further step goes into the last part
        self.note: Any = None

    def reset(self) -> None:
        self.count, self.is_open, self.is_over, self.continues, self.note = 0, True, False, True, None
        self.parts.append({"first_step": 0, "actions": [], "notes": [], "over": False})
        self.env.reset()

    def annotate(self, value: int) -> None:
        self.note = value if self.is_open else None
        self.env.annotate(value=value)

    def step(self, action: int) -> None:
        if self.count is None:
            return
        if self.is_open and not self.continues:
            self.parts.append({"first_step": self.count, "actions": [], "notes": [], "over": False})
        self.count += 1
        over = self.env.step(action)[2]
        if self.is_open:
            self.parts[-1]["actions"].append(action)
            self.parts[-1]["notes"].append(self.note)
            self.parts[-1]["over"] = self.is_over = over
            self.continues = not over
        self.note = None

    def twin(self) -> Model:
        """A copy of the environment, and what its recorder should record."""
        other = Model(copy.deepcopy(self.env))
        other.count = self.count
        other.is_open = self.is_open and not self.is_over
        return other


calls = st.one_of(
    st.tuples(st.just("reset")),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("step"), st.integers(0, 3)),
    st.tuples(st.just("annotate"), st.integers(0, 99)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("copy")),
)


@given(
    st.lists(calls, max_size=60),
    st.sampled_from([CountingEnv, ImageEnv]),
    st.integers(1, 30),
    st.fixed_dictionaries({"rows": st.sampled_from([1, 6, 512]), "chunk": st.sampled_from([1, 500, 100_000])}),
    st.sampled_from([0, 1000]),
)
def test_any_sequence_of_calls_is_recorded(
    tmp_path_factory: Any, script: Any, kind: Any, length: int, sizes: Any, flush_seconds: int
) -> None:
    directory = tmp_path_factory.mktemp("trace")
    with small_blocks(**sizes):
        models = [Model(TraceRecordingWrapper(kind(length), directory, uid="original", flush_seconds=flush_seconds))]
        for name, *arguments in script:
            model = models[-1]
            if name == "copy":
                models.append(model.twin())  # goes on in place of the original, which stays open
            elif name == "flush":
                model.env.flush()
            else:
                getattr(model, name)(*arguments)
        for model in models:
            model.env.close()
    found: dict[str, list[Any]] = {}
    trace = open_trace(directory)
    for part in trace:
        found.setdefault(part.writer, []).append(part)
    bare = kind(length)
    images = [bare.reset()[0].copy()] + [bare.step(0)[0].copy() for _ in range(60)]
    for model in models:
        parts = found.pop(model.env._recorder.writer_id, [])
        assert [part.first_step for part in parts] == [expected["first_step"] for expected in model.parts]
        for part, expected in zip(parts, model.parts):
            assert part.actions.tolist() == expected["actions"]
            end = part.first_step + len(part) + 1
            assert bits(part.observations) == bits(np.array(images[part.first_step : end]))
            assert part.terminations.tolist() == [expected["over"] and i == len(part) - 1 for i in range(len(part))]
            if any(note is not None for note in expected["notes"]):
                assert part.annotations["value"].tolist() == expected["notes"]
            else:
                assert not any(value is not None for value in part.annotations.get("value", []))
    assert found == {}
    assert trace.damage == []


def is_third(step: int) -> bool:
    return step % 3 == 0


# -- other people's wrappers ------------------------------------------------------------------------------------------


def test_wrappers_above_do_not_change_what_is_recorded(tmp_path: Path) -> None:
    inner = TraceRecordingWrapper(gymnasium.make("CartPole-v1"), tmp_path)
    env = RecordEpisodeStatistics(NormalizeObservation(TimeLimit(inner, 7)))
    said = play(env, 3)
    env.close()
    trace = open_trace(tmp_path)
    assert len(trace) == 3
    assert outcomes(tmp_path) == ["cut", "cut", "closed"]  # the limit above is not the recorder's business
    assert sum(map(len, trace)) == len(said) - 3
    assert trace[0].observations.dtype == np.float32


def test_wrappers_below_are_recorded_as_the_agent_sees_them(tmp_path: Path) -> None:
    def wrapped(env: Any) -> Any:
        return RecordEpisodeStatistics(NormalizeObservation(TimeLimit(env, 7)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        env = TraceRecordingWrapper(wrapped(gymnasium.make("CartPole-v1").unwrapped), tmp_path, record_infos=["episode"])
        said = play(env, 3)
        env.close()
    assert bits(said) != []
    observations = [result[0] for result in said]
    got = [row for episode in open_trace(tmp_path) for row in episode.observations]
    assert [bits(row) for row in got] == [bits(row) for row in observations]
    assert set(outcomes(tmp_path)) == {"truncated"}
    assert open_trace(tmp_path)[0].infos[-1]["episode"]["l"] == 7
    assert len(caught) <= 1


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
    for env in (above, below):
        env.reset()
        for _ in range(8):
            env.step(0)
        env.close()
    assert [len(episode) for episode in open_trace(tmp_path / "above")] == [3, 3, 0]
    # Below, the agent never resets, so it is one episode, whose runs of steps end where the environment said so.
    parts = list(open_trace(tmp_path / "below"))
    assert [(part.episode_id, part.first_step, len(part)) for part in parts] == [(0, 0, 3), (0, 3, 4), (0, 7, 1)]
    assert [part.observations[:, 0].tolist() for part in parts] == [[0, 1, 2, 3], [3, 0, 1, 2, 3], [3, 0]]


def _recording_cart_pole(directory: Path) -> Any:
    return TraceRecordingWrapper(gymnasium.make("CartPole-v1"), directory, on_exist="append")


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_recorders_inside_a_vector_environment_share_a_directory(tmp_path: Path, kind: Any) -> None:
    envs = kind([lambda: _recording_cart_pole(tmp_path)] * 3)
    envs.reset(seed=[1, 2, 3])
    for _ in range(60):
        envs.step(np.array([0, 1, 0]))
    envs.close()
    trace = open_trace(tmp_path)
    assert trace.damage == []
    assert {episode.seed for episode in trace} == {1, 2, 3, None}
    writers = {episode.writer for episode in trace}
    assert len(writers) == 3
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


# -- spaces and environments of all kinds -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, np.uint8])
def test_observations_without_dimensions_may_be_arrays_or_scalars(tmp_path: Path, dtype: Any) -> None:
    space = spaces.Box(np.zeros((), dtype), np.ones((), dtype), dtype=dtype)
    steps = [Told(np.array(1, dtype)), Told(dtype(0)), Told(np.array(1, dtype))]
    env = ScriptedEnv(space, space, [(np.array(0, dtype), steps)])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    wrapped.reset()
    for action in (np.array(1, dtype), dtype(0), dtype(1)):
        wrapped.step(action)
    wrapped.close()
    episode = open_trace(tmp_path)[0]
    assert bits(episode.observations) == bits(np.array([0, 1, 0, 1], dtype))
    assert bits(episode.actions) == bits(np.array([1, 0, 1], dtype))


def test_an_environment_without_a_spec_is_recorded(tmp_path: Path) -> None:
    recorded(tmp_path)
    description = open_trace(tmp_path).env_spec
    assert description["id"] is None
    assert description["spec"] is None
    assert "no spec" in description["note"]
    assert description["class"] == "zoo.CountingEnv"


def test_a_spec_with_a_callable_is_stored_as_far_as_it_goes(tmp_path: Path) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Counting-v0", entry_point=CountingEnv, kwargs={"length": 2})
    env = TraceRecordingWrapper(gymnasium.make(spec, disable_env_checker=True), tmp_path)
    env.reset()
    env.close()
    description = open_trace(tmp_path).env_spec
    assert description["id"] == "Counting-v0"
    assert description["note"]
    assert json.loads(description["spec"])["kwargs"] == {"length": 2}


def test_the_generator_of_a_custom_space_is_not_touched(tmp_path: Path) -> None:
    space = OddSpace()
    space.seed(1)
    state = copy.deepcopy(space.np_random.bit_generator.state)
    env = ScriptedEnv(space, space, [({"cells": [1]}, [Told({"cells": []})])])
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
    recorder = env.env
    assert isinstance(recorder, TraceRecordingWrapper)
    env.reset()
    recorder.annotate(value=1.0)
    env.step(0)
    env.close()
    assert open_trace(tmp_path)[0].annotations["value"].tolist() == [1.0]


def test_a_value_that_cannot_be_stored_closes_no_file_that_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    write = TraceWriter.write

    def slow_write(self: Any, *arguments: Any) -> None:
        writing.set()
        assert go_on.wait(30)
        write(self, *arguments)

    monkeypatch.setattr(TraceWriter, "write", slow_write)
    fitting = [Told(np.full(2, i, np.float32)) for i in range(3)]
    steps = [*fitting, Told(object()), *fitting, *fitting]
    env = ScriptedEnv(spaces.Box(-9, 9, (2,)), spaces.Discrete(2), [(np.zeros(2, np.float32), steps)])
    with small_blocks(rows=4, chunk=1 << 20), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        wrapped = TraceRecordingWrapper(env, tmp_path, flush_seconds=0.01)
        wrapped.reset()
        for _ in fitting:
            wrapped.step(0)
        assert writing.wait(30)
        with pytest.raises(RecordingError, match="object"):
            for _ in steps[3:]:
                wrapped.step(0)  # the thread that writes is still at it
        go_on.set()
        wrapped.close()
    (episode,) = open_trace(tmp_path)
    assert episode.observations[:, 0].tolist() == [0, 0, 1, 2][: len(episode) + 1]


def test_a_value_that_cannot_be_stored_ends_the_recording_but_not_the_run(tmp_path: Path) -> None:
    steps = [Told(np.zeros(2, np.float32)), Told(object()), Told(np.ones(2, np.float32)), Told(np.ones(2, np.float32))]
    env = ScriptedEnv(spaces.Box(-1, 1, (2,)), spaces.Discrete(2), [(np.zeros(2, np.float32), steps)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        wrapped = TraceRecordingWrapper(env, tmp_path, on_error="raise")
        wrapped.reset()
        wrapped.step(0)
        wrapped.flush()
        wrapped.step(0)
        with pytest.raises(RecordingError, match="object"):
            wrapped.flush()
        assert wrapped.step(0)[1] == 1.0
        assert wrapped.step(0)[1] == 1.0
        wrapped.close()
    assert [len(episode) for episode in open_trace(tmp_path)] == [1]
