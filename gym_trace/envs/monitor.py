"""A stand-in for Stable-Baselines3's Monitor, to replay recordings without Stable-Baselines3."""

from __future__ import annotations

import time
from typing import Any

import gymnasium

REPLACED = "stable_baselines3.common.monitor:Monitor"


class Monitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds the same return and length to the last info of an episode, but writes no file.

    The arguments of the recorded Monitor are unknown, so info_keywords and reset_keywords are missing from that info.
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
