"""UpdateLog: log what a trainer learned from, so that others can reproduce it. Needs PyTorch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from gym_trace.errors import InvalidOption, RecordingError, TraceError
from gym_trace.playback.trace import open_trace
from gym_trace.recording.single.wrapper import TraceRecordingWrapper
from gym_trace.recording.vector.wrapper import TraceRecordingVectorWrapper
from gym_trace.storage.staging import new_file
from gym_trace.training.proof.chain import ABOUT, END, START, UPDATE, Chain, directory_of
from gym_trace.training.proof.state import (
    Parts,
    generators,
    kernels,
    made_with,
    marks_of,
    norms_of,
    packed,
    state_digest,
    state_of,
)
from gym_trace.training.proof.steps import RecordedSteps, Steps
from gym_trace.training.proof.trace_checks import files_of

_CHECKED_UPDATES = (0, 1)  # their steps are compared with the trace immediately
_MAX_UNDIGESTED = 256  # updates


class UpdateLog:
    """Log of the updates of any PyTorch trainer; verify() relearns them.

    Call update() in place of your function that learns. It logs the arguments and all other state that the result
    depends on, calls the function, and logs a digest of the state afterwards.

    Args:
        trace: the recorder of the environment, also below other wrappers: the log is then in a directory beside the
            trace, DIR.proof, and Steps are references into the trace. Or the directory of the log, new or of a log to
            continue.
        parts: all objects that the function changes, by name: modules, optimizers, schedulers and other objects with
            state_dict() and load_state_dict(), torch.Generator, numpy.random.Generator.
        learn: function that makes an update. It gets the parts and the arguments of update() by name, and depends on
            nothing else; the global generators of PyTorch (CPU and CUDA), NumPy and random are logged. Numbers, arrays,
            or a dict of them that it returns are logged, too.
        overhead: fraction of the time that the log may take. If the digest of the state would take more, only some
            updates have one, at least each 256th.

    Attributes:
        directory: pathlib.Path of the log. updates: number of updates so far. spent: seconds spent on the log.

    Raises InvalidOption, CorruptTrace, RecordingError.

    Examples:
        >>> parts = {"policy": policy, "optimizer": optimizer}  # doctest: +SKIP
        >>> with gym_trace.proof.UpdateLog(recorder, parts, learn) as log:  # doctest: +SKIP
        ...     loss = log.update(batch=batch)
    """

    def __init__(self, trace: Any, parts: Parts, learn: Callable[..., Any], *, overhead: float = 0.025):
        self._parts, self._learn, self._overhead = dict(parts), learn, overhead
        recorder = _recorder_in(trace)
        self._trace: Path | None = None if recorder is None else Path(recorder.directory).absolute()
        self._writer = None if recorder is None else recorder._recorder.writer_id
        self.directory = directory_of(trace) if self._trace is None else directory_of(self._trace)
        about = self.directory / ABOUT
        state = state_of(self._parts)
        if not about.exists():
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                trace_path = None if self._trace is None else os.path.relpath(self._trace, self.directory)
                with new_file(about) as staged:
                    staged.write_text(json.dumps({"trace": trace_path, "parts": list(self._parts)}, indent=1) + "\n")
            except OSError as error:
                raise RecordingError(f"{self.directory}: cannot be written: {error.strerror}") from error
        self._log = Chain(about).open()
        self.updates = self._log.kinds[UPDATE]
        start = {"time": time.time(), "writer": self._writer, **made_with(), **kernels(), "state": state}
        self._log.append(START, start)
        self._marks = marks_of(self._parts)  # after the last update
        self._generators_after: dict[str, Any] = {}  # state of each generator after its last use
        self._since, self.spent = time.perf_counter(), 0.0
        self._undigested = 0

    def update(self, **inputs: Any) -> Any:
        """Learn from the inputs, and log the update. Returns the result of the function.

        inputs: its arguments. Numbers, text, arrays, tensors, and lists and dicts of them are copied into the log;
            Steps are not.

        Raises InvalidOption, also if Steps are not those of the trace; RecordingError.
        """
        begin = time.perf_counter()
        changed = self._changed()
        steps = {name: value.reference() for name, value in inputs.items() if isinstance(value, Steps)}
        if steps and self.updates in _CHECKED_UPDATES:
            self._check(steps)
        content: dict[str, Any] = {
            "outside": state_of({name: self._parts[name] for name in changed}) if changed else None,
            "inputs": {name: packed(value, name) for name, value in inputs.items() if name not in steps},
            "steps": {name: packed(reference, name) for name, reference in steps.items()},
        }
        before = generators()
        learn_start = time.perf_counter()
        result = self._learn(**self._parts, **inputs)
        learn_end = time.perf_counter()
        content["generators"] = used = {}
        for name, after in generators().items():
            if after != before.get(name, after):  # None: unchanged since the last update
                used[name] = None if self._generators_after.get(name) == before[name] else before[name]
                self._generators_after[name] = after
        try:
            content["result"] = packed(result, "result")
        except InvalidOption:  # an object that the log cannot store
            content["result"] = None
        self._marks = marks_of(self._parts)
        now = time.perf_counter()
        self._undigested += 1
        if self.spent + now - begin < self._overhead * (now - self._since) or self._undigested >= _MAX_UNDIGESTED:
            content |= {"digest": state_digest(self._parts), "norms": norms_of(self._parts)}
            self._undigested = 0
        self._log.append(UPDATE, content)
        self.updates += 1
        self.spent += time.perf_counter() - learn_end + learn_start - begin
        return result

    def _changed(self) -> list[str]:
        """Return the parts that changed since the last update."""
        return [name for name, mark in marks_of(self._parts).items() if mark != self._marks[name]]

    def _check(self, steps: dict[str, Any]) -> None:
        """Compare steps with the trace, so that a mistake shows at the first update, not in a later proof."""
        if self._trace is None:
            raise InvalidOption("steps: have no trace; pass the recorder to UpdateLog, or arrays")
        try:
            recorded = RecordedSteps(open_trace(self._trace), self._writer)
            for plain, columns in steps.values():
                recorded.of(plain, columns)
        except TraceError as error:
            advice = "pass the array as an argument of its own, which the log copies"
            raise InvalidOption(f"update {self.updates}: {error}; {advice}") from error

    def close(self) -> None:
        """Log the end: the last state, and the files of the trace. Close the recorder first."""
        if self._log.is_closed:
            return
        with self._log:
            files = None if self._trace is None or _is_open(self._trace) else files_of(self._trace)
            self._log.append(END, {"state": state_of(self._parts), "outside": self._changed(), "files": files})

    def __enter__(self) -> UpdateLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._log.close()


def _is_open(trace: Path) -> bool:
    return any(path.suffix in (".ring", ".part") for path in trace.iterdir())


def _recorder_in(env: Any) -> Any:
    """Return the recorder among the wrappers of an environment; None for a path."""
    if isinstance(env, (str, os.PathLike)):
        return None
    while not isinstance(env, (TraceRecordingWrapper, TraceRecordingVectorWrapper)):
        env = getattr(env, "env", None)
        if env is None:
            raise InvalidOption("trace: pass a recorder, an environment with a recorder below it, or a directory")
    return env
