"""Play on from a step of a recorded episode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import gymnasium

from gym_trace.data.episode import infos_of
from gym_trace.data.values import row_of
from gym_trace.envs.seeding import generator_state, restore_generator
from gym_trace.errors import InvalidOption
from gym_trace.playback.trace import TraceLike, as_trace
from gym_trace.tools.replay.env_at import env_at
from gym_trace.tools.replay.making import Making, replays


class Continued(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment at a recorded step, for a recorder around it.

    The recorder must see whole episodes. So reset() and the first steps return the recorded rows, which env_at() has
    just compared with the environment; the steps after them go to the environment. begin() does the reset
    and these steps. Each further episode begins at the same place.

    Args:
        trace, episode, step, making: as for env_at(). Raises its errors, and InvalidOption where the episode is over.
    """

    def __init__(
        self,
        trace: TraceLike,
        episode: int,
        step: int,
        **making: Any,
    ):
        trace = as_trace(trace)
        index = range(len(trace))[episode]
        self._make: Callable[[], Any] = lambda: env_at(trace, index, step, render_mode="rgb_array", **making)
        super().__init__(self._make())
        whole = trace[index]
        self.episode = whole[: max(0, step)]
        if step and (self.episode.terminations[-1] or self.episode.truncations[-1]):
            self.env.close()
            raise InvalidOption(f"step {step}: episode {index} is over there; pass 0 to {step - 1}")
        self.described = {
            "trace": trace.directory.name,
            "writer": whole.writer,
            "episode_id": whole.episode_id,
            "step": step,
        }
        self._infos = infos_of(self.episode)
        self._row = len(self.episode)
        self._first = self.env.unwrapped  # whose generator a recorder stores before an unseeded reset
        self._left: list[Any] = []
        self._is_new = True
        self._generator: Any = None  # before the reset, if that was not seeded
        if whole.seed is None:
            with closing(replays(trace, [index], Making(**making), None)) as playing:
                played = next(playing)
                self._generator = played.replay.generator_before(played.position)

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec of the environment: the recorder's spec describes this wrapper."""
        return self.env.spec

    @property
    def has_infos(self) -> bool:
        return self._infos is not None

    def begin(self, recorder: Any, annotate: Callable[[], None]) -> tuple[int, float]:
        """Reset a recorder around this, and take the recorded steps; return their number and return.

        annotate: called before each step.
        """
        if not self._is_new:
            self._left.append(self.env)  # closed at the end: closing one may close the window of another
            self.env = self._make()
        self._is_new, self._row = False, 0
        state = self._generator
        now = generator_state(self._first)
        if state is not None:
            restore_generator(self._first, state)
        try:
            recorder.reset(seed=self.episode.seed, options=self.episode.options)
        finally:
            if state is not None and now is not None:
                restore_generator(self._first, now)
        for row in range(len(self.episode)):
            annotate()
            recorder.step(row_of(self.episode.actions, row))
        return len(self.episode), float(sum(map(float, self.episode.rewards)))

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return the recorded first observation. begin() brings the environment to its place."""
        return row_of(self.episode.observations, 0), self.episode.reset_info or {}

    def step(self, action: Any) -> Any:
        if self._row == len(self.episode):
            return self.env.step(action)
        row, self._row = self._row, self._row + 1
        info = {} if self._infos is None else self._infos[row]
        return row_of(self.episode.observations, row + 1), self.episode.rewards[row], False, False, info

    def close(self) -> None:
        for env in self._left:
            env.close()
        self._left.clear()
        super().close()
