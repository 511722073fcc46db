"""Checks of a trace by itself: its bytes, and its episodes in their environment."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_trace.errors import EnvironmentUnavailable, InvalidOption, ReplayDiverged
from gym_trace.format.facts import NAME as FACTS
from gym_trace.integrity.repair import check_trace
from gym_trace.playback.trace import Trace
from gym_trace.proof.result import Proof
from gym_trace.replay.verify import verify_trace
from gym_trace.showing.words import count
from gym_trace.storage.local import open_regular

_BLOCK = 1 << 20

Files = dict[str, list[Any]]  # by name: bytes, and their digest in hexadecimal


def files_of(directory: Path) -> Files:
    """Return size and BLAKE2b digest of the files of a trace, without rings and facts, which users may change."""
    found: Files = {}
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


def check_files(trace: Path, recorded: Any) -> None:
    """Compare the files of a trace with those at the end of a run. Raises ReplayDiverged."""
    then = recorded if isinstance(recorded, dict) else {}
    now = files_of(trace)
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            what = "was removed" if name not in now else "was added" if name not in then else "was changed"
            raise ReplayDiverged(f"{trace / name}: {what} after the end of the run")


def replay(
    trace: Trace,
    proof: Proof,
    make_env: Callable[[], Any] | None,
    trust: bool,
    on_progress: Callable[[Proof], Any] | None,
) -> None:
    """Play the episodes in their environment. Raises ReplayDiverged for one that differs.

    If the environment cannot be made here, `proof.unproved` says why.
    """
    proof.doing, proof.done, proof.out_of = "episode", 0, len(trace)
    found: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    try:
        for verdict in verify_trace(trace, make_env=make_env, trust=trust):
            found[verdict.verdict] += 1
            proof.done += 1
            if verdict.verdict == "differs":
                raise ReplayDiverged(f"{trace.directory}: episode {verdict.index} differs in its environment: "
                                     f"{verdict.difference}")  # fmt: skip
            if verdict.verdict != "identical":
                reasons[verdict.reason] += 1
            if on_progress is not None and on_progress(proof):
                proof.differs = "it was interrupted"
                return
    except (EnvironmentUnavailable, InvalidOption) as error:
        proof.unproved.append(f"the episodes in their environment, which cannot be made here: {error}")
        return
    env = trace.env_spec.get("id") or "their environment"
    if found["identical"]:
        proof.proved.append(f"{count(found['identical'], 'episode')} played again in {env}, bit for bit")
    for reason, number in reasons.items():
        proof.unproved.append(f"{count(number, 'episode')} in {env}: {reason}")
