"""What was recorded is what is read: any space, any value, any way an episode ends, wherever the chunks lie."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from zoo import OddSpace, ScriptedEnv, Told, bits, duplicate, row_bits, small_blocks, spoil

from gym_trace import open_trace, scan_recorded_traces
from gym_trace.wrappers import TraceRecordingWrapper

FLOATS = [np.float16, np.float32, np.float64]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (40, 40)])


# -- spaces -----------------------------------------------------------------------------------------------------------


def _box(dtype: Any, shape: tuple[int, ...]) -> spaces.Box:
    if dtype is np.bool_:
        return spaces.Box(np.zeros(shape, bool), np.ones(shape, bool), dtype=np.bool_)
    if dtype in FLOATS:
        return spaces.Box(-np.inf, np.inf, shape, dtype)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, shape, dtype)


def _multi_discrete(nvec: Any, dtype: Any, start: int) -> spaces.MultiDiscrete:
    return spaces.MultiDiscrete(nvec, dtype, start=np.full_like(np.array(nvec), start))


boxes = st.builds(_box, st.sampled_from([np.bool_, *FLOATS, *INTEGERS]), SHAPES)
discretes = st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-3, 3))
multi_discretes = st.builds(
    _multi_discrete, st.sampled_from([[3, 4], [2], [[2, 3], [4, 5]]]), st.sampled_from([np.int8, np.int64]),
    st.integers(-2, 2),
)  # fmt: skip
typed_spaces = st.one_of(
    boxes, discretes, multi_discretes, st.builds(spaces.MultiBinary, st.sampled_from([1, 5, [2, 3]]))
)
texts = st.builds(spaces.Text, st.integers(1, 12), min_length=st.just(0), charset=st.just("aé\u20ac\U0001f600 \0"))
sequences = st.builds(spaces.Sequence, typed_spaces, stack=st.booleans())
graphs = st.builds(
    spaces.Graph,
    st.sampled_from([spaces.Box(-1, 1, (2,)), spaces.Discrete(5)]),
    st.sampled_from([None, spaces.Discrete(3), spaces.Box(0, 1, (1,), np.float64)]),
)
value_spaces = [texts, sequences, graphs, st.builds(OddSpace)]
if hasattr(spaces, "OneOf"):  # since gymnasium 1.0
    value_spaces.append(st.builds(spaces.OneOf, st.lists(st.one_of(typed_spaces, texts), min_size=1, max_size=3)))
leaf_spaces = st.one_of(typed_spaces, typed_spaces, *value_spaces)
keys = st.sampled_from(["a", "b", "", "rewards", "x/y", "é"])
any_space = st.recursive(
    leaf_spaces,
    lambda children: st.one_of(
        st.builds(spaces.Dict, st.dictionaries(keys, children, max_size=3)),
        st.builds(spaces.Tuple, st.lists(children, max_size=3)),
    ),
    max_leaves=4,
)


# -- values -----------------------------------------------------------------------------------------------------------

_FLOAT_BITS = {  # quiet and signalling NaN with payloads, -0.0, infinities, the smallest numbers
    np.dtype(np.float16): [0x7E01, 0x7C01, 0xFE00, 0x8000, 0x7C00, 0xFC00, 0x0001],
    np.dtype(np.float32): [0x7FC00001, 0x7F800001, 0xFFC0ABCD, 0x80000000, 0x7F800000, 0xFF800000, 1],
    np.dtype(np.float64): [
        0x7FF8000000000001, 0x7FF0000000000001, 0xFFF8000000ABCDEF, 1 << 63, 0x7FF << 52, 0xFFF << 52, 1,
    ],
}  # fmt: skip


def _any_bits(random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """An array of any bits, with the special floats among them."""
    if dtype == bool:
        return random.integers(0, 2, shape).astype(bool)
    array = np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    if dtype in _FLOAT_BITS and array.size:
        words = array.reshape(-1).view(f"<u{dtype.itemsize}")
        words[random.integers(0, words.size)] = _FLOAT_BITS[dtype][random.integers(0, len(_FLOAT_BITS[dtype]))]
    return array


def _with_gaps(array: np.ndarray) -> np.ndarray:
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def _oriented(mood: str, array: np.ndarray) -> Any:
    """The same numbers in another memory layout."""
    if mood == "gaps" and array.ndim:
        return _with_gaps(array)
    if mood == "fortran":
        return np.array(array, order="F")
    if mood == "reversed" and array.ndim:
        return array[::-1]
    if mood == "read-only":
        array.flags.writeable = False
    if mood == "scalar" and array.ndim == 0:
        return array[()]
    return array


def _odd(mood: str, random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """A value that does not match."""
    number = int(random.integers(0, 100))
    if mood == "other dtype":
        others = [d for d in (np.int16, np.float32, np.float64, np.uint8, np.bool_, np.complex64) if d != dtype]
        return _any_bits(random, np.dtype(others[number % len(others)]), shape)
    if mood == "other shape":
        return _any_bits(random, dtype, (*shape, 2) if number % 2 else (3, 1))
    if mood == "big-endian" and dtype.itemsize > 1:
        return _any_bits(random, dtype, shape).astype(dtype.newbyteorder(">"))
    if mood == "number":
        return [number, -0.0, True, 2**70 + number, -number, np.int8(number), np.float32(number), None][number % 8]
    if mood == "other kind":
        return [[1, [2.5]], "text", b"bytes", {"a": np.zeros(2)}, (1, 2), np.array(["x"]), 1j][number % 7]
    return _any_bits(random, dtype, (*shape, 1))


MATCHING = ["sample", "sample", "bits", "bits", "gaps", "fortran", "reversed", "read-only", "scalar"]
ODD = ["other dtype", "other shape", "big-endian", "number", "other kind"]


def value_for(space: Any, mood: str, random: np.random.Generator) -> Any:
    """A value for a space: one that matches, or with an odd mood one of whose leaves may not."""
    if isinstance(space, spaces.Dict):
        return {key: value_for(child, mood, random) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(value_for(child, mood, random) for child in space.spaces)
    typed = isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))
    if not typed or mood == "sample":
        return space.sample()
    if mood in ODD and random.random() < 0.7:
        return _odd(mood, random, space.dtype, space.shape)
    return _oriented(mood, _any_bits(random, space.dtype, space.shape))


def broken(space: Any, value: Any, random: np.random.Generator) -> Any:
    """The value in a structure that its space does not have."""
    if not has_columns(space):
        return value
    if isinstance(value, dict) and isinstance(space, spaces.Dict):
        if value and random.random() < 0.5:
            return {key: value[key] for key in list(value)[1:]}
        return {**value, "one too many": 1}
    if isinstance(value, tuple) and isinstance(space, spaces.Tuple):
        return [value, "x"] if len(value) != 2 else {"x": value}
    return value


def has_columns(space: Any) -> bool:
    """Whether a space has a column at all; an empty one cannot keep a value of another structure."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return any(map(has_columns, space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces))
    return True


