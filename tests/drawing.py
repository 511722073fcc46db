"""What other processes draw in tests; it imports little, since spawned ones import it anew."""

from __future__ import annotations

from typing import Any

from gym_trace.sampling.batches import Batches


def firsts(batches: Batches, count: int) -> list[list[tuple[int, int]]]:
    """Which windows the next batches have."""
    taken = (next(batches) for _ in range(count))
    return [list(zip(batch["episode"].tolist(), batch["first_step"].tolist())) for batch in taken]


def drawn(several: list[Batches], answers: Any) -> None:
    answers.put([firsts(batches, 3) for batches in several])
