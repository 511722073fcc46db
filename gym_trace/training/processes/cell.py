"""The processes of one policy: its learner and its workers. Who dies is started again."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from gym_trace.collecting.executor import (
    UNGUARDED,
    UNGUARDED_CODE,
    WORKER_NAME,
    carried,
    settle,
    started_quietly,
)
from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TraceError, TrainingFailed, told
from gym_trace.training.processes.actor import Actor, act
from gym_trace.training.processes.inference import Desk, Serving, desk_fields, serve
from gym_trace.training.processes.learner import Learning, learn
from gym_trace.training.processes.shared import Rooms, Slots, Weights
from gym_trace.training.rollouts import Shape
from gym_trace.training.settings import Settings

_MOST_BACKOFF = 30.0  # seconds
_MOST_FAILURES = 3  # one after the other, without a rollout or an update in between
_PATIENCE = 20.0  # seconds that processes have to save what they have
_PRELOADED = [
    *("gym_trace.training.processes.actor", "gym_trace.training.processes.learner"),
    "torch._dynamo",  # which PyTorch imports when an optimizer is made
]
_context = multiprocessing.get_context("forkserver")

Message = tuple[str, int, str, Any]  # who ("worker" or "learner"), its number, what kind, and what it says


@dataclass
class Member:
    """A process, as the driver knows it.

    state: "starting", "running", "waiting" (for a slot), "ended", "dead" (to be started again).
    trouble: what it has died of. fatal: as what to raise that, if another attempt would meet it again.
    """

    state: str = "starting"
    process: Any = None
    control: Connection | None = None
    life: int = 0
    restarts: int = 0
    failures: int = 0
    heard: float = 0.0
    due: float = 0.0
    trouble: str = ""
    fatal: type[TraceError] | None = None

    @property
    def is_alive(self) -> bool:
        return self.process is not None


class Cell:
    """Starts and hears processes, until the learner says that it has ended, or it is stopped.

    Args:
        learning, actor: what they are told; slots, pipes, numbers and lives are set here.
        weights: bytes of the network's. seed: of the actions that a server draws.
        event: called with a kind and facts, of whatever happens.
    """

    def __init__(
        self,
        learning: Callable[..., Learning],
        actor: Callable[..., Actor],
        settings: Settings,
        shape: Shape,
        weights: int,
        seed: int,
        *,
        event: Callable[..., None],
        stall_timeout: float,
        max_restarts: int,
        name: str,
        niceness: int = 0,
        cpus: list[int] | None = None,
    ):
        self._learning, self._actor, self._settings = learning, actor, settings
        self._shape, self._size, self._seed = shape, weights, seed
        self._event, self._stall_timeout, self._max_restarts = event, stall_timeout, max_restarts
        self._name, self._niceness, self._cpus = name, niceness, cpus
        self.learner, self.workers = Member(), [Member() for _ in range(settings.workers)]
        self.server: Member | None = Member() if settings.inference == "server" else None
        self.restarts, self.trouble = 0, ""
        self.stopping = False
        self._shaping: dict[str, float] | None = settings.reward_shaping
        self._pipes: list[Connection] = []  # our ends
        self._lives = 0  # of the cell, so that the seeds of workers are new after each

    # -- beginnings ---------------------------------------------------------------------------------------------------

    def prepare(self) -> threading.Thread:
        """Has the process that the others are forked from import what they need; over when they can be started.

        In a thread, as that takes up to a minute on a busy machine, in which nothing else could be heard.
        """
        thread = threading.Thread(target=self._prepare, daemon=True)
        thread.start()
        return thread

    def _prepare(self) -> None:
        _context.set_forkserver_preload(_PRELOADED)
        process = _context.Process(target=_nothing, name=f"{WORKER_NAME} {self._name} first", daemon=True)
        with started_quietly():
            process.start()
        process.join()

    def start(self) -> None:
        """Everything anew, from the log of the run."""
        settings = self._settings
        self._slots = Slots(self._shape, settings.workers * settings.splits * settings.slots_per_split)
        self._weights = Weights(self._size)
        self._full, full_in = _context.Pipe(duplex=False)
        self._full_in = full_in
        pipes = [_context.Pipe(duplex=False) for _ in self.workers]
        self._frees = [reader for reader, _ in pipes]
        self._pipes = [self._full, full_in, *self._frees]
        ours, theirs = _context.Pipe()
        told_ = self._learning(
            slots=self._slots, weights=self._weights, full=self._full, frees=[w for _, w in pipes], control=theirs
        )
        self._run(self.learner, ours, theirs, _learn, (told_, self._niceness), "learner")
        for _, writer in pipes:  # a worker is to see that the learner is gone
            writer.close()
        self._lives += 1
        self._desk: Desk | None = None
        if self.server is not None:
            self._start_server(self.server)
        for number, worker in enumerate(self.workers):
            worker.life = 0
            self._start_worker(number)

    def _start_server(self, server: Member) -> None:
        settings = self._settings
        requests, requests_in = _context.Pipe(duplex=False)
        pipes = [_context.Pipe(duplex=False) for _ in self.workers]
        rooms = Rooms(desk_fields(self._shape), settings.workers * settings.splits)
        answered = [reader for reader, _ in pipes]
        self._desk = Desk(rooms, requests_in, answered)
        ours, theirs = _context.Pipe()
        answers = [writer for _, writer in pipes]
        seed = self._seed + (self._lives << 32)
        told_ = Serving(settings, self._shape, self._weights, rooms, requests, answers, theirs, seed)
        self._run(server, ours, theirs, _serve, (told_, self._niceness), "server")
        for writer in answers:  # a worker is to see that the server is gone
            writer.close()
        self._pipes += [requests, requests_in, *answered]

    def _start_worker(self, number: int) -> None:
        worker = self.workers[number]
        ours, theirs = _context.Pipe()
        told_ = self._actor(
            number=number,
            life=worker.life,
            slots=self._slots,
            weights=self._weights,
            free=self._frees[number],
            full=self._full_in,
            control=theirs,
            desk=self._desk,
        )
        settings = replace(told_.settings, reward_shaping=self._shaping)
        seed = told_.seed + (self._lives - 1 << 32)
        told_ = replace(told_, make_env=carried(told_.make_env), settings=settings, seed=seed)
        cpu = None if not self._cpus else self._cpus[number % len(self._cpus)]
        self._run(worker, ours, theirs, _act, (told_, self._niceness, cpu), f"{number}")

    def _run(self, member: Member, ours: Connection, theirs: Connection, body: Any, args: Any, name: str) -> None:
        process = _context.Process(target=body, args=args, name=f"{WORKER_NAME} {self._name} {name}")
        try:
            with started_quietly():
                process.start()
        finally:
            theirs.close()
        member.state, member.process, member.control = "starting", process, ours
        member.heard = time.monotonic()

    # -- what is heard ------------------------------------------------------------------------------------------------

    def waitables(self) -> list[Any]:
        """What becomes ready when there is something to hear."""
        alive = [member for member in self._members() if member.is_alive]
        return [thing for member in alive for thing in (member.control, member.process.sentinel)]

    def _members(self) -> Iterator[Member]:
        yield self.learner
        if self.server is not None:
            yield self.server
        yield from self.workers

    def poll(self) -> Iterator[Message]:
        """What there is to hear; starts again what has died. Raises TrainingFailed, InvalidOption."""
        yield from self._hear("learner", 0, self.learner)
        if self.server is not None:
            for _ in self._hear("server", 0, self.server):
                pass
        for who, member in (("learner", self.learner), ("server", self.server)):
            if member is not None and member.state == "dead":
                self._core_died(who, member)
                return
        for number, worker in enumerate(self.workers):
            yield from self._hear("worker", number, worker)
            if worker.state == "dead" and not self.stopping:
                self._worker_died(number)
        now = time.monotonic()
        for number, worker in enumerate(self.workers):
            if worker.is_alive and not self.stopping and now - worker.heard > self._stall_timeout:
                worker.trouble = f"no sign of life for {self._stall_timeout:g} s (stall_timeout)"
                self._end_now(worker)
                self._worker_died(number)
            elif worker.state == "due" and now >= worker.due and not self.stopping:
                worker.life += 1
                self.tell(("restarted", (number, worker.life)))
                self._start_worker(number)

    def _hear(self, who: str, number: int, member: Member) -> Iterator[Message]:
        if not member.is_alive:
            return
        gone = not member.process.is_alive()
        assert member.control is not None
        try:
            while member.control.poll():
                kind, fact = member.control.recv()
                member.heard = time.monotonic()
                if kind == "failed":
                    (member.fatal, member.trouble), member.state = fact, "failing"
                elif kind in ("collected", "update"):
                    member.failures, member.state = 0, "running"
                else:
                    member.state = kind
                yield who, number, kind, fact
        except (EOFError, OSError):
            gone = True
        if gone:
            member.process.join()
            code = member.process.exitcode
            self._forget(member)
            if code == UNGUARDED_CODE:
                raise InvalidOption(UNGUARDED)
            if member.state != "ended":
                member.trouble = member.trouble or f"it ended with exit code {code}{_signal(code)}"
                member.state = "dead"

    def tell(self, message: Any) -> None:
        """Says something to the learner."""
        with contextlib.suppress(OSError):  # it is gone, which poll() sees
            if self.learner.control is not None:
                self.learner.control.send(message)

    def shape_rewards(self, shaping: dict[str, float] | None) -> None:
        """From now on, where an episode begins: of the workers there are, and of those that are started."""
        if shaping != self._shaping:
            self._shaping = shaping
            for worker in self.workers:
                with contextlib.suppress(OSError):  # it is gone, which poll() sees
                    if worker.control is not None:
                        worker.control.send(shaping)

    # -- deaths -------------------------------------------------------------------------------------------------------

    def _worker_died(self, number: int) -> None:
        worker = self.workers[number]
        self._count(worker, "worker", number)
        worker.state = "due"
        worker.due = time.monotonic() + min(_MOST_BACKOFF, 0.05 * 2.0**worker.failures)
        worker.trouble = ""

    def _core_died(self, who: str, member: Member) -> None:
        """What the learner had not logged is not learnt; all begin again from what it had."""
        if self.stopping and member is not self.learner:
            member.state = "ended"
            return
        for other in self._members():
            self._end_now(other)
            other.state = "starting"
        self._close_pipes()
        if self.stopping:
            raise TrainingFailed(f"the learner ended before it had saved what it had: {_last_line(member.trouble)}")
        self._count(member, who, 0)
        member.trouble = ""
        self.start()

    def _count(self, member: Member, who: str, number: int) -> None:
        reason = _last_line(member.trouble)
        self.trouble = f"{who} {number}: {reason}"
        if member.fatal is not None:
            raise member.fatal(self.trouble)
        member.failures += 1
        enough = ""
        if member.failures > _MOST_FAILURES:
            enough = f"it failed {member.failures} times without getting anything done"
        elif self.restarts >= self._max_restarts:
            enough = f"max_restarts={self._max_restarts} allows no more restarts"
        event = "death" if enough else "restart"
        self._event(event, who=who, number=number, reason=reason, traceback=member.trouble)
        if enough:
            where = "; events.jsonl of the run has the traceback" if "Traceback" in member.trouble else ""
            raise TrainingFailed(f"{self.trouble}; {enough}{where}")
        self.restarts += 1
        member.restarts += 1

    def _end_now(self, member: Member) -> None:
        if member.is_alive:
            member.process.kill()
            member.process.join()
            self._forget(member)

    def _forget(self, member: Member) -> None:
        if member.control is not None:
            member.control.close()
        member.process.close()
        member.process = member.control = None

    # -- ends ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Has the learner save and end, and after it the workers; see is_over."""
        if not self.stopping:
            self.stopping = True
            self._deadline = time.monotonic() + _PATIENCE
            if self.learner.state == "starting":  # it has nothing to save, and hears nothing for a while
                self.close()
            self.tell(("stop", None))

    def end_workers(self) -> None:
        """Once the learner has ended."""
        self.stopping = True
        self._deadline = time.monotonic() + _PATIENCE
        for member in self._members():
            with contextlib.suppress(OSError):
                if member is not self.learner and member.control is not None:
                    member.control.send(None)

    @property
    def is_over(self) -> bool:
        """Whether no process runs any more. Those that do not end in time are ended."""
        if self.stopping and time.monotonic() > self._deadline:
            for member in self._members():
                self._end_now(member)
        return not any(member.is_alive for member in self._members())

    def close(self) -> None:
        """Ends at once what still runs."""
        for member in self._members():
            self._end_now(member)
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def _signal(code: int) -> str:
    known = [number for number in signal.Signals if number == -code]
    return f" ({known[0].name})" if known else ""


