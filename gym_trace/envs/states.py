"""The whole state of an environment as bytes, for starting in the middle of an episode."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from gym_trace.data.packing import pack, unpack
from gym_trace.data.tensors import plain_array
from gym_trace.data.trees import mapped
from gym_trace.envs.seeding import generator_state, restore_generator
from gym_trace.errors import EnvironmentUnavailable, InvalidOption
from gym_trace.plugins import entry_points

_GROUP = "gym_trace.states"
# Fields of MjData that Gymnasium's environments read; the integration state lacks them, because they belong to the
# previous substep.
_DERIVED = (
    *("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cinert", "cvel"),
    *("cfrc_ext", "cfrc_int", "qfrc_actuator", "actuator_force", "subtree_com", "subtree_linvel", "sensordata"),
)
# The generator in an ALE state: the numbers of a std::mt19937 as text; libstdc++ appends the position.
_TWISTER = re.compile(rb"(?<!\d)(?:\d{1,10} ){623,624}\d{1,10}(?!\d)")
_STEPS_AFTER_STATE = 10
_KEY = 624  # numbers in the state of a std::mt19937


class States(Protocol):
    """Gets and sets the state of an environment. The recorder itself stores the state of the random generator.

    An environment may have both methods. For environments of other packages, register an entry point of the group
    ``gym_trace.states``: a function that takes the unwrapped environment and returns such an object, or None.
    If it has a method ``begin_episode``, that takes the reset info of an episode before states of it are set.

    Examples:
        >>> class Clock(gymnasium.Env):
        ...     time = 0
        ...
        ...     def get_state(self):
        ...         return bytes([self.time])
        ...
        ...     def set_state(self, state):
        ...         self.time = state[0]
        >>> clock = Clock()
        >>> clock.set_state(b"\\x07")
        >>> clock.time, clock.get_state()
        (7, b'\\x07')
    """

    def get_state(self) -> bytes | None:
        """Return the whole state; None if that is impossible now: the recorder tries again before the next step."""

    def set_state(self, state: bytes) -> None:
        """Set the environment to a state. Raises ValueError for other bytes."""


def states_of(env: gymnasium.Env[Any, Any]) -> States | None:
    """Return an object that gets and sets the state of an environment; None if that is not supported."""
    base: Any = env.unwrapped
    for makes_states in _of_other_packages():
        found: States | None = makes_states(base)
        if found is not None:
            return found
    if type(base).__module__.startswith("gymnasium.envs.mujoco."):
        return _MuJoCo(base)
    mujoco = sys.modules.get("gymnasium.envs.mujoco")
    if mujoco is not None and isinstance(base, mujoco.MujocoEnv):
        return None  # its set_state(qpos, qvel) is incomplete: other state is unknown
    if type(base).__module__.startswith("ale_py."):
        return _Ale.of(base)
    if _has_methods(base, "get_state_dict", "set_state_dict"):
        return _StateDict(base)
    return base if _has_methods(base, "get_state", "set_state") else None


def _of_other_packages() -> list[Callable[[Any], States | None]]:
    return [entry.load() for entry in entry_points(_GROUP)]


def _has_methods(env: Any, *names: str) -> bool:
    return all(callable(getattr(type(env), name, None)) for name in names)


def offered_states(env: gymnasium.Env[Any, Any], every: int) -> States:
    """Return states_of() for the option states=every. Raises InvalidOption if the environment offers no state."""
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1:
        raise InvalidOption(f"states={every!r}: pass a number of steps, 1 or more")
    states = states_of(env)
    if states is None:
        name = type(env.unwrapped).__name__
        raise InvalidOption(f"states={every!r}: {name} offers no state; omit it, or give {name} get_state() and "
                            "set_state()")  # fmt: skip
    return states


def settable_states(env: gymnasium.Env[Any, Any], trust: bool) -> States:
    """Return states_of() for setting states from a file.

    Raises EnvironmentUnavailable if the environment offers no state, or passes on bytes unchecked and is not trusted.
    """
    name, states = type(env.unwrapped).__name__, states_of(env)
    if states is None:
        raise EnvironmentUnavailable(f"{name} offers no state to set: it lacks get_state() and set_state()")
    if not (trust or is_checked(states)):
        raise EnvironmentUnavailable(f"{name} does not check states, so those of the trace may do harm; if you trust "
                                     "it, pass --trust (trust=True in Python)")  # fmt: skip
    return states


def is_checked(states: States) -> bool:
    """Return True if set_state() is safe with untrusted bytes."""
    return isinstance(states, _MuJoCo)


def least_compared(states: States) -> int:
    """Return the min number of steps to compare after a state: an incomplete state may differ only later."""
    return 1 if isinstance(states, (_MuJoCo, _Ale)) else _STEPS_AFTER_STATE


def packed_state(env: gymnasium.Env[Any, Any], states: States) -> dict[str, Any] | None:
    """Return the states of an environment and of its random generator; None if get_state() returns None now.

    Raises InvalidOption.
    """
    state = states.get_state()
    if state is None:
        return None
    if type(state) is not bytes:
        raise InvalidOption(f"states: {type(env.unwrapped).__name__}.get_state() returned {type(state).__name__}; "
                            "return bytes")  # fmt: skip
    return {"state": state, "generator": generator_state(env.unwrapped)}


def can_restore(env: gymnasium.Env[Any, Any]) -> bool:
    """Return True if the number of steps determines the state of all wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env) not in (OrderEnforcing, PassiveEnvChecker, TimeLimit):
            return False
        env = env.env
    return True


