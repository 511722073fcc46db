"""Worker processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from gym_trace.errors import InvalidOption
from gym_trace.printable import error_text
from gym_trace.recording.processes.fleet import Job, Key, Lost, lost_by, move_to
from gym_trace.recording.processes.safe_start import forget_safe_path, started_safely, variables_set

# One thread per worker: their libraries must not use all processors each.
_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
_NAME = "gym-trace worker"  # prefix of every process name
_UNGUARDED_CODE = 93  # exit code of a worker whose import of the script began a run
_UNGUARDED = (
    "workers import the script that starts them, and this one starts a run when it is imported: put what it does under "
    'if __name__ == "__main__":'
)
# Signals that reach whole groups of processes.
_STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class LocalProcesses:
    """Backend of new processes on this machine, which inherit no state of this one.

    Args:
        method: "spawn"; or "forkserver", which starts faster once prepare() has imported modules.
        variables: set in the environment of new processes unless they are set here; default: one thread each.
    """

    def __init__(self, method: str = "spawn", variables: dict[str, str] = _ONE_THREAD) -> None:
        self._context: Any = multiprocessing.get_context(method)
        self._variables = variables
        self._workers: dict[Key, tuple[Any, Connection]] = {}
        self._failed_starts: list[Key] = []
        self._raised: dict[Key, Lost] = {}

    def prepare(self, modules: Sequence[str]) -> None:
        """Import modules in the fork server; return when workers can start. Takes up to a minute on a busy machine."""
        self._context.set_forkserver_preload(list(modules))
        process = self._context.Process(target=_nothing, name=f"{_NAME} first", daemon=True)
        with _started_quietly(self._variables):
            process.start()
        process.join()

    def start(self, key: Key, job: Job) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(theirs, job), name=f"{_NAME} {job.name}")
        try:
            with _started_quietly(self._variables):
                process.start()
        except BrokenPipeError:  # killed before it had received its job
            ours.close()
            self._failed_starts.append(key)
        else:
            self._workers[key] = process, ours
        finally:
            theirs.close()

    def send(self, key: Key, message: Any) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has ended: poll() reports that
            self._workers[key][1].send(message)

    def poll(self, seconds: float) -> list[tuple[Key, Any]]:
        lost_at_start = Lost("its process ended while it started")
        messages: list[tuple[Key, Any]] = [(key, lost_at_start) for key in self._failed_starts]
        self._failed_starts = []
        # Wait for processes and for pipes: processes of an environment may hold the pipe of a dead worker open.
        sources = [part for process, connection in self._workers.values() for part in (process.sentinel, connection)]
        wait(sources, 0 if messages else seconds)
        for key, (process, connection) in list(self._workers.items()):
            gone = not process.is_alive()
            try:
                while connection.poll():
                    message = connection.recv()
                    if isinstance(message, Lost):  # reported once the process has ended
                        self._raised[key] = message
                    else:
                        messages.append((key, message))
            except (EOFError, OSError):
                gone = True
            if gone:
                lost, code = self._raised.get(key), self._end(key)
                if code == _UNGUARDED_CODE:
                    raise InvalidOption(_UNGUARDED)
                messages.append((key, lost or Lost(f"its process ended with exit code {code}{_signal_name(code)}")))
        return messages

    def kill(self, key: Key, is_last: bool = False) -> None:
        if key in self._workers:
            self._workers[key][0].kill()
            self._end(key)

    def _end(self, key: Key) -> int:
        process, connection = self._workers.pop(key)
        self._raised.pop(key, None)
        connection.close()
        process.join()
        code: int = process.exitcode
        process.close()
        return code


def _nothing() -> None:
    """Body of the first process of a fork server."""


def _run(connection: Connection, job: Job) -> None:
    """Run a job in its process, and report what it raises."""
    _enter_job(job.niceness, job.cpu)
    try:
        job.body(connection, *job.args)
    except BaseException as error:  # also SystemExit, which an environment may raise
        with contextlib.suppress(OSError):  # the parent is gone
            connection.send(lost_by(error))


def _enter_job(niceness: int, cpu: int | None) -> None:
    """Leave stop signals to the parent, and move to the processor of the job."""
    forget_safe_path()
    for number in _STOP_SIGNALS:  # the parent sends a message instead
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)  # processes of the environment must not inherit this
    move_to(niceness, cpu)


def has_parent(connection: Any = None) -> bool:
    """Return True unless the process that started this one has ended. connection: in Ray actors, it decides."""
    if (own_check := getattr(connection, "has_parent", None)) is not None:
        return bool(own_check())
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def exit_after(seconds: float) -> None:
    """End this process after some time, even if its environment hangs."""

    def leave() -> None:
        time.sleep(seconds)
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def end_if_unguarded() -> None:
    """End a worker that would begin a run while it imports the script, before it has a job."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False) and process.name.startswith(_NAME):
        os._exit(_UNGUARDED_CODE)  # an exception would have another exit code in a fork server


class _Carried:
    """Stand-in for a callable that pickle rejects, such as a lambda; cloudpickle pickles it."""

    def __init__(self, called: Any):
        self._wrapped = CloudpickleWrapper(called)

    def __call__(self, *args: Any) -> Any:
        return self._wrapped.fn(*args)


def portable(name: str, called: Any) -> Any:
    """Return the callable, or a stand-in that other processes can unpickle. Raises InvalidOption."""
    if _main_is_a_file():  # otherwise a fresh process would not find what is defined there
        try:
            ForkingPickler.dumps(called)
            return called
        except Exception:  # user objects define how they are pickled
            pass
    try:
        stand_in = _Carried(called)
        ForkingPickler.loads(ForkingPickler.dumps(stand_in))  # an old cloudpickle may not load what it wrote
    except Exception as error:  # user objects define how they are pickled
        raise InvalidOption(f"{name}: not picklable ({error_text(error)}); pass a module-level function") from error
    return stand_in


@contextmanager
def _started_quietly(variables: dict[str, str]) -> Iterator[None]:
    """Start processes in the block with these variables, and safe from Ctrl-C until they run their job."""
    with variables_set(variables), started_safely(), _held_back(_STOP_SIGNALS), _without_false_main():
        yield


def _main_is_a_file() -> bool:
    return os.path.isfile(getattr(sys.modules["__main__"], "__file__", None) or "")


@contextmanager
def _without_false_main() -> Iterator[None]:
    """Keep processes started in the block from looking for a script that is not a file, such as <stdin>."""
    main = vars(sys.modules["__main__"])
    hidden = {} if _main_is_a_file() or "__file__" not in main else {"__file__": main.pop("__file__")}
    try:
        yield
    finally:
        main.update(hidden)


@contextmanager
def _held_back(signals: tuple[int, ...]) -> Iterator[None]:
    """Block signals, also in processes started in the block, until these unblock them.

    A signal to the whole group would end a process that does not ignore it yet.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its first use would unblock some of them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(code: int) -> str:
    names = [number.name for number in signal.Signals if number == -code]
    return f" ({names[0]})" if names else ""
