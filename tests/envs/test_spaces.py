"""Spaces as plain data and back, and how their values are taken apart and put together."""

import contextlib
import enum
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generated_spaces import any_space
from gymnasium import spaces
from hypothesis import given
from scripted_env import OddSpace, Result, ScriptedEnv, bits

from gym_trace import TraceRecordingWrapper, open_trace
from gym_trace.data.layout import from_array_map, layout_of, put_together, taken_apart, to_array_map
from gym_trace.data.packing import pack, unpack
from gym_trace.data.values import Misfit, objects
from gym_trace.envs.spaces import StandIn, describe, restore
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable
from gym_trace.tools.statistics.summary import summarize


def holds_custom(plain: Any) -> bool:
    if isinstance(plain, dict):
        return plain.get("type") == "custom" or any(map(holds_custom, plain.values()))
    return isinstance(plain, list) and any(map(holds_custom, plain))


def through_files(plain: Any) -> list[Any]:
    """Return the value as a manifest and as a batch restores it."""
    return [json.loads(json.dumps(plain)), unpack(pack(plain))]


@given(any_space)
def test_every_space_is_rebuilt_from_plain_data(space: Any) -> None:
    for plain in through_files(describe(space)):
        if holds_custom(plain):
            with pytest.raises(EnvironmentUnavailable, match="OddSpace"):
                restore(plain)
        else:
            restored = restore(plain)
            assert restored == space
            assert type(restored) is type(space)
            assert repr(restored) == repr(space)
            assert restored.dtype == space.dtype
            assert describe(restored) == describe(space)


SPECIAL = [
    spaces.Box(np.array([-np.inf, 0, -0.0]), np.array([1, np.inf, 5e-324]), dtype=np.float64),
    spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64),
    spaces.Box(0, 2**64 - 1, (), np.uint64),
    spaces.Box(np.zeros((2, 2), bool), np.ones((2, 2), bool), dtype=np.bool_),
    spaces.Box(-1, 1, (0, 3), np.float16),
    spaces.Discrete(3, start=-(2**40)),
    spaces.MultiDiscrete([[2, 3], [4, 5]], np.int16),
    spaces.MultiDiscrete(np.array([2, 9]), start=np.array([-4, 100])),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 3, 1]),
    spaces.Text(0, min_length=0),
    spaces.Text(9, min_length=4, charset="é\u20ac\U0001f600\0\"'\\"),
    spaces.Dict([("b", spaces.Discrete(2)), ("a", spaces.Discrete(3)), ("", spaces.Dict({}))]),
    spaces.Tuple([spaces.Tuple([]), spaces.Discrete(2)]),
    spaces.Sequence(spaces.Dict(x=spaces.Discrete(2)), stack=True),
    spaces.Graph(spaces.Discrete(4), None),
    spaces.Dict({"a/b": spaces.Discrete(2), "0": spaces.Tuple([spaces.Discrete(3)])}),
]


@pytest.mark.parametrize("space", SPECIAL, ids=repr)
def test_special_spaces_are_rebuilt(space: Any) -> None:
    for plain in through_files(describe(space)):
        restored = restore(plain)
        assert restored == space
        assert restored.dtype == space.dtype
        if isinstance(space, spaces.Dict):
            assert list(restored) == list(space)
        if isinstance(space, spaces.Box):
            assert bits(restored.low) == bits(space.low)
            assert bits(restored.high) == bits(space.high)


def test_a_discrete_space_of_another_dtype_is_rebuilt() -> None:
    try:
        space = spaces.Discrete(3, dtype=np.uint8)  # type: ignore[call-arg,unused-ignore]
    except TypeError:
        pytest.skip("this gymnasium has no dtype for Discrete")
    assert restore(describe(space)) == space
    assert restore(describe(space)).dtype == np.uint8


def test_a_large_box_of_equal_bounds_takes_little_room() -> None:
    plain = describe(spaces.Box(0, 255, (210, 160, 3), np.uint8))
    assert len(json.dumps(plain)) < 300


@pytest.mark.parametrize("key", [(2, 3), 2.0, True, None, 2**63, np.int64(2)], ids=repr)
def test_a_dict_space_with_other_keys_is_stored_as_values_with_a_warning(key: Any) -> None:
    with pytest.warns(UserWarning, match="neither text nor integers"):
        plain = describe(spaces.Dict([(5, spaces.Discrete(2)), (key, spaces.Discrete(2))]))
    assert plain["type"] == "custom"


class Side(str, enum.Enum):
    LEFT = "left"


def test_a_dict_space_with_integers_for_keys_has_typed_columns(tmp_path: Path) -> None:
    space: Any = spaces.Dict([(0, spaces.Discrete(4)), (-1, spaces.Box(0, 9, (2,))), (Side.LEFT, spaces.Discrete(4))])
    space.seed(0)
    values = [space.sample() for _ in range(4)]
    for plain in through_files(describe(space)):
        assert list(restore(plain)) == [0, -1, "left"]
    env = ScriptedEnv(space, space, [(values[0], [Result(value) for value in values[1:]])])
    wrapped = TraceRecordingWrapper(env, tmp_path)
    wrapped.reset()
    for value in values[1:]:
        wrapped.step(value)
    wrapped.close()
    (episode,) = open_trace(tmp_path)
    for recorded, expected in ((episode.observations, values), (episode.actions, values[1:])):
        assert list(recorded) == [0, -1, "left"]
        for key, rows in recorded.items():
            assert bits(rows) == bits(np.array([value[key] for value in expected]))
    assert summarize(open_trace(tmp_path), columns=True)["observations"][0]["path"] == ["observations", 0]


