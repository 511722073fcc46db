"""Progress of a run as TensorBoard scalars."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_trace.errors import MissingExtra

if TYPE_CHECKING:
    from gym_trace.results import Return


class Scalars:
    """Writes values of a run against the number of steps.

    group: the heading under which TensorBoard shows them.
    """

    def __init__(self, directory: Path, group: str):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtra("--tensorboard needs tensorboardX: pip install 'gym-trace[tensorboard]'") from error
        self._group = group
        self._writer: Any = SummaryWriter(str(directory))
        self.close = self._writer.close

    def add(self, steps: int, returns: tuple[Return, Return, Return] | None, **values: float) -> None:
        """Write values. returns: mean, min and max of the last episodes; None before the first."""
        for name, value in zip(("mean", "min", "max"), returns or ()):
            if isinstance(value, tuple):  # one curve per objective
                values |= {f"return/{name}/{i}": part for i, part in enumerate(value)}
            else:
                values[f"return/{name}"] = value
        for name, value in values.items():
            self._writer.add_scalar(f"{self._group}/{name}", value, steps)
