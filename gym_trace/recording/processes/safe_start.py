"""Start Python processes that import nothing from the current directory.

multiprocessing starts its processes with `python -c`, which looks for modules in the current directory before the path
of the parent arrives: a logging.py there would run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder

from gym_trace.errors import InvalidOption

_SAFE_PATH = "PYTHONSAFEPATH"  # since Python 3.11
_OURS = "gym-trace"  # Python checks only whether it is empty


@contextmanager
def variables_set(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started in the block; variables that are already set stay."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def started_safely() -> Iterator[None]:
    """Keep processes started in the block from importing modules of the current directory while they start.

    Raises:
        InvalidOption: this Python cannot prevent it, and the directory has such modules.

    Examples:
        >>> import multiprocessing
        >>> with gym_trace.recording.started_safely():
        ...     process = multiprocessing.get_context("spawn").Process(target=print)
    """
    if sys.version_info < (3, 11) or sys.flags.ignore_environment:
        _check_current_directory()
    with variables_set({_SAFE_PATH: _OURS}):
        yield


def forget_safe_path() -> None:
    """In a process started safely, restore the usual module search for scripts that its environment starts."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def _check_current_directory() -> None:
    """Raise InvalidOption for modules that hide the standard library's, unless this process searches here, too."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return
    specs = {name: PathFinder.find_spec(name, [here]) for name in sorted(sys.stdlib_module_names)}
    shadowing = [name for name, spec in specs.items() if spec is not None and spec.origin is not None]
    if shadowing:
        raise InvalidOption(
            f"workers: {shadowing[0]} in the current directory would replace Python's own module; change to another "
            "directory, or use Python 3.11 or newer"
        )