def fits_structure(space: Any, value: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return (
            isinstance(value, dict)
            and set(value) == set(space.spaces)
            and all(fits_structure(child, value[key]) for key, child in space.spaces.items())
        )
    if isinstance(space, spaces.Tuple):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(space.spaces)
            and all(map(fits_structure, space.spaces, value))
        )
    return True


# -- comparing --------------------------------------------------------------------------------------------------------


def is_typed(space: Any) -> bool:
    return isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary))


def matches(space: Any, value: Any) -> bool:
    """Whether a value belongs into the typed column of its space."""
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
    """The rows, as arrays of the same dtype: what indexing gives is of native byte order."""
    return list(array) if array.dtype == object else [array[i : i + 1].reshape(array.shape[1:]) for i in range(len(array))]


def check_tree(space: Any, got: Any, given_values: list[Any]) -> None:
    """got: the column or columns of a space, as read. given_values: one value a row, as the environment gave them."""
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
    """NumPy values of one dtype as they are; other numbers as float64 if it holds them all; the rest exactly."""
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
    """One episode as the environment told it."""

    observations: list[Any]
    actions: list[Any]
    rewards: list[Any]
    terminations: list[bool]
    truncations: list[bool]
    seed: int | None
    outcome: str


def record(directory: Any, env: ScriptedEnv, script: list[Any], flushes: set[int], **options: Any) -> list[Recorded]:
    """Plays a script through a recorder, spoiling every action after its step and every result before the next call."""
    wrapped = TraceRecordingWrapper(env, directory, **options)
    recorded = []
    calls = 0
    for number, (seed, first, steps, actions) in enumerate(script):
        wrapped.reset(seed=seed)
        env.spoil()
        for told, action in zip(steps, actions, strict=True):
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


