"""Processes of one policy: its learner and its workers, restarted on death; or both in turns in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import gymnasium

from gym_trace.errors import CorruptTrace, InvalidOption, RecordingError, TrainingFailed
from gym_trace.recording.processes.fleet import Fleet, Job, Key, Lost, Member
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.training.processes.actor import Actor, RolloutWorker, act
from gym_trace.training.processes.inference import InferenceClient, client_fields, serve
from gym_trace.training.processes.learner import LearnerProcess, learn
from gym_trace.training.processes.shared import PolicyTask, RolloutBuffer, SharedArrays, Weights

_MAX_FAILURES = 3
_SAVE_SECONDS = 20.0  # in which processes save everything
_PRELOADED = [
    *("gym_trace.training.processes.actor", "gym_trace.training.processes.learner"),
    "torch._dynamo",  # PyTorch imports it when an optimizer is made
]
_FATAL = (TrainingFailed, CorruptTrace, InvalidOption, RecordingError)  # errors that a restart would repeat
_LEARNER, _SERVER = "learner", "server"  # keys; those of workers are their numbers

ProcessReport = tuple[str, int, str, Any]  # "worker" or "learner", its number, kind, fact


class PolicyProcesses:
    """Start the processes of a policy, and receive their reports, until the learner ends or they are stopped.

    The processes share memory, so they run on this machine.

    Args:
        event: called with kind and facts for each entry of the event log.
        name: prefix of the process names.
    """

    def __init__(
        self,
        task: PolicyTask,
        make_env: Callable[[], gymnasium.Env[Any, Any]],
        *,
        event: Callable[..., None],
        stall_timeout: float,
        max_restarts: int,
        name: str = "",
        niceness: int = 0,
        cpus: Sequence[int] | None = None,
    ):
        settings = task.settings
        self._task, self._settings, self._make_env = task, settings, make_env
        self._event, self._name, self._niceness, self._cpus = event, name, niceness, cpus
        self.learner, self.workers = Member(is_watched=False), [Member() for _ in range(settings.workers)]
        self._members: dict[Key, Member] = {_LEARNER: self.learner}
        if settings.inference == "server":
            self._members[_SERVER] = Member(is_watched=False)
        self._members.update(enumerate(self.workers))
        self._processes = LocalProcesses("forkserver")
        self._fleet = Fleet(
            self._processes,
            self._members,
            stall_timeout=stall_timeout,
            max_restarts=max_restarts,
            max_failures=_MAX_FAILURES,
        )
        self.trouble = ""
        self.stopping = False
        self._shaping = settings.reward_shaping
        self._last_crash, self._crashes = ("", 0), 0  # error and step of an environment; how many in a row
        self._pipes: list[Connection] = []  # our ends
        self._lives = task.life  # number of starts of everything; each has its own seeds

    # -- start --------------------------------------------------------------------------------------------------------

    def prepare(self) -> threading.Thread:
        """Import modules in the fork server, in a thread that ends when processes can start."""
        thread = threading.Thread(target=self._processes.prepare, args=(_PRELOADED,), daemon=True)
        thread.start()
        return thread

    def start(self) -> None:
        """Start everything from scratch, from the log of the run."""
        task, settings = self._task, self._settings
        self._buffer = RolloutBuffer(task.shape, settings.workers * settings.splits * settings.slots_per_split)
        self._weights = Weights(task.weights)
        full, self._full_in = Pipe(duplex=False)
        pipes = [Pipe(duplex=False) for _ in self.workers]
        self._frees = [reader for reader, _ in pipes]
        self._pipes = [full, self._full_in, *self._frees]
        self._run(_LEARNER, learn, task, self._buffer, self._weights, full, [writer for _, writer in pipes])
        for _, writer in pipes:  # a worker must notice the end of the learner
            writer.close()
        self._lives += 1
        self._client: InferenceClient | None = None
        if _SERVER in self._members:
            self._start_server()
        self._worker_lives = [0] * len(self.workers)
        for number in range(len(self.workers)):
            self._start_worker(number)

    def _start_server(self) -> None:
        settings = self._settings
        requests, requests_in = Pipe(duplex=False)
        pipes = [Pipe(duplex=False) for _ in self.workers]
        arrays = SharedArrays(client_fields(self._task.shape), settings.workers * settings.splits)
        answer_readers = [reader for reader, _ in pipes]
        self._client = InferenceClient(arrays, requests_in, answer_readers)
        answer_writers = [writer for _, writer in pipes]
        seed = self._task.seed + (self._lives << 32)
        self._run(_SERVER, serve, self._task, self._weights, arrays, requests, answer_writers, seed)
        for writer in answer_writers:  # a worker must notice the end of the server
            writer.close()
        self._pipes += [requests, requests_in, *answer_readers]

    def _start_worker(self, number: int) -> None:
        settings = replace(self._settings, reward_shaping=self._shaping)
        task = replace(self._task, settings=settings, seed=self._task.seed + (self._lives - 1 << 32))
        links = self._buffer, self._weights, self._frees[number], self._full_in, self._client
        cpu = None if not self._cpus else self._cpus[number % len(self._cpus)]
        self._run(number, act, Actor(task, self._make_env, number, self._worker_lives[number], *links), cpu=cpu)

    def _run(self, key: Key, body: Callable[..., None], *args: Any, cpu: int | None = None) -> None:
        self._fleet.start(key, Job(f"{self._name} {key}".strip(), body, args, self._niceness, cpu))

    # -- messages -----------------------------------------------------------------------------------------------------

    @property
    def restarts(self) -> int:
        return self._fleet.restarts

    def poll(self, seconds: float) -> Iterator[ProcessReport]:
        """Yield messages, waiting up to `seconds`; restart dead processes. Raises TrainingFailed, InvalidOption."""
        for key, message in self._fleet.poll(seconds):
            member = self._members[key]
            if isinstance(message, Lost):
                if member.state != "ended":
                    self._lost(key, message)
                continue
            kind, fact = message
            if kind == "crashed":
                self._crashed(*fact)
                continue
            member.state = "running" if kind in ("collected", "update") else kind
            if kind in ("collected", "update"):
                member.failures = 0
            if key == _LEARNER:
                yield _LEARNER, 0, kind, fact
            elif isinstance(key, int):
                yield "worker", key, kind, fact
        for number in [] if self.stopping else self._fleet.due():
            worker = int(number)
            self._worker_lives[worker] += 1
            self.tell(("restarted", (worker, self._worker_lives[worker])))
            self._start_worker(worker)

    def tell(self, message: Any) -> None:
        """Send a message to the learner."""
        self._fleet.send(_LEARNER, message)

    def shape_rewards(self, shaping: dict[str, float] | None) -> None:
        """Change the reward shaping of all workers, from their next episodes on."""
        if shaping != self._shaping:
            self._shaping = shaping
            for number in range(len(self.workers)):
                self._fleet.send(number, shaping)

    # -- losses -------------------------------------------------------------------------------------------------------

    def _crashed(self, error: str, step: int, is_passed: bool) -> None:
        """Count consecutive crashes with the same error in the same step, unless an episode got past it."""
        self._crashes = 0 if is_passed else self._crashes + 1 if (error, step) == self._last_crash else 1
        self._last_crash = error, step

    def _lost(self, key: Key, lost: Lost) -> None:
        """Restart a worker; if the learner or the server was lost, restart everything from the log."""
        is_core = key in (_LEARNER, _SERVER)
        if self.stopping and key != _LEARNER:
            self._members[key].state = "ended"
            return
        if is_core:
            self._fleet.close()
            self._close_pipes()
        if self.stopping:
            raise TrainingFailed(f"the learner ended before it had saved everything: {lost.reason}")
        self.trouble = f"{key} 0: {lost.reason}" if is_core else f"worker {key}: {lost.reason}"
        if lost.kind is not None and issubclass(lost.kind, _FATAL):
            kind = CorruptTrace if issubclass(lost.kind, CorruptTrace) else TrainingFailed
            raise kind(self.trouble)
        reason_against = self._fleet.retry(key)
        if self._crashes > _MAX_FAILURES:
            reason_against = f"it failed {self._crashes} times in this step, and no episode got past it"
        who, number = (key, 0) if is_core else ("worker", key)
        self._event("death" if reason_against else "restart", who=who, number=number, reason=lost.reason,
                    traceback=lost.traceback)  # fmt: skip
        if reason_against:
            per_failure = f" of each of its {self._fleet.restarts + 1} failures" if self._fleet.restarts else ""
            hint = f"; events.jsonl of the run has the traceback{per_failure}" if lost.traceback else ""
            raise TrainingFailed(f"{self.trouble}; {reason_against}{hint}")
        if is_core:
            self.start()

    # -- stop ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the learner to save and end; the workers follow. See is_over."""
        if not self.stopping:
            self.stopping = True
            self._deadline = time.monotonic() + _SAVE_SECONDS
            if self.learner.state == "starting":  # it has nothing to save, and does not listen yet
                self.close()
            self.tell(("stop", None))

    def end_workers(self) -> None:
        """Stop the other processes when the learner has ended."""
        self.stopping = True
        self._deadline = time.monotonic() + _SAVE_SECONDS
        for key in self._members:
            if key != _LEARNER:
                self._fleet.send(key, None)

    @property
    def is_over(self) -> bool:
        """Return True if no process runs. After the deadline, those that still run are killed."""
        if self.stopping and time.monotonic() > self._deadline:
            self._fleet.close()
        return not any(member.is_alive for member in self._members.values())

    def close(self) -> None:
        """Kill all processes."""
        self._fleet.close()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.close()


