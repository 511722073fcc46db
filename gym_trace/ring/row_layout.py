"""Where the parts of a row lie in the slabs of a single environment."""

from __future__ import annotations

from typing import Any

from gym_trace.format import wire
from gym_trace.model.layout import Layout, Leaf

DELTA_BYTES = wire.LARGE_ROW  # of values of this size the log has deltas, smaller ones are in the row


class RowLayout:
    """A row: the values of the action that are of fixed size, a mark that it was asked, the reward, the values of the
    observation that are of fixed size, a mark that it is done. What is not of fixed size, or not as the space says, is
    in the log. Columns are numbered: leaves of the observation, leaves of the action, then reward, info, annotations.

    Attributes:
        size: bytes of a row.
        asked, reward, done: offsets in it.
        offsets: of the leaves, in the order of their numbers; None for those that are in the log.
        delta_leaves: whose values are large, so that the log has what has changed of them.
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
        """Of the fixed values of an action, aligned."""
        return self.asked

    @property
    def observation_bytes(self) -> int:
        """Of the fixed values of an observation, aligned."""
        return self.done - self.reward - 8

    def described(self) -> dict[str, Any]:
        """As the ring file has it."""
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
    """The offsets of those leaves that are of fixed size, by identity, and the aligned end."""
    places = {}
    for leaf in leaves:
        if leaf in fixed:
            places[id(leaf)] = offset
            offset += leaf.row_size
    return places, wire.aligned(offset)
