"""Odd objects for the C core: strided arrays, subclasses, numbers and flags that raise."""

from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from gym_trace.data.layout import Layout, Leaf


class Child(np.ndarray):
    """A subclass."""


class Text(str):
    """A subclass."""


class Key:
    """A key that equals a different key."""

    def __init__(self, key: Any):
        self._key = key

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return bool(self._key == other)


class RaisingFloat(float):
    """A subclass of float that refuses conversion."""

    def __float__(self) -> float:
        raise ValueError("no number")


class RaisingNumber:
    """An object that only looks like a number."""

    def __float__(self) -> float:
        raise ZeroDivisionError("no number")

    def __index__(self) -> int:
        raise ZeroDivisionError("no number")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no array")


class Flag:
    """A flag that runs a function in __bool__."""

    def __init__(self, asked: Callable[[], Any]):
        self._asked = asked

    def __bool__(self) -> bool:
        return bool(self._asked())


def raising_flag() -> Flag:
    def asked() -> Any:
        raise ZeroDivisionError("neither")

    return Flag(asked)


def array_for(random: np.random.Generator, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of random bits."""
    size = int(np.prod(shape, dtype=int))
    if dtype.kind == "b":
        return random.integers(0, 2, size).astype(dtype).reshape(shape)
    return np.frombuffer(random.bytes(size * dtype.itemsize), dtype).reshape(shape).copy()


def value_for(random: np.random.Generator, leaf: Leaf) -> Any:
    """Return a value for a leaf: mostly valid, often slightly invalid, sometimes of another type."""
    dtype, shape = leaf.dtype or np.dtype("f4"), leaf.shape
    array = array_for(random, dtype, shape)
    moods: list[Callable[[], Any]] = [
        lambda: array,
        lambda: array[()],
        lambda: np.asfortranarray(array),
        lambda: np.flip(array).copy()[tuple(slice(None, None, -1) for _ in shape)],
        lambda: np.repeat(array, 2, -1)[..., ::2] if shape else array,
        lambda: array.view(Child),
        lambda: _read_only(array),
        lambda: array.astype(dtype.newbyteorder()),
        lambda: array.astype(np.dtype(dtype, metadata={"of": 1})),
        lambda: array_for(random, _any_of(random, "f2", "f8", "i1", "u8", "c8", "?", "g", "M8[s]"), shape),
        lambda: array_for(random, dtype, (*shape, 1)),
        lambda: array_for(random, dtype, (*shape[1:], 2)),
        lambda: array_for(random, dtype, (*shape[:-1], 0)),
        lambda: np.broadcast_to(array_for(random, dtype, ()), shape),
        lambda: array.astype(object),
        lambda: np.ma.masked_array(array),
        lambda: np.array([(1, 2.0)], "i4,f8"),
        lambda: array.tolist(),
        lambda: memoryview(array) if array.size else b"",
        lambda: int(random.choice([0, 1, -1, 127, 128, -129, 2**31, 2**32 - 1, -(2**31) - 1])),
        lambda: [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**30][random.integers(7)],
        lambda: bool(random.integers(2)),
        lambda: _any_of(random, "i1", "u2", "i4", "u8", "q", "Q", "f4", "?").type(1),
        lambda: np.longlong(3),
        lambda: np.ulonglong(2**63),
        lambda: RaisingNumber(),
        lambda: RaisingFloat(1),
        lambda: None,
        lambda: "text",
        lambda: (),
    ]
    with np.errstate(all="ignore"):
        return moods[0 if random.random() < 0.5 else random.integers(len(moods))]()


def tree_value_for(random: np.random.Generator, tree: Layout) -> Any:
    """Return a value for a tree of leaves, mostly with its structure and valid leaves."""
    if isinstance(tree, Leaf):
        if tree.dtype is None:
            return text_for(random)
        return array_for(random, tree.dtype, tree.shape) if random.random() < 0.8 else value_for(random, tree)
    parts = [tree_value_for(random, child) for child in tree.children]
    if tree.keys is None:
        return parts if random.random() < 0.1 else parts[1:] if random.random() < 0.02 else tuple(parts)
    pairs = list(zip(tree.keys, parts))
    random.shuffle(pairs)
    value: dict[Any, Any] = dict(pairs)
    if random.random() < 0.1:
        changes: list[Callable[[], Any]] = [
            lambda: OrderedDict(value),
            lambda: {**value, "more": 1},
            lambda: {str(key) + "s": part for key, part in value.items()},
            lambda: {Key(key): part for key, part in value.items()},
            lambda: list(value),
            lambda: MappingProxyType(value),
        ]
        return changes[random.integers(len(changes))]()
    return value


def text_for(random: np.random.Generator) -> Any:
    """Return a text of any length, or sometimes another object."""
    if random.random() < 0.1:
        return _any_of_objects(random, Text("text"), None, 7, b"text", ["text"], "\ud800", "x" * 4097, np.str_("text"))
    letter = str(random.choice(["a", "\0", "é", "\U0001f600"]))
    return letter * int(random.choice([0, 1, 7, 8, 31, 32, 127, 128, 255, 256, 1000, 4096]))


def _any_of_objects(random: np.random.Generator, *objects: Any) -> Any:
    return objects[random.integers(len(objects))]


def reward_for(random: np.random.Generator) -> Any:
    """Return a reward, mostly a float."""
    rewards: list[Any] = [
        float(random.normal()),
        np.float64(random.normal()),
        np.frombuffer(random.bytes(8), np.float64)[0],
        float(np.frombuffer(random.bytes(8), np.float64)[0]),
        -0.0,
        float("nan"),
        1,
        2**53,
        2**53 + 1,
        -(2**53),
        -(2**53) - 1,
        10**400,
        True,
        np.float32(1),
        np.int64(1),
        np.float64(1).reshape(()),
        np.ones(2),
        RaisingFloat(2),
        RaisingNumber(),
        None,
    ]
    return rewards[random.integers(5 if random.random() < 0.7 else len(rewards))]


def flag_for(random: np.random.Generator) -> Any:
    """Return a flag, mostly False."""
    if random.random() < 0.7:
        return False
    flags: list[Any] = [
        True,
        np.True_,
        np.False_,
        0,
        1,
        None,
        "",
        np.array(True),
        np.array([0.0]),
        np.ones(2),
        1.5,
        Flag(lambda: True),
        Flag(lambda: False),
        raising_flag(),
    ]
    return flags[random.integers(len(flags))]


def _any_of(random: np.random.Generator, *dtypes: str) -> np.dtype[Any]:
    return np.dtype(dtypes[random.integers(len(dtypes))])


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
