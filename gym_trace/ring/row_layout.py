"""Layout of a row in the slabs of a single environment."""

from __future__ import annotations

from typing import Any

from gym_trace.format import wire
from gym_trace.model.layout import Layout, Leaf

DELTA_BYTES = wire.LARGE_ROW  # values of at least this size are deltas in the log; smaller ones are in the row


class RowLayout:
    """Layout of a row: fixed-size action values, the asked mark, the reward, fixed-size observation values, the done
    mark. Values of varying size, or outside their space, are in the log. Columns are numbered: leaves of the
    observation, leaves of the action, then reward, info, annotations.

    Attributes:
        size: bytes of a row.
        asked, reward, done: offsets in a row.
        offsets: of the leaves, in the order of their numbers; None for leaves in the log.
        delta_leaves: leaves with large values, stored as changes in the log.
    """

    def __init__(self, observation: Layout, action: Layout, use_deltas: bool = True):
        self.observation, self.action = observation, action
        self.observation_leaves, self.action_leaves = list(observation.leaves()), list(action.leaves())
        leaves = self.leaves = [*self.observation_leaves, *self.action_leaves]
        self.action_column, self.reward_column = len(self.observation_leaves), len(leaves)
        self.info_column, self.notes_column = self.reward_column + 1, self.reward_column + 2
        self.delta_leaves = [leaf for leaf in leaves if use_deltas and leaf.row_size >= DELTA_BYTES]
        fixed = [leaf for leaf in leaves if leaf.dtype is not None and leaf not in self.delta_leaves]
        self.action_parts, self.asked = _packed(fixed, self.action_leaves, 0)
        self.reward = self.asked + 8
        self.observation_parts, self.done = _packed(fixed, self.observation_leaves, self.reward + 8)
        self.size = self.done + 8
        places = {**self.action_parts, **self.observation_parts}
        self.offsets = [places.get(number) for number in map(id, leaves)]

    @property
    def action_bytes(self) -> int:
        """Size of the fixed values of an action, aligned."""
        return self.asked

    @property
    def observation_bytes(self) -> int:
        """Size of the fixed values of an observation, aligned."""
        return self.done - self.reward - 8

    def described(self) -> dict[str, Any]:
        """Return the layout for the ring file."""
        columns = [
            [list(leaf.path), None if leaf.dtype is None else leaf.dtype.str, list(leaf.shape), offset]
            for leaf, offset in zip(self.leaves, self.offsets)
        ]
        return {
            "row": self.size,
            "asked": self.asked,
            "reward": self.reward,
            "done": self.done,
            "observations": len(self.observation_leaves),
            "columns": columns,
        }


def _packed(fixed: list[Leaf], leaves: list[Leaf], offset: int) -> tuple[dict[int, int], int]:
    """Return the offsets of the fixed-size leaves, by identity, and the aligned end."""
    places = {}
    for leaf in leaves:
        if leaf in fixed:
            places[id(leaf)] = offset
            offset += leaf.row_size
    return places, wire.aligned(offset)
