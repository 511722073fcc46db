"""Summaries agree with NumPy on the whole data, for values of every kind, and are plain data."""

import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from damage import flip, strip_parity
from gymnasium import spaces
from hypothesis import example, given
from hypothesis import strategies as st
from scripted_env import CountingEnv, OddSpace, Result, ScriptedEnv, ToyEnv

from gym_trace import open_trace, summarize
from gym_trace.data.moments import RunningMoments
from gym_trace.errors import CorruptTrace, InvalidOption
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.tools.statistics.accumulators import KNOWN_VALUES, POINTS, Curve, Tally, Variety, moments_as_json
from gym_trace.tools.statistics.columns import DISTINCT_VALUES
from gym_trace.tools.statistics.summary import _running_time


def _record(directory: Path, env: Any, episodes: int, **options: Any) -> None:
    """Play whole episodes with seeded random actions."""
    with TraceRecordingWrapper(env, directory, **options) as recorded:
        recorded.action_space.seed(5)
        for seed in range(episodes):
            recorded.reset(seed=seed)
            while not any(recorded.step(recorded.action_space.sample())[2:4]):
                pass


def _play(directory: Path, env: ScriptedEnv, actions: list[list[Any]], **options: Any) -> None:
    """Play scripted episodes with the given actions, one list per episode."""
    with TraceRecordingWrapper(env, directory, **options) as recorded:
        for row in actions:
            recorded.reset()
            for action in row:
                recorded.step(action)


def _play_lengths(env: Any, *lengths: int) -> None:
    for steps in lengths:
        env.reset()
        for _ in range(steps):
            env.step(0)


def _scripted_rewards(directory: Path, *episodes: list[Any], **options: Any) -> None:
    space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    script = [
        (np.zeros(1), [Result(np.zeros(1), reward, i == len(rewards) - 1) for i, reward in enumerate(rewards)])
        for rewards in episodes
    ]
    env = ScriptedEnv(space, spaces.Discrete(2), script)
    _play(directory, env, [[0] * len(rewards) for rewards in episodes], **options)


def _summary(directory: Path, **options: Any) -> dict[str, Any]:
    """Return the summary after a round trip through JSON without NaN."""
    summary: dict[str, Any] = json.loads(json.dumps(summarize(open_trace(directory), **options), allow_nan=False))
    return summary


# -- from the index ---------------------------------------------------------------------------------------------------


def test_returns_and_lengths_match_the_episodes(tmp_path: Path) -> None:
    _record(tmp_path, gymnasium.make("CartPole-v1"), 40)
    summary = _summary(tmp_path)
    episodes = list(open_trace(tmp_path))
    for name, values in (
        ("return", np.array([episode.rewards.sum() for episode in episodes])),
        ("length", np.array([len(episode.actions) for episode in episodes])),
    ):
        spread = summary[name]
        assert spread["count"] == 40
        assert [spread[key] for key in ("mean", "std", "min", "median", "max")] == pytest.approx(
            [values.mean(), values.std(), values.min(), np.median(values), values.max()]
        )
        assert [spread["quantiles"][key] for key in ("5", "25", "75", "95")] == pytest.approx(
            np.quantile(values, [0.05, 0.25, 0.75, 0.95]).tolist()
        )
        edges, counts = spread["histogram"]["edges"], spread["histogram"]["counts"]
        assert counts == np.histogram(values, edges)[0].tolist()
        assert sum(counts) == 40
    assert summary["return_curve"] == [float(episode.rewards.sum()) for episode in episodes]
    assert summary["episodes"] == summary["parts"] == 40
    assert summary["steps"] == sum(len(episode) for episode in episodes)
    assert not summary["filtered"]


