"""Progress of a run as TensorBoard scalars."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from gym_trace.errors import MissingExtra

if TYPE_CHECKING:
    from gym_trace.results import Return


class Scalars:
    """Writes what a run reports, against the number of steps. A context manager.

    group: in which TensorBoard shows them.
    """

    def __init__(self, directory: str | os.PathLike[str], group: str = "collect"):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtra("--tensorboard needs tensorboardX: pip install 'gym-trace[tensorboard]'") from error
        self._group = group
        self._writer: Any = SummaryWriter(os.fspath(directory))

    def add(self, steps: int, returns: tuple[Return, Return, Return] | None, **values: float) -> None:
        """Write values. returns: mean, min and max of the last episodes; None before the first."""
        for name, value in zip(("mean", "min", "max"), returns or ()):
            if isinstance(value, tuple):  # a curve an objective
                values |= {f"return/{name}/{i}": part for i, part in enumerate(value)}
            else:
                values[f"return/{name}"] = value
        for name, value in values.items():
            self._writer.add_scalar(f"{self._group}/{name}", value, steps)

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
