"""Actions with which an environment was stepped, and which it never answered."""

from __future__ import annotations

from typing import Any, NamedTuple

from gym_trace.model.layout import Layout
from gym_trace.model.packing import pack_lenient, unpack
from gym_trace.model.values import Misfit
from gym_trace.printable import shown

_MOST = 1 << 32  # what a step may be numbered, and a lane
_MOST_EPISODES = 1 << 63  # with the origin in the upper bits


class Pending(NamedTuple):
    """An action with which the environment was stepped, and which it never answered.

    Attributes:
        episode: its id. step: the index in it of the step that was asked for.
        leaves: the values of the leaves of the action space.
    """

    episode: int
    lane: int
    step: int
    leaves: list[Any]

    def described(self) -> list[Any]:
        """As metadata has it (docs/FORMAT.md, section 4)."""
        return [self.episode, self.lane, self.step, unpack(pack_lenient(self.leaves)[0])]

    def action(self, layout: Layout) -> Any:
        """The action, with the structure of its space; None if that is not what it is."""
        if self.leaves and isinstance(self.leaves[0], Misfit):
            return self.leaves[0].value
        return layout.join(iter(self.leaves)) if len(self.leaves) == len(list(layout.leaves())) else None

    def told(self, layout: Layout) -> str:
        """Which it is, in words."""
        lane = f" (lane {self.lane})" if self.lane else ""
        return f"at the end of episode {self.episode}{lane}, in step {self.step}: {shown(self.action(layout), 200)}"


def pending_in(described: Any) -> list[Pending]:
    """The actions that metadata describes, of which nothing is trusted: those that are none are left out."""
    found = []
    for one in described if isinstance(described, list) else ():
        match one:
            case [int(episode), int(lane), int(step), list(leaves)] if (
                0 <= episode < _MOST_EPISODES and 0 <= min(lane, step) <= max(lane, step) < _MOST
            ):
                found.append(Pending(episode, lane, step, leaves))
    return found