def test_duration_and_throughput_count_only_ended_episodes(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    _play_lengths(env, 3, 3, 1)
    env.flush()
    summary = _summary(tmp_path)
    table = open_trace(tmp_path).episodes
    env.close()
    assert summary["outcomes"] == {"terminated": 2, "running": 1}
    assert (summary["complete"], summary["return"]["count"], summary["length"]["max"]) == (2, 2, 3)
    assert summary["steps"] == 7
    table = table[:2]
    assert summary["duration"]["episodes"] == pytest.approx(table["duration"].sum() / 1e9)
    elapsed = (table["end_time"].max() - table["start_time"].min()).astype(np.int64)
    assert summary["duration"]["wall"] == pytest.approx(elapsed / 1e9)
    assert summary["steps_per_second"] == pytest.approx(6e9 / table["duration"].sum())


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20))), st.lists(st.integers(1, 20), max_size=3))
def test_overlapping_episodes_count_once_in_the_running_time(known: list[tuple[int, int]], unknown: list[int]) -> None:
    starts = np.array([start for start, _ in known] + [np.iinfo(np.int64).min] * len(unknown), np.int64)
    durations = np.array([duration for _, duration in known] + unknown, np.int64)
    moments = {moment for start, duration in known for moment in range(start, start + duration)}
    assert _running_time(starts, durations) == pytest.approx((len(moments) + sum(unknown)) / 1e9)


def test_parts_of_a_filtered_episode_are_merged(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=6), 3, frame_filter=lambda step: step % 3 != 1)
    summary = _summary(tmp_path)
    assert (summary["episodes"], summary["parts"], summary["steps"]) == (3, 6 + 3, 12)
    assert summary["filtered"]
    assert summary["length"]["max"] == summary["length"]["min"] == 4
    assert summary["return"]["mean"] == 1 + 3 + 4 + 6


def test_filtered_is_true_even_if_every_episode_has_one_part(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=6), 3, frame_filter=lambda step: step < 2)
    summary = _summary(tmp_path)
    assert summary["episodes"] == summary["parts"] == 3
    assert summary["filtered"]


def test_the_summary_of_an_empty_trace_has_no_means(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    for by in (None, "split", "writer", "outcome"):
        summary = _summary(tmp_path, by=by, columns=True)
        assert (summary["episodes"], summary["steps"], summary["outcomes"]) == (0, 0, {})
        assert summary["return"]["mean"] is summary["length"]["max"] is summary["steps_per_second"] is None
        assert summary["rewards"]["count"] == 0


def test_means_count_only_complete_episodes(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(length=4), tmp_path) as env:
        _play_lengths(env, 4, 4, 2, 0, 3)  # the first two end
    summary, complete = _summary(tmp_path, by="outcome"), list(open_trace(tmp_path))[:2]
    assert (summary["episodes"], summary["complete"], summary["steps"]) == (5, 2, 13)
    assert summary["length"]["count"] == summary["return"]["count"] == 2
    assert summary["return"]["mean"] == np.mean([episode.total_reward for episode in complete])
    assert len(summary["return_curve"]) == 2
    assert summary["groups"]["cut"]["length"]["mean"] == 2  # grouped by outcome; the episode without steps is skipped
    assert summary["groups"]["closed"]["length"]["mean"] == 3


def test_episodes_without_steps_are_counted(tmp_path: Path) -> None:
    with TraceRecordingWrapper(CountingEnv(), tmp_path) as env:
        _play_lengths(env, 0, 0, 0)
    summary = _summary(tmp_path, columns=True)
    assert summary["outcomes"] == {"cut": 2, "closed": 1}
    assert summary["length"]["count"] == summary["return"]["count"] == summary["complete"] == 0
    assert summary["observations"][0]["rows"] == 3


def test_nan_and_infinite_returns_are_counted_separately(tmp_path: Path) -> None:
    _scripted_rewards(tmp_path, [1.0, 2.0], [math.nan], [math.inf, 1.0], [-math.inf], ["odd", "odder"])
    spread = _summary(tmp_path)["return"]
    assert (spread["count"], spread["nan"], spread["inf"]) == (1, 2, 2)
    assert spread["mean"] == spread["min"] == spread["max"] == 3


def test_rewards_of_mixed_types_are_summed(tmp_path: Path) -> None:
    """Many environments return 0 at most steps and a NumPy number at the last one."""
    _scripted_rewards(tmp_path, [0, 0, np.float32(1.5)], [True, np.array(2.0), 3], [10**400, 1])
    assert open_trace(tmp_path).episodes["return"].tolist() == [1.5, 6.0, math.inf]


def test_rewards_of_several_types_keep_their_values(tmp_path: Path) -> None:
    mixed: list[Any] = [1, 2.5, np.float32(3.1), True, np.float16(1.5), np.int8(-3)]
    large: list[Any] = [1.5, np.int64(2**60 + 1), np.float32(0.1), 2**70]
    _scripted_rewards(tmp_path, mixed, large)
    first, second = (episode.rewards for episode in open_trace(tmp_path))
    assert first.dtype == np.float64
    assert first.tolist() == mixed
    assert [(type(value), value) for value in second.tolist()] == [(type(value), value) for value in large]


def test_huge_returns_do_not_break_the_summary(tmp_path: Path) -> None:
    _scripted_rewards(tmp_path, [1.7e308], [-1.7e308], [5e-324], [1.7e308])
    summary = _summary(tmp_path, columns=True)
    assert summary["return"]["max"] == summary["rewards"]["max"] == 1.7e308
    assert summary["return"]["std"] is None  # overflows a float


def test_storage_counts_every_byte_of_the_directory(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=50), 20)
    storage = _summary(tmp_path)["storage"]
    assert storage["bytes"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    columns = storage["columns"]
    assert columns["observations"]["raw_bytes"] == 20 * 51 * 2 * 8
    assert columns["rewards"]["raw_bytes"] == 20 * 50 * 8
    values = sum(column["raw_bytes"] for name, column in columns.items() if name != "fragments")
    assert storage["compression_ratio"] == pytest.approx(values / storage["bytes"])
    assert sum(column["stored_bytes"] for column in columns.values()) < storage["bytes"]


# -- groups -----------------------------------------------------------------------------------------------------------


def test_groups_by_split_and_writer_partition_the_trace(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=3), 4, uid="a")
    _record(tmp_path, CountingEnv(length=5), 2, uid="b", split="eval", on_exist="append")
    _record(tmp_path, CountingEnv(length=7), 1, uid="c", on_exist="append")
    by_split = _summary(tmp_path, by="split", columns=True)
    by_writer = _summary(tmp_path, by="writer")
    assert {name: group["episodes"] for name, group in by_split["groups"].items()} == {"train": 5, "eval": 2}
    assert {name: group["steps"] for name, group in by_writer["groups"].items()} == {"a": 12, "b": 10, "c": 7}
    assert by_split["groups"]["eval"]["length"]["mean"] == 5
    assert sum(group["storage"]["bytes"] for group in by_writer["groups"].values()) == by_split["storage"]["bytes"]
    assert [by_split["groups"][name]["rewards"]["count"] for name in ("train", "eval")] == [19, 10]
    assert by_split["rewards"]["count"] == 29


