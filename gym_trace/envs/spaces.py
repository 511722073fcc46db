"""Convert a gymnasium space to plain data (docs/FORMAT.md, section 5), and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace.data.layout import PlainSpace, from_array_map, to_array_map
from gym_trace.data.tensors import plain_array
from gym_trace.data.values import dtype_from, is_plain_dtype, without_addresses
from gym_trace.errors import CorruptTrace, EnvironmentUnavailable, InvalidOption, TraceError, warn

_MOST_ELEMENTS = 1 << 25  # elements in all arrays of a space
_PARTS = ("spaces", "space", "node_space", "edge_space")
_DEEPEST = 100
_DEEPEST_INFERRED = 16
_OF_PYTHON = {bool: np.bool_, int: np.int64, float: np.float64}
_OneOf = getattr(spaces, "OneOf", None)  # since gymnasium 1.0


def describe(space: gymnasium.Space[Any]) -> PlainSpace:
    """Describe a space as plain data, for JSON and MessagePack."""
    if isinstance(space, spaces.Box) and is_plain_dtype(space.dtype.str):
        bounds = {"low": to_array_map(space.low), "high": to_array_map(space.high)}
        return {"type": "Box", "dtype": _dtype(space), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": _dtype(space), "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(getattr(space, "start", np.zeros_like(space.nvec)))
        arrays = {"nvec": to_array_map(space.nvec), "start": to_array_map(start)}
        return {"type": "MultiDiscrete", "dtype": _dtype(space), "shape": list(space.shape), **arrays}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "dtype": _dtype(space), "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        if all(map(_may_be_path, space.spaces)):
            return {"type": "Dict", "spaces": [[_plain(key), describe(child)] for key, child in space.spaces.items()]}
        keys = ", ".join(f"{key!r}" for key in space.spaces if not _may_be_path(key))
        warn(
            f"a Dict space with the keys {keys:.200}, which are neither text nor integers, is recorded value by value, "
            "not as typed columns",
        )
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [describe(child) for child in space.spaces]}
    if isinstance(space, spaces.Text):
        limits = {"min_length": int(space.min_length), "max_length": int(space.max_length)}
        return {"type": "Text", **limits, "characters": "".join(space.character_list)}
    if isinstance(space, spaces.Sequence):
        return {"type": "Sequence", "space": describe(space.feature_space), "stack": bool(space.stack)}
    if isinstance(space, spaces.Graph):
        edges = None if space.edge_space is None else describe(space.edge_space)
        return {"type": "Graph", "node_space": describe(space.node_space), "edge_space": edges}
    if _OneOf is not None and isinstance(space, _OneOf):
        return {"type": "OneOf", "spaces": [describe(child) for child in space.spaces]}
    kind = type(space)
    text = without_addresses(repr(space))[:1000]
    return {"type": "custom", "class": f"{kind.__module__}.{kind.__qualname__}", "repr": text}


def inferred(value: Any, depth: int = 0) -> PlainSpace:
    """Return a space for values like this one, as plain data. Arrays and numbers get the widest Box of their dtype.

    Dicts and tuples are nested; any other value is recorded value by value.
    """
    value = plain_array(value)
    kind = type(value)
    is_tree = depth < _DEEPEST_INFERRED and isinstance(value, (Mapping, tuple)) and len(value) > 0
    if is_tree and isinstance(value, Mapping) and all(map(_may_be_path, value)):
        return {"type": "Dict", "spaces": [[_plain(key), inferred(item, depth + 1)] for key, item in value.items()]}
    if is_tree and isinstance(value, tuple):
        return {"type": "Tuple", "spaces": [inferred(item, depth + 1) for item in value]}
    if kind in (bool, float) or (kind is int and -(1 << 63) <= value < 1 << 63):
        value = np.asarray(value, _OF_PYTHON[kind])
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in "biuf":
        return _widest(value.dtype, value.shape)
    return {"type": "custom", "class": f"{kind.__module__}.{kind.__qualname__}", "repr": "inferred from a value"}


def _widest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> PlainSpace:
    """Return the Box of all values of a dtype and shape."""
    limits = {"b": (False, True), "f": (-np.inf, np.inf)}.get(dtype.kind)
    if limits is None:
        limits = np.iinfo(dtype).min, np.iinfo(dtype).max
    low, high = (to_array_map(np.array(limit, dtype)) for limit in limits)
    return {"type": "Box", "dtype": dtype.newbyteorder("<").str, "shape": list(shape), "low": low, "high": high}


def _may_be_path(key: object) -> bool:
    return isinstance(key, str) or (type(key) is int and -(1 << 63) <= key < 1 << 63)


def _plain(key: str | int) -> str | int:
    return str.__str__(key) if isinstance(key, str) else key  # ignores a __str__() of a subclass


def _dtype(space: gymnasium.Space[Any]) -> str:
    assert space.dtype is not None  # true for the four kinds that call this
    return space.dtype.newbyteorder("<").str


class StandIn(gymnasium.Space[Any]):
    """Stands in for a space that is not plain data: contains every value, and cannot be sampled."""

    def __init__(self, description: str):
        super().__init__(None, None)
        self.description = description

    def contains(self, x: Any) -> bool:
        """Return True: the real space is unknown."""
        return True

    def sample(self, *_: Any, **__: Any) -> Any:
        """Raise EnvironmentUnavailable."""
        raise EnvironmentUnavailable(
            f"{self.description}: cannot be sampled; pass the space itself: action_space= or observation_space="
        )

    def __repr__(self) -> str:
        return f"StandIn({self.description!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StandIn) and self.description == other.description

    def __hash__(self) -> int:
        return hash(self.description)


def restore(plain: Any, stand_in: bool = False) -> gymnasium.Space[Any]:
    """Rebuild a space from describe(). stand_in: return a StandIn for custom spaces.

    Raises:
        EnvironmentUnavailable: for a custom space, which is not plain data.
        CorruptTrace: for a malformed description.
    """
    try:
        if _elements(plain, 0) > _MOST_ELEMENTS:  # a few bytes of a file can declare very many
            raise EnvironmentUnavailable("the space is too large to be rebuilt; its values can be read")
        space: gymnasium.Space[Any] = _restore(plain, stand_in)
        return space
    except TraceError:
        raise
    except Exception as error:  # gymnasium has many ways to reject a value
        raise CorruptTrace(f"the description of a space is malformed: {error!r:.100}") from error


def _elements(plain: Any, depth: int) -> int:
    """Return the number of elements in the arrays of a space."""
    if isinstance(plain, list):
        return sum(_elements(item, depth + 1) for item in plain) if depth < _DEEPEST else 0
    if not isinstance(plain, Mapping):
        return 0
    shape = plain.get("shape", ()) if plain.get("type") in ("Box", "MultiDiscrete") else ()
    return math.prod(map(int, shape)) + sum(_elements(plain.get(key), depth + 1) for key in _PARTS)


def _restore(plain: Mapping[str, Any], stand_in: bool) -> Any:
    make: Any = spaces  # untyped, because signatures differ between releases
    kind = plain["type"]
    shape = tuple(int(n) for n in plain.get("shape", ()))
    if kind == "Box":
        low, high = from_array_map(plain["low"], shape), from_array_map(plain["high"], shape)
        return make.Box(low, high, shape, dtype_from(plain["dtype"]).type)
    if kind == "Discrete":
        space, dtype = make.Discrete(plain["n"], start=plain["start"]), dtype_from(plain["dtype"])
        # only newer releases of gymnasium have the argument dtype
        return space if space.dtype == dtype else make.Discrete(plain["n"], start=plain["start"], dtype=dtype.type)
    if kind == "MultiDiscrete":
        nvec, start = from_array_map(plain["nvec"], shape), from_array_map(plain["start"], shape)
        return make.MultiDiscrete(nvec, dtype_from(plain["dtype"]).type, **({"start": start} if start.any() else {}))
    if kind == "MultiBinary":
        return make.MultiBinary(list(shape) if len(shape) != 1 else shape[0])
    if kind == "Dict":
        pairs = [(key, _restore(child, stand_in)) for key, child in plain["spaces"]]
        return make.Dict(pairs)  # Dict would sort a dict by its keys
    if kind == "Tuple":
        return make.Tuple([_restore(child, stand_in) for child in plain["spaces"]])
    if kind == "Text":
        return make.Text(plain["max_length"], min_length=plain["min_length"], charset=plain["characters"])
    if kind == "Sequence":
        return make.Sequence(_restore(plain["space"], stand_in), stack=plain["stack"])
    if kind == "Graph":
        edges = None if plain["edge_space"] is None else _restore(plain["edge_space"], stand_in)
        return make.Graph(_restore(plain["node_space"], stand_in), edges)
    if kind == "OneOf" and _OneOf is not None:
        return _OneOf([_restore(child, stand_in) for child in plain["spaces"]])
    if stand_in:
        return StandIn(str(plain.get("class", kind)))
    raise EnvironmentUnavailable(
        f"a space of type {plain.get('class', kind)} cannot be rebuilt from the trace ({plain.get('repr', '')}); "
        "its values can still be read"
    )


# -- vector environments ----------------------------------------------------------------------------------------------


def lane_space(envs: Any, name: str) -> gymnasium.Space[Any]:
    """Return observation_space or action_space of one lane. Raises InvalidOption if it is unknown."""
    try:
        space: gymnasium.Space[Any] = getattr(envs, f"single_{name}")
    except AttributeError as error:
        if not is_of_supersuit(envs):  # SuperSuit's spaces are those of one lane
            raise InvalidOption(
                f"{type(envs.unwrapped).__name__} has no space for a lane; set its single_{name} before recording"
            ) from error
        space = getattr(envs, name)
    return space


def is_of_supersuit(envs: Any) -> bool:
    """Return True for a vector environment of SuperSuit, which exposes neither its autoreset mode nor its lanes."""
    return type(envs.unwrapped).__module__.partition(".")[0] == "supersuit"
