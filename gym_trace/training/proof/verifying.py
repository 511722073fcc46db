"""verify(): relearn the updates of a log. Needs PyTorch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gym_trace.data.showing.text import count
from gym_trace.errors import CorruptRun, InvalidOption, ReplayDiverged, TraceError
from gym_trace.playback.trace import Trace, open_trace
from gym_trace.printable import error_text
from gym_trace.training.proof.anchors import check_anchor
from gym_trace.training.proof.chain import (
    ABOUT,
    END,
    START,
    UPDATE,
    Chain,
    LogEntry,
    chain_in,
    count_entries,
    directory_of,
)
from gym_trace.training.proof.result import Proof, first_difference, progress_reporter, tally
from gym_trace.training.proof.state import (
    Devices,
    Parts,
    distance,
    generators,
    norms_of,
    notes_on,
    packed,
    restore,
    set_generator,
    state_digest,
    state_of,
    unpacked,
)
from gym_trace.training.proof.steps import RecordedSteps
from gym_trace.training.proof.trace_checks import StepUses, check_bytes, check_files, replay

_MAX_THREADS = 1024


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
    device: str | Mapping[str, str] | None = None,
) -> Proof:
    """Relearn every update of a log, compare results and states, and replay the episodes of its trace.

    Args:
        directory: directory of an UpdateLog, or of its trace.
        parts, learn: like those of the UpdateLog; the parts have the logged state afterwards. The global
            generators of PyTorch, NumPy and random change, too.
        on_progress: called after each update and episode; a truthy result ends the proof.
        replays: whether to replay the episodes. make_env: makes their environment; None: the recorded one. trust:
            allow imports and calls of names that only the trace contains.
        anchor: file with the head of the log, or "git-note".
        device: device for tensors and generators of the log that were not on the CPU, or a dict from logged devices to
            those used here, such as {"cuda:0": "cuda:1"}. None: their own.

    Raises:
        TraceNotFound, CorruptTrace: the log is missing or damaged.
        InvalidOption: the parts do not fit the log, or the device is missing.

    Examples:
        >>> proof = gym_trace.proof.verify("runs/mine", parts, learn)  # doctest: +SKIP
        >>> proof.proved, proof.differs  # doctest: +SKIP
    """
    folder = directory_of(directory)
    chain = chain_in(folder)
    if chain.about.name != ABOUT:
        raise InvalidOption(f"{folder}: is a training run; pass it to 'gym-trace train --verify', or verify_run()")
    proof = Proof(doing="update")
    report = progress_reporter(proof, on_progress)
    learner = _Relearning(chain, parts, learn, proof, device)
    trace = learner.trace
    if folder != Path(directory).absolute() and (trace is None or not trace.directory.samefile(directory)):
        of = "no trace" if trace is None else trace.directory
        raise InvalidOption(f"{folder}: is of {of}, not of {directory}; pass the directory of the log to prove that")
    if trace is not None:
        check_bytes(trace.directory, proof)
    with first_difference(proof):
        if anchor is not None:
            check_anchor(chain, anchor, proof)
        for entry in chain.entries():
            learner.take(entry)
            report()
        learner.finish()
        if trace is not None:
            replay(trace, proof, replays, make_env, trust, report)
    return proof


class _Relearning:
    """Relearns the updates of a log, entry by entry."""

    def __init__(self, chain: Chain, parts: Parts, learn: Callable[..., Any], proof: Proof, devices: Devices):
        self._chain, self._parts, self._learn, self._proof = chain, dict(parts), learn, proof
        self._devices = devices
        self._kinds = chain.kinds()
        proof.of = proof.out_of = self._kinds[UPDATE]
        if not proof.of:
            raise CorruptRun("has no updates", chain.path, "nothing was learned yet")
        try:
            trace = chain.facts().get("trace")
        except (OSError, ValueError) as error:
            raise chain.damaged(f"{chain.about.name} beside it cannot be read: {error}") from error
        self.trace: Trace | None = None if trace is None else open_trace(chain.about.parent / str(trace))
        self._uses = None if self.trace is None else StepUses(self.trace)
        self._recorded: RecordedSteps | None = None
        self._starts = self._compared_until = 0  # starts; updates up to the last compared state
        self._seeded = 0  # updates before which the log sets generators
        self._compared = Counter[str]()
        self._end_content: Mapping[str, Any] | None = None
        self._outside: dict[str, list[int]] = {}  # by parts: updates before which they changed outside of learn
        self._arrays = Counter[str]()  # arguments other than Steps: number of updates
        self._settings: dict[str, list[Any]] = {}  # values of arguments that are one number or text

    def take(self, entry: LogEntry) -> None:
        """Process an entry. Raises ReplayDiverged, CorruptTrace, InvalidOption."""
        content = entry.content
        try:
            if not isinstance(content, dict):
                raise TypeError(f"the content of an entry is a {type(content).__name__}")
            self._end_content = content if entry.kind == END else None
            if entry.kind == START:
                self._start(content)
            elif entry.kind == UPDATE:
                self._update(content)
            elif entry.kind == END:
                self._compare_end(content)
        except (TraceError, MemoryError):
            raise
        except Exception as error:  # the log is untrusted, and PyTorch may raise anything
            raise self._chain.damaged(f"{error_text(error)}, in the entry at byte {entry.at}") from error

    def _start(self, content: Mapping[str, Any]) -> None:
        proof, state = self._proof, unpacked(content["state"], self._devices)
        if self._starts:
            if any(_differing(_plain(state), _plain_state(self._parts), "")):
                proof.unproved.append(f"where the state before update {proof.versions} came from, when the script "
                                      "started again")  # fmt: skip
            else:
                self._compared_until = proof.versions
        before = _settings_of(self._parts)
        restore(self._parts, state)
        if not self._starts:
            for name, then, now in _differing(_settings_of(self._parts), before, ""):
                proof.unproved.append(f"where the first state came from: {name[1:]} is {then} in the log, and {now} "
                                      "in the parts that were passed")  # fmt: skip
        self._starts += 1
        proof.notes = list(dict.fromkeys([*proof.notes, *notes_on([content])]))
        threads = content.get("threads", 1)
        if type(threads) is not int or not 0 < threads <= _MAX_THREADS:
            raise ValueError(f"threads={threads!r}")
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(bool(content.get("deterministic")))
        if self.trace is not None:
            writer = content.get("writer")
            self._recorded = RecordedSteps(self.trace, None if writer is None else str(writer), self._devices)

    def _inputs(self, number: int, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an update; first restore the state that it began with."""
        if content["outside"] is not None:
            found = unpacked(content["outside"], self._devices)
            restore({name: self._parts[name] for name in found}, found)
            self._outside.setdefault(", ".join(found), []).append(number)
        inputs = {str(name): unpacked(value, self._devices) for name, value in content["inputs"].items()}
        for name, value in inputs.items():
            if isinstance(value, (bool, int, float, str, type(None))):
                self._settings.setdefault(name, []).append(value)
            else:
                self._arrays[name] += 1
        uses: dict[tuple[str, int], list[Any]] = {}
        for name, reference in content["steps"].items():
            if self._recorded is None:
                raise self._chain.damaged(f"update {number} is of steps, and the log has no trace")
            where, columns = unpacked(reference)
            inputs[str(name)] = self._recorded.of(where, columns, uses)
        if self._uses is not None:
            for (writer, lane), steps in uses.items():
                self._uses.add(writer, lane, [numbers.ravel() for numbers in steps])
        self._seeded += any(state is not None for state in content["generators"].values())
        for name, state in content["generators"].items():
            if state is not None:
                set_generator(name, state, self._devices)
        return inputs

    def _update(self, content: Mapping[str, Any]) -> None:
        number = self._proof.versions
        result = self._learned(number, self._inputs(number, content))
        try:
            self._compare_result(number, content.get("result"), result)
            if "digest" in content:
                if state_digest(self._parts) != content["digest"]:
                    self._differs(number, content.get("norms"))
                self._compared["states"] += 1
                self._compared_until = number + 1
        except ReplayDiverged as error:
            raise ReplayDiverged(f"{error}{self._repeated(number, content)}") from error
        self._proof.versions = self._proof.done = number + 1

    def _learned(self, number: int, inputs: Mapping[str, Any]) -> Any:
        try:
            return self._learn(**self._parts, **inputs)
        except Exception as error:  # the user's function may raise anything
            raise ReplayDiverged(f"update {number}: learn raised {error_text(error)}") from error

    def _repeated(self, number: int, content: Mapping[str, Any]) -> str:
        """Learn an update twice from the same state. Return whether it is deterministic here, as text."""
        state, drawn, outcomes = state_of(self._parts), generators(), []
        try:
            for _ in range(2):
                restore(self._parts, unpacked(state))
                for name, value in drawn.items():
                    set_generator(name, value)
                result = self._learned(number, self._inputs(number, content))
                outcome = {"result": _plain(result)} if content.get("result") is not None else {}
                outcomes.append(outcome | _plain_state(self._parts))
        except TraceError:  # it fails from this state
            return ""
        apart = [f"{name[1:]} is {away}" for name, _, away in _differing(outcomes[0], outcomes[1], "")]
        if not apart:
            return "; learned twice here from one state, it gives the same result"
        others = f", and {len(apart) - 1:,} more differ" if len(apart) > 1 else ""
        return f"; it is not deterministic here: learned twice from one state, {apart[0]}{others}"

    def _compare_result(self, number: int, then: Any, result: Any) -> None:
        """Compare the result of learn. The log has None for objects that it cannot store."""
        try:
            now = packed(result, "result")
        except InvalidOption as error:
            if then is not None:
                raise ReplayDiverged(f"update {number}: the result is another one in the log: {error}") from error
        else:
            if then is not None:
                self._compare(f"update {number}: the result", unpacked(then, "cpu"), unpacked(now, "cpu"))
                self._compared["results"] += 1

    def _differs(self, number: int, norms: Any) -> None:
        """Raise ReplayDiverged for a state that differs after an update."""
        found = []
        for name, now in norms_of(self._parts).items():
            then = norms.get(name) if isinstance(norms, dict) else None
            if isinstance(then, float) and then != now:
                found.append(f"the norm of {name} is {then!r} in the log, and {now!r}")
        since = f", or one of the {number - self._compared_until} before it" if number > self._compared_until else ""
        raise ReplayDiverged(f"update {number}{since}: the state differs when learned again"
                             f"{': ' + '; '.join(found) if found else ''}")  # fmt: skip

    def _compare_end(self, content: Mapping[str, Any]) -> None:
        """Compare the last state, tensor by tensor, except parts that changed after the last update."""
        outside, then = set(content["outside"]), unpacked(content["state"], "cpu")
        if (
            not isinstance(content["outside"], list)
            or not outside <= self._parts.keys()
            or then.keys() != self._parts.keys()
        ):
            raise ValueError("the last state is of other parts")
        now = _plain_state(self._parts)
        inside = [name for name in then if name not in outside]
        self._compare("the last state: ", *({name: state[name] for name in inside} for state in (then, now)))
        for name in sorted(outside):
            self._proof.unproved.append(f"what changed {name} after the last update, outside of learn")
        self._compared["parts"] = len(inside)
        if not outside:
            self._compared_until = self._proof.versions

    def _compare(self, where: str, then: Any, now: Any) -> None:
        for name, before, after in _differing(then, now, ""):
            raise ReplayDiverged(f"{where}{name} is {before} in the log, and {after} when learned again")

    def finish(self) -> None:
        """Add the results to the proof. Raises ReplayDiverged."""
        proof, updates, compared = self._proof, self._proof.versions, self._compared
        seeded = f", and the states of generators before {count(self._seeded, 'update')}" if self._seeded else ""
        proof.limits.append(f"where the first state{seeded} came from, and that these weights chose the actions")
        count_entries(self._kinds, (START, UPDATE, END), ABOUT, proof)
        settings = "".join(f"; {name}={_spread(values)}" for name, values in self._settings.items())
        how = f"learned again, bit for bit; the state compared after {compared['states']:,}{settings}"
        tally(proof, self._compared_until, updates, "updates", how, "no digest of the state follows them")
        returned = "the log has none, or learn returns what it cannot hold"
        tally(proof, compared["results"], updates, "results of updates", "equal, bit for bit", returned)
        for name, numbers in self._outside.items():
            more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
            proof.unproved.append(f"what changed {name} before update {numbers[0]}{more}, outside of learn")
        reason = "the log has no trace" if self.trace is None else "arrays in the log, not Steps of the trace"
        for name, number in self._arrays.items():
            proof.unproved.append(f"where {name} of {count(number, 'update')} came from: {reason}")
        if self._uses is None:
            proof.unproved.append("steps: the log has no trace")
        else:
            self._uses.add_to(proof)
        if self._end_content is None:
            proof.unproved.append("the end: the log was not closed; later updates may be missing")
            return
        parts = "parts of the last state"
        tally(proof, compared["parts"], len(self._parts), parts, "equal, tensor by tensor", "changed outside of learn")
        if self.trace is not None:
            check_files(self.trace.directory, self._end_content.get("files"), proof)


