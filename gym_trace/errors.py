"""Exceptions raised by gym-trace.

TraceError
├── TraceNotFound        no trace at this path
├── TraceExists          the directory already holds a trace and on_exist="error"
├── CorruptTrace         a trace file is damaged; .path and .offset locate the damage
│   └── CorruptRun       a file of a training run is damaged
├── UnsupportedTrace     the trace needs a newer gym-trace
├── UnreadableRecording  a recording of another package is damaged or unsafe to read
├── RemoteError          a store did not respond, or rejected a request
├── RecordingError       the trace could not be written; __cause__ is the reason
├── UnstorableValue      a value cannot be stored exactly without pickle
├── ReplayDiverged       an action or a result differs from the recorded one
├── InvalidOption        an argument is invalid
├── EnvironmentUnavailable   the recorded environment cannot be rebuilt here
├── RenderingError       an image could not be rendered, or a video not written
├── TrainingFailed       training cannot continue
└── MissingExtra         an optional package is not installed

UnpublishedWarning       a recording to a URL is only on this machine so far
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from gym_trace.printable import printable, printable_lines

__all__ = [
    "CorruptRun",
    "CorruptTrace",
    "EnvironmentUnavailable",
    "InvalidOption",
    "MissingExtra",
    "RecordingError",
    "RemoteError",
    "RenderingError",
    "ReplayDiverged",
    "TraceError",
    "TraceExists",
    "TraceNotFound",
    "TrainingFailed",
    "UnpublishedWarning",
    "UnreadableRecording",
    "UnstorableValue",
    "UnsupportedTrace",
]


_INSIDE = ("gym_trace", "contextlib")  # modules of which a warning names no line


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line that called gym-trace."""
    level, frame = 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


class TraceError(Exception):
    """Base class of all errors that gym-trace raises on purpose.

    Messages may quote untrusted files. Control characters are escaped here, so that no message can control a terminal.

    Examples:
        >>> try:
        ...     gym_trace.open_trace("nowhere")
        ... except gym_trace.errors.TraceError as error:
        ...     print(type(error).__name__)
        TraceNotFound
    """

    def __init__(self, *args: object):
        super().__init__(*(printable_lines(arg) if isinstance(arg, str) else arg for arg in args))


class TraceNotFound(TraceError, FileNotFoundError):
    """No trace at the given path.

    Attributes:
        directory: the path if it is a directory without a trace; otherwise None.

    Examples:
        >>> try:
        ...     gym_trace.open_trace("nowhere")
        ... except gym_trace.errors.TraceNotFound as error:
        ...     print(str(error).rpartition(": ")[2])
        no such directory
    """

    def __init__(self, *args: object, directory: str | None = None):
        super().__init__(*args)
        self.directory = directory


class TraceExists(TraceError, FileExistsError):
    """The directory already holds a trace.

    Examples:
        >>> _ = gym_trace.edit.merge(["traces/cartpole"], "traces/there")
        >>> gym_trace.edit.merge(["traces/cartpole"], "traces/there")
        Traceback (most recent call last):
            ...
        gym_trace.errors.TraceExists: traces/there: not empty; pass a new directory
    """


class CorruptTrace(TraceError):
    """A trace file is damaged.

    Attributes:
        path: the file, or None if the bytes are not in a file.
        offset: byte offset of the damaged record in the file, or None.

    Examples:
        >>> error = gym_trace.errors.CorruptTrace("checksum mismatch")
        >>> error.problem, isinstance(error, gym_trace.errors.TraceError)
        ('checksum mismatch', True)
    """

    def __init__(self, problem: str, path: str | os.PathLike[str] | None = None, offset: int | None = None):
        self.problem = printable(problem)
        self.path = None if path is None else os.fspath(path)
        self.offset = offset
        where = "" if path is None else f"{printable(self.path)}: "
        at = "" if offset is None else f" at byte {offset}"
        hint = "" if path is None else "; 'gym-trace check' lists all damage, 'gym-trace edit repair' saves the rest"
        super().__init__(f"{where}{self.problem}{at}{hint}")

    def located(self, path: str | os.PathLike[str], offset: int) -> CorruptTrace:
        """Return the same error with its path and offset.

        Examples:
            >>> error = gym_trace.errors.CorruptTrace("checksum mismatch").located("t.gtb", 4096)
            >>> str(error).partition(";")[0]
            't.gtb: checksum mismatch at byte 4096'
        """
        return CorruptTrace(self.problem, path, offset)


class CorruptRun(CorruptTrace):
    """A file of a training run outside its trace is damaged.

    Args:
        next_step: end of the message: how the user can fix it.

    Examples:
        >>> print(gym_trace.errors.CorruptRun("not JSON", "runs/one/run.json", "train into a new directory"))
        runs/one/run.json: not JSON; train into a new directory
    """

    def __init__(self, problem: str, path: str | os.PathLike[str], next_step: str):
        super().__init__(f"{os.fspath(path)}: {problem}; {next_step}")
        self.path = os.fspath(path)


class UnsupportedTrace(TraceError):
    """The trace needs a newer gym-trace.

    Examples:
        >>> try:
        ...     trace = gym_trace.open_trace("traces/cartpole")
        ... except gym_trace.errors.UnsupportedTrace:
        ...     print("pip install --upgrade gym-trace")
    """


