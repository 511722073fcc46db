"""Sample actions in the worker itself, or in a server process for all workers. Needs PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from gym_trace.data.values import Array
from gym_trace.training.network.model import ActorCritic, set_weights, tensors
from gym_trace.training.processes.shared import Message, PolicyTask, SharedArrays, Weights, has_more, put, take
from gym_trace.training.rollouts import Shape
from gym_trace.training.settings import ANY, Settings

_HEARTBEAT_SECONDS = 1.0


class Stopped(Exception):
    """The driver stopped the run, or is gone."""


class SampledActions(NamedTuple):
    """Action, log-probability, value and next recurrent state of each lane; version of the weights."""

    actions: Array
    logprob: Array
    values: Array
    state: Array
    version: int


class Acting(Protocol):
    """Samples the actions of a worker's groups of environments."""

    is_concurrent: bool  # step another group between request() and result()

    def begin(self, group: int, version: int) -> int:
        """Begin a rollout with this version of the weights; return the version that is used."""

    def request(self, group: int, observed: Sequence[Array], state: Array) -> None:
        """Send the observations of a group: one array per leaf."""

    def result(self, group: int) -> SampledActions:
        """Wait for the actions and return them. Raises Stopped."""


class OwnModel:
    """Samples with a network in the worker's process."""

    is_concurrent = False

    def __init__(self, shape: Shape, settings: Settings, weights: Weights, seeds: Sequence[int]):
        self._model = ActorCritic(shape.leaves, shape.actions, settings)
        self._weights, self._buffer = weights, np.empty(weights.size, np.uint8)
        self._uses_newest = settings.lag == ANY
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._sampled: SampledActions | None = None
        self._version = -1

    def begin(self, group: int, version: int) -> int:
        self._version = _read(self._weights, self._buffer, None if self._uses_newest else version)
        set_weights(self._model, self._buffer)
        return self._version

    def request(self, group: int, observed: Sequence[Array], state: Array) -> None:
        self._sampled = sample_actions(self._model, observed, state, self._generators[group], self._version)

    def result(self, group: int) -> SampledActions:
        assert self._sampled is not None
        return self._sampled


@torch.inference_mode()
def sample_actions(
    model: ActorCritic, observed: Sequence[Array], state: Array, generator: torch.Generator, version: int
) -> SampledActions:
    """Sample actions for a batch of observations."""
    device = str(generator.device)
    distribution, values, next_state = model(tensors(observed, device), torch.from_numpy(state).to(device))
    actions = distribution.sample(generator)
    parts = actions, distribution.log_prob(actions), model.value(values), next_state
    sampled, logprob, values, next_state = (part.cpu().numpy() for part in parts)
    return SampledActions(sampled, logprob, values, next_state, version)


@dataclass(frozen=True)
class InferenceClient:
    """Requests to a server. Picklable only while a process is started.

    arrays: one set per group of each worker. requests, answers (one per worker): pipes with indices of sets.
    """

    arrays: SharedArrays
    requests: Connection
    answers: list[Connection]


def client_fields(shape: Shape) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the arrays of a group: observations and results."""
    lanes = shape.lanes
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        f"observations.{number}": ((lanes, *leaf.shape), leaf.dtype) for number, leaf in enumerate(shape.leaves)
    }
    fields |= {"before": ((lanes, shape.state), np.float32), "state": ((lanes, shape.state), np.float32)}
    fields |= {"actions": ((lanes, shape.actions.columns), np.float32), "version": ((), np.int64)}
    return fields | dict.fromkeys(("logprob", "values"), ((lanes,), np.float32))


class ServedModel:
    """Samples in a server process, while the worker steps other groups."""

    is_concurrent = True

    def __init__(self, client: InferenceClient, worker: int, splits: int, life: int, over: threading.Event):
        self._client, self._answers, self._over = client, client.answers[worker], over
        self._first, self._life = worker * splits, life
        self._versions = [0] * splits
        self._arrived: set[int] = set()

    def begin(self, group: int, version: int) -> int:
        self._versions[group] = version
        return version

    def request(self, group: int, observed: Sequence[Array], state: Array) -> None:
        index = self._first + group
        for number, rows in enumerate(observed):
            self._client.arrays.array(index, f"observations.{number}")[...] = rows
        self._client.arrays.array(index, "before")[...] = state
        put(self._client.requests, Message(index, self._life, self._versions[group]))

    def result(self, group: int) -> SampledActions:
        index = self._first + group
        while index not in self._arrived:
            if self._over.is_set():
                raise Stopped
            if has_more(self._answers, _HEARTBEAT_SECONDS):
                try:
                    message = take(self._answers)
                except EOFError:  # the server is gone; the driver restarts it
                    self._over.wait(_HEARTBEAT_SECONDS)
                    continue
                if message.life == self._life:
                    self._arrived.add(message.slot)
        self._arrived.discard(index)
        array = self._client.arrays.array
        actions, logprob, values, next_state = (array(index, name).copy() for name in SampledActions._fields[:4])
        return SampledActions(actions, logprob, values, next_state, int(array(index, "version")))


def serve(
    control: Connection,
    task: PolicyTask,
    weights: Weights,
    arrays: SharedArrays,
    requests: Connection,
    answers: list[Connection],
    seed: int,
) -> None:
    """Body of a server's process: answer requests until the driver sends a message or is gone."""
    settings, shape = task.settings, task.shape
    model = ActorCritic(shape.leaves, shape.actions, settings).to(settings.device)
    generator = torch.Generator(settings.device).manual_seed(seed)
    buffer = np.empty(weights.size, np.uint8)
    loaded, last_heartbeat = -1, time.monotonic()
    while True:
        ready = wait([requests, control], _HEARTBEAT_SECONDS)
        if control in ready:
            with contextlib.suppress(OSError):  # the driver is gone
                control.send(("ended", None))
            return
        if time.monotonic() - last_heartbeat > _HEARTBEAT_SECONDS:
            last_heartbeat = time.monotonic()
            control.send(("running", None))
        messages = []
        while has_more(requests):
            messages.append(take(requests))
        for version, group in itertools.groupby(sorted(messages, key=lambda t: t.version), lambda t: t.version):
            wanted = weights.newest if settings.lag == ANY else version
            if wanted != loaded:
                loaded = _read(weights, buffer, None if settings.lag == ANY else version)
                set_weights(model, buffer)
            batch = list(group)
            _answer(shape, arrays, model, generator, batch, loaded)
            for message in batch:
                with contextlib.suppress(OSError):  # the worker is gone and will be restarted
                    put(answers[message.slot // settings.splits], message)


def _read(weights: Weights, out: Array, version: int | None) -> int:
    """Read this version of the weights, or the latest: for a restarted worker, older ones may be gone."""
    try:
        return weights.read(out, version)
    except LookupError:
        return weights.read(out)


def _answer(
    shape: Shape,
    arrays: SharedArrays,
    model: ActorCritic,
    generator: torch.Generator,
    messages: list[Message],
    version: int,
) -> None:
    array, lanes = arrays.array, shape.lanes
    leaves = range(len(shape.leaves))
    observed = [
        np.concatenate([array(message.slot, f"observations.{leaf}") for message in messages]) for leaf in leaves
    ]
    state = np.concatenate([array(message.slot, "before") for message in messages])
    sampled = sample_actions(model, observed, state, generator, version)
    for number, message in enumerate(messages):
        rows = slice(number * lanes, (number + 1) * lanes)
        for name in SampledActions._fields[:4]:
            array(message.slot, name)[...] = getattr(sampled, name)[rows]
        array(message.slot, "version")[...] = version