def test_groups_by_outcome_describe_only_their_episodes(tmp_path: Path) -> None:
    """Episodes of several outcomes share chunks, so rows must be assigned individually."""
    space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    random = np.random.default_rng(1)
    script, actions = [], []
    for number in range(30):
        steps = [Result(random.normal(size=2), random.normal()) for _ in range(random.integers(1, 9))]
        if number % 3:
            steps[-1] = steps[-1]._replace(terminated=number % 3 == 1, truncated=number % 3 == 2)
        script.append((random.normal(size=2), steps))
        actions.append(random.integers(0, 4, len(steps)).tolist())
    _play(tmp_path, ScriptedEnv(space, spaces.Discrete(4), script), actions)
    summary = _summary(tmp_path, by="outcome", columns=True)
    assert list(summary["groups"]) == ["terminated", "truncated", "cut"]
    for outcome, group in summary["groups"].items():
        episodes = [episode for episode in open_trace(tmp_path) if episode.outcome == outcome]
        observations = np.concatenate([episode.observations for episode in episodes])
        rewards = np.concatenate([episode.rewards for episode in episodes])
        values, counts = np.unique(np.concatenate([episode.actions for episode in episodes]), return_counts=True)
        assert group["episodes"] == len(episodes)
        assert group["storage"] is None
        assert [known["mean"] for known in group["observations"][0]["dimensions"]] == pytest.approx(
            observations.mean(axis=0).tolist()
        )
        assert group["rewards"]["std"] == pytest.approx(rewards.std())
        assert group["actions"][0]["dimensions"][0]["values"] == np.stack([values, counts], 1).tolist()


def test_an_unknown_grouping_raises(tmp_path: Path) -> None:
    TraceRecordingWrapper(CountingEnv(), tmp_path).close()
    with pytest.raises(InvalidOption, match="split, writer, outcome"):
        summarize(open_trace(tmp_path), by="seed")


# -- columns ----------------------------------------------------------------------------------------------------------


