"""A dm_env.Environment as a Gymnasium environment. Uses attributes only, so that dm_env is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from gym_trace.envs.spaces import StandIn, inferred, restore
from gym_trace.errors import InvalidOption

_LARGEST_SEED = 1 << 32


class DmEnvView(gymnasium.Env[Any, Any]):
    """Steps a dm_env.Environment through Gymnasium's interface.

    A last time step with discount 0 terminates the episode; any other discount truncates it. The info of a step has its
    "discount". reset(seed=...) seeds the numpy.random.RandomState of dm_control's environments.

    Attributes:
        viewed: the dm_env.Environment.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - as gymnasium.Env has it

    def __init__(self, env: Any):
        self.viewed = env
        self.observation_space = _space_of(env.observation_spec(), "observation_spec()")
        self.action_space = _space_of(env.action_spec(), "action_spec()")

    @property  # type: ignore[misc]  # Gymnasium's has a setter
    def np_random(self) -> Any:
        """The generator of dm_control's environments; None for others."""
        random = _random_state(self.viewed)
        return None if random is None else _Generator(random)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        if seed is not None and (random := _random_state(self.viewed)) is not None:
            random.seed(seed % _LARGEST_SEED)
        return self.viewed.reset().observation, {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        timestep = self.viewed.step(action)
        return timestep.observation, timestep.reward, *ends_of(timestep), {"discount": timestep.discount}

    def close(self) -> None:
        self.viewed.close()


class _Generator:
    """A RandomState in the form of a numpy.random.Generator: bit_generator.state is its whole state.

    The state includes the cached normal deviate.
    """

    def __init__(self, random: np.random.RandomState):
        self.bit_generator, self._random = self, random

    @property
    def state(self) -> dict[str, Any]:
        return dict(self._random.get_state(legacy=False))

    @state.setter
    def state(self, state: Mapping[str, Any]) -> None:
        self._random.set_state(dict(state))


def gymnasium_view(env: Any) -> Any:
    """Return a DmEnvView of a dm_env.Environment, and any other object unchanged."""
    is_of_dm_env = all(hasattr(env, name) for name in ("observation_spec", "action_spec", "reset", "step"))
    return DmEnvView(env) if is_of_dm_env and not isinstance(env, gymnasium.Env) else env


def ends_of(timestep: Any) -> tuple[bool, bool]:
    """Return (terminated, truncated) of a time step."""
    is_last = bool(timestep.last())
    terminated = is_last and not np.any(timestep.discount)
    return terminated, is_last and not terminated


def _random_state(env: Any) -> np.random.RandomState | None:
    """Return the generator of an environment of dm_control, suite or composer; None for others."""
    for owner, name in ((getattr(env, "task", None), "random"), (env, "random_state")):
        random = getattr(owner, name, None)
        if isinstance(random, np.random.RandomState):
            return random
    return None


def _space_of(spec: Any, name: str) -> gymnasium.Space[Any]:
    """Return the space of a spec, or of a nest of specs. Raises InvalidOption for anything else."""
    if isinstance(spec, Mapping):
        return spaces.Dict(
            [(key, _space_of(part, f"{name}[{key!r}]")) for key, part in spec.items()]
        )  # keeps the order
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple([_space_of(part, f"{name}[{index}]") for index, part in enumerate(spec)])
    try:
        dtype, shape = np.dtype(spec.dtype), tuple(spec.shape)
    except (AttributeError, TypeError) as error:
        raise InvalidOption(
            f"{name}: got {type(spec).__name__}; return specs of dm_env, or dicts or lists of them"
        ) from error
    if hasattr(spec, "num_values") and shape == ():
        return spaces.Discrete(int(spec.num_values))
    if dtype.kind not in "biuf":
        return StandIn(repr(spec))
    if dtype.kind == "b" or not hasattr(spec, "minimum"):
        return restore(inferred(np.zeros(shape, dtype)))
    low, high = (np.broadcast_to(np.asarray(limit, dtype), shape) for limit in (spec.minimum, spec.maximum))
    return spaces.Box(low, high, shape, dtype)
