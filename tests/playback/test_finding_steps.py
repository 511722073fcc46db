"""Trace.find_steps finds the steps that a loop over all episodes finds."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import flip
from gymnasium import spaces
from runs import record_lengths, record_nested
from scripted_env import Result, ScriptedEnv, small_blocks
from shell import ok, run
from trace_contents import record_anything

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.playback.episode_index import index_of

Holds = Callable[[Any, int], Any]  # called with an episode and a step in it


def by_loop(trace: Any, holds: Holds) -> list[list[int]]:
    return [
        [index, episode.first_step + i]
        for index, episode in enumerate(trace)
        for i in range(len(episode))
        if holds(episode, i)
    ]


NESTED: list[tuple[str, Holds]] = [
    ("reward > 3 and reward < 9", lambda e, i: 3 < e.rewards[i] < 9),
    ("action[0] > 0.5", lambda e, i: e.actions[i, 0] > 0.5),
    ("(next_observation.image == 7).all", lambda e, i: (e.observations["image"][i + 1] == 7).all()),
    ("(observation.image == 7).all", lambda e, i: (e.observations["image"][i] == 7).all()),
    ("next_observation.image[3][2] % 5 == 1", lambda e, i: e.observations["image"][i + 1, 3, 2] % 5 == 1),
    ("observation.pair[0] == 3", lambda e, i: e.observations["pair"][0][i] == 3),
    ('next_observation.pair[1] == "ab"', lambda e, i: e.observations["pair"][1][i + 1] == "ab"),
    ('observation.pair[1] == "ab"', lambda e, i: e.observations["pair"][1][i] == "ab"),
    (
        "observation.pair[0] == next_observation.pair[0] - 1 and not reward > 4",
        lambda e, i: e.observations["pair"][0][i] == e.observations["pair"][0][i + 1] - 1 and not e.rewards[i] > 4,
    ),
    ("(annotations.logits > 25).any()", lambda e, i: e.annotations["logits"][i].max() > 25),
    ("info.map.a.b == 1 and step % 9 == 2", lambda e, i: i % 9 == 2),
    ("info.list[1][0] == 2 and episode == 2 and step < 2", lambda e, i: e.index == 2 and i < 2),
    ("info.nothing is None and step == 0", lambda e, i: i == 0),
]


@pytest.mark.parametrize(("condition", "holds"), NESTED, ids=[condition for condition, _ in NESTED])
def test_every_kind_of_column_can_be_asked_for(tmp_path: Path, condition: str, holds: Holds) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    expected = by_loop(trace, holds)
    assert expected
    assert trace.find_steps(condition).tolist() == expected
    view = trace[[3, 1]]
    if "episode" not in condition:
        assert view.find_steps(condition).tolist() == by_loop(view, lambda e, i: holds(trace[[3, 1][e.index]], i))


@pytest.mark.parametrize("seed", range(24))
def test_filters_lanes_gaps_and_pictures_hide_no_step_and_add_none(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record_anything(tmp_path / "t", random)
    trace = open_trace(tmp_path / "t")
    assert trace.find_steps("step >= 0").tolist() == by_loop(trace, lambda e, i: True)
    assert trace.find_steps("terminated").tolist() == by_loop(trace, lambda e, i: e.terminations[i])
    assert trace.find_steps("truncated or terminated").tolist() == by_loop(
        trace, lambda e, i: e.terminations[i] or e.truncations[i]
    )
    if index_of(trace).readers[0].layouts.is_flat and all(type(e.observations) is np.ndarray for e in trace):
        found = trace.find_steps("(next_observation == 1).all")
        assert found.tolist() == by_loop(trace, lambda e, i: np.all(e.observations[i + 1] == 1))
        found = trace.find_steps("(observation == 1).all")
        assert found.tolist() == by_loop(trace, lambda e, i: np.all(e.observations[i] == 1))


def test_nan_is_found_also_in_the_first_observation(tmp_path: Path) -> None:
    box = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    bad = np.array([0, np.nan, 0], np.float32)
    good = np.zeros(3, np.float32)
    env = ScriptedEnv(box, spaces.Discrete(2), [
        (bad, [Result(good), Result(good + np.inf)]), (good, [Result(good), Result(bad, np.nan)]),
    ])  # fmt: skip
    wrapped = TraceRecordingWrapper(env, tmp_path)
    for _ in range(2):
        wrapped.reset()
        wrapped.step(0)
        wrapped.step(1)
    wrapped.close()
    trace = open_trace(tmp_path)
    assert trace.find_steps("isnan(observation).any").tolist() == [[0, 0]]
    assert trace.find_steps("isnan(observation).any or isnan(next_observation).any").tolist() == [[0, 0], [1, 1]]
    assert trace.find_steps("isinf(next_observation).all").tolist() == [[0, 1]]
    assert trace.find_steps("isnan(reward)").tolist() == [[1, 1]]
    assert trace.find_steps("isnan(reward) and isnan(next_observation).any").tolist() == [[1, 1]]
    assert trace.find_steps("reward > 0 or reward <= 0").tolist() == [[0, 0], [0, 1], [1, 0]]


def test_the_observation_before_a_step_can_be_in_an_earlier_chunk(tmp_path: Path) -> None:
    with small_blocks(rows=3, chunk=100):
        record_lengths(tmp_path, [10, 7])
    trace = open_trace(tmp_path)
    assert index_of(trace).readers[0].chunk_count > 4
    for count in range(10):
        expected = by_loop(trace, lambda e, i, count=count: e.observations[i, 0] == count)
        assert trace.find_steps(f"observation[0] == {count}").tolist() == expected
        assert expected
    assert trace.find_steps("observation[0] is None").tolist() == []


def test_the_observation_behind_skipped_damage_is_unknown(tmp_path: Path) -> None:
    with small_blocks(rows=3, chunk=100):
        record_lengths(tmp_path, [10])
    (batch,) = tmp_path.glob("*.gtb")
    chunk = index_of(open_trace(tmp_path)).readers[0].batches[0].chunks["offset"]
    flip(batch, int(chunk[1]) + 100, int(chunk[1]) + 200, int(chunk[1]) + 210, int(chunk[1]) + 220)
    trace = open_trace(tmp_path)
    with pytest.warns(UserWarning, match="skipped"):
        found = trace.find_steps("observation[0] >= 0 or observation[0] < 0", on_damage="skip")
    counts = np.cumsum(index_of(trace).readers[0].fragments["steps"])
    left = sorted({*range(10)} - {*range(int(counts[0]), int(counts[1]) + 1)})
    assert found[:, 1].tolist() == left


def test_damage_is_raised_or_skipped_with_a_warning(tmp_path: Path) -> None:
    record_lengths(tmp_path, [10, 10, 10], flush_after=10)
    (batch,) = tmp_path.glob("*.gtb")
    second = int(index_of(open_trace(tmp_path)).readers[0].batches[0].chunks["offset"][1])
    flip(batch, second + 200, second + 210, second + 220)
    trace = open_trace(tmp_path)
    with pytest.raises(CorruptTrace):
        trace.find_steps("reward == 3")
    with pytest.warns(UserWarning, match="skipped"):
        found = trace.find_steps("reward == 3", on_damage="skip")
    assert found[:, 0].tolist() == [0, 2]


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("observation > 1", "2 values per row; write (…).any or (…).all"),
        ("observations[0] > 1", "use observation, before the step, or next_observation, after it"),
        ("actions > 1", "no column 'actions' of steps; use action"),
        ("terminations", "use terminated"),
        ("steps > 1", "no column 'steps' of steps; did you mean 'step'?"),
        ("next_observation[2] > 1", "no 2 in next_observation: its rows have the shape (2,)"),
        ("info.x == 1", "this trace has no info"),
        ("annotations.value > 1", "this trace has no annotations"),
        ("terminated.x", "terminated is a single value"),
        ("isfinite(reward)", "unknown function 'isfinite'; use abs(), isnan() or isinf()"),
        ("(reward > 1).some", "expected any or all after '.'"),
        ("reward >", "expected a column, number or text"),
        ("reward", "reward is a number, not a condition"),
    ],
)
def test_mistakes_are_pointed_at(tmp_path: Path, condition: str, told: str) -> None:
    record_lengths(tmp_path, [3])
    with pytest.raises(InvalidOption) as raised:
        open_trace(tmp_path).find_steps(condition)
    assert told in str(raised.value)
    assert "^" in str(raised.value)


def test_a_part_of_a_dict_has_to_be_named(tmp_path: Path) -> None:
    record_nested(tmp_path)
    trace = open_trace(tmp_path)
    with pytest.raises(InvalidOption, match="name one of its parts: image, pair"):
        trace.find_steps("observation == 1")
    with pytest.raises(InvalidOption, match="info is a dict; name a key"):
        trace.find_steps("info == 1")
    with pytest.raises(InvalidOption, match=r"did you mean annotations\.logits\?"):
        trace.find_steps("logits > 25")
    with pytest.raises(InvalidOption, match="go together"):
        trace.find_steps("(observation.image > annotations.logits).any")


def test_cat_prints_the_steps_around_each_hit(tmp_path: Path) -> None:
    record_lengths(tmp_path, [12, 3])
    told = ok(
        "cat", str(tmp_path), "--steps-where", "reward == 6 or reward == 8", "--context", "1", "--columns", "rewards"
    )
    assert [line.split() for line in told.stdout.splitlines()[1:]] == [
        ["0", str(step), str(step + 1)] for step in (4, 5, 6, 7, 8)
    ]
    told = ok("cat", str(tmp_path), "--steps-where", "observation[0] == 0")
    assert [line.split()[:2] for line in told.stdout.splitlines()[1:]] == [
        ["0", "-"],
        ["0", "0"],
        ["1", "-"],
        ["1", "0"],
    ]
    told = ok(
        "cat", str(tmp_path), "--steps-where", "terminated or step == 2", "--episodes", "1", "--columns", "actions"
    )
    assert [line.split()[:2] for line in told.stdout.splitlines()[1:]] == [["1", "2"]]
    for wrong in (["--context", "1"], ["--steps-where", "step == 1", "--steps", "2"]):
        assert run("cat", str(tmp_path), *wrong).exit_code == 2


@pytest.mark.filterwarnings("ignore:observations. got float64")
def test_an_observation_of_another_type_hides_only_its_own_step(tmp_path: Path) -> None:
    first, *rest = [np.full(2, n, np.float32) for n in range(40)]
    script = [(first.astype(np.float64), [Result(row, 1.0) for row in rest]), (first, [])]
    env = ScriptedEnv(spaces.Box(-1, 99, (2,), np.float32), spaces.Discrete(2), script)
    with small_blocks(rows=1, chunk=1), TraceRecordingWrapper(env, tmp_path) as recorded:
        for steps in (len(rest), 0):
            recorded.reset()
            for _ in range(steps):
                recorded.step(0)
    trace = open_trace(tmp_path)
    found = trace.find_steps("observation[0] >= 0")
    assert set(range(4, 39)) <= set(found[:, 1].tolist())  # the first chunk has objects
    assert trace.find_steps("observation[1] == 30 and next_observation[0] == 31").tolist() == [[0, 30]]
