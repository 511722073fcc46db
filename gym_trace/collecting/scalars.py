"""Progress of a run as TensorBoard scalars."""

from __future__ import annotations

import os
from typing import Any

from gym_trace.collecting.supervisor import Collected
from gym_trace.errors import InvalidOption


class Scalars:
    """Writes what a run reports, against the number of steps. A context manager."""

    def __init__(self, directory: str | os.PathLike[str]):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise InvalidOption("--tensorboard needs tensorboardX: pip install 'gym-trace[tensorboard]'") from error
        self._writer: Any = SummaryWriter(os.fspath(directory))

    def add(self, progress: Collected) -> None:
        values = {
            "episodes": progress.episodes,
            "steps_per_second": progress.speeds[0],
            "bytes": progress.bytes,
            "restarts": progress.restarts,
        }
        if progress.returns is not None:
            values |= dict(zip(("return/mean", "return/min", "return/max"), progress.returns))
        for name, value in values.items():
            self._writer.add_scalar(f"collect/{name}", value, progress.steps)

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
