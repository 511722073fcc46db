"""Spaces of every kind, nested, and matching and non-matching values for them."""

from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from scripted_env import OddSpace

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
    """Return an array of random bits, including special floats."""
    if dtype.kind == "b":
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
    """Return the same numbers in another memory layout."""
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
    """Return a value that does not match."""
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
    """Return a value for a space; in an odd mood, one of its leaves may not match."""
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
    """Return the value in a structure that differs from its space."""
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
    """Return True if a space has a column; one without columns cannot keep a value of another structure."""
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
