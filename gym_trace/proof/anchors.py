"""The head of a log, written to where it can be published: a later forgery of the run then shows."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, ReplayDiverged
from gym_trace.format.manifest import json_of
from gym_trace.proof.chain import Chain
from gym_trace.proof.result import Proof
from gym_trace.recording.provenance import inert_git

GIT_NOTE = "git-note"
_REF = "gym-trace"
_KEY = "gym_trace_log"


def write_anchor(chain: Chain, where: str) -> str:
    """Append the head of a log to a file, or with "git-note" to the notes of the current commit, as a line of JSON.

    Returns the line. Raises InvalidOption, RecordingError.
    """
    heads = [entry.head.hex() for entry in chain.entries()]
    if not heads:
        raise InvalidOption(f"{chain.path}: has no entries yet; anchor the run once it has started")
    line = json.dumps({_KEY: {"entries": len(heads), "first": heads[0], "head": heads[-1]}})
    if where == GIT_NOTE:
        _git("notes", "--ref", _REF, "append", "-m", line, "HEAD")
    else:
        try:
            with open(where, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RecordingError(f"{where}: cannot be written: {error.strerror}") from error
    return line


def check_anchor(chain: Chain, where: str, proof: Proof) -> None:
    """Check that the log continues every anchor that a file, or the notes of a git repository, have of it.

    Raises ReplayDiverged if they are missing, or if one is not in the log; InvalidOption.
    """
    heads = [entry.head.hex() for entry in chain.entries()]
    anchors = [anchor for anchor in _anchors(where) if anchor.get("first") in heads[:1]]
    if not anchors:
        raise ReplayDiverged(f"{where}: has no anchor of {chain.path}")
    for anchor in anchors:
        number = anchor.get("entries")
        if not (type(number) is int and heads[number - 1 : number] == [anchor.get("head")]):
            raise ReplayDiverged(f"{chain.path}: entry {number} is not the one of the anchor in {where}")
    proof.proved.append(f"log: continues the anchor of {where}")


def _anchors(where: str) -> list[dict[str, Any]]:
    if where == GIT_NOTE:
        listed = _git("notes", "--ref", _REF, "list").split("\n")
        text = "\n".join(_git("cat-file", "blob", line.split()[0]) for line in listed if line)
    else:
        try:
            text = Path(where).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InvalidOption(f"{where}: cannot be read: {error}") from error
    found = []
    for line in text.split("\n"):
        try:
            facts = json_of(line)[_KEY]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(facts, dict):
            found.append(facts)
    return found


def _git(*arguments: str) -> str:
    """Run git in the current directory, whose repository is untrusted. Raises InvalidOption."""
    try:
        ended = subprocess.run(**inert_git(*arguments), capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise InvalidOption(f"{GIT_NOTE}: git cannot be run: {error.strerror}") from error
    if ended.returncode:
        raise InvalidOption(f"{GIT_NOTE}: git: {ended.stderr.strip()}")
    return str(ended.stdout)
