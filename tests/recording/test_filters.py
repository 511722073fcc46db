"""Filters keep the right episodes and steps, and keep them unchanged."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from runs import acted, manifest_entries
from scripted_env import CountingEnv, ImageEnv, Result, ScriptedEnv, bits, images

from gym_trace import TraceRecordingWrapper, open_trace, scan_recorded_traces
from gym_trace.errors import InvalidOption
from gym_trace.format.ring.row_slab import RowSlab
from gym_trace.playback.episode_index import index_of
from gym_trace.recording.filters import RewardClasses


def record(env: Any, directory: Path, lengths: list[int], **options: Any) -> None:
    wrapped = TraceRecordingWrapper(env, directory, **options)
    for length in lengths:
        wrapped.reset()
        for step in range(length):
            wrapped.step(step % 4)
    wrapped.close()


def parts_of(directory: Path) -> list[tuple[int, int, list[int]]]:
    """(episode id, first step, what the observations count) of every part, checked to be true to CountingEnv."""
    found = []
    for part in open_trace(directory):
        counts = part.observations[:, 0].tolist()
        assert counts == list(range(part.first_step, part.first_step + len(part) + 1))
        assert part.rewards.tolist() == counts[1:]
        assert part.actions.tolist() == [(count - 1) % 4 for count in counts[1:]]
        found.append((part.episode_id, part.first_step, counts))
    return found


def closed_line(directory: Path) -> dict[str, Any]:
    line = manifest_entries(directory)[-1]
    assert line["type"] == "closed"
    return line


# -- episodes ---------------------------------------------------------------------------------------------------------


def test_the_episode_filter_is_called_once_when_an_episode_starts(tmp_path: Path) -> None:
    asked: list[Any] = []
    inner = CountingEnv()

    def is_wanted(episode: int) -> bool:
        asked.append((episode, len(inner.calls)))
        return episode % 2 == 1

    record(inner, tmp_path, [3, 2, 3, 4], episode_filter=is_wanted)
    assert asked == [(0, 0), (1, 4), (2, 7), (3, 11)]


def test_a_filtered_episode_leaves_nothing(tmp_path: Path) -> None:
    record(CountingEnv(), tmp_path, [3, 2, 5, 0, 1], episode_filter=lambda episode: episode in (1, 4))
    trace = open_trace(tmp_path)
    assert [(e.episode_id, e.index, len(e), e.outcome) for e in trace] == [(1, 0, 2, "cut"), (4, 1, 1, "closed")]
    assert set(index_of(trace).readers[0].fragments["episode"].tolist()) == {1, 4}
    assert closed_line(tmp_path)["steps"] == 3


def test_when_every_episode_is_filtered_the_trace_is_empty(tmp_path: Path) -> None:
    record(CountingEnv(), tmp_path, [3, 2], episode_filter=lambda episode: False)
    assert len(open_trace(tmp_path)) == 0
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


@pytest.mark.parametrize("options", [{}, {"frame_filter": lambda step: True}])
def test_annotations_in_a_filtered_episode_do_not_reach_the_next_one(tmp_path: Path, options: Any) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path, episode_filter=lambda e: e == 1, **options)
    acted(env, "reset", {"value": 1.0}, 0, {"value": 2.0}, "reset", 0, "close")
    notes = open_trace(tmp_path)[0].annotations
    assert notes.get("value", np.array([None])).tolist() == [None]


# -- frames -----------------------------------------------------------------------------------------------------------


def test_each_run_of_kept_steps_is_a_part_with_both_end_observations(tmp_path: Path) -> None:
    record(CountingEnv(length=9), tmp_path, [9, 4], frame_filter=lambda step: step in (0, 1, 3, 6, 7, 8))
    assert parts_of(tmp_path) == [
        (0, 0, [0, 1, 2]),
        (0, 3, [3, 4]),
        (0, 6, [6, 7, 8, 9]),
        (1, 0, [0, 1, 2]),
        (1, 3, [3, 4]),
    ]
    trace = open_trace(tmp_path)
    assert [part.outcome for part in trace] == ["terminated"] * 3 + ["closed"] * 2
    assert [part.terminations.tolist() for part in trace] == [
        [False, False], [False], [False, False, True], [False, False], [False],
    ]  # fmt: skip
    assert trace.episodes["first_step"].tolist() == [0, 3, 6, 0, 3]


def test_ctrl_c_between_an_end_and_its_row_drops_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_trace.recording.single.slabs.RowSlab", RowSlab)  # in the C core nothing comes in between
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path, frame_filter=lambda step: True)
    acted(env, "reset", 0, 0)
    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(env._slabs.slab, "_put_result", mock.Mock(side_effect=KeyboardInterrupt))
        env.step(0)
    acted(env, 0, "reset", 0, "close")
    assert [(part.first_step, len(part)) for part in open_trace(tmp_path) if len(part)] == [(0, 2), (3, 1), (0, 1)]


def test_steps_are_counted_over_all_steps_of_the_episode(tmp_path: Path) -> None:
    asked: list[int] = []
    record(CountingEnv(), tmp_path, [4, 3], frame_filter=lambda step: asked.append(step) or step == 2)
    assert asked == [0, 1, 2, 3, 0, 1, 2]
    assert parts_of(tmp_path) == [(0, 2, [2, 3]), (1, 2, [2, 3])]


def test_the_outcome_is_known_even_if_the_last_step_was_filtered_out(tmp_path: Path) -> None:
    record(CountingEnv(length=4), tmp_path, [4, 4], frame_filter=lambda step: step < 2)
    trace = open_trace(tmp_path)
    assert [part.outcome for part in trace] == ["terminated", "terminated"]
    assert not any(part.terminations.any() for part in trace)
    assert all(part.end_time is not None for part in trace)


def test_seed_and_split_are_known_in_every_part(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(), tmp_path, frame_filter=lambda step: step % 2 == 1, split="eval")
    env.reset(seed=11, options={"a": 1})
    acted(env, 0, 0, 0, 0, "close")
    for part in open_trace(tmp_path):
        assert (part.seed, part.options, part.split) == (11, {"a": 1}, "eval")
        assert part.start_time is not None


def test_parts_reach_the_callback_one_by_one(tmp_path: Path) -> None:
    record(CountingEnv(length=5), tmp_path, [5], frame_filter=lambda step: step != 2)
    counts: list[Any] = []
    assert scan_recorded_traces(tmp_path, lambda o, a, r: counts.append(o[:, 0].tolist())) == 2
    assert counts == [[0, 1, 2], [3, 4, 5]]


def test_the_images_of_kept_steps_are_correct(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(ImageEnv(length=40), tmp_path, frame_filter=lambda step: step % 7 in (2, 3))
    env.reset()
    for step in range(40):
        env.step(0)
        if step % 9 == 0:
            env.flush()
    env.close()
    trace, expected = open_trace(tmp_path), images(41)
    assert [(part.first_step, len(part)) for part in trace] == [(first, 2) for first in range(2, 40, 7)]
    for part in trace:
        assert bits(part.observations) == bits(np.array(expected[part.first_step : part.first_step + 3]))


@pytest.mark.parametrize(
    ("kept", "lengths", "parts"),
    [
        ({1, 4}, [6], [(0, 1, [1, 2]), (0, 4, [4, 5])]),
        (
            {0, 2, 3, 5},
            [6, 1],
            [(0, 0, [0, 1]), (0, 2, [2, 3]), (0, 3, [3, 4]), (0, 5, [5, 6]), (1, 0, [0, 1])],  # the end is filtered
        ),
    ],
)
def test_steps_after_the_end_are_filtered_too(
    tmp_path: Path, kept: set[int], lengths: list[int], parts: list[Any]
) -> None:
    record(CountingEnv(length=2), tmp_path, lengths, frame_filter=lambda step: step in kept)
    assert parts_of(tmp_path) == parts
    ended = [episode == 0 for episode, _, _ in parts]
    assert [part.outcome for part in open_trace(tmp_path)] == [["closed", "terminated"][is_over] for is_over in ended]


def test_a_step_whose_filter_raises_is_skipped(tmp_path: Path) -> None:
    def is_wanted(step: int) -> bool:
        if step in (2, 5):
            raise ZeroDivisionError
        return True

    env = TraceRecordingWrapper(CountingEnv(length=6), tmp_path, frame_filter=is_wanted)
    env.reset()
    for step in range(6):
        with contextlib.suppress(ZeroDivisionError):
            env.step(step % 4)
    env.close()
    assert parts_of(tmp_path) == [(0, 0, [0, 1, 2]), (0, 3, [3, 4, 5])]
    assert [part.outcome for part in open_trace(tmp_path)] == ["terminated"] * 2


def test_infos_and_annotations_work_with_filters(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(
        CountingEnv(length=6),
        tmp_path,
        episode_filter=lambda episode: episode != 1,
        frame_filter=lambda step: step % 3 != 1,
        record_infos=["count"],
    )
    for _ in range(3):
        acted(env, "reset", *(act for step in range(6) for act in ({"step": step}, {"half": step / 2}, 0)))
    env.close()
    trace = open_trace(tmp_path)
    assert [(p.episode_id, p.first_step, len(p)) for p in trace] == [
        (e, f, n) for e in (0, 2) for f, n in ((0, 1), (2, 2), (5, 1))
    ]
    for part in (*trace, *(trace[i] for i in range(len(trace)))):
        steps = list(range(part.first_step, part.first_step + len(part)))
        assert part.infos == [{"count": step + 1} for step in steps]
        assert part.annotations["step"].tolist() == steps
        assert part.annotations["half"].tolist() == [step / 2 for step in steps]
        assert part.reset_info == {}


@pytest.mark.parametrize("kept", [{0, 4}, {4}, {3, 4}])
def test_large_values_of_dropped_steps_do_not_lose_the_start_of_an_episode(tmp_path: Path, kept: set[int]) -> None:
    big = "x" * (3 << 20)
    steps = [Result(big), Result(big), Result(big), Result(big), Result("kept")]
    env = ScriptedEnv(spaces.Text(5 << 20), spaces.Discrete(5), [("first", steps), ("second", steps)])
    wrapped = TraceRecordingWrapper(env, tmp_path, frame_filter=lambda step: step in kept)
    for seed in (5, 6):
        wrapped.reset(seed=seed)
        for _ in steps:
            wrapped.step(0)
    wrapped.close()
    trace = open_trace(tmp_path)
    firsts = [step for step in sorted(kept) if step - 1 not in kept]
    assert [(part.episode_id, part.first_step, part.seed) for part in trace] == [
        (episode, first, episode + 5) for episode in (0, 1) for first in firsts
    ]
    assert len(trace[-1].observations[0]) == len(big)
    assert trace[-1].observations[-1] == "kept"


@given(
    st.lists(st.tuples(st.integers(0, 8), st.sets(st.integers(0, 8)), st.booleans()), min_size=1, max_size=5),
    st.sets(st.integers(0, 40), max_size=4),
)
def test_any_choice_of_steps_comes_back_as_runs_of_kept_steps(
    tmp_path_factory: Any, episodes: Any, flushes: Any
) -> None:
    """episodes: length, kept steps, whether the episode is kept."""
    directory = tmp_path_factory.mktemp("trace")
    current: list[Any] = []

    def is_wanted(episode: int) -> bool:
        current[:] = [episodes[episode][1]]
        return bool(episodes[episode][2])

    env = TraceRecordingWrapper(
        CountingEnv(100), directory, episode_filter=is_wanted, frame_filter=lambda step: step in current[0]
    )
    expected = []
    taken = 0
    for number, (length, kept, wanted) in enumerate(episodes):
        env.reset()
        for step in range(length):
            env.step(step % 4)
            taken += 1
            if taken in flushes:
                env.flush()
        begin = None
        for step in range(length + 1):
            if step < length and step in kept:
                begin = step if begin is None else begin
            elif begin is not None:
                if wanted:
                    expected.append((number, begin, list(range(begin, step + 1))))
                begin = None
    env.close()
    assert parts_of(directory) == expected


# -- classes of reward ------------------------------------------------------------------------------------------------


def test_reward_classes_with_a_frame_filter_raise(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot be combined with frame_filter"):
        TraceRecordingWrapper(CountingEnv(), tmp_path, reward_classes=[0.0], frame_filter=lambda step: True)


def test_rare_rewards_are_kept_as_often_as_common_ones() -> None:
    classes = RewardClasses([0.0, 1.0, -1.0])
    random = np.random.default_rng(1)
    rewards = random.choice([0.0, 1.0, -1.0], size=40_000, p=[0.9, 0.08, 0.02])
    kept = Counter(reward for reward in rewards if classes.keeps(reward))
    expected = int((rewards == -1.0).sum())
    assert kept[-1.0] > 0.95 * expected
    for reward in (0.0, 1.0):
        assert abs(kept[reward] - expected) < 6 * expected**0.5
    seen = Counter(rewards.tolist())
    assert classes.summary() == {
        "reward_classes": [-1.0, 0.0, 1.0],
        "class_counts": [seen[-1.0], seen[0.0], seen[1.0]],
    }


def test_a_step_belongs_to_the_nearest_class() -> None:
    classes = RewardClasses([10, 0, -10])
    for reward in (4.9, -4.9, 5.0, 5.1, -100, 1e300, -5.0):
        classes.keeps(reward)
    assert classes.summary() == {"reward_classes": [-10.0, 0.0, 10.0], "class_counts": [2.0, 3.0, 2.0]}


def test_unseen_reward_classes_do_not_suppress_all_steps() -> None:
    classes = RewardClasses([0.0, 100.0])
    assert all(classes.keeps(0.0) for _ in range(50))


def test_reward_classes_record_parts_and_count_rewards(tmp_path: Path) -> None:
    rewards = np.random.default_rng(3).choice([0.0, 1.0], size=3000, p=[0.95, 0.05]).tolist()
    steps = [Result(np.int64(i % 1000), reward) for i, reward in enumerate(rewards)]
    env = ScriptedEnv(spaces.Discrete(1000), spaces.Discrete(2), [(np.int64(0), steps)])
    env.reset(seed=0)
    env._episodes = iter([(np.int64(0), steps)])
    state = env.np_random.bit_generator.state
    wrapped = TraceRecordingWrapper(env, tmp_path, reward_classes=[0, 1])
    wrapped.reset()
    for _ in steps:
        wrapped.step(np.int64(1))
    wrapped.close()
    assert env.np_random.bit_generator.state == state
    kept: Counter[float] = Counter()
    for part in open_trace(tmp_path):
        kept.update(part.rewards.tolist())
        assert part.rewards.tolist() == rewards[part.first_step : part.first_step + len(part)]
        before = part.first_step - 1
        assert part.observations[0] == (before % 1000 if part.first_step else 0)
    ones = rewards.count(1.0)
    assert 0.8 * ones < kept[1.0] <= ones
    assert 0.5 * ones < kept[0.0] < 1.7 * ones
    line = closed_line(tmp_path)
    assert line["reward_classes"] == [0.0, 1.0]
    assert line["class_counts"] == [rewards.count(0.0), rewards.count(1.0)]


def test_the_same_run_keeps_the_same_steps(tmp_path: Path) -> None:
    for name in ("a", "b"):
        record(CountingEnv(length=500), tmp_path / name, [500], reward_classes=[0, 400], uid="same")
    assert parts_of(tmp_path / "a") == parts_of(tmp_path / "b")


def test_a_trace_without_reward_classes_does_not_mention_them(tmp_path: Path) -> None:
    record(CountingEnv(), tmp_path, [2])
    assert "class_counts" not in closed_line(tmp_path)
