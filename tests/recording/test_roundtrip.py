"""Recorded values round-trip: any space, any value, any end of an episode, any chunk boundaries."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from generated_spaces import MATCHING, ODD, any_space, broken, fits_structure, typed_spaces, value_for
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from scripted_env import Result, ScriptedEnv, bits, duplicate, row_bits, small_blocks, spoil

from gym_trace import open_trace, scan_recorded_traces
from gym_trace.recording.single.wrapper import TraceRecordingWrapper

# -- comparing --------------------------------------------------------------------------------------------------------


def is_typed(space: Any) -> bool:
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def matches(space: Any, value: Any) -> bool:
    """Return True if a value belongs in the typed column of its space."""
    if type(value) is int and space.shape == () and space.dtype.kind in "iu":
        limits = np.iinfo(space.dtype)
        return bool(limits.min <= value <= limits.max)
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype == space.dtype and value.shape == space.shape


def check_leaf(space: Any, got: Any, given_values: list[Any]) -> None:
    assert isinstance(got, np.ndarray)
    assert len(got) == len(given_values)
    if not is_typed(space):
        assert [bits(value) for value in got] == [bits(value) for value in given_values]
        return
    if all(matches(space, value) for value in given_values):
        assert got.dtype == space.dtype
        assert got.shape == (len(given_values), *space.shape)
        expected = [np.asarray(value, space.dtype) for value in given_values]
    else:
        expected = [
            np.asarray(value, space.dtype) if matches(space, value) and type(value) is int else value
            for value in given_values
        ]
    assert [row_bits(value) for value in rows_of(got)] == [row_bits(value) for value in expected]
    assert got.flags.writeable


def rows_of(array: np.ndarray) -> list[Any]:
    """Return the rows as arrays of the same dtype; indexing alone gives native byte order."""
    return (
        list(array) if array.dtype == object else [array[i : i + 1].reshape(array.shape[1:]) for i in range(len(array))]
    )


def check_tree(space: Any, got: Any, given_values: list[Any]) -> None:
    """Compare the columns of a space as read (got) with the values from the environment, one per row (given_values)."""
    if not all(fits_structure(space, value) for value in given_values):
        assert got.dtype == object
        for row, value in zip(got, given_values, strict=True):
            if fits_structure(space, value):
                check_row(space, row, value)
            else:
                assert bits(row) == bits(value)
    elif isinstance(space, spaces.Dict):
        assert type(got) is dict
        assert list(got) == list(space.spaces)
        for key, child in space.spaces.items():
            check_tree(child, got[key], [value[key] for value in given_values])
    elif isinstance(space, spaces.Tuple):
        assert type(got) is tuple
        for i, child in enumerate(space.spaces):
            check_tree(child, got[i], [value[i] for value in given_values])
    else:
        check_leaf(space, got, given_values)


def check_row(space: Any, got: Any, value: Any) -> None:
    if isinstance(space, spaces.Dict):
        assert list(got) == list(space.spaces)
        for key, child in space.spaces.items():
            check_row(child, got[key], value[key])
    elif isinstance(space, spaces.Tuple):
        for child, part, given_part in zip(space.spaces, got, value, strict=True):
            check_row(child, part, given_part)
    elif is_typed(space):
        assert row_bits(got) == row_bits(np.asarray(value, space.dtype) if matches(space, value) else value)
    else:
        assert bits(got) == bits(value)


_REAL = (bool, int, float, np.bool_, np.integer, np.float16, np.float32)


def check_rewards(got: np.ndarray, rewards: list[Any]) -> None:
    """Expect NumPy values of one dtype unchanged, other numbers as float64 if lossless, all others exactly."""
    assert len(got) == len(rewards)
    uniform = all(isinstance(reward, (np.ndarray, np.generic)) for reward in rewards)
    if uniform and len({(reward.dtype, reward.shape) for reward in rewards}) == 1:
        assert got.dtype == rewards[0].dtype
        assert [row_bits(reward) for reward in got] == [row_bits(reward) for reward in rewards]
    elif all(isinstance(reward, _REAL) for reward in rewards):
        whole = [int(reward) for reward in rewards if isinstance(reward, (int, np.integer))]
        assert got.dtype == np.float64 or any(abs(number) > 1 << 53 for number in whole)
        assert all(map(is_same_number, got.tolist(), rewards))
    else:
        for reward, number in zip(got, rewards):
            assert row_bits(reward) == row_bits(number) or is_same_number(reward, number)


def is_same_number(got: Any, number: Any) -> bool:
    """Plain Python numbers may come back as floats."""
    return bool(got == number or (got != got and number != number)) and np.ndim(got) == 0 == np.ndim(number)


# -- recording --------------------------------------------------------------------------------------------------------


class Recorded(NamedTuple):
    """One episode as the environment returned it."""

    observations: list[Any]
    actions: list[Any]
    rewards: list[Any]
    terminations: list[bool]
    truncations: list[bool]
    seed: int | None
    outcome: str


def record(directory: Any, env: ScriptedEnv, script: list[Any], flushes: set[int], **options: Any) -> list[Recorded]:
    """Play a script through a recorder; overwrite each action after its step and each result before the next call."""
    wrapped = TraceRecordingWrapper(env, directory, **options)
    recorded = []
    calls = 0
    for number, (seed, first, steps, actions) in enumerate(script):
        wrapped.reset(seed=seed)
        env.spoil()
        for action in actions:
            given_action = duplicate(action)
            wrapped.step(given_action)
            spoil(given_action)
            env.spoil()
            calls += 1
            if calls in flushes:
                wrapped.flush()
        last = number == len(script) - 1
        ended = steps and (steps[-1].terminated or steps[-1].truncated)
        outcome = ("terminated" if steps[-1].terminated else "truncated") if ended else "closed" if last else "cut"
        recorded.append(
            Recorded(
                [first, *(told.observation for told in steps)], actions, [told.reward for told in steps],
                [told.terminated for told in steps], [told.truncated for told in steps], seed, outcome,
            )
        )  # fmt: skip
    wrapped.close()
    return recorded


def check_episode(env: Any, got: Any, given_episode: Recorded) -> None:
    assert len(got) == len(given_episode.actions)
    check_tree(env.observation_space, got.observations, given_episode.observations)
    check_tree(env.action_space, got.actions, given_episode.actions)
    check_rewards(got.rewards, given_episode.rewards)
    assert got.terminations.tolist() == given_episode.terminations
    assert got.truncations.tolist() == given_episode.truncations
    assert got.terminations.dtype == got.truncations.dtype == bool
    assert got.seed == given_episode.seed
    assert got.outcome == given_episode.outcome
    assert got.first_step == 0


def check_slice(env: Any, episode: Any, given_episode: Recorded, steps: slice) -> None:
    got = episode[steps]
    start, stop, _ = steps.indices(len(given_episode.actions))
    assert (len(got), got.first_step) == (stop - start, start)
    check_tree(env.observation_space, got.observations, given_episode.observations[start : stop + 1])
    check_tree(env.action_space, got.actions, given_episode.actions[steps])
    check_rewards(got.rewards, given_episode.rewards[steps])
    assert got.terminations.tolist() == given_episode.terminations[steps]
    assert got.truncations.tolist() == given_episode.truncations[steps]


def check_trace(directory: Any, env: Any, recorded: list[Recorded]) -> None:
    """Read a trace in every possible way."""
    trace = open_trace(directory)
    assert trace.damage == []
    assert len(trace) == len(recorded)
    assert trace.episodes["steps"].tolist() == [len(episode.actions) for episode in recorded]
    for got, expected in zip(trace, recorded, strict=True):
        check_episode(env, got, expected)
    for i in range(len(trace)):
        check_episode(env, trace[i], recorded[i])
        length = len(recorded[i].actions)
        for steps in (slice(0, 1), slice(length // 2, length), slice(length // 3, -1), slice(1, 1)):
            if steps.indices(length)[0] <= steps.indices(length)[1]:
                check_slice(env, trace[i], recorded[i], steps)
    for got, expected in zip(trace, recorded, strict=True):
        check_slice(env, got, expected, slice(len(expected.actions) // 2, None))
    for got, expected in zip(trace.scan(columns=["actions"]), recorded, strict=True):
        check_tree(env.action_space, got.actions, expected.actions)
    handed: list[Any] = []
    assert scan_recorded_traces(directory, lambda *arrays: handed.append(arrays)) == len(recorded)
    for (observations, actions, rewards), expected in zip(handed, recorded, strict=True):
        check_tree(env.observation_space, observations, expected.observations)
        check_tree(env.action_space, actions, expected.actions)
        check_rewards(rewards, expected.rewards)


@st.composite
def scripts(draw: Any, moods: list[str], breaks: bool) -> tuple[Any, list[Any], set[int]]:
    """Draw a function that makes an environment, its script, and the steps after which to flush."""
    some_space = st.one_of(typed_spaces, any_space)
    observation_space, action_space = draw(some_space), draw(some_space)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    for space in (observation_space, action_space):
        space.seed(int(random.integers(0, 2**31)))
    mood = st.sampled_from(moods)

    def value(space: Any) -> Any:
        made = value_for(space, draw(mood), random)
        return broken(space, made, random) if breaks and random.random() < 0.3 else made

    reward = st.one_of(st.floats(width=64), st.floats(-10, 10)) if not breaks else ANY_REWARD
    script = []
    for _ in range(draw(st.integers(1, 4))):
        seed = draw(st.sampled_from([None, 0, 7, 2**40]))
        length = draw(st.integers(0, 6))
        end = draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
        steps, actions = [], []
        for i in range(length):
            flags = end if i == length - 1 else (False, False)
            steps.append(Result(value(observation_space), draw(reward), *flags))
            actions.append(value(action_space))
        script.append((seed, value(observation_space), steps, actions))
    played = [(first, steps) for _, first, steps, _ in script]
    flushes = draw(st.sets(st.integers(1, 24), max_size=4))
    return lambda: ScriptedEnv(observation_space, action_space, played), script, flushes


ANY_REWARD = st.one_of(
    st.floats(width=64),
    st.integers(-5, 5),
    st.integers(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(width=32).map(np.float32),
    st.integers(-100, 100).map(np.int64),
    st.booleans().map(np.bool_),
    st.integers(0, 9).map(lambda n: np.array([n, n / 2])),
    st.integers(0, 9).map(lambda n: np.array(n, np.float64)),
    st.none(),
)


block_sizes = st.fixed_dictionaries(
    {
        "rows": st.sampled_from([1, 5, 512]),
        "chunk": st.sampled_from([1, 300, 1 << 20]),
        "frame": st.sampled_from([20, 4096]),
        "values": st.sampled_from([1, 200, 1 << 20]),
    }
)


@pytest.mark.parametrize(("moods", "breaks"), [(MATCHING, False), (MATCHING + ODD * 2, True)])
@given(st.data(), block_sizes)
def test_values_inside_and_outside_their_space_round_trip(
    tmp_path_factory: Any, moods: list[str], breaks: bool, data: st.DataObject, sizes: Any
) -> None:
    env, episodes, flushes = data.draw(scripts(moods, breaks))
    directory = tmp_path_factory.mktemp("trace")
    with warnings.catch_warnings(), small_blocks(**sizes):
        warnings.simplefilter("ignore" if breaks else "error")  # values that match their space never give a warning
        recorded = record(directory, env(), episodes, flushes)
        check_trace(directory, env(), recorded)


def shape_of(columns: Any) -> Any:
    """Return the dtypes and shapes of the values read."""
    if isinstance(columns, dict):
        return {key: shape_of(column) for key, column in columns.items()}
    return tuple(map(shape_of, columns)) if isinstance(columns, tuple) else (columns.dtype, columns.shape)


@given(scripts(MATCHING + ODD * 2, breaks=True))
def test_values_read_do_not_depend_on_chunk_boundaries(tmp_path_factory: Any, script: Any) -> None:
    env, episodes, flushes = script
    read = []
    for places, sizes in ((set(), {"rows": 512}), (flushes, {}), (set(range(100)), {"frame": 20})):
        directory = tmp_path_factory.mktemp("trace")
        with warnings.catch_warnings(), small_blocks(**sizes):
            warnings.simplefilter("ignore")
            record(directory, env(), episodes, places)
        read.append([(shape_of(e.observations), shape_of(e.actions)) for e in open_trace(directory)])
    assert read[0] == read[1] == read[2]
