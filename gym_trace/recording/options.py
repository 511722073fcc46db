"""What every recording wrapper does first: a directory, and a description of what is recorded."""

from __future__ import annotations

import logging
import os
import platform
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gymnasium import Space

from gym_trace.envs import identity as environment
from gym_trace.envs import spaces
from gym_trace.errors import InvalidOption
from gym_trace.format import directory as trace_directory
from gym_trace.format import wire
from gym_trace.model.values import pack, unpack
from gym_trace.recording import provenance

_log = logging.getLogger("gym_trace")


def opened_directory(directory: str | os.PathLike[str] | None, on_exist: str) -> Path:
    """The directory of a trace, made ready to be written to; None: a fresh one, whose name is logged.

    It is absolute, so that it stays where it is when the process changes its working directory.
    """
    if directory is None:
        path = Path(tempfile.mkdtemp(prefix="gym-trace-"))
        _log.warning("recording to %s", path)
        return path
    path = Path(directory).absolute()
    trace_directory.prepare(path, on_exist)
    return path


def new_schema(
    env: Any,
    observation_space: Space[Any],
    action_space: Space[Any],
    *,
    split: str,
    uid: str | None,
    metadata: Any,
    recorder: dict[str, Any],
) -> dict[str, Any]:
    """The schema record (docs/FORMAT.md, section 4) of a new writer. recorder: with what options it records."""
    origin = provenance.current()
    packed = pack(metadata)  # says what cannot be stored before anything is recorded
    return {
        "format": [wire.MAJOR, wire.MINOR],
        "writer": trace_directory.check_writer_id(uid or trace_directory.new_writer_id()),
        "created": time.time_ns(),
        "split": split,
        "observation_space": spaces.describe(observation_space),
        "action_space": spaces.describe(action_space),
        "environment": environment.describe_environment(env),
        "versions": environment.versions_of(env),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "recorder": recorder,
        "metadata": unpack(packed),  # each batch has it, and all the same
        **({} if origin is None else {"provenance": origin}),
    }


def copied_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema record of the writer of a copy of a wrapper, made from that of the original."""
    return {
        **schema,
        "writer": trace_directory.new_writer_id(),
        "pid": os.getpid(),
        "copied_from": schema["writer"],
    }


def info_keys(record_infos: bool | Sequence[str]) -> tuple[str, ...] | None:
    """The keys of infos to record; None: all, if any. Raises InvalidOption."""
    if isinstance(record_infos, str):
        raise InvalidOption(f"record_infos={record_infos!r}: give True, False or a list of keys")
    return None if isinstance(record_infos, bool) else tuple(record_infos)