def check_trace(directory: Any, env: Any, recorded: list[Recorded]) -> None:
    """Reads a trace in every way there is."""
    trace = open_trace(directory)
    assert trace.damage == []
    assert len(trace) == len(recorded)
    assert trace.episodes["steps"].tolist() == [len(episode.actions) for episode in recorded]
    for got, expected in zip(trace, recorded, strict=True):
        check_episode(env, got, expected)
    for i in range(len(trace)):
        check_episode(env, trace[i], recorded[i])
    for got, expected in zip(trace.scan(columns=["actions"]), recorded, strict=True):
        check_tree(env.action_space, got.actions, expected.actions)
    handed: list[Any] = []
    assert scan_recorded_traces(directory, lambda *arrays: handed.append(arrays)) == len(recorded)
    for (observations, actions, rewards), expected in zip(handed, recorded, strict=True):
        check_tree(env.observation_space, observations, expected.observations)
        check_tree(env.action_space, actions, expected.actions)
        check_rewards(rewards, expected.rewards)


@st.composite
def scripts(draw: Any, moods: list[str], breaks: bool) -> tuple[Any, Any, list[Any], set[int]]:
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
            steps.append(Told(value(observation_space), draw(reward), *flags))
            actions.append(value(action_space))
        script.append((seed, value(observation_space), steps, actions))
    flushes = draw(st.sets(st.integers(1, 24), max_size=4))
    return observation_space, action_space, script, flushes


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


@given(scripts(MATCHING, breaks=False), block_sizes)
def test_values_of_any_space_come_back_bit_for_bit(tmp_path_factory: Any, script: Any, sizes: Any) -> None:
    observation_space, action_space, episodes, flushes = script
    env = ScriptedEnv(observation_space, action_space, [(first, steps) for _, first, steps, _ in episodes])
    directory = tmp_path_factory.mktemp("trace")
    with warnings.catch_warnings(), small_blocks(**sizes):
        warnings.simplefilter("error")  # what matches its space is never complained of
        recorded = record(directory, env, episodes, flushes)
        check_trace(directory, env, recorded)


@given(scripts(MATCHING + ODD * 2, breaks=True), block_sizes)
def test_values_that_do_not_match_their_space_come_back_exactly(
    tmp_path_factory: Any, script: Any, sizes: Any
) -> None:
    observation_space, action_space, episodes, flushes = script
    env = ScriptedEnv(observation_space, action_space, [(first, steps) for _, first, steps, _ in episodes])
    directory = tmp_path_factory.mktemp("trace")
    with warnings.catch_warnings(), small_blocks(**sizes):
        warnings.simplefilter("ignore")
        recorded = record(directory, env, episodes, flushes)
    check_trace(directory, env, recorded)


def shape_of(columns: Any) -> Any:
    """The dtypes and shapes of what was read."""
    if isinstance(columns, dict):
        return {key: shape_of(column) for key, column in columns.items()}
    return tuple(map(shape_of, columns)) if isinstance(columns, tuple) else (columns.dtype, columns.shape)


@given(scripts(MATCHING + ODD * 2, breaks=True))
def test_what_is_read_does_not_depend_on_where_chunks_end(tmp_path_factory: Any, script: Any) -> None:
    observation_space, action_space, episodes, flushes = script
    read = []
    for places, sizes in ((set(), {"rows": 512}), (flushes, {}), (set(range(100)), {"frame": 20})):
        env = ScriptedEnv(observation_space, action_space, [(first, steps) for _, first, steps, _ in episodes])
        directory = tmp_path_factory.mktemp("trace")
        with warnings.catch_warnings(), small_blocks(**sizes):
            warnings.simplefilter("ignore")
            record(directory, env, episodes, places)
        read.append([(shape_of(e.observations), shape_of(e.actions)) for e in open_trace(directory)])
    assert read[0] == read[1] == read[2]
