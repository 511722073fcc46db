"""Recorders at process boundaries: paused and restarted at forks, closed at exit, sharing a directory."""

from __future__ import annotations

import multiprocessing
import os
import socket
import weakref
from multiprocessing.util import Finalize
from typing import Protocol

from gym_trace.errors import RecordingError, TraceError, warn
from gym_trace.format.directory import WriterFiles


class Recording(Protocol):
    """The part of a recorder that forks and exits need."""

    @property
    def manifest(self) -> str: ...  # its path

    @property
    def has_steps(self) -> bool: ...

    def close(self) -> None: ...

    def pause(self) -> None:
        """Call before a fork: write everything and end the thread, so that the child inherits no held lock."""

    def restart_in_child(self) -> None:
        """Call in a forked child: begin a new writer, because the parent owns the files."""


_live: weakref.WeakSet[Recording] = weakref.WeakSet()
watch, forget = _live.add, _live.discard  # open recorders


def is_joined(files: WriterFiles) -> bool:
    """Return True if a new wrapper belongs with this writer: same vector environment, or workers of one run.

    In the writer's own process this holds until its first step: SyncVectorEnv makes all environments before stepping
    any, while a rerun notebook cell comes later. Worker processes may start while others are already recording.
    """
    where = os.path.realpath(files.where)
    for recorder in list(_live):
        if os.path.realpath(recorder.manifest) == where:
            return not recorder.has_steps
    return multiprocessing.parent_process() is not None and files.is_alive() and _is_of_this_run(files)


def _is_of_this_run(files: WriterFiles) -> bool:
    """Return True if the writer's process is in this process group, as multiprocessing workers are."""
    try:
        entry = next(files.entries(), {})
        pid = entry.get("pid")
        return entry.get("host") == socket.gethostname() and isinstance(pid, int) and os.getpgid(pid) == os.getpgid(0)
    except (TraceError, OSError, OverflowError):
        return False


def close_with(owner: object, recorder: Recording) -> None:
    """Close the recorder when owner is garbage-collected, or at exit."""
    Finalize(owner, _close_quietly, args=(recorder,), exitpriority=100)


def _close_quietly(recorder: Recording) -> None:
    """Close a recorder; warn of an error, because at exit and in garbage collection no caller can catch it."""
    try:
        recorder.close()
    except RecordingError as error:
        warn(str(error), RuntimeWarning)


def _before_fork() -> None:
    for recorder in list(_live):
        recorder.pause()


def _after_fork_in_child() -> None:
    for recorder in list(_live):
        recorder.restart_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
