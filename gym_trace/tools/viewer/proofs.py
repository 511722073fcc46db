"""Tools that the page asks for, from lint to branches: each in another process, one at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from gym_trace.data.values import Array
from gym_trace.errors import EnvironmentUnavailable, InvalidOption, TraceError
from gym_trace.playback.episode_index import index_of
from gym_trace.playback.trace import Trace, storage_of
from gym_trace.recording.processes.fleet import Job, Lost
from gym_trace.recording.processes.local import LocalProcesses
from gym_trace.tools.audit.api import audit
from gym_trace.tools.audit.report import CLAIMS, NO, YES, Claim
from gym_trace.tools.integrity.scan import CheckReport
from gym_trace.tools.linting.api import lint_trace
from gym_trace.tools.linting.findings import ERROR, NOTE, WARNING
from gym_trace.tools.replay.verify import verify_trace
from gym_trace.tools.viewer.marks import Key, Mark, Proof
from gym_trace.tools.viewer.opinions import Question, ask
from gym_trace.tools.viewer.rendering import Recipe
from gym_trace.tools.viewer.trace import ViewedTrace, lost_steps
from gym_trace.tools.viewer.whatif import Plan, record

_MOST_MARKS = 2000  # kept of one proof; the summary counts all
_NICENESS = 5
_CONSENTING = EnvironmentUnavailable, InvalidOption  # errors that may ask for --trust
_POLL_SECONDS = 0.1
_REPORT_SECONDS = 0.2  # between two messages on progress


class Proofs:
    """Runs one tool at a time; the results are kept with the trace. Ends with close().

    recipe: settings of the replays.
    """

    def __init__(self, recipe: Recipe):
        self._recipe, self._lock = recipe, threading.Lock()
        self._current: Proof | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        viewed: ViewedTrace,
        tool: str,
        asked: str | Plan | Question,
        trust: bool,
        arrived: Callable[[], Any] = lambda: None,
    ) -> None:
        """Start a tool over a trace. Raises InvalidOption, TraceError.

        asked: the condition of "steps", the plan of "branch", the question of "ask". arrived: called after each message
            of the tool.
        """
        if tool not in TOOLS or not isinstance(asked, _ASKED.get(tool, str)):
            raise InvalidOption(f"tool: pass one of {', '.join(TOOLS)}; branch needs a plan, and ask a question")
        with self._lock:
            if self._current is not None and self._current.state == "running":
                raise TraceError(f"{self._current.tool} is running: wait for it, or cancel it")
            self._current = proof = Proof(tool, asked if isinstance(asked, str) else "")
            viewed.proofs.pop(tool, None)  # the latest one is the last
            viewed.proofs[tool] = proof
            making = self._recipe.making._replace(trust=trust or self._recipe.making.trust)
            arguments = tool, viewed.trace, self._recipe._replace(making=making), asked
            self._thread = threading.Thread(target=self._run, args=(viewed, proof, arguments, arrived), daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End the tool that is running, and wait for the end of its process."""
        with self._lock:
            if self._current is not None and self._current.state == "running":
                self._current.state = "canceled"
            if self._thread is not None:
                self._thread.join()

    close = cancel

    @staticmethod
    def _run(viewed: ViewedTrace, proof: Proof, arguments: tuple[Any, ...], arrived: Callable[[], Any]) -> None:
        processes = LocalProcesses()
        scratch = tempfile.TemporaryDirectory(prefix="gym-trace-", ignore_cleanup_errors=True)  # the tool may be killed
        try:
            processes.start(0, Job("proof", _proved, (scratch.name, *arguments), _NICENESS))
            while proof.state == "running":
                for _, message in processes.poll(_POLL_SECONDS):
                    if isinstance(message, Lost) and proof.state == "running":
                        proof.needs_trust = message.kind in _CONSENTING and "--trust" in message.reason
                        proof.state, proof.error = "failed", message.reason
                    elif not isinstance(message, Lost) and message[0] == "progress":
                        _, proof.done, proof.of = message
                    elif not isinstance(message, Lost) and proof.state == "running":
                        _, proof.summary, proof.is_good, proof.marks, proof.verdicts, proof.claims, opinion = message
                        if isinstance(question := arguments[-1], Question):
                            viewed.opinions.setdefault(question.key, {})[question.label] = opinion
                        proof.state = "done"
                    arrived()
        except (TraceError, OSError) as error:
            proof.state, proof.error = "failed", str(error)
        finally:
            processes.kill(0)
            scratch.cleanup()
            arrived()
            viewed.has_changed()


# -- in the process ---------------------------------------------------------------------------------------------------


def _proved(connection: Any, scratch: str, tool: str, trace: Trace, recipe: Recipe, asked: Any) -> None:
    """Run a tool, and send its progress and result. This runs in the other process, with temporary files in scratch."""
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    report = _Report(connection)
    summary, is_good = TOOLS[tool](trace, recipe, asked, report)
    with contextlib.suppress(OSError):  # the parent is gone
        connection.send(("done", summary, is_good, report.marks, report.verdicts, report.claims, report.opinion))


