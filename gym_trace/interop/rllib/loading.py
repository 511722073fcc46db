"""What a configuration of RLlib takes of an export beside the files themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gym_trace.envs.spaces import restore
from gym_trace.errors import UnreadableRecording
from gym_trace.interop.identity import KEY, read_about
from gym_trace.interop.rllib.shards import FIRST


def spaces_of(path: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The observation space and the action space of what ``gym-trace export --to rllib`` has written.

    Raises UnreadableRecording: it is something else, or damaged.
    """
    file = Path(path) / FIRST
    try:
        said = (pq.read_schema(file).metadata or {})[KEY.encode()].decode()
        writer = next(iter(read_about(said)["writers"].values()))
        return restore(writer["observation_space"]), restore(writer["action_space"])
    except (OSError, pa.ArrowException, LookupError, UnicodeDecodeError, StopIteration) as error:
        raise UnreadableRecording(f"{file}: is not what export --to rllib writes: {error!r:.100}") from error