def _plain(state: Any) -> Any:
    """Return a state as the log restores it, on the CPU."""
    return unpacked(packed(state, "state"), "cpu")


def _settings_of(parts: Parts) -> Any:
    """Return the settings of optimizers and schedulers, without learned state."""
    learned = torch.nn.Module, torch.Generator, np.random.Generator
    states = _plain_state({name: part for name, part in parts.items() if not isinstance(part, learned)})
    return {name: {key: value for key, value in state.items() if key != "state"} for name, state in states.items()}


def _plain_state(parts: Parts) -> Any:
    return unpacked(state_of(parts), "cpu")


def _spread(values: list[Any]) -> str:
    """Return a summary of the values of an argument."""
    if all(value == values[0] for value in values):
        return f"{values[0]!r:.40}"
    is_number = all(isinstance(value, (int, float)) for value in values)
    return f"{min(values):.6g} to {max(values):.6g}" if is_number else f"{len(set(values)):,} values"


def _differing(then: Any, now: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value in the log and value now of each difference."""
    if isinstance(then, dict) and isinstance(now, dict) and list(then) == list(now):
        for key in then:
            yield from _differing(then[key], now[key], f"{name}/{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for index, (before, after) in enumerate(zip(then, now)):
            yield from _differing(before, after, f"{name}/{index}")
    elif packed(then, name) != packed(now, name):
        is_array = isinstance(then, (np.ndarray, torch.Tensor)) and np.shape(then) == np.shape(now)
        yield (name, "another array", distance(then, now)) if is_array else (name, then, now)