class _Report:
    """Collects marks, and sends progress a few times per second."""

    def __init__(self, connection: Any):
        self._connection, self._sent = connection, 0.0
        self.marks: list[Mark] = []
        self.verdicts: dict[Key, str] = {}
        self.claims: list[tuple[str, str, str]] = []
        self.opinion: dict[str, Array] = {}

    def progress(self, done: int, of: int) -> None:
        if time.monotonic() > self._sent + _REPORT_SECONDS:
            self._sent = time.monotonic()
            self._connection.send(("progress", done, of))

    def mark(self, key: Key | None, position: int | None, severity: str, text: str) -> None:
        if len(self.marks) < _MOST_MARKS:
            self.marks.append(Mark(key, position, severity, text))


def _position(step: int | None, column: str | None) -> int:
    """Return the position of a finding on the page, where an observation belongs to the position after its step."""
    return 0 if step is None else step + (column or "").startswith("observations")


def _key(trace: Trace, row: int) -> Key:
    entry = trace.episodes[row]
    return index_of(trace).readers[int(entry["writer"])].writer, int(entry["episode_id"])


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _linted(trace: Trace, recipe: Recipe, where: str, report: _Report) -> tuple[str, bool]:
    codes = []
    for found in lint_trace(trace, on_progress=report.progress):
        codes.append(found.code)
        row = None if found.episode is None else int(np.flatnonzero(index_of(trace).whole_indices == found.episode)[0])
        position = None
        if row is not None and found.step is not None:
            position = max(0, _position(found.step - int(trace.episodes["first_step"][row]), found.column))
        key = None if row is None else _key(trace, row)
        report.mark(key, position, found.severity, f"{found.code}: {found.message}")
    return (f"{_plural(len(codes), 'finding')}: {', '.join(dict.fromkeys(codes))}", False) if codes else ("clean", True)


def _checked(trace: Trace, recipe: Recipe, where: str, report: _Report) -> tuple[str, bool]:
    found = CheckReport()
    for lost, problem in lost_steps(storage_of(trace), found, report.progress):
        last = lost.first_step + lost.steps - 1
        text = f"steps {lost.first_step:,} to {last:,} lost: {problem}"
        report.mark((lost.writer, lost.episode_id), lost.first_step, ERROR, text)
    if found.damages:
        return _plural(len(found.damages), "damaged part"), False
    return f"all {found.bytes:,} bytes are right", True


def _verified(trace: Trace, recipe: Recipe, where: str, report: _Report) -> tuple[str, bool]:
    for module in recipe.imports:
        import_module(module)
    making, words = recipe.making, Counter[str]()
    verdicts = verify_trace(
        trace,
        make_env=making.make_env,
        env_kwargs=making.env_kwargs,
        atol=making.atol,
        rtol=making.rtol,
        tolerances=making.tolerances,
        ignore=making.ignore,
        trust=making.trust,
        on_damage="skip",
    )
    is_good = True
    for verdict in verdicts:
        key = verdict.writer, verdict.episode_id
        report.verdicts[key] = verdict.verdict
        words[verdict.verdict] += 1
        is_good &= verdict.matches
        if verdict.difference is not None:
            difference = verdict.difference
            report.mark(key, _position(difference.step, difference.column), ERROR, f"verify: {difference}")
        elif not verdict.matches:
            report.mark(key, None, WARNING, f"{verdict.verdict}: {verdict.reason}")
        report.progress(sum(words.values()), len(trace))
    return ", ".join(f"{count:,} {word}" for word, count in words.items()) or "no episodes", is_good


def _found(trace: Trace, recipe: Recipe, where: str, report: _Report) -> tuple[str, bool]:
    steps = trace.find_steps(where, on_damage="skip")
    for row, step in steps[:_MOST_MARKS].tolist():
        report.mark(_key(trace, row), step - int(trace.episodes["first_step"][row]), NOTE, where)
    return f"{_plural(len(steps), 'step')} in {_plural(len(np.unique(steps[:, 0])), 'episode')}", True


def _audited(trace: Trace, recipe: Recipe, where: str, report: _Report) -> tuple[str, bool]:
    making, words = recipe.making, Counter[str]()

    def claimed(claim: Claim) -> None:
        words[claim.verdict] += 1
        report.claims.append((claim.name, claim.verdict, claim.text))
        report.progress(len(report.claims), len(CLAIMS))

    audit(
        trace,
        make_env=making.make_env,
        env_kwargs=making.env_kwargs,
        imports=recipe.imports,
        trust=making.trust,
        on_claim=claimed,
    )
    failed = f", {words[NO]} fail{'s' * (words[NO] == 1)}" * bool(words[NO])
    return f"{words[YES]} of {_plural(len(report.claims), 'claim')} hold{failed}", not words[NO]


def _branched(trace: Trace, recipe: Recipe, plan: Plan, report: _Report) -> tuple[str, bool]:
    return record(trace, recipe, plan, report.progress), True


def _asked(trace: Trace, recipe: Recipe, question: Question, report: _Report) -> tuple[str, bool]:
    report.opinion = ask(trace, recipe, question, report.progress)
    plots = ", ".join(f"{name} of {question.label}" for name in report.opinion)
    return f"see {plots} in the plots" if plots else f"{question.label}: no numbers", True


_ASKED: dict[str, type] = {"branch": Plan, "ask": Question}
TOOLS: Mapping[str, Callable[[Trace, Recipe, Any, _Report], tuple[str, bool]]] = {
    "lint": _linted,
    "check": _checked,
    "verify": _verified,
    "audit": _audited,
    "branch": _branched,
    "ask": _asked,
    "steps": _found,
}
