"""Copies of recorders (fork, pickle, deepcopy) are new writers, which begin with their own next reset."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from runs import acted, in_a_child, play, recorder_of, warned
from scripted_env import CountingEnv, ImageEnv, bits, small_blocks

from gym_trace import Episode, TraceRecordingWrapper, TraceWriter, check_trace, open_trace
from gym_trace.playback.episode_index import index_of

WARNING = "copy: a copied or forked recorder records from its next episode on; call reset() or begin()"
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


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


# -- a copy in the middle of an episode -------------------------------------------------------------------------------


def in_a_copy(copier: Callable[[Any], Any]) -> Callable[[Any, Callable[[Any], None]], None]:
    return lambda env, use: use(copier(env))


COPIERS = {
    "deepcopy": in_a_copy(copy.deepcopy),
    "pickle": in_a_copy(lambda env: pickle.loads(pickle.dumps(env))),
    "fork": lambda env, use: in_a_child(lambda: use(env)),
}
copiers = pytest.mark.parametrize("copied", [pytest.param(name, marks=needs_fork) for name in COPIERS])
KINDS = {"box": 0, "images": 0, "filtered": 0, "infos": 0, "lanes": 2}
kinds = pytest.mark.parametrize("kind", KINDS)


def is_recorded(step: int) -> bool:
    return step % 3 != 1


def recorder(kind: str, directory: Path) -> tuple[Any, Any]:
    options: dict[str, Any] = {"filtered": {"frame_filter": is_recorded}, "infos": {"record_infos": True}}.get(kind, {})
    make = partial(ImageEnv if kind == "images" else CountingEnv, length=9)
    return recorder_of(make, directory, KINDS[kind], uid="original", **options)


def parts_of(directory: Path) -> tuple[list[Episode], list[Episode]]:
    """Return the parts of episodes of the original, and those of its copies."""
    trace = open_trace(directory)
    assert check_trace(directory).damages == []
    return [part for part in trace if part.writer == "original"], [part for part in trace if part.writer != "original"]


@copiers
@kinds
def test_a_copy_records_from_its_next_reset_on_and_says_so_once(tmp_path: Path, kind: str, copied: str) -> None:
    env, action = recorder(kind, tmp_path)
    acted(env, "reset", action, action)

    def use(twin: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            acted(twin, action, action, "reset", action, "close")
        assert [str(warning.message) for warning in caught] == [WARNING]

    COPIERS[copied](env, use)
    acted(env, action, "close")
    original, copies = parts_of(tmp_path)
    lanes = KINDS[kind] or 1
    assert [part.actions.size for part in original] == ([1, 1] if kind == "filtered" else [3] * lanes)
    assert [(part.first_step, len(part), part.outcome) for part in copies] == [(0, 1, "closed")] * lanes
    (reader,) = (reader for reader in index_of(open_trace(tmp_path)).readers if reader.writer != "original")
    assert reader.schema["forked_from" if copied == "fork" else "copied_from"] == "original"


@copiers
@kinds
def test_a_copy_that_is_not_reset_writes_nothing_and_warns_of_nothing(tmp_path: Path, kind: str, copied: str) -> None:
    env, action = recorder(kind, tmp_path)
    acted(env, "reset", action)
    before = sorted(path.name for path in tmp_path.glob("*manifest*"))

    def use(twin: Any) -> None:
        assert warned(lambda: acted(copy.deepcopy(acted(twin, "flush")), "close"), twin.close) == []

    COPIERS[copied](env, use)
    assert sorted(path.name for path in tmp_path.glob("*manifest*")) == before
    acted(env, action, "close")
    original, copies = parts_of(tmp_path)
    assert {part.outcome for part in original} == {"closed"}
    assert copies == []


@copiers
@kinds
def test_a_copy_of_a_closed_recorder_records_its_next_episode(tmp_path: Path, kind: str, copied: str) -> None:
    env, action = recorder(kind, tmp_path)
    acted(env, "reset", action, "close")
    if copied == "fork":  # a closed recorder is nothing but closed
        return
    COPIERS[copied](env, lambda twin: acted(twin, "reset", action, "close"))
    original, copies = parts_of(tmp_path)
    assert len(original) == len(copies) == (KINDS[kind] or 1)


@pytest.mark.parametrize("copied", ["deepcopy", pytest.param("fork", marks=needs_fork)])
def test_a_copied_writer_records_from_its_next_begin_on(tmp_path: Path, copied: str) -> None:
    spaces_ = {"observation_space": spaces.Box(0, 9, (1,)), "action_space": spaces.Discrete(9)}
    writer = TraceWriter(tmp_path, uid="original", **spaces_)
    writer.begin(np.zeros(1, np.float32))
    writer.act(1)

    def use(twin: TraceWriter) -> None:
        twin.step(1, np.ones(1, np.float32), 1.0)
        assert warned(lambda: twin.step(2, np.ones(1, np.float32), 2.0)) == [WARNING]
        twin.begin(np.zeros(1, np.float32))
        twin.step(3, np.ones(1, np.float32), 3.0)
        twin.close()

    COPIERS[copied](writer, use)
    writer.step(1, np.ones(1, np.float32), 1.0)
    writer.close()
    original, copies = parts_of(tmp_path)
    assert [part.actions.tolist() for part in original] == [[1]]
    assert [part.actions.tolist() for part in copies] == [[3]]


# -- any order of calls -----------------------------------------------------------------------------------------------


class Model:
    """The expected recording of a CountingEnv or ImageEnv, part by part."""

    def __init__(self, env: Any):
        self.env = env
        self.parts: list[dict[str, Any]] = []
        self.count: int | None = None  # steps since the last reset
        self.is_open = False  # a further step would be recorded
        self.continues = False  # a further step goes into the last part
        self.note: Any = None

    def reset(self) -> None:
        self.count, self.is_open, self.continues, self.note = 0, True, True, None
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
            self.parts[-1]["over"] = over
            self.continues = not over
        self.note = None

    def twin(self) -> Model:
        """A copy of the environment, whose recorder waits for the next reset."""
        other = Model(copy.deepcopy(self.env))
        other.count = self.count
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


@pytest.mark.filterwarnings("ignore:copy")
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
                models.append(model.twin())  # used in place of the original, which stays open
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
    seen = [bare.reset()[0].copy()] + [bare.step(0)[0].copy() for _ in range(60)]
    for model in models:
        parts = found.pop(model.env._recorder.writer_id, [])
        assert [part.first_step for part in parts] == [expected["first_step"] for expected in model.parts]
        for part, expected in zip(parts, model.parts):
            assert part.actions.tolist() == expected["actions"]
            end = part.first_step + len(part) + 1
            assert bits(part.observations) == bits(np.array(seen[part.first_step : end]))
            assert part.terminations.tolist() == [expected["over"] and i == len(part) - 1 for i in range(len(part))]
            if any(note is not None for note in expected["notes"]):
                assert part.annotations["value"].tolist() == expected["notes"]
            else:
                assert not any(value is not None for value in part.annotations.get("value", []))
    assert found == {}
    assert trace.damage == []
