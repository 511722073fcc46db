"""Report the JUnit files of gym-trace verify and pytest to GitHub: annotations, and a summary of the job.

python report_junit.py DIRECTORY    the last step of action.yml; needs the standard library alone
"""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_EPISODE = re.compile(r"episode \d+ \((.+)/\d+\)")  # name of a test case of gym-trace verify: writer and id
_KINDS = ("failure", "error", "skipped")
_MOST_ANNOTATIONS = 10  # GitHub shows no more annotations of a step
_MOST_SHOWN = 20  # in the summary
_LONGEST = 2000  # characters of a message


class Problem(NamedTuple):
    """An episode or test that did not pass. path, line: where GitHub shows it."""

    name: str
    kind: str
    message: str
    path: str
    line: int


class Suite(NamedTuple):
    """The results of a trace, or of pytest."""

    name: str
    counts: dict[str, int]
    problems: list[Problem]


def read_suites(directory: Path) -> Iterator[Suite]:
    for path in sorted(directory.glob("*.xml")):
        for suite in ElementTree.parse(path).getroot().iter("testsuite"):
            name = suite.get("name", path.stem)
            counts, problems = dict.fromkeys(("passed", *_KINDS), 0), []
            for case in suite.iter("testcase"):
                kind = next((kind for kind in _KINDS if case.find(kind) is not None), "passed")
                counts[kind] += 1
                if kind in ("failure", "error") or (kind == "skipped" and name != "pytest"):
                    found = case.find(kind)
                    message = "" if found is None else found.get("message") or found.text or ""
                    problems.append(_problem(name, kind, message[:_LONGEST], case))
            yield Suite(name, counts, problems)


def _problem(suite: str, kind: str, message: str, case: ElementTree.Element) -> Problem:
    name, line = case.get("name", ""), int(case.get("line") or 0) + 1  # pytest counts from 0
    path = case.get("file", suite)
    episode = _EPISODE.fullmatch(name)
    if episode is not None and Path(suite, f"{episode[1]}.manifest.jsonl").exists():
        path = f"{suite}/{episode[1]}.manifest.jsonl"  # GitHub shows annotations of files, not of directories
    return Problem(name, kind, message, os.path.relpath(path), line)


def annotated(suite: Suite) -> Iterator[str]:
    """Yield commands to GitHub's runner: one for each test that failed, or the first problem of a trace."""
    for problem in suite.problems if suite.name == "pytest" else suite.problems[:1]:
        title = problem.name
        if suite.name != "pytest":
            title = f"{len(suite.problems)} of {sum(suite.counts.values())} episodes do not match"
        level = "warning" if problem.kind == "skipped" else "error"
        properties = {"file": problem.path, "line": str(problem.line), "title": title}
        listed = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
        yield f"::{level} {listed}::{_escaped(problem.message)}"


def _escaped(text: str, others: str = "") -> str:
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{others}" else c for c in text)


def summary(suites: list[Suite]) -> Iterator[str]:
    """Yield the lines of the summary in Markdown. Recorded text is escaped."""
    yield "### gym-trace\n"
    yield "| | passed | differ or fail | errors | skipped |\n|---|---|---|---|---|"
    for suite in suites:
        yield f"| {_cell(_shown(suite))} | {' | '.join(map(str, suite.counts.values()))} |"
    problems = [(suite, problem) for suite in suites for problem in suite.problems]
    for suite, problem in problems[:_MOST_SHOWN]:
        yield f"\n{_cell(_shown(suite))}, {_cell(problem.name)}\n\n<pre>{_text(problem.message)}</pre>"
    if len(problems) > _MOST_SHOWN:
        yield f"\nand {len(problems) - _MOST_SHOWN} more"


def _shown(suite: Suite) -> str:
    return suite.name if suite.name == "pytest" else os.path.relpath(suite.name)


def _cell(text: str) -> str:
    return f"<code>{_text(text)}</code>".replace("\n", " ").replace("|", "&#124;")


def _text(text: str) -> str:
    return html.escape(text).replace("\n\n", "\n&#8203;\n")  # an empty line would end the HTML


def main(directory: str) -> None:
    suites = list(read_suites(Path(directory)))
    for line in [line for suite in suites for line in annotated(suite)][:_MOST_ANNOTATIONS]:
        print(line)
    text = "\n".join(summary(suites)) + "\n"
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main(sys.argv[1])