class EverythingEnv(ToyEnv):
    """Observations and actions of many kinds, nested."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (12, 12, 3), np.uint8),
            "speed": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "task": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.Text(9)]),
        }
    )
    action_space = spaces.Dict(
        {"buttons": spaces.MultiBinary(2), "force": spaces.Box(-1, 1, ()), "gears": spaces.MultiDiscrete([2, 5])}
    )

    def result(self, action: Any) -> Result:
        if action is None and self.episode == 0:
            self.observation_space.seed(0)
        return Result(self.observation_space.sample(), terminated=bool(self.t and self.np_random.random() < 0.1))


def test_every_leaf_is_described_by_its_kind_of_space(tmp_path: Path) -> None:
    _record(tmp_path, EverythingEnv(), 12)
    summary = _summary(tmp_path, columns=True)
    episodes = list(open_trace(tmp_path))
    leaves = {tuple(leaf["path"]): leaf for leaf in summary["observations"] + summary["actions"]}

    image = np.concatenate([episode.observations["image"] for episode in episodes]).astype(float)
    whole = leaves["observations", "image"]["all"]
    assert (whole["count"], whole["min"], whole["max"]) == (image.size, image.min(), image.max())
    assert (whole["mean"], whole["std"]) == pytest.approx((image.mean(), image.std()))

    speed = np.concatenate([episode.observations["speed"] for episode in episodes]).astype(float)
    dimensions = leaves["observations", "speed"]["dimensions"]
    assert [known["index"] for known in dimensions] == [[0], [1], [2]]
    assert [known["std"] for known in dimensions] == pytest.approx(speed.std(axis=0).tolist())
    assert [known["min"] for known in dimensions] == speed.min(axis=0).tolist()

    force = np.concatenate([episode.actions["force"] for episode in episodes]).astype(float)
    assert leaves["actions", "force"]["dimensions"][0]["mean"] == pytest.approx(force.mean())

    for path, rows in {
        ("observations", "task", 0): [episode.observations["task"][0] for episode in episodes],
        ("actions", "buttons"): [episode.actions["buttons"] for episode in episodes],
        ("actions", "gears"): [episode.actions["gears"] for episode in episodes],
    }.items():
        joined = np.concatenate(rows)
        for known in leaves[path]["dimensions"]:
            values, counts = np.unique(joined[(slice(None), *known["index"])], return_counts=True)
            assert known["values"] == np.stack([values, counts], 1).tolist()

    texts = [text for episode in episodes for text in episode.observations["task"][1]]
    told = leaves["observations", "task", 1]
    assert (told["rows"], told["distinct"], told["distinct_is_exact"]) == (len(texts), len(set(texts)), True)
    assert told["examples"] == [repr(str(text)) for text in dict.fromkeys(texts)][:3]
    assert all(leaf["misfits"] == 0 for leaf in leaves.values())


def test_moments_skip_and_count_nan_and_infinities(tmp_path: Path) -> None:
    rows = np.array([[1, np.nan], [2, np.inf], [3, -np.inf], [6, 7]], np.float32)
    script = [(rows[0], [Result(rows[1], math.nan), Result(rows[2], 2.0), Result(rows[3], math.inf, True)])]
    _play(tmp_path, ScriptedEnv(spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(2), script), [[0, 1, 1]])
    summary = _summary(tmp_path, columns=True)
    clean, dirty = summary["observations"][0]["dimensions"]
    assert (clean["count"], clean["nan"], clean["inf"], clean["mean"]) == (4, 0, 0, 3)
    assert (dirty["count"], dirty["nan"], dirty["inf"]) == (1, 1, 2)
    assert dirty["mean"] == dirty["min"] == dirty["max"] == 7
    assert dirty["std"] == 0
    rewards = summary["rewards"]
    assert (rewards["count"], rewards["nan"], rewards["inf"], rewards["values"]) == (1, 1, 1, [[2.0, 1]])


@pytest.mark.filterwarnings("ignore:observations")
def test_values_outside_their_space_are_used_if_numeric_and_else_counted(tmp_path: Path) -> None:
    space = spaces.Box(-9, 9, (2,), np.float32)
    fits = np.array([1, 2], np.float32)
    wide, odd = np.array([3.0, 4.0]), np.zeros(3)  # another dtype; another shape
    script = [(fits, [Result(wide), Result(odd), Result("text"), Result({"a": 1}), Result(fits, "much", True)])]
    _play(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), [[0, 1, 0, 1, 1]])
    summary = _summary(tmp_path, columns=True)
    described = summary["observations"][0]
    assert (described["rows"], described["misfits"]) == (6, 3)
    assert [known["mean"] for known in described["dimensions"]] == pytest.approx([5 / 3, 8 / 3])
    assert (summary["rewards"]["count"], summary["rewards"]["misfits"]) == (4, 1)


@pytest.mark.filterwarnings("ignore:observations")
def test_observations_that_do_not_match_their_space_are_counted(tmp_path: Path) -> None:
    space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Box(0, 1, (1,))})
    good = {"a": 1, "b": np.ones(1, np.float32)}
    script = [(good, [Result({"a": 1}), Result(good, terminated=True)])]
    _play(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), [[0, 0]])
    for leaf in _summary(tmp_path, columns=True)["observations"]:
        assert (leaf["rows"], leaf["misfits"]) == (3, 1)


def test_distinct_values_of_a_custom_space_are_counted_and_shown(tmp_path: Path) -> None:
    space = OddSpace()
    script = [(space.sample(), [Result(space.sample(), terminated=True)])]
    _play(tmp_path, ScriptedEnv(space, spaces.Discrete(2), script), [[0]])
    leaf = _summary(tmp_path, columns=True)["observations"][0]
    assert (leaf["rows"], leaf["distinct"]) == (2, 2)
    assert leaf["examples"][0].startswith("{'cells':")


def test_writers_of_different_environments_are_described_separately(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(shape=(2,)), 2)
    _record(tmp_path, CountingEnv(shape=(3,)), 1, on_exist="append")
    summary = _summary(tmp_path, columns=True)
    assert sorted((leaf["shape"], leaf["rows"]) for leaf in summary["observations"]) == [([2], 12), ([3], 6)]
    assert len(summary["actions"]) == 1


def test_columns_include_running_episodes(tmp_path: Path) -> None:
    env = TraceRecordingWrapper(CountingEnv(length=3), tmp_path)
    _play_lengths(env, 3, 1)
    env.flush()
    summary = _summary(tmp_path, columns=True)
    env.close()
    assert (summary["rewards"]["count"], summary["observations"][0]["rows"]) == (4, 6)


def test_a_damaged_chunk_raises_for_columns_but_not_for_the_index(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=500), 4)
    (batch,) = tmp_path.glob("*.gtb")
    strip_parity(batch)
    whole = _summary(tmp_path)
    flip(batch, batch.stat().st_size // 2)
    trace = open_trace(tmp_path)
    assert _summary(tmp_path) == whole
    with pytest.raises(CorruptTrace):
        summarize(trace, columns=True)


def test_progress_ends_with_all_steps(tmp_path: Path) -> None:
    _record(tmp_path, CountingEnv(length=10), 4)
    told: list[tuple[int, int]] = []
    summarize(open_trace(tmp_path), columns=True, by="outcome", on_progress=lambda *numbers: told.append(numbers))
    assert told[-1] == (40, 40)


# -- distributions ----------------------------------------------------------------------------------------------------

finite_floats = st.floats(allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e6, 1e6)


@given(st.lists(st.lists(moderate, min_size=1, max_size=20), min_size=1, max_size=6))
def test_merged_moments_equal_the_moments_of_the_whole(pieces: list[list[float]]) -> None:
    parts, stream = RunningMoments(1), RunningMoments(1)
    for piece in pieces:
        rows = np.array(piece)[:, None]
        stream.add(rows)
        part = RunningMoments(1)
        part.add(rows)
        parts.merge(part)
    whole = np.concatenate([np.array(piece) for piece in pieces])
    for moments in (parts, stream):
        (known,) = moments_as_json(moments)
        assert (known["count"], known["min"], known["max"]) == (len(whole), whole.min(), whole.max())
        assert known["mean"] == pytest.approx(whole.mean(), abs=1e-6)
        assert known["std"] == pytest.approx(whole.std(), rel=1e-9, abs=1e-6)


def test_moments_lose_no_precision_far_from_zero() -> None:
    """At 1e12, a sum of squares minus the squared sum would lose a deviation of 1 completely."""
    random = np.random.default_rng(0)
    noise = random.normal(size=(100_000, 1))
    moments = RunningMoments(1)
    for block in np.array_split(noise + 1e12, 37):
        moments.add(block)
    (known,) = moments_as_json(moments)
    assert known["std"] == pytest.approx(noise.std(), rel=1e-4)
    assert known["mean"] - 1e12 == pytest.approx(noise.mean(), abs=1e-3)


def _curve(pieces: list[Any]) -> list[float | None]:
    curve = Curve(1)
    for piece in pieces:
        curve.add(np.array(piece)[:, None])
    return curve.result()[0]


def test_a_curve_does_not_depend_on_how_the_rows_come() -> None:
    """Rows one by one, a few at a time, in large blocks and merged: the points stay about equally large."""
    values = np.sin(np.linspace(0, 6, 30_000))
    expected = [group.mean() for group in np.array_split(values, POINTS)]
    parts, other = Curve(1), Curve(1)
    parts.add(values[:12_000, None])
    for piece in np.array_split(values[12_000:], 700):
        other.add(piece[:, None])
    parts.merge(other)
    for curve in (_curve(np.array_split(values, 1000)), _curve([values]), parts.result()[0]):
        assert curve == pytest.approx(expected, abs=0.02)


def test_a_curve_skips_nan_and_has_gaps_without_values() -> None:
    assert _curve([[1.0, float("nan"), float("inf")]]) == [1.0, None, None]
    assert _curve([]) == []
    assert _curve([np.array([3, 255], np.uint8), np.array([True])]) == [3.0, 255.0, 1.0]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int8, np.int64, np.float16])
def test_moments_of_every_dtype_and_of_no_rows(dtype: Any) -> None:
    rows = np.array([[0], [1], [1]], dtype)
    moments = RunningMoments(1)
    moments.add(rows[:0])
    assert moments_as_json(moments)[0]["mean"] is None
    moments.add(rows)
    assert moments_as_json(moments)[0]["mean"] == pytest.approx(2 / 3)
    assert moments_as_json(moments)[0]["std"] == pytest.approx(math.sqrt(2) / 3)


@given(st.lists(st.lists(finite_floats, max_size=30), min_size=1, max_size=6), st.integers(0, 40))
@example([[1.7e308, -1.7e308], [5e-324]], 0)
@example([[5e-324, 1e-323], [1.0]], 0)
@example([[-1.0], [-0.0, 0.0]], 0)
def test_a_histogram_does_not_depend_on_the_order_of_values(pieces: list[list[float]], most: int) -> None:
    stream, merged = Tally(most), Tally(most)
    for piece in pieces:
        stream.add(np.array(piece))
        part = Tally(most)
        part.add(np.array(piece))
        merged.merge(part)
    whole = np.array([value for piece in pieces for value in piece])
    result = stream.result()
    assert result == merged.result()
    if "values" in result:
        values, counts = np.unique(whole, return_counts=True)
        assert result["values"] == [list(pair) for pair in zip(values.tolist(), counts.tolist())]
        return
    edges, counts = np.array(result["histogram"]["edges"]), result["histogram"]["counts"]
    places = np.clip(np.searchsorted(edges, whole, side="right") - 1, 0, len(counts) - 1)
    assert np.bincount(places, minlength=len(counts)).tolist() == counts
    assert len(counts) <= 64


def test_few_distinct_rewards_are_listed_and_many_become_a_histogram(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    _scripted_rewards(tmp_path / "few", random.integers(0, 20, 300).astype(float).tolist())
    _scripted_rewards(tmp_path / "many", random.normal(size=DISTINCT_VALUES + 1).tolist())
    _scripted_rewards(tmp_path / "scattered", random.normal(size=30).tolist())
    assert len(_summary(tmp_path / "few", columns=True)["rewards"]["values"]) == 20
    for name, count in (("many", DISTINCT_VALUES + 1), ("scattered", 30)):
        assert sum(_summary(tmp_path / name, columns=True)["rewards"]["histogram"]["counts"]) == count


def test_variety_reports_when_the_distinct_count_is_a_lower_bound() -> None:
    variety, other = Variety(), Variety()
    variety.add([f"text {i}" for i in range(KNOWN_VALUES - 1)])
    assert variety.result()["distinct_is_exact"]
    other.add(["text 0", "another", "a third"])
    variety.merge(other)
    assert variety.result()["distinct"] == KNOWN_VALUES
    assert not variety.result()["distinct_is_exact"]
    assert variety.count == KNOWN_VALUES + 2
