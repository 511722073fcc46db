"""Checks of a trace by itself: its bytes, and its episodes in their environment."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.format.facts import NAME as FACTS
from gym_trace.integrity.repair import check_trace
from gym_trace.model.values import Array
from gym_trace.playback.trace import Trace
from gym_trace.proof.result import Proof, Tell, tally
from gym_trace.replay.verify import verify_trace
from gym_trace.showing.words import count
from gym_trace.storage.local import open_regular

_BLOCK = 1 << 20


def files_of(directory: Path) -> dict[str, list[Any]]:
    """Return, by name, size and BLAKE2b digest of the files of a trace but rings, and facts, which users may change."""
    found: dict[str, list[Any]] = {}
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if name != FACTS and not name.startswith(".") and not name.endswith(".ring") and path.is_file():
            hashed, size = hashlib.blake2b(digest_size=32), 0
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                while block := file.read(_BLOCK):
                    hashed.update(block)
                    size += len(block)
            found[name] = [size, hashed.hexdigest()]
    return found


def check_bytes(trace: Path, proof: Proof) -> None:
    """Compare all checksums of a trace. Raises CorruptTrace for the first that is wrong."""
    report = check_trace(trace)
    for damage in [*report.damages, *report.healed]:
        raise damage.error()
    proof.proved.append(f"{trace}: every checksum, of {report.bytes:,} bytes in {count(report.files, 'file')}")


def check_files(trace: Path, recorded: Any, proof: Proof) -> None:
    """Compare the files of a trace with those at the end of a run. Raises ReplayDiverged."""
    then = recorded if isinstance(recorded, dict) else {}
    now = files_of(trace)
    if recorded is None:
        tally(proof, 0, len(now), "files of the trace", "", "the log was closed before the recorder, and has none")
        return
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            what = "was removed" if name not in now else "was added" if name not in then else "was changed"
            raise ReplayDiverged(f"{trace / name}: {what} after the end of the run")
    tally(proof, len(now), len(now), "files of the trace", "are those of the end", "the trace is empty")


def replay(
    trace: Trace, proof: Proof, wanted: bool, make_env: Callable[[], Any] | None, trust: bool, tell: Tell
) -> None:
    """Play the episodes in their environment, if wanted. Raises ReplayDiverged for one that differs.

    If the environment cannot be made here, `proof.unproved` says why.
    """
    if not wanted:
        proof.unproved.append("the episodes in their environment: --no-replay")
        return
    proof.doing, proof.done, proof.out_of = "episode", 0, len(trace)
    identical, reasons = 0, Counter[str]()
    try:
        for verdict in verify_trace(trace, make_env=make_env, trust=trust):
            proof.done += 1
            if verdict.verdict == "differs":
                raise ReplayDiverged(f"{trace.directory}: episode {verdict.index} differs in its environment: "
                                     f"{verdict.difference}")  # fmt: skip
            if verdict.verdict == "identical":
                identical += 1
            else:
                reasons[verdict.reason] += 1
            tell()
    except (EnvironmentUnavailable, InvalidOption) as error:
        proof.unproved.append(f"the episodes in their environment, which cannot be made here: {error}")
        return
    env = trace.env_spec.get("id") or "their environment"
    why = "; ".join(f"{reason} ({number:,})" for reason, number in reasons.items()) or "there is nothing to play"
    tally(proof, identical, len(trace), "episodes", f"played again in {env}, bit for bit", why)


class Uses:
    """Number of updates that learned from each recorded step."""

    def __init__(self, trace: Trace):
        table = trace.episodes
        self._counts = {
            place: np.zeros(int(begins[-1]) + int(table["steps"][rows[-1]]), np.uint32)
            for place, (rows, begins) in lanes_of(trace).items()
        }

    def add(self, writer: str, lane: int, steps: Array) -> None:
        """Add an update. steps: numbers of steps of the lane, each once."""
        self._counts[writer, lane][steps] += 1

    def tell(self, proof: Proof) -> None:
        counts = np.concatenate([np.zeros(0, np.uint32), *self._counts.values()])
        used = counts[counts > 0]
        least, most = (int(used.min()), int(used.max())) if len(used) else (0, 0)
        often = "once" if most == 1 else f"{least:,} times" if least == most else f"{least:,} to {most:,} times"
        tally(
            proof,
            len(used),
            len(counts),
            "recorded steps",
            f"learned from, each {often}",
            "no update learned from them",
        )


def lanes_of(trace: Trace) -> dict[tuple[str, int], tuple[Array, Array]]:
    """Return, by writer and lane, the episodes in order and the number of steps of the lane before each."""
    table = trace.episodes
    found, by_lane = {}, dict[tuple[str, int], list[int]]()
    for index, (writer, lane) in enumerate(zip(table["writer"].tolist(), table["lane"].tolist())):
        by_lane.setdefault((trace.writers[writer], lane), []).append(index)
    for name, indexes in by_lane.items():
        rows = np.array(indexes)
        rows = rows[np.lexsort((table["first_step"][rows], table["episode_id"][rows]))]
        ends = np.cumsum(table["steps"][rows].astype(np.int64))
        found[name] = rows, ends - table["steps"][rows]
    return found
