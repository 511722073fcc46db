"""Attribute names of other libraries: their AttributeError names the attribute to use here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

_EPISODE = {
    **dict.fromkeys(("obs", "observation"), "{}.observations"),
    **dict.fromkeys(("next_obs", "next_observation", "next_observations"), "{}.observations[1:]"),
    **dict.fromkeys(("act", "acts", "action"), "{}.actions"),
    **dict.fromkeys(("rew", "rews", "reward"), "{}.rewards"),
    **dict.fromkeys(("terminated", "terminals"), "{}.terminations"),
    **dict.fromkeys(("truncated", "timeouts"), "{}.truncations"),
    **dict.fromkeys(("done", "dones"), "{0}.terminations | {0}.truncations"),
    "info": "{}.infos",
    "id": "{}.episode_id",
    **dict.fromkeys(("returns", "episode_return"), "{}.total_reward"),
    **dict.fromkeys(("length", "steps", "num_steps", "n_steps"), "len({})"),
}
_COLUMNS = ("observations", "actions", "rewards", "terminations", "truncations", "infos", "annotations")
OF_EPISODE = {name: ours.format("episode") for name, ours in _EPISODE.items()}
OF_TRACE = {
    **{name: ours.format("trace[0]") for name, ours in _EPISODE.items()},
    **{name: f"trace[0].{name}" for name in _COLUMNS},
    **dict.fromkeys(("length", "num_episodes", "n_episodes", "total_episodes"), "len(trace)"),
    **dict.fromkeys(("return", "returns", "episode_returns"), 'trace.episodes["return"]'),
    **dict.fromkeys(("steps", "lengths", "episode_lengths"), 'trace.episodes["steps"]'),
}


class KnowsOtherNames:
    """An object whose AttributeError says what to use instead."""

    __slots__ = ()
    _OTHER_NAMES: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # or type checkers would accept every name

        def __getattr__(self, name: str) -> Any:
            if name in self._OTHER_NAMES:
                raise AttributeError(
                    f"{type(self).__name__!r} object has no attribute {name!r}; use {self._OTHER_NAMES[name]}"
                )
            return object.__getattribute__(self, name)  # raises the usual AttributeError, or the one of a property
