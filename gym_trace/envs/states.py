"""The whole state of an environment as plain data, to start from in the middle of an episode."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from gym_trace.envs.seeding import generator_state, restore_generator
from gym_trace.errors import EnvironmentUnavailable, InvalidOption

_GROUP = "gym_trace.states"
# What environments of Gymnasium read of MjData and the integration state lacks: it belongs to the substep before.
_DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cinert", "cvel"),
    *("cfrc_ext", "cfrc_int", "qfrc_actuator", "actuator_force", "subtree_com", "subtree_linvel", "sensordata"),
)


class States(Protocol):
    """Gets and sets the state of an environment. The recorder keeps the state of the random generator itself.

    An environment may have both methods itself. For environments of others, an entry point of the group
    ``gym_trace.states`` is a function of the unwrapped environment that returns such an object, or None.
    """

    def get_state(self) -> bytes:
        """Return the whole state."""

    def set_state(self, state: bytes) -> None:
        """Set the environment to a state. Raises ValueError for other bytes."""


def states_of(env: gymnasium.Env[Any, Any]) -> States | None:
    """Return how to get and set the state of an environment; None if it offers no state."""
    base: Any = env.unwrapped
    for entry in entry_points(group=_GROUP):
        found: States | None = entry.load()(base)
        if found is not None:
            return found
    if type(base).__module__.startswith("gymnasium.envs.mujoco."):
        return _MuJoCo(base)
    mujoco = sys.modules.get("gymnasium.envs.mujoco")
    if mujoco is not None and isinstance(base, mujoco.MujocoEnv):
        return None  # its set_state(qpos, qvel) is another one, and what else it keeps is unknown
    methods = (getattr(type(base), name, None) for name in ("get_state", "set_state"))
    return base if all(map(callable, methods)) else None


def is_checked(states: States) -> bool:
    """Return True if any bytes can be set without harm."""
    return isinstance(states, _MuJoCo)


def packed_state(env: gymnasium.Env[Any, Any], states: States) -> dict[str, Any]:
    """Return the state of an environment, with that of its random generator. Raises InvalidOption."""
    state = states.get_state()
    if type(state) is not bytes:
        raise InvalidOption(f"states: {type(env.unwrapped).__name__}.get_state() returned {type(state).__name__}; "
                            "return bytes")  # fmt: skip
    return {"state": state, "generator": generator_state(env.unwrapped)}


def can_restore(env: gymnasium.Env[Any, Any]) -> bool:
    """Return True if the state of all wrappers is known from the number of steps."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env) not in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
            return False
        env = env.env
    return True


def restore_state(env: gymnasium.Env[Any, Any], states: States, packed: Any, steps: int) -> None:
    """Set an environment that was just reset to a state from packed_state(), after `steps` steps.

    Raises EnvironmentUnavailable if it is not one of its states.
    """
    state = packed.get("state") if isinstance(packed, Mapping) else None
    if type(state) is not bytes:
        raise EnvironmentUnavailable("a recorded state is malformed")
    try:
        states.set_state(state)
    except Exception as error:  # code of the environment
        raise EnvironmentUnavailable(f"a recorded state cannot be set: {error}") from error
    if packed.get("generator") is not None:
        restore_generator(env.unwrapped, packed["generator"])
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            env._elapsed_steps = steps  # type: ignore[assignment]
        env = env.env


class _MuJoCo:
    """State of an environment of gymnasium.envs.mujoco: float64, the integration state, then the derived arrays."""

    def __init__(self, env: Any):
        self._env = env

    def get_state(self) -> bytes:
        state = np.empty(self._size)
        self._mujoco.mj_getState(self._env.model, self._env.data, state, self._kind)
        return b"".join(array.tobytes() for array in (state, *self._derived()))

    def set_state(self, state: bytes) -> None:
        size, derived = self._size, self._derived()
        expected = 8 * size + sum(array.nbytes for array in derived)
        if len(state) != expected:
            raise ValueError(f"it has {len(state)} bytes, those of this model have {expected}")
        numbers = np.frombuffer(state, np.float64)
        if not np.isfinite(numbers).all():
            raise ValueError("it has numbers that are not finite")
        self._mujoco.mj_setState(self._env.model, self._env.data, numbers[:size].copy(), self._kind)
        for array in derived:
            array[...] = numbers[size : size + array.size].reshape(array.shape)
            size += array.size

    @property
    def _mujoco(self) -> Any:
        return importlib.import_module("mujoco")

    @property
    def _kind(self) -> Any:
        return self._mujoco.mjtState.mjSTATE_INTEGRATION

    @property
    def _size(self) -> int:
        return int(self._mujoco.mj_stateSize(self._env.model, self._kind))

    def _derived(self) -> list[Any]:
        return [getattr(self._env.data, name) for name in _DERIVED]
