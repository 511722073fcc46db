"""Python processes that we start: none of them imports what lies in the directory that it is started in.

multiprocessing starts its processes with `python -c`, which looks for modules in the current directory first, before it
has the path of its parent: a logging.py there would be run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder

from gym_trace.errors import InvalidOption

_SAFE_PATH = "PYTHONSAFEPATH"  # since Python 3.11
_OURS = "gym-trace"  # any text turns it on


@contextmanager
def variables_set(variables: dict[str, str]) -> Iterator[None]:
    """Set these environment variables for processes that are started meanwhile, where they are not set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def started_safely() -> Iterator[None]:
    """Keep processes that are started meanwhile from importing modules of the current directory while they start.

    Raises:
        InvalidOption: the Python at work cannot be kept from it, and there are such modules.
    """
    if sys.version_info < (3, 11) or sys.flags.ignore_environment:
        _check_current_directory()
    with variables_set({_SAFE_PATH: _OURS}):
        yield


def forget_safe_path() -> None:
    """In a process that was started so: scripts that its environment starts look for modules as they always do."""
    if os.environ.get(_SAFE_PATH) == _OURS:
        del os.environ[_SAFE_PATH]


def _check_current_directory() -> None:
    """Raises InvalidOption for modules that hide those of the standard library, unless this process has them, too."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return
    specs = {name: PathFinder.find_spec(name, [here]) for name in sorted(sys.stdlib_module_names)}
    hiding = [name for name, spec in specs.items() if spec is not None and spec.origin is not None]
    if hiding:
        raise InvalidOption(
            f"workers: {hiding[0]} in the current directory would take the place of Python's own module in their "
            "processes; change to another directory, or use Python 3.11 or newer"
        )
