"""Forks, the end of a process, and garbage collection: when recorders have to be paused, restarted or closed."""

from __future__ import annotations

import os
import warnings
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from gym_trace.errors import RecordingError


class Recording(Protocol):
    """A recorder, as far as forks and exits are concerned."""

    def close(self) -> None:
        """Saves everything."""

    def pause(self) -> None:
        """Before a fork: writes everything and ends the thread, so that the child inherits no held lock."""

    def restart_in_child(self) -> None:
        """After a fork, in the child: begins a new writer, because the files belong to the parent."""


_live: weakref.WeakSet[Recording] = weakref.WeakSet()


def watch(recorder: Recording) -> None:
    """Registers a recorder for forks."""
    _live.add(recorder)


def forget(recorder: Recording) -> None:
    """Unregisters a recorder that is closed."""
    _live.discard(recorder)


def close_with(owner: object, recorder: Recording) -> None:
    """Closes recorder when owner is garbage-collected, or at exit, whichever comes first."""
    Finalize(owner, _close_quietly, args=(recorder,), exitpriority=100)


def _close_quietly(recorder: Recording) -> None:
    """At exit and in garbage collection nobody can catch an error, so it becomes a warning."""
    try:
        recorder.close()
    except RecordingError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def _before_fork() -> None:
    for recorder in list(_live):
        recorder.pause()


def _after_fork_in_child() -> None:
    for recorder in list(_live):
        recorder.restart_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
