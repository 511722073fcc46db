"""Learner and worker of a policy that take turns in this process, for a debugger or a profiler."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any

from gym_trace.processes.fleet import Member
from gym_trace.training.processes.actor import Actor, Worker
from gym_trace.training.processes.cell import Message
from gym_trace.training.processes.learner import LearnerProcess, Learning
from gym_trace.training.processes.shared import Slots, Weights
from gym_trace.training.rollouts import Shape
from gym_trace.training.settings import Settings


class Turns:
    """Like Cell, without processes: errors are raised as they are, and nothing is restarted."""

    def __init__(
        self,
        learning: Callable[..., Learning],
        actor: Callable[..., Actor],
        settings: Settings,
        shape: Shape,
        weights: int,
        seed: int,
        **_: Any,
    ):
        self._learning, self._actor, self._settings = learning, actor, settings
        self._shape, self._size = shape, weights
        self.workers, self.restarts, self.trouble = [Member("running")], 0, ""
        self.stopping = self.is_over = False
        self._said: list[Message] = []
        self._pipes: list[Connection] = []
        self._learner: LearnerProcess | None = None
        self._worker: Worker | None = None
        self._shaping = settings.reward_shaping
        self._rollouts: Generator[None] = (none for none in list[None]())

    def prepare(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def start(self) -> None:
        settings = self._settings
        (full, full_in), (free, free_in), (orders, self._orders) = (
            multiprocessing.Pipe(duplex=False) for _ in range(3)
        )
        self._pipes = [full, full_in, free, free_in, orders, self._orders]
        slots = Slots(self._shape, settings.splits * settings.slots_per_split)
        weights: Any = Weights(self._size)
        learner: Any = _Control("learner", orders, self._said)
        self._learner = LearnerProcess(
            self._learning(slots=slots, weights=weights, full=full, frees=[free_in]), learner
        )
        self._learner.begin()
        control: Any = _Control("worker", orders, self._said)
        self._worker = Worker(
            self._actor(number=0, life=0, slots=slots, weights=weights, free=free, full=full_in), control
        )
        self._worker.shaping = self._shaping
        self._rollouts = self._worker.rollouts()

    def shape_rewards(self, shaping: dict[str, float] | None) -> None:
        """Change the reward shaping from the next episode on."""
        self._shaping = shaping
        if self._worker is not None:
            self._worker.shaping = shaping

    def poll(self, seconds: float) -> Iterator[Message]:
        """Collect a rollout, and make an update if there is enough for one. Never waits."""
        if not self.is_over and self._learner is not None:
            self.is_over = True  # if the rest raises
            if self._learner.goes_on and not self.stopping:
                next(self._rollouts)
            self.is_over = not self._learner.turn()
        said, self._said[:] = list(self._said), []
        yield from said

    def tell(self, message: Any) -> None:
        self._orders.send(message)

    def stop(self) -> None:
        if not self.stopping and not self.is_over:
            self.tell(("stop", None))
        self.stopping = True

    def end_workers(self) -> None:
        self.stopping = True

    def close(self) -> None:
        self._rollouts.close()
        if self._learner is not None:
            self._learner.close()
        for pipe in self._pipes:
            pipe.close()


class _Control:
    """Control connection of a learner or a worker in this process; it never blocks."""

    def __init__(self, who: str, orders: Connection, said: list[Message]):
        self.fileno, self.recv = orders.fileno, orders.recv
        self._who, self._said = who, said

    def send(self, message: tuple[str, Any]) -> None:
        self._said.append((self._who, 0, *message))
