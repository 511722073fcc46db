"""Play back a recorded trace episode by episode, as a learning algorithm would.

python benchmarks/demo_callback.py traces/cartpole
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gym_trace import scan_recorded_traces

lengths: list[int] = []
returns: list[float] = []


def episode_cb(observations: Any, actions: Any, rewards: Any) -> None:
    """Called once per episode. N steps have N actions, N rewards and N + 1 observations."""
    if not lengths:
        print(
            f"the first episode: observations {observations.shape} {observations.dtype}, "
            f"actions {actions.shape} {actions.dtype}, rewards {rewards.shape} {rewards.dtype}"
        )
    lengths.append(len(rewards))
    returns.append(float(np.sum(rewards)))


if len(sys.argv) != 2:
    sys.exit(__doc__)
scan_recorded_traces(sys.argv[1], episode_cb)
if lengths:
    best = int(np.argmax(returns))
    print(f"played back {len(lengths)} episodes, {sum(lengths):,} steps")
    print(f"best episode: {best}, with a return of {returns[best]:g} in {lengths[best]} steps")
