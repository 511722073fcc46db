"""A stand-in for Stable-Baselines3's Monitor, so that its recordings are played again without Stable-Baselines3."""

from __future__ import annotations

import time
from typing import Any

import gymnasium

REPLACED = "stable_baselines3.common.monitor:Monitor"


class Monitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts the same return and length into the last info of an episode, and writes no file.

    A recorded Monitor does not say how it was made. info_keywords and reset_keywords, which add to that info, are
    unknown.
    """

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._rewards: list[float] = []
        self._start = time.monotonic()
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._rewards.append(float(reward))
        if terminated or truncated:
            seconds = round(time.monotonic() - self._start, 6)
            info["episode"] = {"r": round(sum(self._rewards), 6), "l": len(self._rewards), "t": seconds}
        return observation, reward, terminated, truncated, info
