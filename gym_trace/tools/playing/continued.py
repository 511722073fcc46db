"""Continue playing from a step of a recorded episode."""

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
    just compared with the environment, or after which it has set it to its recorded state; later steps go to the
    environment. begin() makes the reset and the recorded steps. Every episode continues from the same step.

    Args:
        trace, episode, step, render_mode, making: as for env_at(). Raises its errors, and InvalidOption if the episode
            ended before.

    Examples:
        >>> env = gym_trace.replay.Continued("traces/cartpole", 8, 40, render_mode=None)
        >>> observation, _ = env.reset()
        >>> bool((observation == gym_trace.open_trace("traces/cartpole")[8].observations[0]).all())
        True
    """

    def __init__(
        self,
        trace: TraceLike,
        episode: int,
        step: int,
        render_mode: str | None = "rgb_array",
        **making: Any,
    ):
        trace = as_trace(trace)
        index = range(len(trace))[episode]
        self._make: Callable[[], Any] = lambda: env_at(trace, index, step, render_mode=render_mode, **making)
        super().__init__(self._make())
        recorded = trace[index]
        self.episode = recorded[: max(0, step)]
        if step and (self.episode.terminations[-1] or self.episode.truncations[-1]):
            self.env.close()
            raise InvalidOption(f"step {step}: episode {index} is over there; pass 0 to {step - 1}")
        self.described = {
            "trace": trace.directory.name,
            "writer": recorded.writer,
            "episode_id": recorded.episode_id,
            "step": step,
        }
        self._infos = infos_of(self.episode)
        self._row = len(self.episode)
        self._first_env = self.env.unwrapped  # a recorder stores its generator before an unseeded reset
        self._used_envs: list[Any] = []
        self._is_unused = True
        self._generator: Any = None  # its state before the recorded reset, if that was unseeded
        if recorded.seed is None:
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
        """Reset the recorder around this environment, and repeat the recorded steps; return their count and return.

        annotate: called before each step.
        """
        if not self._is_unused:
            if self.env.render_mode is None:
                self.env.close()
            else:
                self._used_envs.append(self.env)  # closed at the end: closing it now may close the window of the next
            self.env = self._make()
        self._is_unused, self._row = False, 0
        before_reset = self._generator
        current = generator_state(self._first_env)
        if before_reset is not None:
            restore_generator(self._first_env, before_reset)
        try:
            recorder.reset(seed=self.episode.seed, options=self.episode.options)
        finally:
            if before_reset is not None and current is not None:
                restore_generator(self._first_env, current)
        for row in range(len(self.episode)):
            annotate()
            recorder.step(row_of(self.episode.actions, row))
        return len(self.episode), float(sum(map(float, self.episode.rewards)))

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Return the recorded first observation; the environment is already at its step."""
        return row_of(self.episode.observations, 0), self.episode.reset_info or {}

    def step(self, action: Any) -> Any:
        if self._row == len(self.episode):
            return self.env.step(action)
        row, self._row = self._row, self._row + 1
        info = {} if self._infos is None else self._infos[row]
        return row_of(self.episode.observations, row + 1), self.episode.rewards[row], False, False, info

    def close(self) -> None:
        for env in self._used_envs:
            env.close()
        self._used_envs.clear()
        super().close()
