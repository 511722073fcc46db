"""What can go wrong with a trace, as exceptions.

TraceError
├── TraceNotFound        no trace at this path
├── TraceExists          there is a trace already and on_exist="error"
├── CorruptTrace         bytes that do not check; carries .path and .offset
├── UnsupportedTrace     a format version or feature this release does not know
├── UnreadableRecording  an old recording (see gym_trace.interop) that is damaged, or is not safe to read
├── RecordingError       the trace could not be written (its __cause__ says why)
├── UnstorableValue      a value that cannot be stored exactly without pickle
├── ReplayDiverged       an agent did not act as recorded, and was not to
├── InvalidOption        an argument that does not make sense
├── EnvironmentUnavailable   the recorded environment cannot be made here
├── RenderingError       no picture could be had, or no video be written
└── MissingExtra         a package that only some features need is not installed
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

from gym_trace.printable import printable, printable_lines

__all__ = [
    "CorruptTrace",
    "EnvironmentUnavailable",
    "InvalidOption",
    "MissingExtra",
    "RecordingError",
    "RenderingError",
    "ReplayDiverged",
    "TraceError",
    "TraceExists",
    "TraceNotFound",
    "UnreadableRecording",
    "UnstorableValue",
    "UnsupportedTrace",
]


class TraceError(Exception):
    """Base of every error that gym-trace raises on purpose.

    Messages name what files hold, which may be hostile to a terminal: they are made printable here, for all.
    """

    def __init__(self, *args: object):
        super().__init__(*(printable_lines(arg) if isinstance(arg, str) else arg for arg in args))


class TraceNotFound(TraceError, FileNotFoundError):
    """There is no trace at the given path.

    Attributes:
        directory: where there is none, if it is a directory; otherwise None.
    """

    def __init__(self, *args: object, directory: str | None = None):
        super().__init__(*args)
        self.directory = directory


class TraceExists(TraceError, FileExistsError):
    """The directory holds a trace already."""


class CorruptTrace(TraceError):
    """Bytes of a trace file do not check.

    Attributes:
        path: the file, or None for bytes that are not in a file.
        offset: where in the file the damaged record begins, in bytes, or None.
    """

    def __init__(self, problem: str, path: str | os.PathLike[str] | None = None, offset: int | None = None):
        self.problem = printable(problem)
        self.path = None if path is None else os.fspath(path)
        self.offset = offset
        where = "" if path is None else f"{printable(self.path)}: "
        at = "" if offset is None else f" at byte {offset}"
        hint = "" if path is None else "; 'gym-trace check' lists all damage, 'gym-trace repair' saves the rest"
        super().__init__(f"{where}{self.problem}{at}{hint}")

    def located(self, path: str | os.PathLike[str], offset: int) -> CorruptTrace:
        """The same problem, with the place it was found at."""
        return CorruptTrace(self.problem, path, offset)


class CorruptRun(CorruptTrace):
    """A file of a training run, but none of its trace, does not check. next_step: what can be done about it."""

    def __init__(self, problem: str, path: str | os.PathLike[str], next_step: str):
        super().__init__(f"{os.fspath(path)}: {problem}; {next_step}")
        self.path = os.fspath(path)


class UnsupportedTrace(TraceError):
    """The trace needs a newer gym-trace."""


class UnreadableRecording(TraceError):
    """A recording of another package is damaged, or of a kind that is never read, such as pickles.

    Always one line: what other packages say of what they cannot read has several.
    """

    def __init__(self, *args: object):
        super().__init__(*(" ".join(arg.split("\n")) if isinstance(arg, str) else arg for arg in args))


class RecordingError(TraceError):
    """The trace could not be written; what was written before can be read."""


class UnstorableValue(TraceError, TypeError):
    """A value that has no exact form in a trace."""


class ReplayDiverged(TraceError):
    """An action is not the one that was recorded."""


class InvalidOption(TraceError, ValueError):
    """An argument that does not make sense."""


class EnvironmentUnavailable(TraceError):
    """The recorded environment cannot be made on this machine."""


class RenderingError(TraceError):
    """No picture could be had of an environment or an episode, or no video be written."""


class TrainingFailed(TraceError):
    """Training cannot go on: what is learnt is not finite, or processes die again and again."""


class MissingExtra(TraceError, ImportError):
    """A package that only some features need is not installed; the message says how to."""


def told(error: BaseException) -> str:
    """An error of other people's code in one line, with whose it is: pygame.error: No available video device."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return " ".join(f"{name}: {error}".split())


def raise_if_of_signal(error: BaseException) -> None:
    """Raise error again if a signal handler raised it, such as a timeout: it is not about the code it fell into."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    if trace is None:  # raised by the very code that caught it
        return
    handlers = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise error
        trace = trace.tb_next


def _code_of(handler: Any) -> Any:
    """The code of a handler; None of one that is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    return getattr(function, "__code__", None)
