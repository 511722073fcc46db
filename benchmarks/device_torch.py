"""PyTorch's side of device.py: environments, plain copies to compare recorders with, rollouts, training batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces, vector

import gym_trace
from gym_trace.exchange.torch import BatchStream

_FLOATS, _ACTIONS = 64, 8


class Batched(vector.VectorEnv[Any, Any, Any]):
    """Steps all lanes as tensors.

    layers, width: of a network that stands for the dynamics. pixels: edge of a picture. horizon: steps of an episode.
    """

    metadata = {"autoreset_mode": vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012 - as VectorEnv has it

    def __init__(
        self, lanes: int, device: str = "cpu", layers: int = 0, width: int = 0, pixels: int = 0, horizon: int = 500
    ):
        self.num_envs, self.pixels, self.device, self._horizon = lanes, pixels, device, horizon
        self.single_observation_space = (
            spaces.Box(0, 255, (pixels, pixels, 3), np.uint8)
            if pixels
            else spaces.Box(-np.inf, np.inf, (_FLOATS,), np.float32)
        )
        self.single_action_space = spaces.Box(-1, 1, (_ACTIONS,), np.float32)
        self.observation_space = vector.utils.batch_space(self.single_observation_space, lanes)
        self.action_space = vector.utils.batch_space(self.single_action_space, lanes)
        self._generator = torch.Generator(device).manual_seed(0)
        self._force = self._random(_ACTIONS, _FLOATS) / 8
        self._layers = [self._random(_FLOATS, width) / 8, self._random(width, _FLOATS) / 16] * layers

    def _random(self, *shape: int) -> Any:
        return torch.randn(shape, device=self.device, generator=self._generator)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._state = self._random(self.num_envs, _FLOATS)
        self._times = torch.zeros(self.num_envs, dtype=torch.int32, device=self.device)
        return self._observation(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        state = self._state
        for layer in self._layers:
            state = torch.relu(state @ layer)
        self._state = torch.tanh(state * 0.99 + actions @ self._force)
        self._times += 1
        terminated, truncated = self._state[:, 1].abs() > 0.9999, self._times >= self._horizon
        self._times *= ~(terminated | truncated)
        return self._observation(), self._state[:, 0] - 0.1 * (actions * actions).sum(1), terminated, truncated, {}

    def _observation(self) -> Any:
        if not self.pixels:
            return self._state
        stripes = torch.arange(self.pixels, device=self.device)[None, :, None, None] * 3
        shades = (self._state[:, :1, None, None] * 100 + stripes).to(torch.uint8)
        return shades.expand(self.num_envs, self.pixels, self.pixels, 3).contiguous()


class PackedCopy:
    """Steps an environment, and copies the rows of all leaves to the host, side by side as bytes.

    Without lag, each step waits for its copy. With it, that many steps are copied at a time, on a stream beside.
    """

    def __init__(self, envs: Batched, lanes: list[int] | None, lag: int = 0):
        self._envs, self._lag, self._staged = envs, lag, 0
        self._chosen = None if lanes is None else torch.tensor(lanes, device=envs.device)
        self._buffers: list[Any] = []
        self._stream = torch.cuda.Stream(envs.device) if envs.device != "cpu" else None

    def reset(self) -> Any:
        return self._envs.reset()

    def step(self, actions: Any) -> Any:
        result = self._envs.step(actions)
        rows = self._packed((result[0], actions, *result[1:4]))
        if not self._buffers:
            self._buffers = [_Buffer(max(1, self._lag), rows) for _ in range(2)]
        buffer = self._buffers[0]
        if not self._lag:
            buffer.pinned[0].copy_(rows)
            buffer.keep()
            return result
        buffer.rows[self._staged].copy_(rows)
        self._staged += 1
        if self._staged == self._lag:
            self._staged = 0
            buffer.copy(self._stream)
            self._buffers.reverse()
            self._buffers[0].wait()  # its rows are replaced by the next steps
        return result

    def _packed(self, leaves: tuple[Any, ...]) -> Any:
        rows = torch.cat([leaf.reshape(len(leaf), -1).view(torch.uint8) for leaf in leaves], 1)
        return rows if self._chosen is None else rows.index_select(0, self._chosen)


class _Buffer:
    """Rows of some steps on the device, and pinned memory for them."""

    def __init__(self, steps: int, rows: Any):
        self.rows = torch.empty((steps, *rows.shape), dtype=torch.uint8, device=rows.device)
        self.pinned = torch.empty((steps, *rows.shape), dtype=torch.uint8, pin_memory=rows.is_cuda)
        self._arrived: Any = None
        self._kept = np.empty(self.pinned.shape, np.uint8)

    def copy(self, stream: Any) -> None:
        if stream is None:
            self.pinned.copy_(self.rows)
            self.keep()
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.pinned.copy_(self.rows, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(stream)

    def wait(self) -> None:
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
            self.keep()

    def keep(self) -> None:
        """Copy the rows out of the pinned memory, which the next copy needs."""
        self._kept[...] = self.pinned.numpy()


class Side:
    """Interface of a library for device.py."""

    def __init__(self, device: str):
        if device != "cpu" and not torch.cuda.is_available():
            raise LookupError(f"PyTorch {torch.__version__} sees no GPU")
        if device == "cpu":
            torch.set_num_threads(1)
        self.device = "cpu" if device == "cpu" else "cuda"
        self.card = "CPU" if device == "cpu" else torch.cuda.get_device_name()

    def envs(self, lanes: int, **options: int) -> Batched:
        return Batched(lanes, self.device, **options)

    def actions(self, lanes: int, count: int) -> list[Any]:
        return list(torch.rand(count, lanes, _ACTIONS, device=self.device) * 2 - 1)

    def packed(self, envs: Batched, lanes: list[int] | None, lag: int = 0) -> PackedCopy:
        return PackedCopy(envs, lanes, lag)

    def wait(self, result: Any = None) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def array(self, value: Any) -> Any:
        return value.cpu().numpy().copy()

    def rollouts(self, lanes: int, steps: int) -> Callable[[], tuple[Any, ...]]:
        """Return a function that steps an environment, and returns the arguments of TraceWriter.rollouts()."""
        envs = self.envs(lanes)
        last = envs.reset()[0]

        def collected() -> tuple[Any, ...]:
            nonlocal last
            observations = torch.empty((steps + 1, lanes, _FLOATS), device=self.device)
            observations[0], parts = last, []
            actions = torch.rand(steps, lanes, _ACTIONS, device=self.device) * 2 - 1
            for step in range(steps):
                observations[step + 1], *part, _ = envs.step(actions[step])
                parts.append(part)
            last = observations[-1]
            return observations, actions, *map(torch.stack, zip(*parts))

        return collected

    def copied(self, arrays: tuple[Any, ...]) -> Callable[[], None]:
        """Return a function that copies arrays to the host as fast as a program can: into pinned memory."""
        pinned = [torch.empty(array.shape, dtype=array.dtype, pin_memory=array.is_cuda) for array in arrays]

        def copy() -> None:
            for target, array in zip(pinned, arrays):
                target.copy_(array, non_blocking=True)
            self.wait()

        return copy

    def batches(self, directory: str, seconds: float) -> dict[str, float]:
        """Return GB/s of windows of 16 steps that arrive on the device, and of plain copies."""
        host = torch.ones(1 << (20 if self.device == "cpu" else 28), dtype=torch.uint8)
        sources = {"plain copy": host}
        if self.device != "cpu":
            sources["plain copy from pinned memory"] = host.pin_memory()
        found = {}
        for name, source in sources.items():
            copies = (source.to(self.device, copy=True) for _ in iter(int, 1))
            found[name] = self._throughput(copies, seconds / 4)
        trace = gym_trace.open_trace(directory)
        for name, cache in (("windows", "memory"), ("windows, cached on the device", self.device)):
            windows = trace.windows(16, batch_size=256, seed=0, cache=cache)
            batches = (batch["observations"] for batch in BatchStream(windows, device=self.device))
            found[name] = self._throughput(batches, seconds)
        return found

    def _throughput(self, batches: Iterator[Any], seconds: float) -> float:
        next(batches)
        self.wait()
        begun, moved = time.perf_counter(), 0
        while time.perf_counter() < begun + seconds:
            moved += next(batches).nbytes
        self.wait()
        return moved / 1e9 / (time.perf_counter() - begun)
