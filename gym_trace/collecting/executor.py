"""Where workers run: processes of this machine, and what such a process does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from gymnasium.vector.utils import CloudpickleWrapper

from gym_trace.child_processes import forget_safe_path, started_safely, variables_set
from gym_trace.collecting.worker import Report, Setup, Worker
from gym_trace.errors import InvalidOption, told

# Each worker is one of several: their libraries are not to use all processors each.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
WORKER_NAME = "gym-trace worker"  # that of each process begins so
UNGUARDED_CODE = 93  # exit code of a worker whose import of the script began a run
UNGUARDED = (
    "workers import the script that starts them, and this one starts a run when it is imported: put what it does under "
    'if __name__ == "__main__":'
)
# Which reach whole groups of processes.
_STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Executor(Protocol):
    """Starts workers, passes messages, and ends them. Workers are named by numbers of the caller's choice."""

    def start(self, number: int, setup: Setup) -> None:
        """Starts a worker, which reports when it is ready."""

    def tell(self, number: int, episodes: list[int] | None) -> None:
        """Gives a worker episodes to do, or None: to save what it has and end."""

    def poll(self, seconds: float) -> list[tuple[int, Report | None]]:
        """What workers say, waiting for it at most so long; None of one that has ended, as its last word."""

    def stop(self, number: int) -> None:
        """Ends a worker at once, whatever it is doing; returns when it has ended."""


class ProcessExecutor:
    """Processes, started afresh (spawn), so that nothing of this one leaks into them."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, tuple[Any, Connection]] = {}
        self._stillborn: list[int] = []

    def start(self, number: int, setup: Setup) -> None:
        ours, theirs = self._context.Pipe()
        try:
            setup = replace(setup, make_env=carried(setup.make_env), make_policy=carried(setup.make_policy))
            process = self._context.Process(target=work, args=(theirs, setup), name=f"{WORKER_NAME} {number}")
            with started_quietly():
                process.start()
        except BrokenPipeError:  # it was killed before it was told what to do
            ours.close()
            self._stillborn.append(number)
        else:
            self._workers[number] = process, ours
        finally:
            theirs.close()

    def tell(self, number: int, episodes: list[int] | None) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has ended: poll() says so
            self._workers[number][1].send(episodes)

    def poll(self, seconds: float) -> list[tuple[int, Report | None]]:
        said: list[tuple[int, Report | None]] = [(number, None) for number in self._stillborn]
        self._stillborn = []
        # A process that has ended is told by itself: its pipe may be held open by processes of its environment.
        wait(
            [thing for process, connection in self._workers.values() for thing in (process.sentinel, connection)],
            0 if said else seconds,
        )
        for number, (process, connection) in list(self._workers.items()):
            gone = not process.is_alive()
            try:
                while connection.poll():
                    said.append((number, connection.recv()))
            except (EOFError, OSError):
                gone = True
            if gone:
                process.join()
                unguarded = process.exitcode == UNGUARDED_CODE
                self._forget(number)
                if unguarded:
                    raise InvalidOption(UNGUARDED)
                said.append((number, None))
        return said

    def stop(self, number: int) -> None:
        if number in self._workers:
            process, _ = self._workers[number]
            process.kill()
            process.join()
            self._forget(number)

    def _forget(self, number: int) -> None:
        process, connection = self._workers.pop(number)
        connection.close()
        process.close()


def work(connection: Connection, setup: Setup) -> None:
    """The body of a worker process."""
    settle(setup.niceness, setup.cpu)
    if setup.num_envs is None:
        worker = Worker(connection, setup)
    else:  # vector environments need a newer Gymnasium than the rest
        from gym_trace.collecting.vector_worker import VectorWorker

        worker = VectorWorker(connection, setup)
    threading.Thread(target=worker.listen, daemon=True).start()
    try:
        worker.run()
    except Exception:  # the parent says it
        worker.say("failed", traceback.format_exc())


def settle(niceness: int = 0, cpu: int | None = None) -> None:
    """Has a process that was started quietly leave signals to its parent, and run where it is to run."""
    forget_safe_path()
    for number in _STOP_SIGNALS:  # the parent tells us
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # what environments start is not to inherit this
    if niceness:
        os.nice(niceness)
    if cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})


class _Carried:
    """A callable that pickle cannot carry to another process, such as a lambda, in the wrapping that gymnasium has."""

    def __init__(self, called: Any):
        self._wrapped = CloudpickleWrapper(called)

    def __call__(self, *args: Any) -> Any:
        return self._wrapped.fn(*args)


def end_if_unguarded() -> None:
    """Ends a worker that would begin a run while it imports the script, before it has anything to do."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith(WORKER_NAME):
        os._exit(UNGUARDED_CODE)  # a forkserver would take what is raised for another end


def carried(called: Any) -> Any:
    """The callable, or a stand-in that another process can have. Raises whatever pickling it raises."""
    if _main_is_a_file():  # otherwise a fresh process would not find what is defined there
        try:
            ForkingPickler.dumps(called)
            return called
        except Exception:  # of many kinds, as objects have their own ways of being pickled
            pass
    stand_in = _Carried(called)
    ForkingPickler.dumps(stand_in)
    return stand_in


def check_portable(make_env: Any, policy: Any) -> None:
    """Raises InvalidOption if one of them cannot be carried to another process."""
    for name, called in (("make_env", make_env), ("policy", policy)):
        try:
            if isinstance(there := carried(called), _Carried):
                ForkingPickler.loads(ForkingPickler.dumps(there))  # an old cloudpickle may not take what it gave
        except Exception as error:  # as above
            raise InvalidOption(
                f"{name} cannot be carried to a worker process ({told(error)}): pass a function of a module, which "
                "makes what it needs by itself"
            ) from error


@contextmanager
def started_quietly() -> Iterator[None]:
    """Has processes that are started within it use a thread each, and not be ended by Ctrl-C before they settle()."""
    with variables_set(_ONE_THREAD), started_safely(), _held_back(_STOP_SIGNALS), _without_false_main():
        yield


def _main_is_a_file() -> bool:
    return os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")


@contextmanager
def _without_false_main() -> Iterator[None]:
    """Has processes that are started within it not look for a script that is no file, such as <stdin>."""
    main = vars(sys.modules["__main__"])
    hidden = {} if _main_is_a_file() or "__file__" not in main else {"__file__": main.pop("__file__")}
    try:
        yield
    finally:
        main.update(hidden)


@contextmanager
def _held_back(signals: tuple[int, ...]) -> Iterator[None]:
    """Has these signals wait, also for processes that are started within it, until those ask for them.

    They reach whole groups of processes, and would end one that is not yet ready to ignore them.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # which would let some of them through when it is first needed
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
