"""Environments that reset themselves: how to recognize them and read their steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from gym_trace.envs.spaces import is_of_supersuit
from gym_trace.errors import InvalidOption
from gym_trace.format.ring.lanes.autoreset import DISABLED, NEXT_STEP, SAME_STEP

# Keys of the last observation and info in the infos of a SAME_STEP: Gymnasium 1, Gymnasium before it, SuperSuit.
FINAL_OBSERVATION = ("final_obs", "final_observation", "terminal_observation")
FINAL_INFO = ("final_info",)
_OF_SINGLE = ("final_observation", "final_info")  # keys of AutoResetWrapper

# For dataclasses.replace(): make() then adds no autoreset wrapper (only before Gymnasium 1.0).
SPEC_WITHOUT: dict[str, Any] = {"autoreset": False} if hasattr(EnvSpec, "autoreset") else {}

_WRAPPERS = tuple(
    getattr(gymnasium.wrappers, name) for name in ("Autoreset", "AutoResetWrapper") if hasattr(gymnasium.wrappers, name)
)  # Gymnasium 1: NEXT_STEP; 0.29: SAME_STEP

_MODES = {mode.lower(): mode for mode in (NEXT_STEP, SAME_STEP, DISABLED)}


# -- vector environments ----------------------------------------------------------------------------------------------


def vector_mode(envs: Any) -> str:
    """Return the mode of a vector environment; NEXT_STEP by default. Raises InvalidOption for an unknown one."""
    mode = (getattr(envs, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        return SAME_STEP if is_of_supersuit(envs) else NEXT_STEP
    found = _mode_of(mode)
    if found is None:
        raise InvalidOption(
            f"{type(envs.unwrapped).__name__} has the autoreset_mode {mode!r} in its metadata; "
            f"set one of {', '.join(_MODES.values())} before recording"
        )
    return found


def named_mode(mode: Any) -> str:
    """Return the mode with a name such as "NextStep" or "next-step", or a member of Gymnasium's AutoresetMode.

    Raises InvalidOption.
    """
    found = _mode_of(mode)
    if found is None:
        raise InvalidOption(f"autoreset={mode!r}: pass one of {', '.join(_MODES.values())}")
    return found


def _mode_of(mode: Any) -> str | None:
    name = str(getattr(mode, "value", mode))
    return _MODES.get(name.replace("_", "").replace("-", "").lower())


def demand_all_lanes(envs: Any) -> None:
    """Raise InvalidOption for an asynchronous EnvPool, which returns only some of its lanes in each step."""
    pool = envs.unwrapped
    config = getattr(pool, "config", None)
    if getattr(pool, "is_async", False) is not True or not isinstance(config, Mapping) or "batch_size" not in config:
        return
    raise InvalidOption(
        f"batch_size: an EnvPool that steps {config['batch_size']} of its {pool.num_envs} environments at a time "
        f"cannot be recorded; make it with batch_size=num_envs"
    )


# -- single environments ----------------------------------------------------------------------------------------------


def autoreset_wrapper(env: Any) -> Any:
    """Return the wrapper of a single environment whose step() resets it, or None."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, _WRAPPERS):
            return env
        env = env.env
    return None


def wrapper_mode(wrapper: Any) -> str:
    """Return the mode that an autoreset wrapper gives its environment; DISABLED for None."""
    if wrapper is None:
        return DISABLED
    return NEXT_STEP if "autoreset" in vars(wrapper) else SAME_STEP


def resets_next(wrapper: Any) -> bool:
    """Return True if the next step of an environment with this autoreset wrapper, or None, is a reset."""
    return wrapper is not None and bool(vars(wrapper).get("autoreset"))


def last_of_episode(observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the last observation and info of an episode from a SAME_STEP."""
    return info.get(_OF_SINGLE[0], observation), info.get(_OF_SINGLE[1], info)


def info_of_reset(info: dict[str, Any]) -> dict[str, Any]:
    """Return the first info of the next episode from the info of a SAME_STEP."""
    return {key: value for key, value in info.items() if key not in _OF_SINGLE}


def without_autoreset(env: Any) -> Any:
    """Return env without the wrappers that reset it in step(): a replay resets it itself."""
    while (resetting := autoreset_wrapper(env)) is not None:
        if env is resetting:
            env = env.env
            continue
        above = env
        while above.env is not resetting:
            above = above.env
        above.env = resetting.env
    return env
