"""Learning targets from rewards and values: returns to go, advantages, n-step returns, V-trace."""

from __future__ import annotations

from gym_trace.playback.sampling.targets import gae, n_step_returns, returns_to_go, vtrace

__all__ = ["gae", "n_step_returns", "returns_to_go", "vtrace"]
