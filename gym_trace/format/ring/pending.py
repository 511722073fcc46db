"""Pending actions: the environment was stepped with them and has not returned."""

from __future__ import annotations

from typing import Any, NamedTuple

from gym_trace.data.layout import Layout
from gym_trace.data.packing import pack_lenient, unpack
from gym_trace.data.values import Misfit
from gym_trace.printable import shown

_MOST = 1 << 32  # limit of step and lane numbers
_MOST_EPISODES = 1 << 63  # limit of episode ids, with the origin in the upper bits


class Pending(NamedTuple):
    """An action whose step has not returned.

    Attributes:
        episode: id of the episode.
        step: index of the step in the episode.
        leaves: values of the action, one per leaf of its space.
    """

    episode: int
    lane: int
    step: int
    leaves: list[Any]

    def described(self) -> list[Any]:
        """Return the description for the metadata (docs/FORMAT.md, section 4)."""
        return [self.episode, self.lane, self.step, unpack(pack_lenient(self.leaves)[0])]

    def action(self, layout: Layout) -> Any:
        """Return the action with the structure of its space; None if the leaves do not match the space."""
        if self.leaves and isinstance(self.leaves[0], Misfit):
            return self.leaves[0].value
        return layout.join(iter(self.leaves)) if len(self.leaves) == len(list(layout.leaves())) else None

    def as_text(self, layout: Layout) -> str:
        """Return the action, episode, lane and step as text."""
        lane = f" (lane {self.lane})" if self.lane else ""
        return f"at the end of episode {self.episode}{lane}, in step {self.step}: {shown(self.action(layout), 200)}"


def pending_in(described: Any) -> list[Pending]:
    """Parse the pending actions of untrusted metadata; skip invalid ones."""
    found = []
    for action in described if isinstance(described, list) else ():
        match action:
            case [int(episode), int(lane), int(step), list(leaves)] if (
                0 <= episode < _MOST_EPISODES and 0 <= min(lane, step) <= max(lane, step) < _MOST
            ):
                found.append(Pending(episode, lane, step, leaves))
    return found
