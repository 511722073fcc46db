"""What keeps recorders safe when a process forks, ends, or forgets them."""

from __future__ import annotations

import os
import warnings
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from gym_trace.errors import RecordingError


class Recording(Protocol):
    """What is asked of a recorder."""

    def close(self) -> None:
        """Saves everything."""

    def pause(self) -> None:
        """Before a fork: writes what there is and ends the thread, so that the child finds no lock held."""

    def resume(self) -> None:
        """After a fork, in the parent, before Python looks how many threads there are."""

    def restart_in_child(self) -> None:
        """After a fork, in the child, which must not touch the parent's files."""


_live: weakref.WeakSet[Recording] = weakref.WeakSet()


def watch(recorder: Recording) -> None:
    """Has recorder told of forks."""
    _live.add(recorder)


def forget(recorder: Recording) -> None:
    """To be called when recorder is closed."""
    _live.discard(recorder)


def close_with(owner: object, recorder: Recording) -> None:
    """Closes recorder when owner is collected, or this process ends in an orderly way, whichever comes first."""
    Finalize(owner, _close_quietly, args=(recorder,), exitpriority=100)


def _close_quietly(recorder: Recording) -> None:
    """At exit and in garbage collection nobody can catch an error: say it and go on."""
    try:
        recorder.close()
    except RecordingError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _before_fork() -> None:
    for recorder in list(_live):
        recorder.pause()


def _after_fork_in_parent() -> None:
    for recorder in list(_live):
        recorder.resume()


def _after_fork_in_child() -> None:
    for recorder in list(_live):
        recorder.restart_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
