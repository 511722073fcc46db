"""Batches drawn by other processes in tests. It imports little, because spawned processes import it again."""

from typing import Any

from gym_trace.playback.sampling.batches import Batches


def firsts(batches: Batches, count: int) -> list[list[tuple[int, int]]]:
    """Return the windows of the next batches."""
    taken = (next(batches) for _ in range(count))
    return [list(zip(batch["episode"].tolist(), batch["first_step"].tolist())) for batch in taken]


def drawn(several: list[Batches], answers: Any) -> None:
    answers.put([firsts(batches, 3) for batches in several])