# -- without processes ------------------------------------------------------------------------------------------------


class InlineProcesses:
    """PolicyProcesses without processes, for a debugger or a profiler: nothing is restarted.

    Errors are raised as they are, except for observations and rewards of the wrong form: TrainingFailed says which.
    """

    def __init__(self, task: PolicyTask, make_env: Callable[[], gymnasium.Env[Any, Any]]):
        self._task, self._make_env = task, make_env
        self.workers, self.restarts, self.trouble = [Member("running")], 0, ""
        self.stopping = self.is_over = False
        self._reports: list[ProcessReport] = []
        self._pipes: list[Connection] = []
        self._learner: LearnerProcess | None = None
        self._worker: RolloutWorker | None = None
        self._shaping = task.settings.reward_shaping
        self._rollouts: Generator[None] = (none for none in list[None]())

    def prepare(self) -> None:
        """Do nothing: there is no process to wait for."""

    def start(self) -> None:
        task, settings = self._task, self._task.settings
        (full, full_in), (free, free_in), (orders, self._orders) = (Pipe(duplex=False) for _ in range(3))
        self._pipes = [full, full_in, free, free_in, orders, self._orders]
        buffer, weights = RolloutBuffer(task.shape, settings.splits * settings.slots_per_split), Weights(task.weights)
        control: Any = _Control(_LEARNER, orders, self._reports)
        self._learner = LearnerProcess(control, task, buffer, weights, full, [free_in])
        self._learner.begin()
        control = _Control("worker", orders, self._reports)
        worker_task = replace(task, seed=task.seed + (task.life << 32))
        self._worker = RolloutWorker(Actor(worker_task, self._make_env, 0, 0, buffer, weights, free, full_in), control)
        self._worker.shaping = self._shaping
        self._rollouts = self._worker.rollouts()

    def shape_rewards(self, shaping: dict[str, float] | None) -> None:
        """Change the reward shaping from the next episode on."""
        self._shaping = shaping
        if self._worker is not None:
            self._worker.shaping = shaping

    def poll(self, seconds: float) -> Iterator[ProcessReport]:
        """Collect a rollout, and make an update if there is enough for one. Never waits."""
        if not self.is_over and self._learner is not None:
            self.is_over = True  # if the rest raises
            if self._worker is not None and self._learner.continues and not self.stopping:
                try:
                    next(self._rollouts)
                except Exception as error:
                    self._worker.raise_for_misfit(error)
                    raise
            self.is_over = not self._learner.turn()
        reports, self._reports[:] = list(self._reports), []
        yield from reports

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

    def __init__(self, who: str, orders: Connection, reports: list[ProcessReport]):
        self.fileno, self.recv = orders.fileno, orders.recv
        self._who, self._reports = who, reports

    def send(self, message: tuple[str, Any]) -> None:
        self._reports.append((self._who, 0, *message))
