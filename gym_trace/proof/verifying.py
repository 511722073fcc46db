"""verify(): learns the updates of a log again. Needs PyTorch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gym_trace.errors import CorruptRun, InvalidOption, ReplayDiverged, TraceError
from gym_trace.format.manifest import json_of
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.proof.anchors import check_anchor
from gym_trace.proof.chain import ABOUT, chain_in
from gym_trace.proof.recorded import check_bytes, check_files, replay
from gym_trace.proof.result import LIMITS, Proof
from gym_trace.proof.state import Packed, Parts, made_with, norms_of, restore, set_generator, state_of, unpacked
from gym_trace.proof.steps import RecordedSteps
from gym_trace.proof.update_log import END, START, UPDATE, directory_of
from gym_trace.showing.words import count


def verify(
    directory: str | os.PathLike[str],
    parts: Parts,
    learn: Callable[..., Any],
    *,
    on_progress: Callable[[Proof], Any] | None = None,
    replays: bool = True,
    make_env: Callable[[], Any] | None = None,
    trust: bool = False,
    anchor: str | None = None,
) -> Proof:
    """Learn every update of a log again, compare results and states, and play the episodes of its trace again.

    Args:
        directory: of an UpdateLog, or of its trace.
        parts, learn: like those of the UpdateLog; their state is that of the log afterwards. The global
            generators of PyTorch, NumPy and random change, too.
        on_progress: called after each update and episode; a truthy result ends it.
        replays: whether to play the episodes again. make_env: makes their environment; None: the recorded one. trust:
            allow imports and calls that only the trace names.
        anchor: file with the head of the log, or "git-note".

    Raises:
        TraceNotFound, CorruptTrace: no log, or damaged.
        InvalidOption: the parts are other ones than those of the log.
    """
    place = directory_of(directory)
    proof = Proof(unproved=list(LIMITS), doing="update")
    learner = _Again(place, parts, learn, proof)
    if learner.trace is not None:
        check_bytes(learner.trace.directory, proof)
    try:
        if anchor is not None:
            check_anchor(learner.chain, anchor)
            proof.proved.append(f"log: continues the anchor of {anchor}")
        for entry in learner.entries:
            learner.take(entry.kind, entry.content)
            if on_progress is not None and entry.kind == UPDATE and on_progress(proof):
                proof.differs = "it was interrupted"
                return proof
        learner.finish()
        if learner.trace is not None and replays:
            replay(learner.trace, proof, make_env, trust, on_progress)
        elif learner.trace is not None:
            proof.unproved.append("the episodes in their environment: --no-replay")
    except InvalidOption:
        raise
    except (TraceError, MemoryError) as error:
        proof.differs = str(error) or "not enough memory"
    return proof


class _Again:
    """Learns entry by entry."""

    def __init__(self, directory: Path, parts: Parts, learn: Callable[..., Any], proof: Proof):
        self._directory, self._parts, self._learn, self._proof = directory, dict(parts), learn, proof
        self.chain = chain_in(directory)
        self.entries = list(self.chain.entries())
        proof.of = proof.out_of = sum(entry.kind == UPDATE for entry in self.entries)
        if not proof.of:
            raise CorruptRun("has no updates", directory, "nothing was learned yet")
        about = json_of((directory / ABOUT).read_bytes())
        trace = about.get("trace") if isinstance(about, dict) else None
        self.trace: Trace | None = None if trace is None else open_trace(directory / str(trace))
        self._recorded: RecordedSteps | None = None
        self._starts = self._referenced = self._copied = self._undigested = 0
        self._end: Mapping[str, Any] | None = None
        self._notes: dict[str, None] = {}
        self._outside: dict[str, list[int]] = {}  # parts, and updates before which something else changed them

    def take(self, kind: str, content: Any) -> None:
        """Take an entry. Raises ReplayDiverged, CorruptTrace, InvalidOption."""
        if not isinstance(content, dict):
            raise self.chain.damaged(f"the content of an entry is a {type(content).__name__}")
        self._end = content if kind == END else None
        if kind == START:
            self._start(content)
        elif kind == UPDATE:
            self._update(content)
        elif kind == END:
            self._compare_end(content)

    def _start(self, content: Mapping[str, Any]) -> None:
        state = unpacked(content.get("state"))
        done = self._proof.versions
        if self._starts and Packed(state, "").digest() != state_of(self._parts).digest():
            self._proof.unproved.append(
                f"where the state before update {done} came from, when the script started again"
            )
        self._starts += 1
        restore(self._parts, state)
        for name, now in made_with().items():
            if content.get(name) != now:
                self._notes[f"{name} was {content.get(name)}, is {now} here"] = None
        self._proof.notes = list(self._notes)
        torch.set_num_threads(int(content.get("threads") or 1))
        torch.use_deterministic_algorithms(bool(content.get("deterministic")))
        if self.trace is not None:
            writer = content.get("writer")
            self._recorded = RecordedSteps(self.trace, None if writer is None else str(writer))

    def _update(self, content: Mapping[str, Any]) -> None:
        number = self._proof.versions
        try:
            if content.get("outside") is not None:
                found = unpacked(content["outside"])
                restore({name: self._parts[name] for name in found}, found)
                self._outside[", ".join(found)] = [*self._outside.get(", ".join(found), []), number]
            values = unpacked(content["values"])
            inputs = {str(name): value for name, value in values["inputs"].items()}
            for name, (plain, columns) in values["steps"].items():
                if self._recorded is None:
                    raise self.chain.damaged(f"update {number} is of steps, and the log has no trace")
                inputs[str(name)] = self._recorded.of(plain, columns)
                self._referenced += 1
            for name, state in content["generators"].items():
                if state is not None:
                    set_generator(name, state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, TraceError):
                raise
            raise self.chain.damaged(f"update {number}: {error}") from error
        result = self._learn(**self._parts, **inputs)
        if content.get("result") is not None:
            then, now = unpacked(content["result"]), unpacked(Packed(result, "result").stored())
            for name, before, after in _differing(then, now, ""):
                where = f"update {number}: the result{name}"
                raise ReplayDiverged(f"{where} is {before} in the log, and {after} when learned again")
        self._undigested += 1
        if "digest" in content:
            if state_of(self._parts).digest() != content["digest"]:
                self._differs(number, content.get("norms"))
            self._undigested = 0
        self._proof.versions, self._proof.done = number + 1, number + 1

    def _differs(self, number: int, norms: Any) -> None:
        """Raise ReplayDiverged for a state that differs after an update."""
        found = []
        for name, now in norms_of(self._parts).items():
            then = norms.get(name) if isinstance(norms, dict) else None
            if isinstance(then, float) and then != now:
                found.append(f"the norm of {name} is {then!r} in the log, and {now!r}")
        since = f", or one of the {self._undigested - 1} before it" if self._undigested > 1 else ""
        raise ReplayDiverged(f"update {number}{since}: the state differs when learned again"
                             f"{': ' + '; '.join(found) if found else ''}")  # fmt: skip

    def _compare_end(self, content: Mapping[str, Any]) -> None:
        """Compare the last state, tensor by tensor, but parts that changed after the last update."""
        then, now = unpacked(content.get("state")), unpacked(state_of(self._parts).stored())
        for name in content.get("outside") or ():
            self._proof.unproved.append(f"what changed {name} after the last update, outside of learn")
            then.pop(name, None), now.pop(name, None)
        for name, before, after in _differing(then, now, ""):
            where = f"the last state: {name.lstrip('/')}"
            raise ReplayDiverged(f"{where} is {before} in the log, and {after} when learned again")

    def finish(self) -> None:
        """Say what was proved. Raises ReplayDiverged."""
        proof, log = self._proof, f"log: {len(self.entries):,} entries"
        proof.proved.append(f"{log}, each with the digest of the one before, from {ABOUT} on")
        proof.proved.append(f"{count(proof.versions, 'update')} learned again, bit for bit")
        if self._referenced and self.trace is not None:
            proof.proved.append(f"steps of {count(self._referenced, 'update')} read from {self.trace.directory}")
        for name, numbers in self._outside.items():
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            proof.unproved.append(f"what changed {name} before update {numbers[0]}{more}, outside of learn")
        if self._end is None:
            proof.unproved.append("the end: the log was not closed; later updates may be missing")
        elif self.trace is not None and self._end.get("files") is not None:
            check_files(self.trace.directory, self._end["files"])
            proof.proved.append("the end: the last state, tensor by tensor; files of the trace as they were then")
        else:
            proof.proved.append("the end: the last state, tensor by tensor")


def _differing(then: Any, now: Any, name: str) -> Any:
    """Yield name, value in the log and value now for what differs."""
    if isinstance(then, Mapping) and isinstance(now, Mapping) and list(then) == list(now):
        for key in then:
            yield from _differing(then[key], now[key], f"{name}/{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (before, after) in enumerate(zip(then, now)):
            yield from _differing(before, after, f"{name}/{at}")
    elif isinstance(then, (np.ndarray, torch.Tensor)) and type(then) is type(now) and then.shape == now.shape:
        before, after = np.asarray(Packed(then, "").arrays[0]), np.asarray(Packed(now, "").arrays[0])
        if then.dtype != now.dtype or not np.array_equal(before, after):
            far = _as_floats(then) - _as_floats(now)
            yield name, "another array", f"{float(np.nanmax(np.abs(far))):.3g} away" if far.size else "of another type"
    elif then != now and not all(isinstance(value, float) and math.isnan(value) for value in (then, now)):
        yield name, then, now


def _as_floats(array: Any) -> Any:
    return np.asarray(array.double().numpy() if isinstance(array, torch.Tensor) else array, np.float64)