def _last_line(trouble: str) -> str:
    return trouble.strip().splitlines()[-1] if trouble.strip() else "unknown"


def _nothing() -> None:
    """What the first process does."""


def _learn(told_: Learning, niceness: int) -> None:
    settle(niceness)
    with _reported(told_.control):
        learn(told_)


def _act(told_: Actor, niceness: int, cpu: int | None) -> None:
    settle(niceness, cpu)
    with _reported(told_.control):
        act(told_)
        told_.control.send(("ended", None))  # not after it has failed, or nobody would start it again


def _serve(told_: Serving, niceness: int) -> None:
    settle(niceness)
    with _reported(told_.control):
        serve(told_)
        told_.control.send(("ended", None))


@contextlib.contextmanager
def _reported(control: Connection) -> Iterator[None]:
    """Has the driver say what was raised."""
    import traceback

    try:
        yield
    except (TrainingFailed, CorruptTrace, InvalidOption, RecordingError) as error:  # which would come again
        kind = CorruptTrace if isinstance(error, CorruptTrace) else TrainingFailed
        with contextlib.suppress(OSError):
            control.send(("failed", (kind, " ".join(str(error).split()))))
    except BaseException as error:  # such as SystemExit, which an environment may raise
        with contextlib.suppress(OSError):
            control.send(("failed", (None, f"{traceback.format_exc()}\n{told(error)}")))
