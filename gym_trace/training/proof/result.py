"""Result of a proof, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gym_trace.errors import InvalidOption, TraceError

LIMITS = (
    "who made the run, and when: an anchor that was published (--anchor) is evidence of both",
    "runs that were made and thrown away: another seed may have been tried before",
)
ReportProgress = Callable[[], None]  # raises Interrupted


@dataclass
class Proof:
    """Facts about a run that were proved, and those that were not.

    Attributes:
        versions: number of versions that were relearned and match. of: number of all versions.
        differs: the first difference; "" without one.
        checkpoints: how many were compared, tensor by tensor.
        proved: one sentence per kind of thing that was compared, with their number.
        unproved: one sentence per kind that was not, with the reason. The proof is complete if this is empty.
        limits: what no proof of this kind can cover.
        notes: other possible reasons of a difference, such as another version of PyTorch.
        doing: what is being compared; done, out_of: progress.

    Examples:
        >>> proof = gym_trace.training.verify_run("runs/one")  # doctest: +SKIP
        >>> proof.versions, proof.unproved  # doctest: +SKIP
    """

    versions: int = 0
    of: int = 0
    differs: str = ""
    checkpoints: int = 0
    proved: list[str] = field(default_factory=list)
    unproved: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=lambda: list(LIMITS))
    notes: list[str] = field(default_factory=list)
    doing: str = "version"
    done: int = 0
    out_of: int = 0


def tally(proof: Proof, done: int, of: int, what: str, how: str, why: str) -> None:
    """Add the numbers of things of a kind that were compared, and that were not.

    how: result of the comparison. why: reason for the others.
    """
    if done:
        proof.proved.append(f"{done:,} of {of:,} {what} {how}")
    if done < of or not of:
        proof.unproved.append(f"{of - done:,} of {of:,} {what}: {why}")


class Interrupted(Exception):
    """on_progress ended the proof."""


def progress_reporter(proof: Proof, on_progress: Callable[[Proof], Any] | None) -> ReportProgress:
    """Return a function that calls on_progress with the proof."""

    def report() -> None:
        if on_progress is not None and on_progress(proof):
            raise Interrupted

    return report


@contextmanager
def first_difference(proof: Proof) -> Iterator[None]:
    """Put the error that ends a proof into proof.differs. Raises InvalidOption for wrong arguments."""
    try:
        yield
    except InvalidOption:
        raise
    except Interrupted:
        proof.differs = "it was interrupted"
    except (TraceError, MemoryError) as error:
        proof.differs = str(error) or "not enough memory"