def restore_state(env: gymnasium.Env[Any, Any], states: States, packed: Any, steps: int) -> None:
    """Set a freshly reset environment to a state from packed_state(), recorded after `steps` steps.

    Raises EnvironmentUnavailable if the environment rejects the state.
    """
    state = packed.get("state") if isinstance(packed, Mapping) else None
    if type(state) is not bytes:
        raise EnvironmentUnavailable("a recorded state is malformed")
    try:
        states.set_state(state)
    except Exception as error:  # foreign code may raise anything
        raise EnvironmentUnavailable(f"a recorded state cannot be set: {error}") from error
    if packed.get("generator") is not None:
        restore_generator(env.unwrapped, packed["generator"])
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, TimeLimit):
            env._elapsed_steps = steps  # type: ignore[assignment]  # Gymnasium declares it as None
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
            raise ValueError(f"it has {len(state)} bytes, a state of this model has {expected}")
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


class _Ale:
    """State of an ale_py environment, with the emulator's random generator: the bytes of ALEState.serialize().

    ALE's states lack the previous action, which sticky actions may repeat. So a state is returned only if the
    generator's next number does not make the emulator repeat that action.
    """

    def __init__(self, env: Any):
        self._env = env

    @classmethod
    def of(cls, env: Any) -> States | None:
        """Return the states of an environment; None if this ALE does not serialize its generator."""
        if not _has_methods(env, "clone_state", "restore_state"):
            return None
        states = cls(env)
        try:
            return states if states._takes_next_action(states._serialized()) is not None else None
        except Exception:  # another ALE may raise anything
            return None

    def get_state(self) -> bytes | None:
        state = self._serialized()
        return state if self._takes_next_action(state) else None

    def set_state(self, state: bytes) -> None:
        self._env.restore_state(sys.modules["ale_py"].ALEState(state))

    def _serialized(self) -> bytes:
        return bytes(self._env.clone_state(include_rng=True).serialize())

    def _takes_next_action(self, state: bytes) -> bool | None:
        """Return True if the next action is executed at once, without repeating the last one; None if unknown."""
        chance = float(self._env.ale.getFloat("repeat_action_probability"))
        if chance <= 0:
            return True
        found = _TWISTER.findall(state)
        if not found:
            return None
        numbers = [
            int(number) for number in found[-1].split()
        ]  # the last one is ALE's, the first the emulated console's
        twister = np.random.MT19937()
        key, position = np.array(numbers[:_KEY], np.uint32), [*numbers[_KEY:], _KEY][0]
        twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
        return bool(twister.random_raw() / 2**32 >= chance)


class _StateDict:
    """State of an environment with get_state_dict() and set_state_dict(), such as ManiSkill's: arrays or tensors."""

    def __init__(self, env: Any):
        self._env = env

    def get_state(self) -> bytes:
        return pack(mapped(lambda value: np.array(plain_array(value)), self._env.get_state_dict()))

    def set_state(self, state: bytes) -> None:
        self._env.set_state_dict(_like(self._env.get_state_dict(), unpack(state)))


def _like(known: Any, given: Any) -> Any:
    """Convert arrays to the types of the environment's own state. Raises ValueError for other dtypes or shapes."""
    if isinstance(known, Mapping):
        if not isinstance(given, Mapping) or set(known) != set(given):
            raise ValueError("it has other keys than this environment")
        return {key: _like(part, given[key]) for key, part in known.items()}
    form = np.asarray(plain_array(known))
    if not isinstance(given, np.ndarray) or (given.dtype, given.shape) != (form.dtype, form.shape):
        raise ValueError("it has arrays of other dtypes or shapes than this environment")
    if isinstance(known, np.ndarray):
        return given
    return known.new_tensor(given) if hasattr(known, "new_tensor") else given[()]
