"""Public import path of gym_trace.adapters.ray."""

from gym_trace.adapters.ray import read_trace

__all__ = ["read_trace"]
