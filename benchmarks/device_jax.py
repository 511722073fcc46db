"""JAX's side of device.py: environments, plain copies to compare recorders with, and rollouts of a scan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces, vector

_FLOATS, _ACTIONS = 64, 8


def _step(weights: Any, state: Any, times: Any, actions: Any) -> Any:
    """Return the next state and times, and what a step returns: reward, terminated, truncated."""
    force, layers, horizon = weights
    moved = state
    for layer in layers:
        moved = jax.nn.relu(moved @ layer)
    moved = jnp.tanh(moved * 0.99 + actions @ force)
    times = times + 1
    terminated, truncated = jnp.abs(moved[:, 1]) > 0.9999, times >= horizon
    reward = moved[:, 0] - 0.1 * (actions * actions).sum(1)
    return moved, times * ~(terminated | truncated), reward, terminated, truncated


class Batched(vector.VectorEnv[Any, Any, Any]):
    """Steps all lanes by one compiled function. layers, width: of a network that stands for the dynamics."""

    metadata = {"autoreset_mode": vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as VectorEnv has it

    def __init__(self, lanes: int, device: Any, layers: int = 0, width: int = 0, horizon: int = 500):
        self.num_envs = lanes
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (_FLOATS,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (_ACTIONS,), np.float32)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, lanes)
        self.action_space = vector.utils.batch_space(self.single_action_space, lanes)
        with jax.default_device(device):
            keys = jax.random.split(jax.random.key(0), 4)
            self._state = jax.random.normal(keys[0], (lanes, _FLOATS))
            into, out = jax.random.normal(keys[1], (_FLOATS, width)), jax.random.normal(keys[2], (width, _FLOATS))
            force = jax.random.normal(keys[3], (_ACTIONS, _FLOATS)) / 8
            self.weights = force, [into / 8, out / 16] * layers, horizon
            self._times = jnp.zeros(lanes, jnp.int32)
        self._step = jax.jit(_step)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self._state, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._state, self._times, *result = self._step(self.weights, self._state, self._times, actions)
        return self._state, *result, {}


@jax.jit
def _packed(leaves: tuple[Any, ...], chosen: Any) -> Any:
    def row_bytes(leaf: Any) -> Any:
        values = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
        return jax.lax.bitcast_convert_type(values.reshape(len(leaf), -1), jnp.uint8).reshape(len(leaf), -1)

    rows = jnp.concatenate([row_bytes(leaf) for leaf in leaves], 1)
    return rows if chosen is None else rows[chosen]


class PackedCopy:
    """Steps an environment, and copies the rows of all leaves to the host, side by side as bytes.

    Without lag, each step waits for its copy. With it, the copy arrives while later steps run.
    """

    def __init__(self, envs: Batched, lanes: list[int] | None, lag: int = 0):
        self._envs, self._lag, self._waiting = envs, lag, deque[Any]()
        self._chosen = None if lanes is None else jnp.asarray(lanes)

    def reset(self) -> Any:
        return self._envs.reset()

    def step(self, actions: Any) -> Any:
        result = self._envs.step(actions)
        rows = _packed((result[0], actions, *result[1:4]), self._chosen)
        if self._lag:
            rows.copy_to_host_async()
        self._waiting.append(rows)
        if len(self._waiting) > self._lag:
            np.asarray(self._waiting.popleft())
        return result


class Side:
    """Interface of a library for device.py."""

    def __init__(self, device: str):
        if device != "cpu" and jax.default_backend() == "cpu":
            raise LookupError(f"JAX {jax.__version__} sees no GPU")
        self._device = jax.devices("cpu" if device == "cpu" else None)[0]
        self.card = self._device.device_kind

    def envs(self, lanes: int, **options: int) -> Batched:
        return Batched(lanes, self._device, **options)

    def actions(self, lanes: int, count: int) -> list[Any]:
        with jax.default_device(self._device):
            return list(jax.random.uniform(jax.random.key(1), (count, lanes, _ACTIONS), minval=-1, maxval=1))

    def packed(self, envs: Batched, lanes: list[int] | None, lag: int = 0) -> PackedCopy:
        return PackedCopy(envs, lanes, lag)

    def wait(self, result: Any = None) -> None:
        jax.block_until_ready(result)

    def array(self, value: Any) -> Any:
        return np.array(value)

    def rollouts(self, lanes: int, steps: int) -> Callable[[], tuple[Any, ...]]:
        """Return a function that steps an environment, and returns the arguments of TraceWriter.rollouts()."""
        envs = self.envs(lanes)

        @jax.jit
        def scan(weights: Any, state: Any, times: Any, key: Any) -> Any:
            def step(carry: Any, key: Any) -> Any:
                actions = jax.random.uniform(key, (lanes, _ACTIONS), minval=-1, maxval=1)
                following, times, *result = _step(weights, *carry, actions)
                return (following, times), (carry[0], actions, *result)

            carry, (observations, *others) = jax.lax.scan(step, (state, times), jax.random.split(key, steps))
            return carry, (jnp.concatenate([observations, carry[0][None]]), *others)

        with jax.default_device(self._device):
            carry, number = (envs.reset()[0], jnp.zeros(lanes, jnp.int32)), 0

        def collected() -> tuple[Any, ...]:
            nonlocal carry, number
            with jax.default_device(self._device):
                carry, arrays = scan(envs.weights, *carry, jax.random.key(number))
            number += 1
            return arrays

        return collected

    def copied(self, arrays: tuple[Any, ...]) -> Callable[[], None]:
        """Return a function that copies arrays to the host."""
        fresh = [jnp.copy(array) for array in arrays]  # JAX keeps the host's copy of those it has copied
        jax.block_until_ready(fresh)

        def copy() -> None:
            for array in fresh:
                array.copy_to_host_async()
            for array in fresh:
                np.asarray(array)

        return copy
