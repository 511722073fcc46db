"""verify(): learns the updates of a log again. Needs PyTorch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gym_trace.errors import CorruptRun, InvalidOption, ReplayDiverged, TraceError
from gym_trace.format.manifest import json_of
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.proof.anchors import check_anchor
from gym_trace.proof.chain import ABOUT, END, START, UPDATE, Chain, Entry, chain_in
from gym_trace.proof.recorded import check_bytes, check_files, replay
from gym_trace.proof.result import LIMITS, Proof, first_difference, telling
from gym_trace.proof.state import (
    Parts,
    norms_of,
    notes_on,
    packed,
    restore,
    set_generator,
    state_digest,
    state_of,
    unpacked,
)
from gym_trace.proof.steps import RecordedSteps
from gym_trace.proof.update_log import directory_of
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
    device: str | None = None,
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
        device: of the tensors in the log that were not on the CPU; None: the one that each had.

    Raises:
        TraceNotFound, CorruptTrace: no log, or damaged.
        InvalidOption: the parts are other ones than those of the log, or there is no such device.
    """
    place = directory_of(directory)
    chain = chain_in(place)
    if chain.about.name != ABOUT:
        raise InvalidOption(f"{place}: is a training run; pass it to 'gym-trace train --verify', or verify_run()")
    proof = Proof(unproved=list(LIMITS), doing="update")
    tell = telling(proof, on_progress)
    learner = _Again(chain, parts, learn, proof, device)
    trace = learner.trace
    if trace is not None:
        check_bytes(trace.directory, proof)
    with first_difference(proof):
        if anchor is not None:
            check_anchor(chain, anchor, proof)
        for entry in chain.entries():
            learner.take(entry)
            tell()
        learner.finish()
        if trace is not None:
            replay(trace, proof, replays, make_env, trust, tell)
    return proof


class _Again:
    """Learns entry by entry."""

    def __init__(self, chain: Chain, parts: Parts, learn: Callable[..., Any], proof: Proof, device: str | None):
        self._chain, self._parts, self._learn, self._proof = chain, dict(parts), learn, proof
        self._device = device
        kinds = Counter(entry.kind for entry in chain.entries())
        self._count = kinds.total()
        proof.of = proof.out_of = kinds[UPDATE]
        if not proof.of:
            raise CorruptRun("has no updates", chain.path, "nothing was learned yet")
        about = json_of(chain.about.read_bytes())
        trace = about.get("trace") if isinstance(about, dict) else None
        self.trace: Trace | None = None if trace is None else open_trace(chain.about.parent / str(trace))
        self._recorded: RecordedSteps | None = None
        self._starts = self._referenced = self._undigested = 0
        self._end: Mapping[str, Any] | None = None
        self._outside: dict[str, list[int]] = {}  # parts, and updates before which something else changed them

    def take(self, entry: Entry) -> None:
        """Take an entry. Raises ReplayDiverged, CorruptTrace, InvalidOption."""
        content = entry.content
        if not isinstance(content, dict):
            raise self._chain.damaged(f"the content of an entry is a {type(content).__name__}")
        self._end = content if entry.kind == END else None
        if entry.kind == START:
            self._start(content)
        elif entry.kind == UPDATE:
            self._update(content)
        elif entry.kind == END:
            self._compare_end(content)

    def _start(self, content: Mapping[str, Any]) -> None:
        proof, state = self._proof, content.get("state")
        if self._starts and any(_differing(unpacked(state, "cpu"), unpacked(state_of(self._parts), "cpu"), "")):
            proof.unproved.append(
                f"where the state before update {proof.versions} came from, when the script started again"
            )
        self._starts += 1
        restore(self._parts, unpacked(state, self._device))
        proof.notes = list(dict.fromkeys([*proof.notes, *notes_on([content])]))
        torch.set_num_threads(int(content.get("threads") or 1))
        torch.use_deterministic_algorithms(bool(content.get("deterministic")))
        if self.trace is not None:
            writer = content.get("writer")
            self._recorded = RecordedSteps(self.trace, None if writer is None else str(writer), self._device)

    def _inputs(self, number: int, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an update, after all that changed before it."""
        try:
            if content["outside"] is not None:
                found = unpacked(content["outside"], self._device)
                restore({name: self._parts[name] for name in found}, found)
                self._outside.setdefault(", ".join(found), []).append(number)
            inputs = {str(name): unpacked(value, self._device) for name, value in content["inputs"].items()}
            for name, reference in content["steps"].items():
                if self._recorded is None:
                    raise self._chain.damaged(f"update {number} is of steps, and the log has no trace")
                inputs[str(name)] = self._recorded.of(*unpacked(reference))
                self._referenced += 1
            for name, state in content["generators"].items():
                if state is not None:
                    set_generator(name, state, self._device)
        except TraceError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._chain.damaged(f"update {number}: {error}") from error
        return inputs

    def _update(self, content: Mapping[str, Any]) -> None:
        number = self._proof.versions
        result = self._learn(**self._parts, **self._inputs(number, content))
        if content.get("result") is not None:
            then, now = unpacked(content["result"], "cpu"), unpacked(packed(result, "result"), "cpu")
            self._compare(f"update {number}: the result", then, now)
        self._undigested += 1
        if "digest" in content:
            if state_digest(self._parts) != content["digest"]:
                self._differs(number, content.get("norms"))
            self._undigested = 0
        self._proof.versions = self._proof.done = number + 1

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
        outside = set(content.get("outside") or ())
        for name in outside:
            self._proof.unproved.append(f"what changed {name} after the last update, outside of learn")
        then, now = ({name: part for name, part in unpacked(state, "cpu").items() if name not in outside}
                     for state in (content.get("state"), state_of(self._parts)))  # fmt: skip
        self._compare("the last state: ", then, now)

    def _compare(self, where: str, then: Any, now: Any) -> None:
        """Raises ReplayDiverged."""
        for name, before, after in _differing(then, now, ""):
            raise ReplayDiverged(f"{where}{name} is {before} in the log, and {after} when learned again")

    def finish(self) -> None:
        """Say what was proved. Raises ReplayDiverged."""
        proof = self._proof
        entries = f"{self._count:,} entries, each with the digest of the one before, from {ABOUT} on"
        proof.proved.append(f"log: {entries}")
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


def _differing(then: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value in the log and value now for what differs."""
    if isinstance(then, dict) and isinstance(now, dict) and list(then) == list(now):
        for key in then:
            yield from _differing(then[key], now[key], f"{name}/{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (before, after) in enumerate(zip(then, now)):
            yield from _differing(before, after, f"{name}/{at}")
    elif packed(then, name) != packed(now, name):
        if not isinstance(then, (np.ndarray, torch.Tensor)) or np.shape(then) != np.shape(now):
            yield name, then, now
        else:
            far = np.abs(_as_floats(then) - _as_floats(now))
            yield name, "another array", f"{np.nanmax(far):.3g} away" if far.size else "of another type"


def _as_floats(array: Any) -> Any:
    return np.asarray(array.double() if isinstance(array, torch.Tensor) else array, np.float64)
