"""Reports of a verification for other programs: JSON, and JUnit XML for CI."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from xml.etree import ElementTree
from xml.sax.saxutils import quoteattr

import click

import gym_trace
from gym_trace.printable import printable
from gym_trace.storage import replaced_file

if TYPE_CHECKING:
    from gym_trace.results import Divergence

# Verdicts in JUnit; all others have passed.
_OUTCOMES = {"differs": "failure", "damaged": "error", "unverifiable": "skipped"}
_MOST_LISTED = 10  # damaged files or ranges in one message


def writable_file(value: str) -> Path:
    """Check the name of a file, new or replaced, and return its path."""
    path = Path(os.path.realpath(value))
    if path.exists() and not path.is_file():
        raise click.BadParameter(f"{value} is not a file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise click.BadParameter(f"{path.parent} is not a writable directory")
    return path


def plot_file(value: str) -> Path:
    """Check --plot: a writable file that ends in .svg or .png."""
    if os.path.splitext(value)[1].lower() not in (".svg", ".png"):
        raise click.BadParameter(f"{printable(value)}: unknown ending; choose a name that ends in .svg or .png")
    return writable_file(value)


@dataclass
class Outcome:
    """Result of a whole verification.

    ended: "complete", or the reason it ended early; message: the error.
    needed: Verdict.needed of matching episodes, by index.
    from_states: number of steps compared from recorded states.
    error: the largest error of these steps that is a number, and the index of its episode.
    """

    trace: str
    chosen: int
    verdicts: dict[str, int] = field(default_factory=dict)
    ended: str = "complete"
    message: str = ""
    exit_code: int = 0
    versions: dict[str, Any] = field(default_factory=dict)
    damage: list[dict[str, Any]] = field(default_factory=list)
    needed: dict[int, int] = field(default_factory=dict)
    from_states: int = 0
    error: tuple[int, Divergence] | None = None
    started: float = field(default_factory=time.time)

    def add_errors(self, index: int, from_states: int, errors: Iterable[Divergence]) -> None:
        """Add the errors of an episode."""
        self.from_states += from_states
        for error in errors if from_states else ():
            if error.largest is not None and (self.error is None or error.largest > (self.error[1].largest or 0.0)):
                self.error = index, error

    @property
    def seconds(self) -> float:
        return round(max(0.0, time.time() - self.started), 6)

    @property
    def start(self) -> str:
        """UTC, ISO 8601."""
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.started))


class Reports:
    """Report files, renamed into place when complete.

    Until then, rows are in temporary files. add() takes a verdict as plain data, close() the result.
    """

    def __init__(self, report: Path | None, junit: Path | None):
        self._stack = ExitStack()
        self._files: list[tuple[Path, TextIO, Callable[..., str], Callable[..., tuple[str, str]]]] = []
        for path, row, frame in ((report, _json_row, _json_frame), (junit, _junit_row, _junit_frame)):
            if path is not None:
                rows: Any = tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n")  # noqa: SIM115 - the stack closes it
                self._stack.enter_context(rows)
                self._files.append((path, rows, row, frame))
        self._last = time.monotonic()
        self._number = 0

    def add(self, verdict: dict[str, Any], text: str, environment: str) -> None:
        """Add a verdict, its text if it did not pass, and the id of the environment."""
        now = time.monotonic()
        for _, rows, row, _ in self._files:
            rows.write(row(verdict, text, environment, now - self._last, self._number))
        self._last, self._number = now, self._number + 1

    def close(self, outcome: Outcome) -> None:
        """Replace the files atomically. Raises OSError."""
        with self._stack:
            for path, rows, _, frame in self._files:
                head, foot = frame(outcome)
                rows.seek(0)
                with replaced_file(path) as staged, open(staged, "w", encoding="utf-8", newline="\n") as file:
                    file.write(head)
                    shutil.copyfileobj(rows, file)
                    file.write(foot)


# -- JSON -------------------------------------------------------------------------------------------------------------


def _json_row(verdict: dict[str, Any], text: str, environment: str, seconds: float, number: int) -> str:
    return f"{',' if number else ''}\n{json.dumps(verdict, allow_nan=False)}"


def _json_frame(outcome: Outcome) -> tuple[str, str]:
    document = {
        "trace": outcome.trace,
        "gym_trace": gym_trace.__version__,
        "started": outcome.start + "Z",
        "seconds": outcome.seconds,
    }
    for name in ("ended", "message", "exit_code", "chosen", "verdicts", "versions", "damage"):
        document[name] = getattr(outcome, name)
    return f'{json.dumps(document, allow_nan=False)[:-1]}, "episodes": [', "\n]}\n"


# -- JUnit ------------------------------------------------------------------------------------------------------------


def _junit_row(verdict: dict[str, Any], text: str, environment: str, seconds: float, number: int) -> str:
    name = f"episode {verdict['index']} ({verdict['writer']}/{verdict['episode_id']})"
    return _test_case(environment, name, seconds, _OUTCOMES.get(verdict["verdict"]), verdict["verdict"], text)


def _junit_frame(outcome: Outcome) -> tuple[str, str]:
    counted = {kind: outcome.verdicts.get(verdict, 0) for verdict, kind in _OUTCOMES.items()}
    tests, incomplete = sum(outcome.verdicts.values()), ""
    message = "; ".join("{path}: {problem}".format(**damage) for damage in outcome.damage[:_MOST_LISTED])
    if outcome.ended != "complete":
        message = f"{outcome.ended} after {tests} of {outcome.chosen} episodes; {outcome.message}".removesuffix("; ")
    if message:  # otherwise the episodes so far would look complete
        incomplete = _test_case("gym-trace", "all episodes", 0.0, "error", outcome.ended, message)
        tests, counted["error"] = tests + 1, counted["error"] + 1
    numbers = f'tests="{tests}" failures="{counted["failure"]}" errors="{counted["error"]}"'
    seconds = f'time="{outcome.seconds:.3f}"'
    suite = f'name={quoteattr(printable(outcome.trace))} {numbers} skipped="{counted["skipped"]}" {seconds}'
    head = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuites name="gym-trace verify" {numbers} {seconds}>\n'
        f'<testsuite {suite} timestamp="{outcome.start}">\n'
    )
    return head, f"{incomplete}</testsuite>\n</testsuites>\n"


def _test_case(group: str, name: str, seconds: float, kind: str | None, type_: str, message: str) -> str:
    case = ElementTree.Element("testcase", _safe(classname=group, name=name, time=f"{seconds:.6f}"))
    if kind is not None:
        more = {} if kind == "skipped" else {"type": type_}
        ElementTree.SubElement(case, kind, _safe(message=message, **more))
    return ElementTree.tostring(case, "unicode") + "\n"


def _safe(**attributes: str) -> dict[str, str]:
    """Escape control characters and surrogates, which XML forbids."""
    return {name: printable(text) for name, text in attributes.items()}
