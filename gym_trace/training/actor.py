"""What a worker process does: steps vector environments with the policy, records, and hands rollouts over."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import ClipAction

from gym_trace.envs.seeding import episode_seed
from gym_trace.model.returns import LaneReturns, Return
from gym_trace.model.values import Array
from gym_trace.recording.provenance import recorded_by
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper
from gym_trace.ring.lanes.autoreset import DISABLED
from gym_trace.training.forms import picked
from gym_trace.training.model import ActorCritic, set_weights, tensors
from gym_trace.training.rollouts import STATE, Origin, Rollout, Shape
from gym_trace.training.settings import ANY, Settings
from gym_trace.training.shared import Slots, Token, Weights, has_more, put, take

_LOOK_SECONDS = 1.0  # between signs of life, while there is no free slot
_ORPHANED_SECONDS = 5.0  # that a worker has to save what it has when its parent is gone


@dataclass(frozen=True)
class Actor:
    """What a worker is told. Picklable, as make_env has to be.

    number, life: which worker, and how often it was started again.
    free: slots that it may fill. full: those that it has filled. control: of the driver, and back.
    """

    number: int
    life: int
    make_env: Callable[[], gymnasium.Env[Any, Any]]
    settings: Settings
    shape: Shape
    slots: Slots
    weights: Weights
    free: Connection
    full: Connection
    control: Connection
    directory: str
    seed: int
    provenance: dict[str, Any] = field(default_factory=dict)


class Collected(NamedTuple):
    """What a worker says of a rollout: the returns and lengths of episodes that ended, and seconds spent."""

    steps: int
    episodes: tuple[tuple[Return, int], ...]
    seconds: dict[str, float]


def clipped(make_env: Callable[[], gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any]:
    """The environment, which clips continuous actions: the trace has them as they were drawn, as is learnt from."""
    env = make_env()
    return ClipAction(env) if isinstance(env.action_space, Box) else env


class Stopped(Exception):
    """The driver wants no more, or is gone."""


class Worker:
    """Runs in a process of its own, until it is told to end."""

    def __init__(self, actor: Actor):
        self._actor = actor
        self._over = threading.Event()
        self._model = ActorCritic(actor.shape.leaves, actor.shape.actions, actor.settings)
        self._room = np.empty(actor.weights.size, np.uint8)

    def listen(self) -> None:
        """Waits for the driver to say that it is over, or to be gone; in a thread of its own."""
        try:
            self._actor.control.recv()
        except (EOFError, OSError):
            threading.Thread(target=_exit_soon, daemon=True).start()
        self._over.set()

    def say(self, kind: str, fact: Any = None) -> None:
        try:
            self._actor.control.send((kind, fact))
        except OSError:
            self._over.set()

    def run(self) -> None:
        actor = self._actor
        splits: list[Split] = []
        try:
            for number in range(actor.settings.splits):
                splits.append(Split(actor, number))
            self.say("running")
            waiting: list[list[Token]] = [[] for _ in splits]
            for split in itertools.cycle(splits):
                token, waited = self._free_slot(waiting, split.number)
                version = self._read_weights(token.version)
                origin, told = split.collect(actor.slots.rollout(token.slot), self._model, version, self._over)
                actor.slots.set_origin(token.slot, origin)
                split.envs.secure()
                put(actor.full, token)
                self.say("collected", told._replace(seconds={**told.seconds, "waiting": waited}))
        except Stopped:
            pass
        finally:
            for split in splits:
                split.envs.close()

    def _free_slot(self, waiting: list[list[Token]], split: int) -> tuple[Token, float]:
        """Waits for one. Tokens of lives before this one are of no use any more."""
        actor, begin = self._actor, time.perf_counter()
        while not self._over.is_set():
            if waiting[split]:
                return waiting[split].pop(0), time.perf_counter() - begin
            if not has_more(actor.free, _LOOK_SECONDS):
                self.say("waiting")
                continue
            try:
                token = take(actor.free)
            except EOFError:  # the learner is gone, which the driver sees to
                self._over.wait(_LOOK_SECONDS)
                continue
            if token.life == actor.life:
                waiting[token.slot // actor.settings.slots_per_split % actor.settings.splits].append(token)
        raise Stopped

    def _read_weights(self, version: int) -> int:
        weights = self._actor.weights
        try:
            version = weights.read(self._room, None if self._actor.settings.lag == ANY else version)
        except LookupError:  # after a worker was started again
            version = weights.read(self._room)
        set_weights(self._model, self._room)
        return version


class Split:
    """A vector environment of a worker, which is recorded."""

    def __init__(self, actor: Actor, number: int):
        settings = actor.settings
        self.number, self._lanes, self._steps = number, settings.num_envs, settings.rollout
        self._form, self._leaves = actor.shape.actions, actor.shape.leaves
        self._writer = f"a{actor.number}-{number}-{actor.life}-{os.urandom(4).hex()}"
        roots = np.random.SeedSequence(actor.seed, spawn_key=(actor.number, actor.life, number)).generate_state(2)
        self._seeds = _seeds(int(roots[0]))
        self._generator = torch.Generator().manual_seed(int(roots[1]))
        envs = SyncVectorEnv([lambda: clipped(actor.make_env)] * self._lanes, autoreset_mode=DISABLED)
        try:
            with recorded_by(actor.provenance):
                self.envs = TraceRecordingVectorWrapper(envs, actor.directory, uid=self._writer, on_exist="append")
        except BaseException:
            envs.close()
            raise
        self._first_step = 0
        self._returns, self._lengths = LaneReturns(self._lanes), np.zeros(self._lanes, np.int64)
        self._state = np.zeros((self._lanes, actor.shape.state), np.float32)
        self._observations, _ = self.envs.reset(seed=[next(self._seeds) for _ in range(self._lanes)])
        if settings.stagger:
            self._stagger()

    def _stagger(self) -> None:
        """Steps at random, so that the lanes are not at the same step of their episodes when learning begins."""
        self.envs.action_space.seed(next(self._seeds))
        for step in range(self._steps):
            *_, over = self._step(self.envs.action_space.sample())
            here = np.arange(self._lanes) * self._steps // self._lanes == self._steps - 1 - step
            self._reset(over | here)

    def _step(self, actions: Any) -> tuple[Any, Array, Array, Array]:
        self._observations, rewards, terminations, truncations, _ = self.envs.step(actions)
        self._first_step += 1
        return rewards, terminations, truncations, terminations | truncations

    def _reset(self, lanes: Array) -> None:
        if lanes.any():
            seeds = [next(self._seeds) if lane else None for lane in lanes.tolist()]
            self._observations, _ = self.envs.reset(seed=seeds, options={"reset_mask": lanes})
            self._state[lanes] = 0.0

    @torch.inference_mode()
    def collect(
        self, rollout: Rollout, model: ActorCritic, version: int, over: threading.Event
    ) -> tuple[Origin, Collected]:
        """Fills a rollout. Raises Stopped."""
        first_step, ended = self._first_step, list[tuple[Return, int]]()
        acting, begin = 0.0, time.perf_counter()
        rollout.state[...] = self._state
        versions = np.full(self._lanes, version, np.int64)
        for step in range(self._steps):
            if over.is_set():
                raise Stopped
            before = time.perf_counter()
            observed = [picked(self._observations, leaf.path) for leaf in self._leaves]
            for column, rows in zip(rollout.observations, observed):
                column[step] = rows
            distribution, values, state = model(tensors(observed), torch.from_numpy(self._state))
            drawn = distribution.sample(self._generator)
            logprob = distribution.log_prob(drawn).numpy()
            notes = {"logprob": logprob, "value": model.value(values).numpy(), "version": versions}
            if step == 0 and self._state.size:
                notes[STATE] = self._state.copy()
            self._state = np.array(state.numpy())
            rollout.actions[step], rollout.logprob[step] = drawn.numpy(), logprob
            acting += time.perf_counter() - before
            self.envs.annotate(**notes)
            rewards, terminations, truncations, lanes = self._step(self._form.to_batch(rollout.actions[step]))
            rollout.rewards[step], rollout.terminations[step] = rewards, terminations
            rollout.truncations[step] = truncations
            self._returns.add(rewards, np.ones(self._lanes, bool))
            self._lengths += 1
            if lanes.any():
                for final, leaf in zip(rollout.finals, self._leaves):
                    final[step, truncations] = picked(self._observations, leaf.path)[truncations]
                ended.extend(zip(self._returns.take(lanes), self._lengths[lanes].tolist()))
                self._lengths[lanes] = 0
                self._reset(lanes)
        for column, leaf in zip(rollout.observations, self._leaves):
            column[self._steps] = picked(self._observations, leaf.path)
        stepping = time.perf_counter() - begin - acting
        told = Collected(self._steps * self._lanes, tuple(ended), {"acting": acting, "stepping": stepping})
        return Origin(self._writer, first_step, version), told


def _seeds(root: int) -> Iterator[int]:
    return (episode_seed(root, episode) for episode in itertools.count())


def _exit_soon() -> None:
    """Ends this process even if its environment hangs."""
    time.sleep(_ORPHANED_SECONDS)
    os._exit(1)


def act(actor: Actor) -> None:
    """The body of a worker process."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        return
    worker = Worker(actor)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.run()
