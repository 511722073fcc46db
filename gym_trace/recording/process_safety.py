"""Recorders of one process and its like: paused and restarted at forks, closed at exit, and which share a directory."""

from __future__ import annotations

import multiprocessing
import os
import socket
import warnings
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from gym_trace.errors import RecordingError, TraceError
from gym_trace.format.directory import WriterFiles


class Recording(Protocol):
    """A recorder, as far as forks and exits are concerned.

    Attributes:
        manifest: the path of its manifest.
        has_steps: whether any step was recorded, or may have been.
    """

    @property
    def manifest(self) -> str: ...

    @property
    def has_steps(self) -> bool: ...

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


def is_joined(files: WriterFiles) -> bool:
    """Whether a new wrapper belongs with this writer: to the same vector environment, or to workers of one run.

    In the process of the writer that is so until its first step: the environments of SyncVectorEnv are made before they
    are stepped, and a cell of a notebook is run again after that. Workers begin one by one while others are at work.
    """
    where = os.path.realpath(files.where)
    for recorder in list(_live):
        if os.path.realpath(recorder.manifest) == where:
            return not recorder.has_steps
    return multiprocessing.parent_process() is not None and files.is_alive() and _is_of_this_run(files)


def _is_of_this_run(files: WriterFiles) -> bool:
    """Whether the process of a writer is in the group of this one, as processes of multiprocessing are."""
    try:
        entry = next(files.entries(), {})
        pid = entry.get("pid")
        return entry.get("host") == socket.gethostname() and isinstance(pid, int) and os.getpgid(pid) == os.getpgid(0)
    except (TraceError, OSError, OverflowError):
        return False


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
