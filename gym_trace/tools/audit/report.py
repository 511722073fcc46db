"""Claims about an environment, and the report of an audit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gym_trace.errors import InvalidOption
from gym_trace.tools.replay.compare import Difference
from gym_trace.tools.replay.divergence import Divergence

YES, NO, NOT_TRIED = "yes", "no", "not tried"

CLAIMS = (  # docs/guides/audit.md says what each means
    *("runs", "in-space", "action-unchanged", "fresh-observations", "deterministic", "own-randomness"),
    *("time-independent", "fresh-process", "seeded", "stateless-reset", "lanes", "state", "deepcopy", "render-pure"),
)


@dataclass(frozen=True)
class Claim:
    """One promise of an environment, and what was seen of it.

    Attributes:
        name: such as "deterministic".
        verdict: "yes", "no", or "not tried".
        text: how much was compared, where it fails first, or why it was not tried.
        episodes, steps: number of compared episodes and steps; an episode counts each time that it is played.
        episode: index of the episode with the first difference, or None.
        difference: the first difference from the reference: "recorded" is the first result, "seen" the second one.
        divergences: how far each leaf of observations and the rewards depart in that episode, the earliest first.

    Examples:
        >>> claim = gym_trace.results.Claim("deterministic", "yes", "8 episodes, played twice", episodes=8)
        >>> claim.name, claim.verdict
        ('deterministic', 'yes')
    """

    name: str
    verdict: str
    text: str
    episodes: int = 0
    steps: int = 0
    episode: int | None = None
    difference: Difference | None = None
    divergences: tuple[Divergence, ...] = ()

    def __str__(self) -> str:
        return f"{self.verdict}: {self.text}"


@dataclass(frozen=True)
class AuditReport:
    """Result of gym_trace.audit().

    Attributes:
        environment: its id, or the name of the function that makes it.
        date: day of the audit, UTC, such as "2026-11-27".
        versions: installed versions of packages, by name.
        claims: all of them, in the order in which they were tried.
        required: names of claims that must hold.

    Examples:
        >>> claim = gym_trace.results.Claim("deterministic", "no", "observations differ at step 3")
        >>> report = gym_trace.results.AuditReport("Mine-v0", "2026-11-28", {}, (claim,))
        >>> [claim.name for claim in report.failed], str(report["deterministic"].text)
        ([], 'observations differ at step 3')
    """

    environment: str
    date: str
    versions: dict[str, str]
    claims: tuple[Claim, ...]
    required: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Claim:
        """Return the claim of a name, such as "seeded". Raises InvalidOption for an unknown one."""
        check_names([name])
        return next(claim for claim in self.claims if claim.name == name)

    def __str__(self) -> str:
        width = max(map(len, CLAIMS))
        return "\n".join(f"{claim.name:{width}}  {claim}" for claim in self.claims)

    @property
    def failed(self) -> list[Claim]:
        """The required claims whose verdict is not "yes"."""
        return [claim for claim in map(self.__getitem__, self.required) if claim.verdict != YES]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data: environment, date, versions, and per claim its name, verdict and counts.

        Examples:
            >>> sorted(gym_trace.results.AuditReport("Mine-v0", "2026-11-28", {}, ()).to_json())
            ['claims', 'date', 'environment', 'versions']
        """
        names = ("name", "verdict", "text", "episodes", "steps", "episode")
        claims = [{name: getattr(claim, name) for name in names} for claim in self.claims]
        return {"environment": self.environment, "date": self.date, "versions": self.versions, "claims": claims}


def check_names(names: Collection[str]) -> None:
    """Raise InvalidOption for a name that is not a claim."""
    for name in names:
        if name not in CLAIMS:
            raise InvalidOption(f"{name!r} is not a claim; choose from {', '.join(CLAIMS)}")
