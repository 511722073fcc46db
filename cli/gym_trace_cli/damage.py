"""What check and repair both show: a damaged place in a line, and how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gym_trace_cli import show

if TYPE_CHECKING:
    from gym_trace.format.batch_reader import Damage


def line(damage: Damage) -> str:
    where = f"bytes {damage.start} to {damage.end}: " if damage.end else ""
    return show.printable(f"{damage.path}: {where}{damage.problem}")


def bytes_shown(progress: show.Progress) -> Callable[[int, int], None]:
    """A function to be told of bytes done and bytes in all."""

    def on_progress(done: int, total: int) -> None:
        progress.update(f"{show.size(done)} of {show.size(total)}", done / total if total else None)

    return on_progress
