"""Recorded episodes as an environment, without a simulator."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import gymnasium
import numpy as np

from gym_trace.data.episode import Episode, infos_of
from gym_trace.data.layout import Layout
from gym_trace.data.packing import pack_lenient
from gym_trace.data.tensors import plain_array
from gym_trace.data.values import row_of
from gym_trace.envs.spaces import restore
from gym_trace.errors import InvalidOption, ReplayDiverged, warn
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import TraceLike, as_trace

_ON_DIVERGENCE = ("ignore", "warn", "raise", "truncate")


class ReplayEnv(gymnasium.Env[Any, Any]):
    """Replays the episodes of a trace to an agent, in order and repeatedly.

    It has the recorded spaces, and returns the recorded observations, rewards, flags and infos. ``reset(seed=s)`` plays
    the episode that was recorded with the seed s, or a random one chosen by s; ``reset(options={"episode": i})`` plays
    episode i of the trace. An episode that did not end, or is still running, is truncated after its last step. If the
    final observation is unknown (Episode.has_final_observation), the last step returns the observation before it, and
    sets ``info["final_observation_unknown"]``. A ReplayEnv can be pickled.

    Args:
        trace: a trace, a view, or a directory. Episodes recorded later are not played.
        episodes: indices of the episodes to play; None: all that have steps and begin with a reset.
        on_divergence: reaction to an action that differs from the recorded one: "ignore" it, "warn" once per episode,
            "raise" ReplayDiverged, or "truncate": end the episode with the current observation, reward 0, and the step
            in ``info["diverged"]``.
        observation_space, action_space: replace the recorded ones. Spaces of custom classes are not stored;
            by default, a StandIn takes their place, which contains every value and cannot be sampled.

    Attributes:
        episode: the Episode being played, None before the first reset.

    Raises:
        InvalidOption: no episode can be played, or an argument is invalid.

    Examples:
        >>> env = gym_trace.ReplayEnv("traces/cartpole")
        >>> observation, info = env.reset(options={"episode": 3})
        >>> observation.shape, env.step(env.action_space.sample())[1]  # the recorded reward
        ((4,), 1.0)
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as gymnasium.Env has it

    def __init__(
        self,
        trace: TraceLike,
        *,
        episodes: Collection[int] | None = None,
        on_divergence: str = "ignore",
        observation_space: gymnasium.Space[Any] | None = None,
        action_space: gymnasium.Space[Any] | None = None,
    ):
        if on_divergence not in _ON_DIVERGENCE:
            raise InvalidOption(f"on_divergence={on_divergence!r}: pass one of {', '.join(_ON_DIVERGENCE)}")
        self.trace = as_trace(trace)[:]  # unlike the trace, a view does not grow
        table = self.trace.episodes
        whole = np.flatnonzero((table["first_step"] == 0) & (table["steps"] > 0))
        self._playable = whole if episodes is None else whole[np.isin(whole, list(episodes))]
        if not len(self._playable):
            raise InvalidOption(f"{self.trace.directory}: no playable episode; one needs a reset and at least one step")
        writers = [
            index_of(self.trace).readers[number] for number in np.unique(table["writer"][self._playable]).tolist()
        ]
        given = {"observation_space": observation_space, "action_space": action_space}
        for name in given:
            if len({pack_lenient(writer.schema.get(name))[0] for writer in writers}) > 1:
                raise InvalidOption(
                    f"{self.trace.directory}: writers have different spaces ({name}); select episodes of one writer "
                    "with episodes=..., by trace.episodes['writer']"
                )
            space = given[name]
            setattr(self, name, restore(writers[0].schema.get(name), stand_in=True) if space is None else space)
        self._on_divergence = on_divergence
        self._actions: Layout = writers[0].layouts.actions
        self._next = 0  # index in _playable
        self._step: int | None = None  # index of the next step; None: call reset() first
        self._warned = False
        self.episode: Episode | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode, or the episode that seed or options select.

        Examples:
            >>> env = gym_trace.ReplayEnv("traces/cartpole")
            >>> observation, _ = env.reset(options={"episode": 2})
            >>> bool((observation == gym_trace.open_trace("traces/cartpole")[2].observations[0]).all())
            True
        """
        super().reset(seed=seed)
        if options is not None and "episode" in options:
            self._next = self._playable_index(options["episode"])
        elif seed is not None:
            recorded = np.flatnonzero(self.trace.episodes["seed"][self._playable] == seed)
            sampled = self.np_random.integers(len(self._playable))
            self._next = int(recorded[0] if len(recorded) else sampled)
        self.episode = episode = self.trace[int(self._playable[self._next])]
        self._next = (self._next + 1) % len(self._playable)
        self._step, self._warned = 0, False
        self._observations, self._recorded_actions = episode.observations, episode.actions
        self._rewards, self._ends = episode.rewards, (episode.terminations, episode.truncations)
        self._infos = infos_of(episode)
        return row_of(self._observations, 0), dict(episode.reset_info or {})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Return the results of the recorded step.

        Raises ReplayDiverged if the action differs from the recorded one, and on_divergence is "raise".

        Examples:
            >>> env = gym_trace.ReplayEnv("traces/cartpole", on_divergence="raise")
            >>> _ = env.reset(options={"episode": 0})
            >>> env.step(gym_trace.open_trace("traces/cartpole")[0].actions[0])[1:]
            (1.0, False, False, {})
        """
        episode, step = self.episode, self._step
        if episode is None or step is None:
            raise gymnasium.error.ResetNeeded("no episode in progress; call reset() first")
        if self._on_divergence != "ignore" and not self._is_recorded(action, step):
            if self._on_divergence == "truncate":
                self._step = None
                return row_of(self._observations, step), 0.0, False, True, {"diverged": step}
            self._report_divergence(episode, step, action)
        terminated, truncated = (bool(flags[step]) for flags in self._ends)
        is_last = step + 1 == len(episode)
        self._step = None if is_last else step + 1
        reward, info = self._rewards[step], {} if self._infos is None else dict(self._infos[step])
        reward = float(reward) if isinstance(reward, np.float64) else reward
        is_known = not is_last or episode.has_final_observation
        observation = row_of(self._observations, step + 1 if is_known else step)
        info |= {} if is_known else {"final_observation_unknown": True}
        return observation, reward, terminated, truncated or (is_last and not terminated), info

    def _playable_index(self, episode: Any) -> int:
        found = np.flatnonzero(self._playable == episode)
        if not len(found):
            raise InvalidOption(f"options: episode {episode!r} cannot be played; see ReplayEnv")
        return int(found[0])

    def _is_recorded(self, action: Any, step: int) -> bool:
        recorded = row_of(self._recorded_actions, step)
        try:
            pairs = zip(self._actions.leaves(), self._actions.split(recorded), self._actions.split(action))
            return all(_same(leaf.dtype, old, new) for leaf, old, new in pairs)
        except LookupError:
            return pack_lenient(recorded)[0] == pack_lenient(action)[0]

    def _report_divergence(self, episode: Episode, step: int, action: Any) -> None:
        recorded = row_of(self._recorded_actions, step)
        message = f"episode {episode.index}, step {step}: the action is {action!r}, the recorded one {recorded!r}"
        if self._on_divergence == "raise":
            raise ReplayDiverged(message)
        if not self._warned:
            self._warned = True
            warn(f"{message}; later steps do not follow from it")


def _same(dtype: Any, recorded: Any, action: Any) -> bool:
    """Return True if a leaf of an action equals the recorded one as its dtype; integers may not overflow it."""
    if dtype is None:
        return pack_lenient(recorded)[0] == pack_lenient(action)[0]
    try:
        action = np.asarray(plain_array(action))
        is_same = np.shape(recorded) == action.shape and np.array_equal(recorded, action.astype(dtype))
        return bool(is_same and (action.dtype.kind == "f" or np.array_equal(action, action.astype(dtype))))
    except (TypeError, ValueError):
        return False
