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
from gym_trace.training.processes.shared import Plan, Rooms, Token, Weights, has_more, put, take
from gym_trace.training.rollouts import Shape
from gym_trace.training.settings import ANY, Settings

_LOOK_SECONDS = 1.0


class Stopped(Exception):
    """The driver stopped the run, or is gone."""


class Drawn(NamedTuple):
    """Result for each lane: action, log-probability, value of the observation, next recurrent state; and the version of
    the weights."""

    actions: Array
    logprob: Array
    values: Array
    state: Array
    version: int


class Acting(Protocol):
    """Samples the actions of a worker's splits."""

    in_turns: bool  # step another split between ask() and answer()

    def begin(self, split: int, version: int) -> int:
        """Begin a rollout with this version of the weights; return the version it gets."""

    def ask(self, split: int, observed: Sequence[Array], state: Array) -> None:
        """Send the observations of a split: one array per leaf."""

    def answer(self, split: int) -> Drawn:
        """Wait for the result and return it. Raises Stopped."""


class OwnModel:
    """Network in the worker's process."""

    in_turns = False

    def __init__(self, shape: Shape, settings: Settings, weights: Weights, seeds: Sequence[int]):
        self._model = ActorCritic(shape.leaves, shape.actions, settings)
        self._weights, self._room = weights, np.empty(weights.size, np.uint8)
        self._any = settings.lag == ANY
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drawn: Drawn | None = None
        self._version = -1

    def begin(self, split: int, version: int) -> int:
        self._version = _read(self._weights, self._room, None if self._any else version)
        set_weights(self._model, self._room)
        return self._version

    def ask(self, split: int, observed: Sequence[Array], state: Array) -> None:
        self._drawn = drawn(self._model, observed, state, self._generators[split], self._version)

    def answer(self, split: int) -> Drawn:
        assert self._drawn is not None
        return self._drawn


@torch.inference_mode()
def drawn(
    model: ActorCritic, observed: Sequence[Array], state: Array, generator: torch.Generator, version: int
) -> Drawn:
    """Sample actions for a batch of observations."""
    device = str(generator.device)
    distribution, values, after = model(tensors(observed, device), torch.from_numpy(state).to(device))
    actions = distribution.sample(generator)
    parts = actions, distribution.log_prob(actions), model.value(values), after
    taken, logprob, values, after = (part.cpu().numpy() for part in parts)
    return Drawn(taken, logprob, values, after, version)


@dataclass(frozen=True)
class Desk:
    """Requests to a server. Picklable to processes that are being started.

    rooms: one a split of each worker. requests: tokens of rooms. answers: of each worker, tokens of rooms.
    """

    rooms: Rooms
    requests: Connection
    answers: list[Connection]


def desk_fields(shape: Shape) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Return the arrays of a room: observations and results."""
    lanes = shape.lanes
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        f"observations.{number}": ((lanes, *leaf.shape), leaf.dtype) for number, leaf in enumerate(shape.leaves)
    }
    fields |= {"before": ((lanes, shape.state), np.float32), "state": ((lanes, shape.state), np.float32)}
    fields |= {"actions": ((lanes, shape.actions.columns), np.float32), "version": ((), np.int64)}
    return fields | dict.fromkeys(("logprob", "values"), ((lanes,), np.float32))


class Asking:
    """Server that samples for a worker, which steps other splits in the meantime."""

    in_turns = True

    def __init__(self, desk: Desk, worker: int, splits: int, life: int, over: threading.Event):
        self._desk, self._answers, self._over = desk, desk.answers[worker], over
        self._first, self._life = worker * splits, life
        self._versions = [0] * splits
        self._arrived: set[int] = set()

    def begin(self, split: int, version: int) -> int:
        self._versions[split] = version
        return version

    def ask(self, split: int, observed: Sequence[Array], state: Array) -> None:
        room = self._first + split
        for number, rows in enumerate(observed):
            self._desk.rooms.array(room, f"observations.{number}")[...] = rows
        self._desk.rooms.array(room, "before")[...] = state
        put(self._desk.requests, Token(room, self._life, self._versions[split]))

    def answer(self, split: int) -> Drawn:
        room = self._first + split
        while room not in self._arrived:
            if self._over.is_set():
                raise Stopped
            if has_more(self._answers, _LOOK_SECONDS):
                try:
                    token = take(self._answers)
                except EOFError:  # the server is gone; the driver restarts it
                    self._over.wait(_LOOK_SECONDS)
                    continue
                if token.life == self._life:
                    self._arrived.add(token.slot)
        self._arrived.discard(room)
        array = self._desk.rooms.array
        actions, logprob, values, after = (array(room, name).copy() for name in Drawn._fields[:4])
        return Drawn(actions, logprob, values, after, int(array(room, "version")))


def serve(
    control: Connection,
    plan: Plan,
    weights: Weights,
    rooms: Rooms,
    requests: Connection,
    answers: list[Connection],
    seed: int,
) -> None:
    """Body of a server's process: answer requests until the driver sends a message or is gone."""
    settings, shape = plan.settings, plan.shape
    model = ActorCritic(shape.leaves, shape.actions, settings).to(settings.device)
    generator = torch.Generator(settings.device).manual_seed(seed)
    room = np.empty(weights.size, np.uint8)
    have, looked = -1, time.monotonic()
    while True:
        ready = wait([requests, control], _LOOK_SECONDS)
        if control in ready:
            with contextlib.suppress(OSError):  # the driver is gone
                control.send(("ended", None))
            return
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            control.send(("running", None))
        tokens = []
        while has_more(requests):
            tokens.append(take(requests))
        for version, group in itertools.groupby(sorted(tokens, key=lambda t: t.version), lambda t: t.version):
            wanted = weights.newest if settings.lag == ANY else version
            if wanted != have:
                have = _read(weights, room, None if settings.lag == ANY else version)
                set_weights(model, room)
            asked = list(group)
            _answer(shape, rooms, model, generator, asked, have)
            for token in asked:
                with contextlib.suppress(OSError):  # the worker is gone and will be restarted
                    put(answers[token.slot // settings.splits], token)


def _read(weights: Weights, room: Array, version: int | None) -> int:
    """Read this version of the weights, or the latest: for a restarted worker, older ones may be gone."""
    try:
        return weights.read(room, version)
    except LookupError:
        return weights.read(room)


def _answer(
    shape: Shape, rooms: Rooms, model: ActorCritic, generator: torch.Generator, tokens: list[Token], version: int
) -> None:
    array, lanes = rooms.array, shape.lanes
    leaves = range(len(shape.leaves))
    observed = [np.concatenate([array(token.slot, f"observations.{leaf}") for token in tokens]) for leaf in leaves]
    state = np.concatenate([array(token.slot, "before") for token in tokens])
    found = drawn(model, observed, state, generator, version)
    for number, token in enumerate(tokens):
        rows = slice(number * lanes, (number + 1) * lanes)
        for name in Drawn._fields[:4]:
            array(token.slot, name)[...] = getattr(found, name)[rows]
        array(token.slot, "version")[...] = version
