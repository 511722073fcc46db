"""Recorders made again from a spec, copied and pickled, in any order of calls."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from runs import acted, play
from scripted_env import CountingEnv, ImageEnv, bits, images, small_blocks

from gym_trace import TraceRecordingWrapper, open_trace


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
    acted(env, 1, 2)
    for copier in (copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))):
        acted(copier(env), 3, 0, "reset", 0, "close")
    acted(env, 0, "close")
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
    env = acted(TraceRecordingWrapper(ImageEnv(length=9), tmp_path, uid="first"), "reset", 0, 0, 0)
    twin = copy.deepcopy(env)
    env.step(1)
    acted(twin, 2, "close")
    env.close()
    (part,) = (episode for episode in open_trace(tmp_path) if episode.writer != "first")
    assert part.first_step == 3
    assert bits(part.observations) == bits(np.array(images(5)[3:]))


def test_a_copy_that_takes_no_step_writes_nothing(tmp_path: Path) -> None:
    env = acted(TraceRecordingWrapper(CountingEnv(), tmp_path), "reset", 0)
    before = sorted(path.name for path in tmp_path.glob("*manifest*"))
    twin = acted(copy.deepcopy(env), "flush")
    second = copy.deepcopy(twin)
    twin.close()
    assert sorted(path.name for path in tmp_path.glob("*manifest*")) == before
    acted(second, 0, "close")
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
    acted(copy.deepcopy(acted(env, "reset", 0, 0)), 0, 0, 0, "close")
    env.close()
    parts = [e for e in open_trace(tmp_path) if e.writer != "first"]
    assert [(p.first_step, p.observations[:, 0].tolist()) for p in parts] == [(3, [3, 4])]


class Model:
    """The expected recording of a CountingEnv or ImageEnv, part by part."""

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


def is_third(step: int) -> bool:
    return step % 3 == 0
