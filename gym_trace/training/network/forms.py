"""Observations and actions for networks: one array per leaf of the observation space, one row per action."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from gym_trace.data.values import Array
from gym_trace.errors import InvalidOption

Path = tuple[Any, ...]
MASK = "action_mask"  # leaf of a Dict observation that marks the allowed discrete actions


class SpaceLeaf(NamedTuple):
    """Part of a space with one dtype and one shape."""

    path: Path
    space: Any
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def is_mask(self) -> bool:
        return self.path[-1:] == (MASK,)


def leaves_of(space: Any, what: str = "observation") -> list[SpaceLeaf]:
    """Return the leaves of a space. Raises InvalidOption for unsupported spaces. what: observation or action."""
    return list(_leaves(space, (), what))


def _leaves(space: Any, path: Path, what: str) -> Iterator[SpaceLeaf]:
    if isinstance(space, spaces.Dict):
        for name, inner in space.spaces.items():
            yield from _leaves(inner, (*path, name), what)
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index), what)
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield SpaceLeaf(path, space, np.dtype(space.dtype), tuple(space.shape or ()))
    else:
        name = "/".join(map(str, path))
        raise InvalidOption(
            f"the {what}{f', {name},' * bool(name)} is {type(space).__name__}, which is not supported; wrap the "
            f"environment so that it {'omits it' if name else 'returns numbers'}"
        )


def picked(tree: Any, path: Path) -> Array:
    """Return the leaf at a path of an observation or a batch."""
    for key in path:
        tree = tree[key]
    return np.asarray(tree)


class ActionForm:
    """Actions of a space as rows of float32: discrete ones as indices, then continuous ones unchanged.

    Attributes:
        choices: number of actions of each discrete column. normals: number of continuous columns.
    """

    def __init__(self, space: Any):
        self.choices: list[int] = []
        self.normals = 0
        self._space = space
        self._parts: list[tuple[SpaceLeaf, slice]] = []  # each leaf and its columns of the row
        for leaf in sorted(leaves_of(space, "action"), key=lambda leaf: isinstance(leaf.space, spaces.Box)):
            begin = self.columns
            if isinstance(leaf.space, spaces.Discrete):
                self.choices.append(int(leaf.space.n))
            elif isinstance(leaf.space, spaces.MultiDiscrete):
                self.choices.extend(leaf.space.nvec.ravel().tolist())
            elif isinstance(leaf.space, spaces.MultiBinary):
                self.choices.extend([2] * int(np.prod(leaf.shape)))
            elif leaf.dtype.kind == "f":
                self.normals += int(np.prod(leaf.shape))
            else:
                raise InvalidOption(
                    f"the action is a Box of {leaf.dtype}, which is not supported; wrap the environment so that it "
                    "takes a MultiDiscrete"
                )
            self._parts.append((leaf, slice(begin, self.columns)))

    @property
    def columns(self) -> int:
        return len(self.choices) + self.normals

    def to_batch(self, rows: Array) -> Any:
        """Return the actions of a vector environment. rows: (lanes, columns)."""
        actions = {leaf.path: _as_actions(leaf.space, rows[:, columns]) for leaf, columns in self._parts}
        return _nested(self._space, (), actions)

    def to_rows(self, batch: Any) -> Array:
        """Return the rows, (n, columns), of n actions of a vector environment or an episode."""
        parts = [_as_rows(leaf.space, picked(batch, leaf.path)) for leaf, _ in self._parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, 1)


def check_bounds(action_space: Any, std: float) -> None:
    """Raise InvalidOption if few actions sampled around 0 are within bounds: the others are clipped to one value."""
    for leaf in leaves_of(action_space, "action"):
        if isinstance(leaf.space, spaces.Box):
            low, high = leaf.space.low, leaf.space.high
            if np.maximum(low, -high).max(initial=0) > 3 * std:
                raise InvalidOption(
                    f"the action is a Box from {low.min():g} to {high.max():g}, and actions are sampled around 0 "
                    f"(initial_std={std:g}); wrap it in gymnasium.wrappers.RescaleAction(env, -1.0, 1.0)"
                )


def _as_actions(space: Any, rows: Array) -> Array:
    if isinstance(space, spaces.Discrete):
        return np.asarray(rows[:, 0].astype(space.dtype) + space.start)
    actions: Array = rows.astype(space.dtype).reshape(len(rows), *space.shape)
    return actions + space.start if isinstance(space, spaces.MultiDiscrete) else actions


def _as_rows(space: Any, batch: Array) -> Array:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        batch = batch - space.start
    return batch.astype(np.float32).reshape(len(batch), -1)


def _nested(space: Any, path: Path, actions: dict[Path, Array]) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _nested(inner, (*path, name), actions) for name, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nested(inner, (*path, index), actions) for index, inner in enumerate(space.spaces))
    return actions[path]