MALFORMED: list[Any] = [
    {},
    {"type": "Box"},
    {"type": "Box", "dtype": "|O", "shape": [1], "low": {}, "high": {}},
    {"type": "Box", "dtype": "<f4", "shape": [-1], "low": {}, "high": {}},
    {"type": "Box", "dtype": "<f4", "shape": "ab", "low": 1, "high": 2},
    {"type": "Box", "dtype": "<f4", "shape": [1], "low": {"dtype": "<f4", "shape": [], "data": "!"}, "high": {}},
    {"type": "Discrete", "dtype": "<i8", "n": -1, "start": 0},
    {"type": "Discrete", "dtype": "<i8", "n": "many", "start": 0},
    {"type": "MultiDiscrete", "dtype": "<i8", "shape": [1], "nvec": {}, "start": {}},
    {"type": "MultiBinary", "dtype": "|i1", "shape": [0]},
    {"type": "Dict", "spaces": 3},
    {"type": "Dict", "spaces": [["a"]]},
    {"type": "Dict", "spaces": [["a", None]]},
    {"type": "Tuple", "spaces": None},
    {"type": "Text", "min_length": 2, "max_length": 1, "characters": "a"},
    {"type": "Sequence", "space": []},
    {"type": "Graph", "node_space": {"type": "Text"}, "edge_space": None},
    *([{"type": "OneOf", "spaces": 1}] if hasattr(spaces, "OneOf") else []),
    {"type": "Dict", "spaces": [[{}, {"type": "Discrete", "dtype": "<i8", "n": 2, "start": 0}]]},
]


@pytest.mark.parametrize("plain", MALFORMED, ids=repr)
def test_a_malformed_description_is_refused(plain: Any) -> None:
    with pytest.raises(CorruptTrace):
        restore(plain)
    with contextlib.suppress(CorruptTrace):  # some are well enough formed to be laid out
        layout_of(plain, ("observations",))


def test_a_space_that_is_nested_without_end_is_refused() -> None:
    plain: Any = {"type": "Discrete", "dtype": "<i8", "n": 2, "start": 0}
    for _ in range(3000):
        plain = {"type": "Tuple", "spaces": [plain]}
    with pytest.raises(CorruptTrace, match="deep"):
        layout_of(plain, ("observations",))
    with pytest.raises(CorruptTrace):
        restore(plain)


def test_a_space_of_a_newer_gymnasium_is_named() -> None:
    with pytest.raises(EnvironmentUnavailable, match="Fancy"):
        restore({"type": "custom", "class": "gymnasium.spaces.Fancy", "repr": "Fancy(3)"})


@given(any_space)
def test_leaves_have_the_dtypes_of_their_spaces_and_paths_of_their_own(space: Any) -> None:
    leaves = list(layout_of(describe(space), ("observations",)).leaves())
    paths = [leaf.path for leaf in leaves]
    assert len(set(paths)) == len(paths)
    assert all(path[0] == "observations" for path in paths)
    if isinstance(space, spaces.Box):
        assert (leaves[0].dtype, leaves[0].shape) == (space.dtype, space.shape)


@given(any_space)
def test_taken_apart_values_are_joined_again(space: Any) -> None:
    space.seed(3)
    layout = layout_of(describe(space), ("x",))
    value = space.sample()
    parts = taken_apart(layout, value)
    assert len(parts) == len(list(layout.leaves()))
    joined = layout.join(iter(parts))
    assert bits(joined) == bits(value)


TREE = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)]), "b": spaces.Discrete(3)})


@pytest.mark.parametrize(
    "value",
    [1, None, {}, {"a": (1, 1)}, {"a": (1, 1), "b": 1, "c": 1}, {"a": (1,), "b": 1}, {"a": {"0": 1, "1": 1}, "b": 2},
     "ab", {"a": np.array([1, 1]), "b": 1}, [("a", (1, 1)), ("b", 1)]],
    ids=repr,
)  # fmt: skip
def test_a_value_of_another_structure_is_kept_whole(value: Any) -> None:
    layout = layout_of(describe(TREE), ("x",))
    parts = taken_apart(layout, value)
    assert isinstance(parts[0], Misfit)
    columns = [objects([part, fitting]) for part, fitting in zip(parts, [1, 0, 2])]
    rows = put_together(layout, columns)
    assert bits(rows[0]) == bits(value)
    assert rows[1] == {"a": (1, 0), "b": 2}


def test_arrays_in_descriptions_keep_their_bits() -> None:
    nan = np.array([0x7FC00001, 0x7F800001, 0x80000000], np.uint32).view(np.float32)
    for array in (
        nan,
        nan.astype(">f4"),
        np.zeros((2, 0)),
        np.array(3, np.int8),
        np.full((3, 3), -0.0),
        np.eye(3)[::2],
    ):
        plain = json.loads(json.dumps(to_array_map(array)))
        again = from_array_map(plain, array.shape)
        assert bits(again) == bits(array.astype(array.dtype.newbyteorder("<")))


def test_a_custom_space_says_what_it_was() -> None:
    plain = describe(OddSpace())
    assert plain["class"] == "scripted_env.OddSpace"
    assert "OddSpace" in plain["repr"]


def test_a_custom_space_among_others_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    space = spaces.Dict({"odd": OddSpace(), "box": spaces.Box(-1, 1, (2,), np.float32)})
    TraceRecordingWrapper(ScriptedEnv(space, OddSpace(), []), tmp_path).close()
    trace = open_trace(tmp_path)
    assert trace.observation_space["box"] == space["box"]
    assert trace.observation_space["odd"] == StandIn("scripted_env.OddSpace") == trace.action_space
    with pytest.raises(EnvironmentUnavailable, match=r"scripted_env\.OddSpace: cannot be sampled"):
        trace.action_space.sample()
