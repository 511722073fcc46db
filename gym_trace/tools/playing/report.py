"""PlayReport: the result of a session, which needs no pygame."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PlayReport:
    """Result of a session.

    Attributes:
        seed: root seed.
        episodes, steps: number of episodes begun, and of steps.
        kept: returns of the episodes that ended by themselves and were not discarded.
        discarded: numbers of the episodes that the person discarded.
        seconds: playing time, without pauses.
        fps: steps per second reached over that time; None without a step, or if steps wait for keys.
        left: discarded episodes that could not be removed, and why.

    Examples:
        >>> report = gym_trace.play(env, "traces/by-hand")  # doctest: +SKIP
        >>> report.kept, report.fps  # doctest: +SKIP
    """

    seed: int = 0
    episodes: int = 0
    steps: int = 0
    kept: list[float] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    seconds: float = 0.0
    left: str = ""

    @property
    def fps(self) -> float | None:
        return self.steps / self.seconds if self.steps and self.seconds else None
