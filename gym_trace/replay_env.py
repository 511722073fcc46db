"""ReplayEnv as a registered environment: gymnasium.make("gym_trace.replay_env:Replay-v0", directory=...)."""

from __future__ import annotations

import os
from typing import Any

from gymnasium.envs.registration import register, registry

from gym_trace.playback.trace import Trace
from gym_trace.tools.replay.replay_env import ReplayEnv

__all__ = ["ReplayEnv"]


def replay_of(directory: Trace | str | os.PathLike[str], **options: Any) -> ReplayEnv:
    """Return a ReplayEnv for gymnasium.make("gym_trace.replay_env:Replay-v0", ...). options: passed to ReplayEnv."""
    return ReplayEnv(directory, **options)


if "Replay-v0" not in registry:
    register("Replay-v0", "gym_trace.replay_env:replay_of", disable_env_checker=True)
