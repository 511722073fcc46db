"""Show what an action does before its key is chosen, in a copy of the environment, of which nothing is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np

from gym_trace.tools.playing.keymap import Inputs, Question, keymap_of_answers
from gym_trace.tools.video.frames import rendered_frame
from gym_trace.tools.video.simulate import fps_of

_STEPS, _SECONDS = 30, 1.0  # limits of a demonstration; of the time that its steps take
_KEY = "demonstrated"


class Demonstration:
    """Pictures of each action, repeated from a reset; none where the environment cannot be copied.

    The copy is made when a picture is first needed. Close it after the window: some environments shut pygame down.

    make_env: makes the copy if the environment has no spec.
    """

    def __init__(self, env: Any, make_env: Callable[[], Any] | None):
        self._original, self._make_env = env, make_env
        self._copy: Any = None
        self._frames: dict[Question, list[Any]] = {}

    def picture(self, question: Question) -> Any:
        """Return the picture of the action that a question is about, for this moment; None without one."""
        if question not in self._frames:
            self._frames[question] = []
            with suppress(Exception):  # the environment is another's code
                self._play(question, self._frames[question])
        frames = self._frames[question]
        return frames[int(time.monotonic() * fps_of(self._original)) % len(frames)] if frames else None

    def _play(self, question: Question, frames: list[Any]) -> None:
        if self._copy is None:
            spec = self._original.spec
            self._copy = gymnasium.make(spec) if spec is not None else self._make_env and self._make_env()
        action = keymap_of_answers(self._original.action_space, [question], [_KEY]).action(Inputs([_KEY]))
        end = time.monotonic() + _SECONDS
        self._copy.reset(seed=0)
        for _ in range(_STEPS):
            frame = rendered_frame(self._copy)
            frames.append(frame if isinstance(frame, str) else np.asarray(frame).copy())
            _, _, terminated, truncated, _ = self._copy.step(action)
            if terminated or truncated or time.monotonic() > end:
                break

    def close(self) -> None:
        with suppress(Exception):
            if self._copy is not None:
                self._copy.close()
