"""Publish the head of a log, so that a later forgery of the run shows."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from tempfile import TemporaryFile
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, ReplayDiverged
from gym_trace.format.manifest import json_of
from gym_trace.recording.provenance import inert_git
from gym_trace.storage.local import open_regular
from gym_trace.training.proof.chain import Chain, chain_in, directory_of
from gym_trace.training.proof.result import Proof, tally

GIT_NOTE = "git-note"
_REF = "gym-trace"
_KEY = "gym_trace_log"
_MAX_BYTES = 16 << 20  # limit of a file of anchors
_GIT_SECONDS = 60.0  # limit on one git command
# Opening a pipe without a reader would block.
_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)


def write_anchor(log: Chain | str | os.PathLike[str], where: str) -> str:
    """Append the head of a log to a file, or with "git-note" to the notes of the current commit, as a line of JSON.

    Args:
        log: directory of the log, of its trace, or of a training run.
        where: path of a file, or "git-note".

    Returns:
        The line.

    Raises:
        InvalidOption: the log has no entries yet. RecordingError: the line cannot be written. TraceNotFound.

    Examples:
        >>> gym_trace.proof.write_anchor("runs/one", "anchor.txt")  # doctest: +SKIP
    """
    chain = log if isinstance(log, Chain) else chain_in(directory_of(log))
    heads = [entry.head.hex() for entry in chain.entries()]
    if not heads:
        raise InvalidOption(f"{chain.path}: has no entries yet; anchor the run once it has started")
    line = json.dumps({_KEY: {"entries": len(heads), "first": heads[0], "head": heads[-1]}})
    if where == GIT_NOTE:
        _git("notes", "--ref", _REF, "append", "-m", line, "HEAD")
    else:
        try:
            with open(os.open(where, _APPENDING, 0o666), "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            raise RecordingError(f"{where}: cannot be written: {error.strerror}") from error
    return line


def check_anchor(chain: Chain, where: str, proof: Proof) -> None:
    """Check that the log continues each of its anchors in a file, or in the notes of a git repository.

    Raises ReplayDiverged if it has no anchor, or an anchor is not in the log; InvalidOption.
    """
    heads = [entry.head.hex() for entry in chain.entries()]
    anchors = [anchor for anchor in _anchors(where) if anchor.get("first") in heads[:1]]
    if not anchors:
        raise ReplayDiverged(f"{where}: has no anchor of {chain.path}")
    for anchor in anchors:
        number = anchor.get("entries")
        if not (type(number) is int and number > 0 and heads[number - 1 : number] == [anchor.get("head")]):
            raise ReplayDiverged(f"{chain.path}: entry {number} is not the one of the anchor in {where}")
    last = max(anchor["entries"] for anchor in anchors)
    why = "they were made after the anchor"
    tally(proof, last, len(heads), "entries of the log", f"are those of the anchor of {where}", why)


def _anchors(where: str) -> list[dict[str, Any]]:
    if where == GIT_NOTE:
        listed = _git("notes", "--ref", _REF, "list").split("\n")
        text = _git("cat-file", "--batch", text="".join(f"{line.split()[0]}\n" for line in listed if line))
    else:
        try:
            with open(open_regular(os.path.realpath(where), os.O_RDONLY), encoding="utf-8") as file:
                text = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            raise InvalidOption(f"{where}: cannot be read: {error}") from error
        if len(text) > _MAX_BYTES:
            raise InvalidOption(f"{where}: is larger than {_MAX_BYTES >> 20} MiB; pass a file of anchors")
    found = []
    for line in text.split("\n"):
        try:
            facts = json_of(line)[_KEY]
        except (ValueError, LookupError, TypeError, RecursionError):
            continue
        if isinstance(facts, dict):
            found.append(facts)
    return found


def _git(*arguments: str, text: str = "") -> str:
    """Run git in the current directory, whose repository is untrusted. text: its input. Raises InvalidOption."""
    command = inert_git(*arguments)
    command["env"]["GIT_NO_REPLACE_OBJECTS"] = "1"
    with TemporaryFile() as input_file, TemporaryFile() as errors:
        input_file.write(text.encode())
        input_file.seek(0)
        try:
            process = subprocess.Popen(**{**command, "stdin": input_file}, stdout=subprocess.PIPE, stderr=errors)
        except OSError as error:
            raise InvalidOption(f"{GIT_NOTE}: git cannot be run: {error.strerror}") from error
        timer = threading.Timer(_GIT_SECONDS, process.kill)  # if a pipe replaces one of its files, git never ends
        timer.start()
        try:
            with process:
                assert process.stdout is not None
                output = process.stdout.read(_MAX_BYTES + 1)
                if len(output) > _MAX_BYTES:
                    process.kill()
        finally:
            timer.cancel()
        errors.seek(0)
        problem = errors.read(1 << 10).decode(errors="replace").strip()
    if len(output) > _MAX_BYTES:
        raise InvalidOption(f"{GIT_NOTE}: the notes are larger than {_MAX_BYTES >> 20} MiB")
    if process.returncode:
        raise InvalidOption(f"{GIT_NOTE}: git: {problem or f'ended by signal, perhaps after {_GIT_SECONDS} seconds'}")
    return str(output, errors="replace")