class UnreadableRecording(TraceError):
    """A recording of another package is damaged, or in a format that is never read, such as pickle.

    The message is one line: line breaks in errors of other packages become spaces.

    Examples:
        >>> with open("broken.jsonl", "w") as file:
        ...     _ = file.write("no JSON")
        >>> try:
        ...     gym_trace.import_trace("broken.jsonl", "traces/broken", "jsonl")
        ... except gym_trace.errors.UnreadableRecording as error:
        ...     print(str(error).partition(" (")[0])
        broken.jsonl: line 1: not JSON
    """

    def __init__(self, *args: object):
        super().__init__(*(" ".join(arg.split("\n")) if isinstance(arg, str) else arg for arg in args))


class RecordingError(TraceError):
    """The trace could not be written. Steps in a batch or ring stay readable.

    Examples:
        >>> with gym_trace.TraceWriter("traces/full") as writer:
        ...     try:
        ...         writer.begin(0.0)
        ...         writer.step(1, 0.0, 1.0)
        ...     except gym_trace.errors.RecordingError:  # the disk is full, for example; earlier steps are kept
        ...         writer.end()
    """


class RemoteError(TraceError, OSError):
    """A store at a URL did not respond, or rejected a request. The message never quotes its response.

    Examples:
        >>> import contextlib
        >>> with contextlib.suppress(gym_trace.errors.RemoteError):  # doctest: +SKIP
        ...     trace = gym_trace.open_trace("s3://bucket/trace")
    """


class UnpublishedWarning(RuntimeWarning):
    """Files of a recording to a URL stay in its spool, because the store did not accept them.

    The message names the spool and the reason. Commands that issue this warning exit with 1.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", gym_trace.errors.UnpublishedWarning)
        ...     # env.close() now raises it
    """


class UnstorableValue(TraceError, TypeError):
    """A value cannot be stored exactly in a trace.

    Examples:
        >>> with gym_trace.TraceWriter("traces/unstorable") as writer:
        ...     writer.begin(0.0)
        ...     try:
        ...         writer.step(1, 0.0, 1.0, critic=len)
        ...     except gym_trace.errors.UnstorableValue as error:
        ...         print(str(error).partition(";")[0])
        a value of type builtins.builtin_function_or_method cannot be stored
    """


class ReplayDiverged(TraceError):
    """An action, or the result of a replay, differs from the recorded one.

    Examples:
        >>> env = gym_trace.ReplayEnv("traces/cartpole", on_divergence="raise")
        >>> _ = env.reset(options={"episode": 0})
        >>> try:
        ...     env.step(1 - int(gym_trace.open_trace("traces/cartpole")[0].actions[0]))
        ... except gym_trace.errors.ReplayDiverged as error:
        ...     print(str(error).partition(":")[0])
        episode 0, step 0
    """


class InvalidOption(TraceError, ValueError):
    """An argument is invalid.

    Examples:
        >>> gym_trace.open_trace("traces/cartpole").select("returm > 3")
        Traceback (most recent call last):
            ...
        gym_trace.errors.InvalidOption: no column 'returm'; did you mean 'return'?
          returm > 3
          ^^^^^^
    """


class EnvironmentUnavailable(TraceError):
    """The recorded environment cannot be rebuilt on this machine.

    Attributes:
        imports: installed modules that were imported for the recording, if importing them here may help.

    Examples:
        >>> try:
        ...     gym_trace.audit("NotRegisteredAnywhere-v0")
        ... except gym_trace.errors.EnvironmentUnavailable as error:
        ...     print(error)
        NotRegisteredAnywhere-v0: Environment `NotRegisteredAnywhere` doesn't exist.
    """

    def __init__(self, *args: object, imports: tuple[str, ...] = ()):
        super().__init__(*args)
        self.imports = imports


class RenderingError(TraceError):
    """An environment or episode could not be rendered, or a video could not be written.

    Examples:
        >>> gym_trace.replay.as_picture(np.zeros(3))
        Traceback (most recent call last):
            ...
        gym_trace.errors.RenderingError: not an image: float64 of shape (3,); images are uint8 (H, W, 3)
    """


class TrainingFailed(TraceError):
    """Training cannot continue: weights are not finite, or processes keep dying.

    Examples:
        >>> try:  # doctest: +SKIP
        ...     gym_trace.train(lambda: gymnasium.make("CartPole-v1"), "runs/one", steps=100_000)
        ... except gym_trace.errors.TrainingFailed as error:
        ...     print(error)
    """


class MissingExtra(TraceError, ImportError):
    """An optional package is not installed; the message names the pip command.

    Examples:
        >>> str(gym_trace.errors.MissingExtra("plots need matplotlib: pip install 'gym-trace[plot]'"))
        "plots need matplotlib: pip install 'gym-trace[plot]'"
    """


_SIGNALS = tuple(map(int, signal.valid_signals()))  # plain integers: lookups by enum take 0.3 ms


def raise_if_of_signal(error: BaseException) -> None:
    """Raise error again if a signal handler, such as a timeout, raised it: the interrupted code is not its cause."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    if trace is None:  # raised by the code that caught it
        return
    handlers = set(map(_code_of, signal_handlers().values()))
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def signal_handlers() -> dict[int, Callable[..., Any]]:
    """Return the signal handlers that are Python functions, by the number of their signal."""
    return {number: handler for number in _SIGNALS if callable(handler := _signal.getsignal(number))}


def _code_of(handler: Any) -> Any:
    """Return the code object of a handler; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    return getattr(function, "__code__", None)
