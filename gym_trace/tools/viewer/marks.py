"""Findings of a tool that was run from the page."""

from __future__ import annotations

from typing import Any, NamedTuple

Key = tuple[str, int]  # writer and id of an episode


class Mark(NamedTuple):
    """A finding, on the page a tick of the scrubber.

    Attributes:
        key: writer and id of the episode; None: the whole trace.
        position: on the page, in the episode; None: the whole episode.
        severity: "error", "warning" or "note".
    """

    key: Key | None
    position: int | None
    severity: str
    text: str


class Proof:
    """A tool that runs over a trace, or has run.

    Attributes:
        state: "running", "done", "failed" or "canceled".
        done, of: progress, in units of the tool; of: 0 if it is not known.
        is_good: True if nothing was found.
        needs_trust: True if it failed because the user must trust the trace first; error says what the trace would do.
        marks: the findings, at most 2,000.
        verdicts: verdict of each verified episode.
        claims: name, verdict and text of each claim of an audit.
    """

    def __init__(self, tool: str, where: str):
        self.tool, self.where = tool, where
        self.state, self.done, self.of, self.summary, self.error = "running", 0, 0, "", ""
        self.is_good, self.needs_trust = False, False
        self.marks: list[Mark] = []
        self.verdicts: dict[Key, str] = {}
        self.claims: list[tuple[str, str, str]] = []

    def plain(self) -> dict[str, Any]:
        """Return its state as JSON."""
        about = {"state": self.state, "done": self.done, "of": self.of, "where": self.where, "good": self.is_good}
        consent = {"consent": self.error} if self.needs_trust else {}
        return {**about, "summary": self.summary, "error": self.error, "claims": self.claims, **consent}
