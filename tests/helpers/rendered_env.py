"""An environment whose images and text show the step number, optionally with images as observations."""

import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class RenderedEnv(gymnasium.Env[Any, Any]):
    """Counts its steps. Ends after `length`.

    pictures: whether observations are what it renders. offset: added to what is observed. luck: whether rewards come
    from the system's entropy. breaks_at: the step at which render() raises an error.
    """

    metadata = {"render_modes": ["rgb_array", "ansi", "human"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        length: int = 6,
        size: tuple[int, int] = (30, 41),
        pictures: bool = False,
        offset: int = 0,
        luck: bool = False,
        breaks_at: int | None = None,
        render_mode: str | None = None,
    ):
        self.length, self.size, self.pictures, self.offset = length, tuple(size), pictures, offset
        self.luck, self.breaks_at, self.render_mode = luck, breaks_at, render_mode
        self.observation_space: Any = spaces.Box(-1, 1 << 30, (2,), np.int64)
        if pictures:
            self.observation_space = spaces.Box(0, 255, (*self.size, 3), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.steps = 0

    def picture(self, step: int) -> Any:
        """Return a different image for each step, with noise that no lossy format preserves."""
        height, width = self.size
        picture = np.full((height, width, 3), step % 251, np.uint8)
        picture[:4] = np.random.default_rng(step).integers(0, 256, (4, width, 3))
        return picture

    def _observation(self) -> Any:
        if self.pictures:
            return self.picture(self.steps + self.offset)
        return np.array([self.steps + self.offset * (self.steps > 2), self.steps])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        reward = random.SystemRandom().random() if self.luck else 0.5
        return self._observation(), reward, self.steps >= self.length, False, {}

    def render(self) -> Any:
        if self.steps == self.breaks_at:
            raise OSError("the screen is broken")
        if self.render_mode == "ansi":
            return f"step {self.steps}\n\x1b[41m@\x1b[0m{'.' * self.steps}\n"
        return self.picture(self.steps) if self.render_mode == "rgb_array" else None


if "Rendered-v0" not in gymnasium.registry:
    gymnasium.register("Rendered-v0", entry_point="rendered_env:RenderedEnv")


def make_rendered(**kwargs: Any) -> Any:
    return gymnasium.make("Rendered-v0", **kwargs)
